"""Who owns which slice of every parameter: the one statement of it that ZeRO's stages, memory and checkpoints read."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from impl.plan import Plan

TIED = "trunk.tokens.weight"
"""The embedding of tokens, which is the output head's matrix too."""

Kind = Literal["split", "whole", "partial", "tied"]
"""Of a parameter: each tensor-parallel rank has another part; or all have the same; or they have the same but each
meets its own tokens only (sequence parallelism); or it is at both ends of a pipeline."""

REDUCTIONS = 2
"""Buckets of gradients that are reduced at a time, while further ones are filled."""
ALIGNMENT = 16
"""Elements to which parameters and slices are padded: every slice then begins on a vector register's border, so that an
update gives the same bits whoever computes it."""


class Division(NamedTuple):
    """Parameters that are divided alike, in buckets of their own."""

    unit: str
    """Stage 3 gathers these together; the same for all at other stages."""
    kind: Kind


UNDIVIDED = Division("", "whole")


def divisions(names: Iterable[tuple[str, bool]], plan: Plan, *, is_tied: bool) -> dict[Division, list[str]]:
    """The model's parameters, from the last to the first: the backward pass finishes them in this order.

    Args:
        names: with whether a parameter is split over tensor-parallel ranks.
        is_tied: the tied embedding's two ends are on different pipeline ranks, of which this is one.
    """
    found: dict[Division, list[str]] = {}
    for name, is_split in reversed(list(names)):
        is_partial = plan.sequence_parallel and plan.tp > 1 and name.startswith("trunk.")
        kind: Kind = "split" if is_split and plan.tp > 1 else "partial" if is_partial else "whole"
        kind = "tied" if name == TIED and is_tied else kind
        found.setdefault(Division(unit_of(name) if plan.zero_stage == 3 else "", kind), []).append(name)
    return found


def owners(kind: Kind, plan: Plan) -> int:
    """Ranks that divide a parameter: those over which its gradient is summed."""
    return plan.dp * plan.tp if kind == "partial" else plan.dp


def unit_of(name: str) -> str:
    """What a parameter is gathered with: a block's name, or `tokens`, which the embedding and the head share."""
    parts = name.split(".")
    if name == TIED:
        return "tokens"
    if parts[:2] == ["trunk", "layers"]:
        return f"layers.{parts[2]}"
    if parts[:2] == ["trunk", "embedding_norm"]:
        return "embedding_norm"
    return "embedding" if parts[0] == "trunk" and parts[1] in ("positions", "token_types") else "head"


def units_of_block(block: str) -> tuple[str, ...]:
    """What a block of the model needs gathered."""
    return (block, "tokens") if block in ("embedding", "head") else (block,)


class Slot(NamedTuple):
    """A parameter's place in a bucket."""

    name: str
    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size


class Piece(NamedTuple):
    """A part of a parameter: elements `start` to `stop` of it, flattened, which begin at `at` in the bucket."""

    name: str
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class BucketLayout:
    """Parameters one after another, padded so that `ranks` equal slices make it up; rank r owns the r-th.

    Source: ZeRO (1910.02054), section 5.
    """

    slots: tuple[Slot, ...]
    ranks: int = 1
    zero_stage: int = 0
    """0 where no other rank shares the bucket."""
    unit: str = ""
    kind: Kind = "whole"
    """As in `Division`."""

    @property
    def slice_size(self) -> int:
        return _padded(self.slots[-1].stop, self.ranks * ALIGNMENT) // self.ranks

    @property
    def size(self) -> int:
        return self.slice_size * self.ranks

    @property
    def weights(self) -> int:
        """Elements of the weights that a rank keeps."""
        return self.slice_size if self.zero_stage == 3 else self.size

    @property
    def gradients(self) -> int:
        """Elements of the gradients that a rank keeps."""
        return self.slice_size if self.zero_stage >= 2 else self.size

    @property
    def updated(self) -> int:
        """Elements of each moment that a rank keeps."""
        return self.slice_size if self.zero_stage else self.size

    @property
    def names(self) -> list[str]:
        return [slot.name for slot in self.slots]

    def own(self, rank: int) -> slice:
        """The rank's slice of the bucket."""
        return slice(rank * self.slice_size, (rank + 1) * self.slice_size)

    def pieces(self, rank: int) -> Iterator[Piece]:
        """What of each parameter is in the rank's slice; padding is in no piece."""
        own = self.own(rank)
        for slot in self.slots:
            start, stop = max(own.start, slot.start), min(own.stop, slot.stop)
            if start < stop:
                yield Piece(slot.name, start - slot.start, stop - slot.start, start)


def lay_out(
    sizes: Iterable[tuple[str, int]], ranks: int, elements: int, zero_stage: int, division: Division = UNDIVIDED
) -> list[BucketLayout]:
    """Buckets of parameters, given by name and size: neighbours together, each closed by the one that makes it reach
    `elements`; one of twice as many or more stands alone. At `zero_stage` 0 no ranks divide them."""
    buckets: list[list[Slot]] = []
    filled = elements
    for name, size in sizes:
        if filled >= elements or (filled and size >= 2 * elements):
            buckets.append([])
            filled = 0
        start = _padded(buckets[-1][-1].stop, ALIGNMENT) if buckets[-1] else 0
        buckets[-1].append(Slot(name, start, size))
        filled += size
    ranks = ranks if zero_stage else 1
    return [BucketLayout(tuple(slots), ranks, zero_stage if ranks > 1 else 0, *division) for slots in buckets]


def rectangles(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Elements `start` to `stop` of a flattened vector or matrix as (offsets, sizes) of boxes, in order: at most 3."""
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    _, columns = shape
    while start < stop:
        row, column = divmod(start, columns)
        rows = (stop - start) // columns if column == 0 else 0
        size = (rows, columns) if rows else (1, min(columns - column, stop - start))
        yield (row, column), size
        start += size[0] * size[1]


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
