"""What the closed form computes of each plan: columns of many plans, and quantities of ranks as linear laws.

Shapes: a column has a number for each plan, [n]; a quantity of ranks [3, n], by kind: first, between, last.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

Array = np.ndarray
Size = Any
"""Number that a law computes of one plan; a column where the laws of many plans are gathered."""
FIRST, BETWEEN, LAST = range(3)
"""Kinds of pipeline rank."""
T = TypeVar("T")
U = TypeVar("U")


class Ranks(NamedTuple):
    """Columns that describe the three kinds of pipeline rank."""

    p: Size
    v: Size
    layers: Size
    """Layers of a rank over all its chunks. Shape: [3, n]."""
    missing: Size
    """Number of layers that the middle ranks lack in total, compared with all being the fullest."""
    second: Size
    """Layers of the second rank, which has more microbatches in flight than other middle ranks."""
    behind: Size
    """Number of ranks after the first of the fullest middle ones."""
    m: Size = 0
    schedule: Size = 0
    blocks: Size = 1
    """Blocks of a stage (`impl.simulator.reduction.blocks_of`). Shape: [3, n]."""

    @property
    def is_first(self) -> Array:
        return np.stack([self.p > 0, self.p <= 2, self.p == 1])

    @property
    def is_last(self) -> Array:
        return np.stack([self.p == 1, self.p == 1, self.p > 0])


class Law(NamedTuple):
    """Quantity of a pipeline rank as a linear function of its layers and of whether it has the model's ends."""

    layer: Size
    one: Size
    """Quantity with one layer and neither end of the model; the fields below: with one layer and the named ends."""
    first: Size
    last: Size
    whole: Size

    @classmethod
    def of(cls, quantity: Callable[[U], float], units: Sequence[U], period: int) -> "Law":
        """Return the law of a quantity that is known of `units_of`, or of `needed` ones: the others are not used.

        Args:
            period: layers after which their kinds repeat; each of them counts as their mean.
        """
        one, more, *ends = map(quantity, units)
        layer = (more - one) / (2 * period)
        one, *ends = (unit - (period - 1) * layer for unit in (one, *ends))
        first, last, whole = {1: [one, one, *ends], 2: [*ends, one], 3: ends}[len(ends)]
        return cls(layer, one, first, last, whole)

    def at(self, ranks: Ranks) -> Array:
        """Return the quantity of each kind of rank. Shape: [3, n]."""
        more, is_alone = (ranks.layers - 1) * self.layer, ranks.p == 1
        first, last = (np.where(is_alone, self.whole, end) for end in (self.first, self.last))
        between = np.where(ranks.p > 2, self.one, first)
        return np.stack([more[FIRST] + first, more[BETWEEN] + between, more[LAST] + last])


class Work(NamedTuple):
    """Seconds of a microbatch by operation: each a Law, or those in all stages of a rank [3, n]."""

    forward: Any
    backward: Any
    input_gradient: Any
    weight_gradient: Any


class Hops(NamedTuple):
    """Seconds of a microbatch's transfers: through all ranks, the longest, and from the last rank back to the first."""

    one_way: Size
    longest: Size
    back: Size


class Held(NamedTuple):
    """Needs of gradients, parameters and updates: seconds and bytes of ranks."""

    reducing: Law
    summing: Law
    """Seconds of sums over ZeRO's replicas."""
    gathering: Law
    updating: Law
    parameters: Law
    """Bytes of parameters; `gradients` and `optimizer` are bytes, too."""
    gradients: Law
    optimizer: Law
    tied: Size
    """Seconds to sum the tied embedding's gradients."""
    gathered: Size
    """Bytes of gathered parameters by kind of rank."""
    buckets: Any
    """Needs of divided gradients and of the update (`impl.simulator.buckets.Buckets`)."""


class Kept(NamedTuple):
    """Bytes of activations that a microbatch keeps, and of temporary tensors."""

    kept: Law
    passing: Law
    owed: Size
    """Bytes that a layer keeps for deferred weight gradients."""
    received: Size
    """Bytes of a received tensor."""


def columns(rows: Sequence[T], which: Array) -> Any:
    """Return tuples of one type as one tuple of columns: [n], or [3, n] of numbers by kind of rank."""
    kind = type(rows[0])
    if issubclass(kind, tuple) and kind is not tuple:
        return kind(*(columns(of, which) for of in zip(*rows, strict=True)))  # type: ignore[arg-type]
    return np.array(rows).T.take(which, axis=-1)  # twice as fast as by an index
