"""Pipeline schedules as tables: one row of actions per pipeline rank, in the order in which the rank does them.

The same table is executed, simulated and drawn.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

from impl.errors import InputError


class Op(StrEnum):
    """Kind of a rank's work, by its letters in an action's text."""

    F = "F"  # forward pass
    B = "B"  # backward pass: gradients of the input and of the weights
    I = "I"  # noqa: E741 - gradient of the input only
    W = "W"  # gradient of the weights only
    SEND_F, RECV_F, SEND_B, RECV_B = "sF", "rF", "sB", "rB"  # of activations and their gradients; written by `lower`

    __hash__ = str.__hash__  # Enum's own is Python code and slows every look-up of an action


class Action(NamedTuple):
    """Unit of a rank's work; written `0F3`: stage 0, forward, microbatch 3."""

    op: Op
    stage: int
    microbatch: int

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Parse the text of an action, such as `0F3`.

        Raises:
            InputError: the text is not an action.
        """
        found = re.fullmatch(rf"(\d+)({'|'.join(Op)})(\d+)", text)
        if not found:
            raise InputError(f"{text!r} is not an action; valid: stage, one of {' '.join(Op)}, microbatch, as in 0F3")
        return cls(Op(found[2]), int(found[1]), int(found[3]))

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"


Rows = Sequence[Sequence[Action]]
NOMINAL = {Op.F: 1, Op.B: 2, Op.I: 1, Op.W: 1}
"""Nominal durations, used to put actions of different ranks in one order."""
DIRECTION = {Op.SEND_F: 1, Op.RECV_F: -1, Op.SEND_B: -1, Op.RECV_B: 1}
"""Offset from the stage of a transfer to the stage at its other end."""
HELD = {Op.F: 1, Op.B: -1, Op.W: -1}
"""Change in held activations: from a microbatch's forward pass in a stage to the end of its backward pass."""
SENDS_UNDER_WAY = 2
"""Sends that a rank leaves pending before it waits for the oldest.

gloo reports completion, and so frees the tensors, only on wait. Any number is safe: a row could run if every send
were awaited at once (see `lower`).
"""


@dataclass(frozen=True)
class Schedule:
    """Computing actions of every pipeline rank, in order; sends and receives follow from them."""

    name: str
    rows: tuple[tuple[Action, ...], ...]

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """Rank of each stage."""
        return {action.stage: rank for rank, row in enumerate(self.rows) for action in row}

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages (model chunks) of a rank."""
        return sorted(stage for stage, owner in self.rank_of.items() if owner == rank)

    @cached_property
    def _split(self) -> frozenset[tuple[int, int]]:
        """Pairs (stage, microbatch) whose backward pass comes in two parts."""
        return frozenset(action[1:] for action in chain.from_iterable(self.rows) if action.op is Op.I)

    @property
    def is_split(self) -> bool:
        """True if weight gradients are computed apart from input gradients."""
        return bool(self._split)

    def needs(self, action: Action) -> list[Action]:
        """Return the actions whose results an action reads: the only definition of the data flow."""
        op, stage, microbatch = action
        if op is Op.W:
            return [Action(Op.I, stage, microbatch)]
        if op is Op.F:
            return [Action(Op.F, stage - 1, microbatch)] if stage else []
        needed = [Action(Op.F, stage, microbatch)]
        if stage + 1 < len(self.rank_of):
            gradient = Op.I if (stage + 1, microbatch) in self._split else Op.B
            needed.append(Action(gradient, stage + 1, microbatch))
        return needed

    @cached_property
    def order(self) -> tuple[tuple[int, Action], ...]:
        """Pairs (rank, action) of the whole table, each after all that it needs, by end at NOMINAL durations.

        Raises:
            InputError: the table cannot run; names the action at which every rank is stuck.
        """
        ends: dict[Action, int] = {}
        ordered: list[tuple[int, int, Action]] = []
        clock, done = [0] * len(self.rows), [0] * len(self.rows)
        free, waits = list(range(len(self.rows))), dict[Action, list[int]]()  # ranks that can go on; that cannot
        while free:
            rank = free.pop()
            while done[rank] < len(self.rows[rank]):
                action = self.rows[rank][done[rank]]
                needed = self.needs(action)
                if lacking := [need for need in needed if need not in ends]:
                    waits.setdefault(lacking[0], []).append(rank)
                    break
                ends[action] = clock[rank] = max([clock[rank], *(ends[need] for need in needed)]) + NOMINAL[action.op]
                ordered.append((clock[rank], rank, action))
                done[rank] += 1
                free += waits.pop(action, ())
        if waits:
            stuck = sorted((r, f"{self.rows[r][done[r]]}, which needs {need}") for need in waits for r in waits[need])
            heads = "; ".join(f"rank {rank} is stuck at {head}" for rank, head in stuck)
            raise InputError(f"schedule {self.name} cannot run: {heads}")
        return tuple((rank, action) for _, rank, action in sorted(ordered))

    @cached_property
    def transfers(self) -> dict[Action, Action]:
        """Actions whose result another rank reads, mapped to the reading action."""
        read = ((need, action) for _, action in self.order for need in self.needs(action))
        return {need: action for need, action in read if self.rank_of[need.stage] != self.rank_of[action.stage]}

    @cached_property
    def flow(self) -> tuple[tuple[int | None, tuple[int, int] | None], ...]:
        """For each of `order`: the index of the action whose result it awaits, and (sender, receiver) of its own."""
        place = {action: i for i, (_, action) in enumerate(self.order)}
        pairs = self.transfers.items()
        awaited = {reader: place[source] for source, reader in pairs}
        link = {source: (self.rank_of[source.stage], self.rank_of[reader.stage]) for source, reader in pairs}
        return tuple((awaited.get(action), link.get(action)) for _, action in self.order)

    @property
    def ways(self) -> set[tuple[int, int]]:
        """Pairs (sender, receiver) of ranks between which activations or their gradients are sent."""
        borders = pairwise(rank for _, rank in sorted(self.rank_of.items()))
        return {way for a, b in borders if a != b for way in ((a, b), (b, a))}

    @cached_property
    def lowered(self) -> list[list[Action]]:
        """Rows with sends and receives, as `lower` writes them."""
        return lower(self)

    def peer(self, transfer: Action) -> int:
        """Return the rank at the other end of a send or receive."""
        return self.rank_of[transfer.stage + DIRECTION[transfer.op]]


def lower(schedule: Schedule) -> list[list[Action]]:
    """Return the rows with their sends and receives; an action's stage is the sender's for a send, else the receiver's.

    A transfer is written into both rows at once, in the one order of the whole table: two ranks have their common
    transfers in the same order, and no cycle of ranks waits, even if every send waited for its receive.

    Raises:
        InputError: as `Schedule.order`.
    """
    rows: list[list[Action]] = [[] for _ in schedule.rows]
    for rank, action in schedule.order:
        rows[rank].append(action)
        if reader := schedule.transfers.get(action):
            send, receive = (Op.SEND_F, Op.RECV_F) if action.op is Op.F else (Op.SEND_B, Op.RECV_B)
            rows[rank].append(Action(send, action.stage, action.microbatch))
            rows[schedule.rank_of[reader.stage]].append(Action(receive, reader.stage, reader.microbatch))
    return rows


def peak_in_flight(row: Iterable[Action]) -> int:
    """Return the most activations, of one microbatch in one stage each, that a rank holds at once."""
    held = peak = 0
    for action in row:
        held += HELD.get(action.op, 0)
        peak = max(peak, held)
    return peak


def forward_only(schedule: Schedule) -> Schedule:
    """Return a schedule of one forward pass through the same stages, for evaluation."""
    stages = map(schedule.stages_of, range(len(schedule.rows)))
    rows = tuple(tuple(Action(Op.F, stage, 0) for stage in own) for own in stages)
    return Schedule(f"{schedule.name}, forward only", rows)
