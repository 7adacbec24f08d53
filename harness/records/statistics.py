"""Warm-up steps, and statistics of repeated measurements: mean, 95% interval, quartiles."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np  # needed by figures only, which import it

WARMUP_STEPS = 3
"""Least number of first steps that are not timed: allocators, caches and compilers settle in them."""
WARMUP_SHARE = 0.1
"""Least share of first steps that are not timed."""
CONFIDENCE = 0.95


def warmup_steps(steps: int) -> int:
    """Return the number of first steps left out of timing: max(3, 10% of all), at most half of them."""
    return min(max(WARMUP_STEPS, math.ceil(WARMUP_SHARE * steps)), steps // 2)


@dataclass(frozen=True)
class Estimate:
    """Mean of `n` measurements and the half-width of its 95% interval; None for n = 1."""

    mean: float
    half_width: float | None
    n: int

    def __truediv__(self, other: "Estimate") -> "Estimate":
        """Return the ratio of two independent means; relative half-widths add in quadrature.

        The half-width is None if either mean has none. `n` is the smaller one.
        """
        mean, n = self.mean / other.mean, min(self.n, other.n)
        if self.half_width is None or other.half_width is None:
            return Estimate(mean, None, n)
        relative = math.hypot(self.half_width / self.mean, other.half_width / other.mean)
        return Estimate(mean, abs(mean) * relative, n)

    def scaled(self, factor: float) -> "Estimate":
        return Estimate(self.mean * factor, None if self.half_width is None else self.half_width * factor, self.n)


UNKNOWN = Estimate(math.nan, None, 0)
"""Estimate without any measurement."""


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of repeats or seeds with its 95% interval by Student's t.

    Raises:
        ValueError: there are no values.
    """
    n = len(values)
    if n == 0:
        raise ValueError("an estimate needs at least one value")
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean, None, 1)
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    return Estimate(mean, t_quantile(n - 1) * deviation / math.sqrt(n), n)


@functools.cache
def t_quantile(degrees_of_freedom: int) -> float:
    """Return the two-sided 95% point of Student's t."""
    from scipy.special import stdtrit  # the import takes a third of a second, and single runs never need it

    return float(stdtrit(degrees_of_freedom, (1 + CONFIDENCE) / 2))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return first quartile, median and third quartile, interpolated linearly."""
    ordered = sorted(values)

    def at(share: float) -> float:
        position = share * (len(ordered) - 1)
        low = math.floor(position)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (position - low) * (ordered[high] - ordered[low])

    return at(0.25), at(0.5), at(0.75)


def running_mean(values: "Sequence[float] | np.ndarray", window: int) -> list[float]:
    """Return the mean over the last `window` values, fewer at the start, so that no value depends on later ones."""
    import numpy as np

    blocks = np.zeros((math.ceil(len(values) / window), window))
    blocks.flat[: len(values)] = values
    heads, tails = blocks.cumsum(axis=1).ravel(), blocks[:, ::-1].cumsum(axis=1)[:, ::-1].ravel()
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)  # each window is the end of one block and the beginning of the next
    totals = heads[: len(values)] + np.where(starts % window, tails[starts], 0.0)
    return (totals / (ends - starts)).tolist()
