"""What the experiments of M6-T (Yang et al. 2021, 2105.15082) and M6-10T (Lin et al. 2021, 2110.03888) share."""

import math
from collections.abc import Callable, Sequence

from harness.experiment.kit import (
    Check, Claim, Column, Evidence, Measure, Record, Run, Tolerance, estimate, less, tally, with_interval,
)  # fmt: skip
from impl.grouping import by_key

ABSTRACT = "abstract"
"""The papers' texts were not at hand, but for their abstracts."""
BySeed = dict[tuple[str, int], float]
"""A measure of a way to train, by device and seed."""


def last_loss(record: Record) -> float:
    """Return nats a token on held-out text after the last step; NaN where nothing was evaluated."""
    return record.last_evaluations[0].per("tokens") if record.last_evaluations else math.nan


LAST_LOSS = Column(key="loss", header="loss", unit="nats a token", of=lambda one: one.estimate(last_loss))


def place(record: Record) -> tuple[str, int]:
    """Return the device and the seed of a record."""
    return record.environment.device_name or "", record.run.seed


def by_seed(way: Callable[[Run], str], measure: Measure) -> Callable[[Sequence[Record]], dict[str, BySeed]]:
    """Return a function that gives a measure of each way to train, where records have it."""

    def found(records: Sequence[Record]) -> dict[str, BySeed]:
        known = ((way(one.run), (place(one), measure(one))) for one in records)
        return {name: dict(of) for name, of in by_key(one for one in known if not math.isnan(one[1][1])).items()}

    return found


def ratio_of(found: dict[str, BySeed], one: str, other: str, most: float, what: str) -> Evidence | None:
    """Judge whether one way's measure is at most so many times another's, by the ratios of equal seeds."""
    first, second = found.get(one, {}), found.get(other, {})
    both = sorted(first.keys() & second.keys())
    if not both:
        return None
    ratio = estimate([first[at] / second[at] for at in both])
    times = f"{with_interval(ratio, '.4f', '.4f')} times {other}"
    numbers = f"{what}: {one} {times}, {len(both)} seed{'s' * (len(both) > 1)}"
    return tally([less(ratio, most)], "", numbers)


def at_most(
    ways: Callable[[Sequence[Record]], dict[str, BySeed]], one: str, other: str, what: str, by: float = 0.0
) -> Check:
    """Return a check that one way's measure is at most another's, or above it by a share."""
    return lambda records: ratio_of(ways(records), one, other, 1 + by, what)


def in_abstract(text: str, check: Check, tolerance: Tolerance | None = None) -> Claim:
    return Claim(text, ABSTRACT, check, kind="direction", tolerance=tolerance)
