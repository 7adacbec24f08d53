"""What the closed form counts of buckets of gradients: buffers of those that are divided, and an update's widened one.

A bucket ends at a size or with its stage. The largest of a stage is thus linear in its layers up to a limit; there are
as many buffers of its size as are filled and reduced at a time, and a larger parameter has its own.

Shapes: as in `impl.simulator.columns`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from impl.cost.buffers import buffers_at_once
from impl.cost.parameters import MASTER_BYTES
from impl.cost.place import Place, parameter_bytes
from impl.pipeline.schedule import Action, Op
from impl.run import Run
from impl.simulator.columns import Array, Law, Ranks, Size
from impl.zero.partition import BucketLayout

ONCE, SEVERAL, PUT_OFF = (
    tuple(Action(op, 0, 0) for op in ops)
    for ops in ((Op.F, Op.B), (Op.F, Op.B) * 2, (Op.F, Op.F, Op.I, Op.I, Op.W, Op.W))
)
"""Passes through a stage of one microbatch, of two, and of two with weight gradients that are put off."""


class Largest(NamedTuple):
    """Bytes of the largest buckets of a rank."""

    size: Law
    """Bytes of a bucket of several parameters below the limit."""
    limit: Size
    alone: Size
    """Bytes of the largest bucket of one parameter. Shape: [3, n]."""


class Made(NamedTuple):
    """Buffers that are in use at a time, of the size of the largest bucket of several parameters."""

    filled: Size
    """Number where reductions are awaited before further gradients come."""
    spread: Size
    """Number where one bucket has gradients of several stages of a rank, and so is never empty."""
    once: Size
    """Number, those being reduced included, for one microbatch whose gradients fit one bucket."""
    several: Size


class Buckets(NamedTuple):
    """Buffers that a rank needs for divided gradients and the update, in addition to its states."""

    divided: Largest
    made: Made
    more: Size
    """Buffers that the largest parameter takes if it has none of its own. Shape: [3, n]."""
    spread: Size
    """Such buffers where a bucket of several stages is never empty. Shape: [3, n]."""
    put_off: Law
    """Bytes of all buffers where weight gradients are deferred, so that several buckets fill at a time."""
    reduced: Size
    """Number of these buffers that exist only if reductions are not awaited."""
    widened: Largest
    """Largest buckets of the part that the rank updates, in master precision."""

    def filled(self, ranks: Ranks, is_split: Array, overlaps: Array) -> Array:
        """Return the bytes of the buffers of divided gradients. Shape: [3, n]."""
        reached, (_, limit, alone), made = self.divided.size.at(ranks), self.divided, self.made
        size, is_whole = np.minimum(reached, limit), reached <= limit
        of_one = np.where(overlaps, np.where(ranks.m > 1, made.several, made.once), made.filled)
        of_one = np.where(ranks.v > 1, made.spread + overlaps, of_one)
        count = np.where(is_whole, of_one, np.where(overlaps, made.several, made.filled))
        more = np.where(np.where(is_whole, ranks.v, 1) > 1, self.spread, self.more)
        found = count * size + np.where(alone > size, alone, more * size)
        return np.where(is_split, self.put_off.at(ranks) - np.where(overlaps, 0, self.reduced) * size, found)

    def updated(self, ranks: Ranks) -> Array:
        """Return the bytes of the largest bucket that is widened for its update. Shape: [3, n]."""
        size, limit, alone = self.widened
        return np.maximum(np.minimum(size.at(ranks), limit), alone)


class OfUnit(NamedTuple):
    """Elements of buckets of a unit: the largest of several parameters, its limit, and the largest of one."""

    divided: tuple[float, float, float]
    updated: tuple[float, float, float]
    made: Made = Made(0, 0, 0, 0)
    more: int = 0
    spread: int = 0
    put_off: float = 0.0
    reduced: int = 0


def of_unit(place: Place) -> OfUnit:
    """Return the buckets of a unit."""
    elements = place.run.plan.bucket_bytes // parameter_bytes(place.run).gradient
    divided = [bucket for bucket in place.buckets if bucket.zero_stage >= 2]
    updated = _largest(place.buckets, elements, lambda bucket: bucket.updated)
    if not divided:
        return OfUnit((0.0, 0.0, 0.0), updated)
    common, limit, alone = largest = _largest(divided, elements, lambda bucket: bucket.size)
    few, more = [bucket for bucket in divided if bucket.size <= common], 0
    kinds, spread = {bucket.kind for bucket in few if bucket.zero_stage == 2}, 0
    (_, once), (filled, several), put_off = buffers_at_once(place, few, (ONCE, SEVERAL, PUT_OFF))
    if common < alone <= limit:
        [(with_it, _)] = buffers_at_once(place, divided, (SEVERAL,))
        more = with_it - filled
        spread = len(kinds | {bucket.kind for bucket in divided if bucket.zero_stage == 2}) - len(kinds)
    made, reduced = Made(filled, max(filled, len(kinds)), once, several), put_off[1] - put_off[0]
    return OfUnit(largest, updated, made, more, spread, put_off[1] * common + alone * (alone > common), reduced)


def _largest(
    buckets: Sequence[BucketLayout], elements: int, size_of: Callable[[BucketLayout], int]
) -> tuple[float, float, float]:
    several = [bucket for bucket in buckets if len(bucket.names) > 1]
    alone = max((size_of(bucket) for bucket in buckets if len(bucket.names) == 1), default=0)
    if not several:
        return 0, 0, alone
    fullest = max(several, key=size_of)
    least = fullest.size  # of what a bucket reaches before it is closed
    if least < elements:
        least = elements + max(slot.size for slot in fullest.slots) / 2  # of the one that closes it, on average
    return size_of(fullest), least * size_of(fullest) / fullest.size, alone


def buckets_of(
    run: Run, units: Sequence[OfUnit], law: Callable[[Callable[[OfUnit], float], Sequence[OfUnit]], Law]
) -> Buckets:
    """Return the buckets of a run's ranks, given the buckets of its `needed` units."""
    each, is_widened = parameter_bytes(run).gradient, not (run.fp32_gradients or run.plan.offload_optimizer)

    def largest(size: int, of: Callable[[OfUnit], tuple[float, float, float]]) -> Largest:
        limit, alone = max(of(unit)[1] for unit in units), by_kind([size * of(unit)[2] for unit in units])
        return Largest(law(lambda unit: size * of(unit)[0], units), size * limit, alone)

    return Buckets(
        largest(each, lambda unit: unit.divided),
        Made(*map(max, zip(*(unit.made for unit in units), strict=True))),
        by_kind([unit.more for unit in units]),
        by_kind([unit.spread for unit in units]),
        law(lambda unit: each * unit.put_off, units),
        max(unit.reduced for unit in units),
        largest(MASTER_BYTES[run.precision] * is_widened, lambda unit: unit.updated),
    )


def by_kind(sizes: Sequence[float]) -> tuple[float, float, float]:
    """Return the largest size of each kind of rank, given those of `needed` units."""
    _, between, *ends = sizes
    return max(between, ends[0]), between, max(between, ends[-1])
