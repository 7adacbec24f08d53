"""What a rank asks of its process groups in a step, in order: what begins, and what it waits for."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "receive"]
TRANSFERS = ("send", "receive")


class Begin(NamedTuple):
    """A collective or transfer that a rank begins."""

    kind: Kind
    group: str
    """Name of the process group, the same on all of its ranks: in NCCL each group has a queue of its own."""
    members: tuple[int, ...]
    """Ranks of the group."""
    elements: int
    """Number of elements of the whole tensor: the sum's, or of all parts together."""
    dtype: str
    peer: int | None = None
    """Rank at the other end of a transfer."""
    batch: int | None = None
    """Place in the log of the first of the transfers that begin together; None: it begins alone."""

    def __str__(self) -> str:
        size = f"{self.elements} {self.dtype}"
        if self.peer is not None:
            return f"{self.kind} of {size} {'to' if self.kind == 'send' else 'from'} rank {self.peer}"
        return f"{self.kind} of {size} over {named(self.members)}"


class Wait(NamedTuple):
    """Wait of a rank, or of its device, for the end of what it began at this place of its log."""

    of: int


Log = Sequence[Begin | Wait]
Logs = Mapping[int, Log]
"""Of every rank that was executed, by its number."""
Standing = Callable[[int], int]
"""Function from a rank to the executed one that stands for it: itself, or one that does the same in its own groups."""


def named(ranks: Iterable[int], most: int = 8) -> str:
    """Return ranks in words, at most a few of them by number."""
    ranks = list(ranks)
    shown = ", ".join(map(str, ranks[:most]))
    return f"ranks {shown}{f' and {len(ranks) - most} more' if len(ranks) > most else ''}"


def begun(log: Log) -> Iterator[tuple[int, Begin]]:
    """Yield what begins, with its place in the log."""
    yield from ((place, event) for place, event in enumerate(log) if isinstance(event, Begin))
