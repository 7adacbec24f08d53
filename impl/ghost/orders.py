"""Whether the ranks' orders fit together: equal on all members of a group, no deadlock by NCCL's rules, all awaited.

Ranks that were not executed have the executed rank that stands for them. In a group whose ranks all have the same one,
such as tensor-parallel neighbours, each then does what the others do at the same time. If that execution of the
executed ranks ends, so does every other order of the same events, as a queue has one order only.
"""

from collections import deque
from collections.abc import Iterator
from itertools import zip_longest
from typing import NamedTuple

from impl.ghost.events import TRANSFERS, Begin, Log, Logs, Standing, Wait, begun, named

SHOWN = 4
"""Most ranks of which is said where they hang."""


def problems(logs: Logs, standing: Standing = lambda rank: rank) -> list[str]:
    """Return all errors, one line each: the first difference of every group and pair, else what hangs or is missing.

    A hang is only looked for where the orders are equal: without that, it has another cause.
    """
    found = [*_unequal_collectives(logs, standing), *_unequal_transfers(logs, standing)]
    if not found:
        found = [line for one_queue in (False, True) if (line := hang(logs, standing, one_queue=one_queue))][:1]
    return [*found, *_unawaited(logs)]


def _unequal_collectives(logs: Logs, standing: Standing) -> Iterator[str]:
    """Yield groups whose members do not begin the same collectives in the same order."""
    orders: dict[str, dict[int, list[Begin]]] = {}
    for rank, log in logs.items():
        for _, event in begun(log):
            if event.kind not in TRANSFERS:
                orders.setdefault(event.group, {}).setdefault(rank, []).append(event)
    for of_ranks in orders.values():
        first, order = next(iter(of_ranks.items()))
        if first not in order[0].members:
            yield f"rank {first} begins {order[0]}, to which it does not belong"
            continue
        for other in sorted({standing(member) for member in order[0].members}):
            pairs = enumerate(zip_longest(order, of_ranks.get(other, ())), 1)
            if differing := next(((nth, a, b) for nth, (a, b) in pairs if a != b), None):
                nth, a, b = differing
                where = f"collective {nth} over {named(order[0].members)}"
                yield f"{where} is {a or 'none'} on rank {first}, and {b or 'none'} on rank {other}"
                break


def _unequal_transfers(logs: Logs, standing: Standing) -> Iterator[str]:
    """Yield pairs of ranks of which one does not send what the other receives, in the same order."""
    orders: dict[tuple[int, int, str], dict[str, list[Begin]]] = {}
    for rank, log in logs.items():
        for _, event in begun(log):
            if event.peer is not None:
                peer = standing(event.peer)
                pair = (rank, peer) if event.kind == "send" else (peer, rank)
                orders.setdefault((*pair, event.group), {}).setdefault(event.kind, []).append(event)
    for (source, target, _), by_kind in orders.items():
        pairs = enumerate(zip_longest(by_kind.get("send", ()), by_kind.get("receive", ())), 1)
        for nth, (sent, received) in pairs:
            if sent is None or received is None or sent[3:5] != received[3:5]:
                here = f"transfer {nth} from rank {source} to rank {target}"
                sides = f"{sent or 'no send'} on rank {source}, and {received or 'no receive'} on rank {target}"
                yield f"{here} is {sides}"
                break


def _unawaited(logs: Logs) -> Iterator[str]:
    """Yield what a rank never waits for: whether its result is there when it is used, is then chance."""
    for rank, log in logs.items():
        awaited = {event.of for event in log if isinstance(event, Wait)}
        if lacking := [event for place, event in begun(log) if place not in awaited]:
            yield f"rank {rank} never waits for {lacking[0]}{f' and {len(lacking) - 1} more' if lacking[1:] else ''}"


class _Entry(NamedTuple):
    """Entry of a queue: a collective, a transfer, or a batch of transfers that start together."""

    place: int
    """Place of its first event in the log."""
    parts: dict[int, Begin]
    """Its events that have not ended, by their places in the log."""


class _Rank:
    """A rank's queues, each with what is left in it, and how far its waits let it go."""

    def __init__(self, log: Log, *, one_queue: bool) -> None:
        self.log, self.ended = log, set[int]()
        self.queues: dict[str, deque[_Entry]] = {}
        for place, event in begun(log):
            queue = self.queues.setdefault("" if one_queue else event.group, deque())
            if event.batch is not None and queue and queue[-1].place == event.batch:
                queue[-1].parts[place] = event
            else:
                queue.append(_Entry(place, {place: event}))
        self._waits = [place for place, event in enumerate(log) if isinstance(event, Wait)]
        self._front = 0

    def heads(self) -> Iterator[tuple[int, Begin]]:
        """Yield the entries that this rank would let end now."""
        while self._front < len(self._waits):
            wait = self.log[self._waits[self._front]]
            assert isinstance(wait, Wait)
            if wait.of not in self.ended:
                break
            self._front += 1
        limit = self._waits[self._front] if self._front < len(self._waits) else len(self.log)
        for queue in self.queues.values():
            if queue and queue[0].place < limit:
                yield from queue[0].parts.items()

    def end(self, place: int, event: Begin) -> None:
        queue = self.queues[event.group if event.group in self.queues else ""]
        del queue[0].parts[place]
        if not queue[0].parts:
            queue.popleft()
        self.ended.add(place)


def hang(logs: Logs, standing: Standing = lambda rank: rank, *, one_queue: bool = False) -> str | None:
    """Execute the logs by NCCL's rules and return what hangs; None: everything ends.

    What a rank begins in one group runs in that order, transfers too, as where groups are made at start-up
    (`device_id`); it starts on the device when all has ended that the rank had waited for before. A collective ends
    when all members have started it, a transfer when both ends have.

    Args:
        one_queue: all groups of a rank share one queue, as on a device with the fewest resources.
    """
    ranks = {rank: _Rank(log, one_queue=one_queue) for rank, log in logs.items()}
    members: dict[tuple[int, ...], frozenset[int]] = {}
    ready: dict[tuple[object, ...], dict[tuple[int, str], tuple[int, Begin]]] = {}
    to_do = deque(ranks)
    while to_do:
        rank = to_do.popleft()
        for place, event in list(ranks[rank].heads()):
            if event.members not in members:
                members[event.members] = frozenset(map(standing, event.members))
            at, needed = _meeting(rank, event, standing, members[event.members])
            there = ready.setdefault(at, {})
            there[rank, event.kind] = place, event
            if len(there) == needed:
                for (who, _), ended in there.items():
                    ranks[who].end(*ended)
                    to_do.append(who)
                del ready[at]
    stuck = {rank: list(one.heads()) for rank, one in ranks.items() if any(one.queues.values())}
    if not stuck:
        return None
    where = "in one queue for all groups" if one_queue else "with a queue for each group"
    first = {rank: heads[0][1] for rank, heads in stuck.items() if heads}
    heads = "; ".join(f"rank {rank} at {event}" for rank, event in list(first.items())[:SHOWN])
    return f"{where}, {named(stuck)} wait{'s' * (len(stuck) == 1)} for ever: {heads}"


def _meeting(rank: int, event: Begin, standing: Standing, members: frozenset[int]) -> tuple[tuple[object, ...], int]:
    """Return where an event meets its like, and how many meet there."""
    if event.peer is None:
        return (event.group,), len(members)
    ends = (rank, standing(event.peer)) if event.kind == "send" else (standing(event.peer), rank)
    return (event.group, *ends), 2
