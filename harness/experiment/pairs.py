"""Comparison of runs that differ in one choice only, measured in turn, by pairs of repeats."""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, TypeVar

from harness.analysis.columns import milliseconds
from harness.analysis.points import Measure, Point, points
from harness.records.labels import DEFAULTS
from harness.records.measures import in_order
from harness.records.record import Record
from harness.records.statistics import UNKNOWN, Estimate, estimate
from impl.run import Run

_Point = TypeVar("_Point", bound=Point)
_Choice = TypeVar("_Choice", bound=Hashable)

step_seconds: Measure = attrgetter("step_seconds")
STEP = milliseconds("step", "step", lambda point: point.estimate(step_seconds))


@dataclass(frozen=True, eq=False)
class Cell(Point):
    """Runs on one device that differ only in a choice, seed and repeat.

    As a point it has the records of all choices, and a run whose fields that may differ are at their defaults.
    """

    choices: Mapping[Any, Point] = field(default_factory=dict)
    """Successful runs, by choice."""
    why_not: Mapping[Any, str] = field(default_factory=dict)
    """Status of the other runs, by choice: invalid, oom, failed."""
    other: Any = None
    """Choice that the relative measure is over."""

    @property
    def n(self) -> int:
        """Runs of the choice with most."""
        return max(one.n for one in self.choices.values())

    @property
    def system(self) -> str:
        """Name of the system that the runs were simulated for; empty if they were run."""
        return (self.records[0].environment.system or "") if self.is_simulated else ""

    def of(self, choice: Hashable) -> Point:
        """Return the runs with a choice; a point without records if there are none."""
        return self.choices.get(choice, Point(self.run))

    def ratio(self, ours: Hashable, theirs: Hashable, measure: Measure = step_seconds) -> Estimate:
        """Return the mean ratio of a measure, ours over theirs, over pairs of equal seed and repeat.

        It has a 95% t-interval, or the simulator's own. A temporary slowdown of the machine affects both runs of a
        pair. NaN if there are no pairs, or ranks shared cores.
        """
        if self.is_simulated:
            both = self.of(ours), self.of(theirs)
            return both[0].over(both[1], measure) if all(one.records for one in both) else UNKNOWN
        ratios = [measure(a) / measure(b) for a, b in self._pairs(ours, theirs)]
        ratios = [one for one in ratios if not math.isnan(one)]
        return estimate(ratios) if ratios and not self.is_oversubscribed else UNKNOWN

    def loss_difference(self, ours: Hashable, theirs: Hashable) -> float:
        """Return the largest relative difference of losses of a pair; infinite if one is NaN or missing, NaN if all."""
        pairs = [(a.losses, b.losses) for a, b in self._pairs(ours, theirs) if a.losses and b.losses]
        each = [abs(b - a) / abs(a) for of_a, of_b in pairs for a, b in zip(of_a, of_b, strict=False)]
        each += [math.inf for a, b in pairs if len(a) != len(b)]
        return max((math.inf if math.isnan(one) else one for one in each), default=math.nan)

    def _pairs(self, ours: Hashable, theirs: Hashable) -> list[tuple[Record, Record]]:
        """Return the runs of two choices with equal seed and repeat."""
        a, b = ({(r.run.seed, r.run.repeat): r for r in self.of(choice).records} for choice in (ours, theirs))
        return [(a[key], b[key]) for key in a if key in b]

    def compare(self, ours: Hashable, theirs: Hashable) -> "Cell":
        """Return the cell with the step time of a choice relative to another's."""
        return replace(self, relative=self.ratio(ours, theirs), other=theirs)


def by_choice(
    found: Iterable[_Point], choice: Callable[[Run], _Choice], *fields: str
) -> dict[tuple[Run, str], dict[_Choice, _Point]]:
    """Return points that differ only in some fields, on one device, by the choice that their runs make in these.

    The groups are by what they share: a run whose fields that may differ, by dotted name, are at their defaults, and
    the device.
    """
    groups: dict[tuple[Run, str], dict[_Choice, _Point]] = {}
    for one in found:
        groups.setdefault((apart_from(one.run, *fields), one.device), {})[choice(one.run)] = one
    return groups


def apart_from(run: Run, *names: str) -> Run:
    """Return the run with these fields, by dotted name, at their defaults: what runs that differ in them share."""
    for name in names:
        group, _, field = name.rpartition(".")
        fields = {field: DEFAULTS[name]}
        run = replace(run, **{group: replace(getattr(run, group), **fields)} if group else fields)
    return run


def cells(records: Sequence[Record], *fields: str, choice: Callable[[Run], Hashable]) -> list[Cell]:
    """Return runs of any status in cells, by model size and then by the varying fields.

    Args:
        fields: dotted names of the fields in which the runs of a cell may differ.
        choice: function that returns a run's choice in these fields.
    """
    found = by_choice(points(records, lambda _: 0.0), choice, *fields)
    why_not: dict[Run, dict[Hashable, str]] = {}
    for record in in_order(records):
        if record.status != "ok":
            why_not.setdefault(apart_from(record.point, *fields), {})[choice(record.run)] = record.status
    made: list[Cell] = []
    for (run, device), choices in found.items():
        first, *others = choices.values()
        every = sum((one.records for one in others), first.records)
        more = {"choices": choices, "why_not": why_not.get(run, {})}
        made.append(Cell(run, every, device, first.model, first.parameters, **more))
    return made


def with_interval(one: Estimate, mean: str = ".3g", half_width: str = ".2g") -> str:
    """Return an estimate as text in these formats, `0.87 ± 0.02`; that of one measurement has no interval."""
    return f"{one:{mean}}" + ("" if one.half_width is None else f" ± {one.half_width:{half_width}}")
