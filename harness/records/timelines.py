"""Pipeline timelines of a run: the measured one, and the one simulated from its own times."""

from harness.records.record import Record
from harness.records.statistics import quartiles
from impl.pipeline.schedule import Op
from impl.pipeline.schedules import build
from impl.pipeline.simulate import Timeline, simulate


def measured(record: Record) -> Timeline | None:
    """Return the timeline of the last step; None for runs without a pipeline, or that did not reach that step."""
    rows = [rank.timeline for rank in record.ranks if rank.timeline]
    return Timeline.from_rows(rows) if rows else None


def predicted(record: Record, timeline: Timeline) -> Timeline:
    """Return the run's schedule simulated with the median times of each stage's forward and backward passes alone."""
    seconds: dict[tuple[Op, int], list[float]] = {}
    for span in timeline.spans:
        seconds.setdefault(span.action[:2], []).append(float(span.end - span.start))
    medians = {kind: quartiles(values)[1] for kind, values in seconds.items()}
    run = record.run
    schedule = build(run.plan.schedule, run.plan.pp, run.microbatches, run.plan.chunks)
    return simulate(schedule, lambda action: medians[action[:2]])
