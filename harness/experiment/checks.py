"""Checks of claims that experiments have in common, on values that they give."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from harness.analysis.columns import values as values_of
from harness.analysis.points import Measure, Point, points
from harness.analysis.render import Column
from harness.experiment.claims import Check, Claim, Evidence, Tolerance, holds, less, near, tally
from harness.records.record import Record
from harness.records.statistics import Estimate, exact
from impl.grouping import by_key

_T = TypeVar("_T")
_Point = TypeVar("_Point", bound=Point)


def falls(values: Sequence[Estimate | float], what: str, numbers: str) -> Evidence | None:
    """Judge whether every value is smaller than the one before it; None for fewer than two."""
    return tally([less(b, a) for a, b in pairwise(values)], what, numbers)


def rises(values: Sequence[Estimate | float], what: str, numbers: str) -> Evidence | None:
    """Judge whether every value is larger than the one before it; None for fewer than two."""
    return tally([less(a, b) for a, b in pairwise(values)], what, numbers)


def larger(one: Point, other: Point, measure: Measure) -> Estimate:
    """Return by how much a point's measure is over another's, as a share of it."""
    return one.over(other, measure) - 1


def largest(best: Point, others: Iterable[Point], measure: Measure) -> Estimate:
    """Return by how much a point's measure is over the others', by the comparison that is least sure."""
    return all_hold([larger(best, one, measure) for one in others])


def all_hold(margins: Sequence[Estimate]) -> Estimate:
    """Return the margin that decides whether all hold: one that fails, else one that is open, else the smallest."""
    return min(margins, key=lambda one: ({False: 0, None: 1, True: 2}[holds(one)], one.mean))


def known(found: Iterable[_Point]) -> list[_Point]:
    """Return the points whose relative measure is known."""
    return [one for one in found if not math.isnan(one.relative.mean)]


def at_most(
    found: Iterable[_Point],
    limit: float,
    what: str,
    text: Callable[[_Point], str],
    *,
    is_brief: bool = False,
) -> Evidence | None:
    """Judge whether the relative measure of every point is at most a limit; None if it is known of none.

    Args:
        text: number of a point, in words.
        is_brief: give the smallest and the largest number only.
    """
    ones = known(found)
    numbers = ends(ones, lambda one: one.relative.mean, text) if is_brief else ", ".join(map(text, ones))
    return tally([one.relative.scaled(-1) - -limit for one in ones], what, numbers)


def ends(found: Sequence[_T], measure: Callable[[_T], float], text: Callable[[_T], str]) -> str:
    """Return the texts of what has the smallest and the largest measure, as `0.8 (dp) to 0.9 (tp)`."""
    ordered = sorted(found, key=measure)
    return " to ".join(map(text, ordered[:1] + ordered[1:][-1:]))


def grouped(points: Iterable[Point], *columns: Column) -> list[list[Point]]:
    """Return the points of one device that are equal in these columns, in groups, in order of their first points."""
    return list(by_key(((one.device, *values_of(one, columns)), one) for one in points).values())


def within_share(
    pairs: Iterable[tuple[Estimate | float, float]], within: float, what: str, numbers: str = "", *, digits: int = 0
) -> Evidence | None:
    """Judge whether numbers are the expected ones, within a share of them; pairs with NaN are left out.

    Args:
        pairs: numbers, each with the expected one.
        within: largest relative distance.
        what: plural name of the numbers.
        numbers: text of the evidence; by default the furthest distance.
        digits: decimals of that distance, in percent.
    """
    ratios = [ours.scaled(1 / one) if isinstance(ours, Estimate) else exact(ours / one) for ours, one in pairs]
    off = max((one - 1 for one in ratios if not math.isnan(one.mean)), key=lambda one: abs(one.mean), default=exact(0))
    furthest = f"furthest {_percent(off, digits)}% off"
    return tally([near(one, 1, within) for one in ratios], what, numbers or furthest)


def as_expected(
    found: Callable[[Sequence[Record]], Iterable[_T]],
    ours: Callable[[_T], Estimate | float],
    expected: Callable[[_T], float],
    within: float,
    what: str = "points",
    *,
    digits: int = 0,
    are_shares: bool = False,
) -> Check:
    """Return a check of a number of the points that `found` returns for records, as `within_share`.

    Args:
        are_shares: judge the difference of two shares, as `within_points`.
    """
    pairs = lambda records: ((ours(one), expected(one)) for one in found(records))
    if are_shares:
        return lambda records: within_points(pairs(records), within, what)
    return lambda records: within_share(pairs(records), within, what, digits=digits)


def within_points(
    pairs: Iterable[tuple[Estimate | float, float]], within: float, what: str, numbers: str = ""
) -> Evidence | None:
    """Judge as `within_share`, but by the difference of two shares, in percentage points."""
    found = [(ours if isinstance(ours, Estimate) else exact(ours), expected) for ours, expected in pairs]
    known = (ours - expected for ours, expected in found if not math.isnan(ours.mean - expected))
    off = max(known, key=lambda one: abs(one.mean), default=exact(0))
    furthest = f"furthest {_percent(off, 1)} points off"
    return tally([near(ours, expected, within) for ours, expected in found], what, numbers or furthest)


def _percent(off: Estimate, digits: int) -> str:
    """Return a difference in percent with its interval."""
    wide = f" ± {100 * off.half_width:.{digits}f}" if off.half_width else ""
    return f"{100 * off.mean:+.{digits}f}{wide}"


def measured_only(check: Check) -> Check:
    """Return a check of measured runs alone, for a claim that holds on simulated ones whatever part takes no time."""
    return lambda records: check([one for one in records if not one.is_simulated])


def simulated_only(check: Check) -> Check:
    """Return a check of simulated runs alone, for a claim that small layouts would decide by what sets them apart."""
    return lambda records: check([one for one in records if one.is_simulated])


def as_predicted(counted: Measure, predicted: Measure, within: float) -> Check:
    """Return a check that counted bytes are the predicted ones within a share of them; NaN was not counted."""

    def check(records: Sequence[Record]) -> Evidence | None:
        ratios = [counted(one) / predicted(one) for one in records if not math.isnan(counted(one))]
        if not ratios:
            return None
        numbers = f"{min(ratios):.3f} to {max(ratios):.3f} times the prediction"
        return tally([abs(ratio - 1) <= within for ratio in ratios], "points", numbers)

    return check


def falls_along(lines: Iterable[Sequence[Point]], measure: Measure, what: str, numbers: str = "") -> Evidence | None:
    """Judge whether a measure falls at every step of every line."""
    return tally([larger(a, b, measure) for line in lines for a, b in pairwise(line)], what, numbers)


def best_over(
    ours: Iterable[Point], theirs: Iterable[Point], measure: Measure, *alike: Column
) -> list[tuple[Point, Estimate]]:
    """Return our points of largest measure, each over theirs, where both have points that are equal in columns."""
    best = lambda found: max(found, key=lambda one: one.mean(measure))
    key = lambda one: (one.device, *values_of(one, alike))
    others = {key(group[0]): best(group) for group in grouped(theirs, *alike)}
    both = [(best(group), others.get(key(group[0]))) for group in grouped(ours, *alike)]
    return [(one, one.over(other, measure)) for one, other in both if other is not None]


def each(
    found: Callable[[Sequence[Record]], Iterable[tuple[Any, ...]]],
    holds: Callable[..., bool | Estimate],
    what: str,
    text: str,
    joined: str = ", ",
    *,
    is_brief: bool = False,
    after: str = "",
) -> Check:
    """Return a check that every point holds, with its numbers as text; points with NaN are left out.

    Args:
        found: function of records that returns each point's numbers, and names for the text.
        holds: function of these that returns by how much the point holds.
        what: plural name of the points.
        text: format of a point's numbers and names, as `{:.1%} (published {:.1%})`.
        joined: separator of the texts.
        is_brief: give only the points whose first numbers are the smallest and the largest.
        after: end of the whole text.
    """

    def check(records: Sequence[Record]) -> Evidence | None:
        mean = lambda value: value.mean if isinstance(value, Estimate) else value
        isnan = lambda value: isinstance(mean(value), float) and math.isnan(mean(value))
        known = [one for one in found(records) if not any(map(isnan, one))]
        said = lambda one: text.format(*one)
        numbers = ends(known, lambda one: mean(one[0]), said) if is_brief else joined.join(map(said, known))
        return tally([holds(*one) for one in known], what, numbers + after)

    return check


def within(limit: float) -> Callable[..., bool | Estimate]:
    """Return a condition for `each`: the first two numbers of a point differ by at most this much."""
    return lambda ours, expected, *_: near(ours, expected, limit)


AS_SCHEDULED = Tolerance(0.1, "the simulation leaves transfers and uneven passes out", "2026-11-20")


def as_simulated(records: Sequence[Record]) -> Evidence | None:
    """Check that pipelined steps last as long as simulated with their own times, within a tenth."""
    found = [one for one in points(records, lambda record: record.pipeline_seconds) if not one.is_oversubscribed]
    ratios = [one.estimate(lambda record: record.pipeline_seconds / record.predicted_pipeline_seconds) for one in found]
    numbers = ends(ratios, lambda one: one.mean, lambda one: f"{one:.3f}") + " of the simulated time"
    return tally([near(one, 1, AS_SCHEDULED) for one in ratios], "points", numbers)


AS_SIMULATED = Claim(
    "a step lasts as long as its schedule says, simulated with the run's own times, within 10%",
    "our own",
    as_simulated,
    kind="self-consistency",
    tolerance=AS_SCHEDULED,
)
