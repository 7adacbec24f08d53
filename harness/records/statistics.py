"""Warm-up steps, and statistics of repeated measurements: mean, 95% interval, quartiles."""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from impl.grouping import by_key

WARMUP_STEPS = 3
"""Least number of first steps that are not timed: allocators, caches and compilers settle in them."""
WARMUP_SHARE = 0.1
"""Least share of first steps that are not timed."""
CONFIDENCE = 0.95
MOST_REPEATS = 1000
"""Most repeats that are said to decide a claim."""
POWER = 0.9
"""Share of such series of repeats that would decide it."""
NINE_TENTHS = 1.645
"""Standard deviations on each side that hold nine tenths of a normal distribution."""


def warmup_steps(steps: int) -> int:
    """Return the number of first steps left out of timing: max(3, 10% of all), at most half of them."""
    return min(max(WARMUP_STEPS, math.ceil(WARMUP_SHARE * steps)), steps // 2)


@dataclass(frozen=True)
class Estimate:
    """Mean of `n` measurements and the half-width of its interval; None for one measurement, 0 for an exact number.

    The interval is Student's for 95% of measured values, and for 90% of simulated ones the simulator's own.
    """

    mean: float
    half_width: float | None
    n: int
    df: float | None = None
    """Degrees of freedom of the interval; None: n - 1. Infinite for an interval that no repeats make narrower."""
    causes: Mapping[str, float] | None = None
    """Relative change of a simulated value by each independent cause of error, off by its standard deviation.

    What two values have in common cancels in their ratio. None for a measured value.
    """

    @property
    def freedom(self) -> float:
        """Degrees of freedom of the interval."""
        return self.n - 1 if self.df is None else self.df

    @property
    def standard_error(self) -> float | None:
        """Standard deviation of the mean; None if it is not known."""
        if not self.half_width or self.freedom == math.inf:
            return self.half_width
        return self.half_width / t_quantile(self.freedom)

    def __truediv__(self, other: "Estimate") -> "Estimate":
        """Return the ratio of two independent means, with Welch's interval of its relative errors.

        The half-width is None if either mean has none; the ratio to 0 is NaN. `n` is the smaller one.
        """
        if other.mean == 0:
            return replace(UNKNOWN, n=min(self.n, other.n))
        if self.causes is not None and other.causes is not None:
            return simulated(self.mean / other.mean, _less(self.causes, other.causes))
        mean = self.mean / other.mean
        a, b = (one and one / other.mean for one in (self.standard_error, other.standard_error))
        return _welch(mean, self, other, a, b and b * mean)

    def __sub__(self, other: "Estimate | float") -> "Estimate":
        """Return the difference to another independent mean, with Welch's interval, or to an exact number."""
        if not isinstance(other, Estimate):
            return replace(self, mean=self.mean - other, causes=None)
        if self.causes is not None and other.causes is not None:
            causes = _less(*({name: one.mean * by for name, by in (one.causes or {}).items()} for one in (self, other)))
            return replace(simulated(1.0, causes), mean=self.mean - other.mean, causes=None)
        return _welch(self.mean - other.mean, self, other, self.standard_error, other.standard_error)

    def __format__(self, spec: str) -> str:
        """Return the mean as text."""
        return format(self.mean, spec)

    def scaled(self, factor: float) -> "Estimate":
        """Return the estimate of a quantity that is `factor` times as large."""
        wide = None if self.half_width is None else self.half_width * abs(factor)
        return replace(self, mean=self.mean * factor, half_width=wide)


def _welch(mean: float, one: Estimate, other: Estimate, a: float | None, b: float | None) -> Estimate:
    """Return an estimate whose variance is the sum of two squares; Welch (1947) gives its freedom."""
    n = min((each.n for each in (one, other) if each.half_width != 0), default=1)  # of those that are not exact
    if a is None or b is None or math.isnan(mean):
        return Estimate(mean, None, n)
    if not (variance := a * a + b * b):
        return Estimate(mean, 0.0, n, math.inf)
    parts = sum(each**4 / each_one.freedom for each, each_one in ((a, one), (b, other)) if each)
    freedom = variance**2 / parts if parts else math.inf
    return Estimate(mean, t_quantile(freedom) * math.sqrt(variance), n, freedom)


UNKNOWN = Estimate(math.nan, None, 0)
"""Estimate without any measurement."""


def exact(value: float) -> Estimate:
    """Return the estimate of a number that repeats would not change: a count, or a formula's value."""
    return simulated(value, {})


def simulated(value: float, causes: Mapping[str, float]) -> Estimate:
    """Return a simulated value with the interval that holds it nine times of ten, by its causes of error."""
    return Estimate(value, NINE_TENTHS * abs(value) * math.hypot(*causes.values()), 1, math.inf, causes)


def rest(whole: float, parts: Iterable[float]) -> float:
    """Return the standard deviation that independent parts leave of a whole; 0 if they are as large."""
    return math.sqrt(max(0.0, whole**2 - math.fsum(part**2 for part in parts)))


def _less(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) - other.get(name, 0.0) for name in {**one, **other}}


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


def slope(pairs: Sequence[tuple[float, float]]) -> Estimate:
    """Return the least-squares slope of the second numbers' means at each first number, with Student's 95% interval.

    Repeats at one place are as far off a line together, so that they are one place of it, not several.
    UNKNOWN without two places; without an interval for two.
    """
    places = [(a, math.fsum(of) / len(of)) for a, of in by_key(pairs).items()]
    n = len(places)
    x, y = (math.fsum(column) / n for column in zip(*places, strict=True)) if n else (0.0, 0.0)
    spread = math.fsum((a - x) ** 2 for a, _ in places)
    if not spread:
        return UNKNOWN
    found = math.fsum((a - x) * (b - y) for a, b in places) / spread
    if n < 3:
        return Estimate(found, None, n)
    residual = math.fsum((b - y - found * (a - x)) ** 2 for a, b in places)
    return Estimate(found, t_quantile(n - 2) * math.sqrt(residual / (n - 2) / spread), n, n - 2)


def repeats_to_decide(margin: Estimate) -> int | None:
    """Return the least number of repeats of which POWER of all series would exclude 0, at today's mean and deviation.

    A series whose interval is just as wide as the mean excludes 0 half of the time. None if it is over MOST_REPEATS, if
    one measurement gives no deviation, or if repeats do not change the interval.
    """
    error = margin.standard_error
    if error is None or margin.freedom == math.inf or margin.n < 2:
        return None
    per_repeat, freedom = error * math.sqrt(margin.n), margin.freedom / (margin.n - 1)

    def needed(n: int) -> float:
        own = round(freedom * (n - 1), 2)
        return (t_quantile(own) + t_quantile(own, POWER)) * per_repeat / math.sqrt(n)

    return next((n for n in range(margin.n, MOST_REPEATS + 1) if needed(n) < abs(margin.mean)), None)


@functools.cache
def t_quantile(degrees_of_freedom: float, below: float = (1 + CONFIDENCE) / 2) -> float:
    """Return the point that a share of Student's t is below, by default the two-sided 95% point.

    For infinite degrees it is 1: the interval is given otherwise.
    """
    from scipy.special import stdtrit  # the import takes a third of a second, and single runs never need it

    return 1.0 if degrees_of_freedom == math.inf else float(stdtrit(degrees_of_freedom, below))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return first quartile, median and third quartile, interpolated linearly."""
    ordered = sorted(values)

    def at(share: float) -> float:
        position = share * (len(ordered) - 1)
        low = math.floor(position)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (position - low) * (ordered[high] - ordered[low])

    return at(0.25), at(0.5), at(0.75)
