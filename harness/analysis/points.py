"""Points of a sweep: repeats and seeds of one run on one device, with estimates of their measures."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from harness.records.measures import devices, in_order, model_names, shape, with_seconds, without_losses
from harness.records.record import Record
from harness.records.statistics import NINE_TENTHS, UNKNOWN, Estimate, estimate, rest, simulated
from impl.grouping import by_key
from impl.run import Run

Measure = Callable[[Record], float]
"""Function that returns a measure of a record, as `lambda record: record.flop_rate`; NaN where it has none."""


@dataclass(frozen=True, eq=False)
class Point:
    """Repeats and seeds of one run on one device, or a point of a paper that was not run."""

    run: Run
    """Run with seed and repeat 0."""
    records: tuple[Record, ...] = ()
    """Records that have the measure which is compared; empty if the point was not run."""
    device: str = ""
    """Name of the device, with `, simulated` if nothing was run."""
    model: str = ""
    """Name of the model, as `GPT 1.2B`."""
    parameters: float = math.nan
    """Parameters of the model."""
    relative: Estimate = UNKNOWN
    """Measure relative to the baseline's."""
    is_baseline: bool = False
    """True if the point is its own baseline, so that its relative measure is no result."""
    printed: Mapping[str, float] = field(default_factory=dict)
    """Numbers that a source prints for this point, by the key of their column."""

    @property
    def n(self) -> int:
        """Number of runs."""
        return len(self.records)

    @property
    def is_simulated(self) -> bool:
        """True if nothing was run."""
        return bool(self.records) and self.records[0].is_simulated

    @property
    def is_oversubscribed(self) -> bool:
        """True if ranks of one of the runs shared CPU cores, so that times are useless for scaling."""
        return any(record.is_oversubscribed for record in self.records)

    @property
    def is_disturbed(self) -> bool:
        """True if others took much of the processors' time during one of the runs."""
        return any(record.is_disturbed for record in self.records)

    def estimate(self, measure: Measure) -> Estimate:
        """Return the mean of a measure over the records with its interval; NaN if none has it.

        The interval is that of repeats, or the simulator's own. Of what was learned repeats of a seed say nothing new:
        they count as one.
        """
        known = [(record, value) for record in self.records if not math.isnan(value := measure(record))]
        if known and self.is_simulated:
            return simulated(known[0][1], causes(self.records[0], measure))
        of_seed = by_key((record.run.seed, value) for record, value in known)
        values = [value for _, value in known]
        if len(of_seed) < len(known) and is_learned(measure, *known[0]):
            values = [math.fsum(of) / len(of) for of in of_seed.values()]
        return estimate(values) if values else UNKNOWN

    def mean(self, measure: Measure) -> float:
        """Return the mean of a measure over the records; NaN if none has it."""
        return self.estimate(measure).mean

    def over(self, other: "Point", measure: Measure) -> Estimate:
        """Return a measure over another point's: exactly 1 over itself, NaN if ranks of either shared cores."""
        if self.is_oversubscribed or other.is_oversubscribed:
            return UNKNOWN
        if self is other:
            return Estimate(1.0, None, len(self.records))
        return self.estimate(measure) / other.estimate(measure)

    def against(self, baseline: "Point | None", measure: Measure) -> "Point":
        """Return the point relative to a baseline; as it is without one."""
        if baseline is None:
            return self
        return replace(self, relative=self.over(baseline, measure), is_baseline=baseline is self)


def relative(point: Point) -> Estimate:
    """Return a point's measure over that of its baseline."""
    return point.relative


def is_learned(measure: Measure, record: Record, value: float) -> bool:
    """Return True if a measure of a record is of its losses or evaluations: without these it is another."""
    try:
        return measure(without_losses(record)) != value
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return True


def causes(record: Record, measure: Measure) -> dict[str, float]:
    """Return the relative change of a simulated record's measure by each cause of error, off by a standard deviation.

    Causes are independent; those with equal names are shared by records of one system. The record's own is what these
    leave of its 90% interval: errors of published steps that nothing was fitted to are as far apart as if two runs had
    nothing else in common (results/accuracy.md).
    """
    steps, kept = record.timed_seconds, record.prediction
    if not steps or not (value := measure(record)):
        return {}
    small = 1e-4
    elasticity = (measure(with_seconds(record, steps[0] * (1 + small))) / value - 1) / small
    shared = {f"{record.environment.system} {name}": slope for name, slope in kept.slopes.items()}
    whole = math.log(kept.high / kept.low) / (2 * NINE_TENTHS) if kept.low and kept.high else 0.0
    own = max(kept.own_sd, rest(whole, shared.values()))
    return {name: elasticity * by for name, by in (shared | {record.id: own}).items()}


def points(records: Sequence[Record], measure: Measure, *, failed: bool = False) -> list[Point]:
    """Return the runs that have a measure as points, by model size and varying fields; failed ones only if `failed`."""
    names, called = model_names(records), devices(records)
    found: dict[tuple[Run, str], list[Record]] = {}
    for record in in_order(records):
        if (failed or record.status == "ok") and not math.isnan(measure(record)):
            where = record.environment
            device = called[where.system] if record.is_simulated else where.device_name or ""
            found.setdefault((record.point, device), []).append(record)
    return [
        Point(run, tuple(group), device, names[shape(run)], group[0].parameters)
        for (run, device), group in found.items()
    ]
