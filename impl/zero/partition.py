"""Ownership of slices of every parameter, defined once for ZeRO's stages, memory formulas and checkpoints."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from impl.plan import Plan

TIED = "trunk.tokens.weight"
"""Name of the token embedding, which is the output head's matrix too."""

OUTPUT = "trunk.output.weight"
"""Name of the output head's matrix where it is not the token embedding."""

Kind = Literal["split", "whole", "partial", "tied", "copied", "expert"]
"""How tensor-parallel ranks hold a parameter.

split: each rank has another part; whole: all have the same; partial: all have the same, but each computes gradients
from its own tokens only (sequence parallelism), or its own heads; tied: it is at both ends of a pipeline; copied: it is
split over a grid's x, if these are several, and all of y have the same; expert: as split, and only some of the ranks of
dp and cp have it.
"""

OF_PARTS = (".attention.norms.", ".inner.alpha", ".router.")
"""In the names of whole parameters that meet only a rank's own heads or features, or of whose outputs a rank uses a
part of the features: their gradients are summed."""
OF_HEADS = (".qkv.bias", ".up.bias", ".inner.", ".attention.norms.")
"""In the names of parameters that have no dim of hidden features."""
EXPERT = ".experts."
"""In the names of parameters of experts."""
REDUCTIONS = 2
"""Buckets of gradients that are reduced at a time, while further ones are filled."""
ALIGNMENT = 16
"""Elements to which parameters and slices are padded.

Every slice then begins on a vector register's border, so that an update gives the same bits on any rank.
"""


class Division(NamedTuple):
    """Group of parameters that are divided alike, in buckets of their own."""

    unit: str
    """Name of the parameters that stage 3 gathers together; empty at other stages."""
    kind: Kind


UNDIVIDED = Division("", "whole")


def divisions(names: Iterable[tuple[str, bool]], plan: Plan, *, is_tied: bool) -> dict[Division, list[str]]:
    """Return the model's parameters by division, from the last to the first, as the backward pass finishes them.

    Args:
        names: each parameter's name, and whether it is split over tensor-parallel ranks.
        is_tied: the tied embedding's two ends are on different pipeline ranks, of which this is one.
    """
    found: dict[Division, list[str]] = {}
    for name, is_split in reversed(list(names)):
        is_of_part = plan.sequence_parallel or any(part in name for part in OF_PARTS)
        is_partial = plan.x > 1 and name.startswith("trunk.") and is_of_part
        kind: Kind = "split" if is_split and plan.tp > 1 else "partial" if is_partial else "whole"
        kind = "copied" if plan.y > 1 and kind != "partial" and any(part in name for part in OF_HEADS) else kind
        kind = "tied" if name == TIED and is_tied else "expert" if plan.ep > 1 and EXPERT in name else kind
        found.setdefault(Division(unit_of(name) if plan.zero_stage == 3 else "", kind), []).append(name)
    return found


def owners(kind: Kind, plan: Plan) -> int:
    """Return the number of ranks that divide a parameter: those over which its gradient is summed first."""
    return plan.zero * plan.x if kind == "partial" else plan.zero // plan.ep if kind == "expert" else plan.zero


def unit_of(name: str) -> str:
    """Return the unit that a parameter is gathered with: a block's name, or `tokens` for the tied embedding."""
    parts = name.split(".")
    if name == TIED:
        return "tokens"
    if parts[:2] == ["trunk", "layers"]:
        return f"layers.{parts[2]}"
    if parts[:2] == ["trunk", "embedding_norm"]:
        return "embedding_norm"
    return "embedding" if parts[0] == "trunk" and parts[1] in ("positions", "token_types") else "head"


def units_of_block(block: str, tied: bool) -> tuple[str, ...]:
    """Return the units that a block of a model, whose embedding and head may be tied, needs gathered."""
    return (block, "tokens") if block == "embedding" or (block == "head" and tied) else (block,)


class Slot(NamedTuple):
    """Place of a parameter in a bucket."""

    name: str
    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size


class Piece(NamedTuple):
    """Part of a parameter: its flattened elements `start` to `stop`, which begin at `at` in the bucket."""

    name: str
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class BucketLayout:
    """Parameters one after another, padded into `ranks` equal slices; rank r owns the r-th.

    Source: ZeRO (1910.02054), section 5.
    """

    slots: tuple[Slot, ...]
    ranks: int = 1
    zero_stage: int = 0
    """Stage of ZeRO; 0 where no other rank shares the bucket."""
    unit: str = ""
    kind: Kind = "whole"
    """Kind of the bucket's `Division`."""

    @cached_property
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
        """Return the rank's slice of the bucket."""
        return slice(rank * self.slice_size, (rank + 1) * self.slice_size)

    def pieces(self, rank: int) -> Iterator[Piece]:
        """Yield the pieces of parameters in the rank's slice; padding is in no piece."""
        own = self.own(rank)
        for slot in self.slots:
            start, stop = max(own.start, slot.start), min(own.stop, slot.stop)
            if start < stop:
                yield Piece(slot.name, start - slot.start, stop - slot.start, start)


def lay_out(
    sizes: Iterable[tuple[str, int]], ranks: int, elements: int, zero_stage: int, division: Division = UNDIVIDED
) -> list[BucketLayout]:
    """Return buckets of parameters, given by name and size, each of neighbours.

    A bucket is closed by the parameter that makes it reach `elements`; one of twice as many or more has its own bucket.
    At `zero_stage` 0 no ranks divide them.
    """
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


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
