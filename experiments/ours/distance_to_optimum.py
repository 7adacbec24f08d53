"""How far from the shortest possible step is every pipeline schedule, in the memory that it takes?

No order of a step's passes is shorter than a lower bound that follows from the passes, the ranks they are on, and how
many activations a rank may hold (`impl/pipeline/bound.py`). Each schedule stands here beside the bound in its own
memory: with a forward pass, an input gradient and a weight gradient that take as long, with its own passes' times, and
as it was measured.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from experiments.ours import claim
from experiments.ptdp2021 import layouts
from harness.experiment.kit import (
    BUBBLE, CHUNKS, MARK, MICROBATCHES, MODEL, PERCENT, PP, RUNS, SCHEDULE, Column, Estimate, Experiment, Plan, Point,
    Recipe, Record, Run, Tolerance, cost, each, figure_of, named, of_run, points, share, table_of, untested,
)  # fmt: skip
from impl.pipeline.bound import Problem, lower_bound
from impl.pipeline.schedule import Action, Op
from impl.pipeline.schedules import build
from impl.pipeline.simulate import Number, simulate, uniform

CHUNKED = {"interleaved": 2, "zbv": 2, "v_half": 2, "v_min": 2, "dualpipe_v": 2}
SCHEDULES = ("gpipe", "one_f_one_b", "eager_one_f_one_b", "zb_h1", "zb_h2", *CHUNKED)
NOISE = Tolerance(0.05, "a pass's median stands for its times, which differ from each other", "2026-11-25")
NEAR = Tolerance(0.04, "half of what 1F1B is over it with two ranks and eight equal microbatches", "2026-11-25")
NOTE = (
    "Lower bound: of the same passes on the same ranks, with no more activations than the fullest rank holds. Equal "
    "passes: T_F = T_B = T_W, in forward passes of a rank. Own times: the run's medians, and transfers that take none. "
    "Without a flush: a rank's work alone, which is a step of PipeDream-2BW (Narayanan et al. 2020, 2006.09503); it "
    "keeps two versions of the weights and updates with gradients of the older one, so that it is not trained here."
)
Over = Callable[[Point], Estimate]


@cache
def at_equal(run: Run) -> tuple[float, float]:
    """Return the simulated step and the lower bound with equal passes."""
    plan, cost = run.plan, uniform(chunks=run.plan.chunks)
    schedule = build(plan.schedule, plan.pp, run.microbatches, plan.chunks)
    return float(simulate(schedule, cost).step_time), float(lower_bound(Problem.of(schedule, cost)))


def work(run: Run) -> float:
    """Return the seconds that each rank computes in a step, with equal passes."""
    return float(run.microbatches * sum(map(uniform(), (Action(op, 0, 0) for op in (Op.F, Op.B)))))


def over_at_equal(one: Point) -> float:
    step, bound = at_equal(one.run)
    return step / bound - 1


def own_bound(record: Record) -> float:
    """Return the lower bound with the median times of the run's own passes; NaN where they were not measured."""
    if record.timeline is None:
        return math.nan
    seconds = {span.action[:2]: span.end - span.start for span in record.simulated_timeline().spans}

    def least(action: Action) -> Number:
        if action.op is Op.F:
            return seconds[action[:2]]
        parts = {op: seconds.get((op, action.stage), 0.0) for op in (Op.I, Op.W)}
        split, whole = sum(parts.values()), seconds.get((Op.B, action.stage), math.inf)
        return min(parts[action.op], parts[action.op] / split * whole) if split else whole / 2

    schedule = build(record.run.plan.schedule, record.run.plan.pp, record.run.microbatches, record.run.plan.chunks)
    return float(lower_bound(Problem.of(schedule, least)))


def over(seconds: str) -> Over:
    """Return a function of a point: how far a measure of its seconds is above the bound of its own times."""
    return lambda one: one.estimate(lambda record: getattr(record, seconds) / own_bound(record) - 1)


SIMULATED, MEASURED = over("predicted_pipeline_seconds"), over("pipeline_seconds")


def pipelines(records: Sequence[Record]) -> list[Point]:
    """Return the points of the schedules, by microbatches."""
    found = [one for one in points(records, lambda record: record.bubble) if one.run.plan.schedule in SCHEDULES]
    return sorted(found, key=lambda one: (one.run.microbatches, SCHEDULES.index(one.run.plan.schedule)))


def judged(records: Sequence[Record], above: Over, schedules: Sequence[str] = SCHEDULES) -> list[tuple[Estimate, Run]]:
    """Return how far the schedules are above their bounds, where ranks share no cores."""
    fair = [one for one in pipelines(records) if not one.is_oversubscribed]
    return [(above(one), one.run) for one in fair if one.run.plan.schedule in schedules]


SHOWN = (
    MODEL, PP, SCHEDULE, CHUNKS, MICROBATCHES, Column(key="microbatches_in_flight", header="in flight"),
    of_run("step_at_equal", "step, equal passes", lambda run: at_equal(run)[0]),
    of_run("bound_at_equal", "lower bound", lambda run: at_equal(run)[1]),
    share("over_at_equal", "over it", over_at_equal),
    share("unflushed", "without a flush", lambda one: work(one.run) / at_equal(one.run)[1] - 1),
     share("simulated_over", "over it, own times", SIMULATED),
    share("measured_over", "over it, measured", MEASURED), BUBBLE, RUNS, MARK,
)  # fmt: skip
TWO, EIGHT = ([Plan(pp=p, schedule=one, chunks=CHUNKED.get(one, 1)) for one in SCHEDULES] for p in (2, 8))
ON_8 = replace(named("gpt-1.2b"), dropout=0.0), Recipe(steps=10, microbatch=1)

EXPERIMENT = Experiment(
    source="our own",
    expectation="ZB-H1 at the bound, ZB-V near it, 1F1B and GPipe as far above as their bubbles are",
    claims=(
        claim(
            "no measured step is shorter than the lower bound of its own times, but for 5%",
            each(
                lambda records: judged(records, MEASURED), lambda above, _: above - -NOISE, "pipelines",
                "{:+.1%} ({.plan.schedule})", is_brief=True,
            ),
            kind="self-consistency", tolerance=NOISE,
        ),
        claim(
            "ZB-H1's step with its own times is within 4% of the lower bound in its memory",
            each(
                lambda records: judged(records, SIMULATED, ["zb_h1"]), lambda above, _: (above - NEAR).scaled(-1),
                "pipelines", "{:+.1%} ({.microbatches} microbatches)",
            ),
            tolerance=NEAR,
        ),
    ),
    table=table_of("distance", "Schedules over the lower bound", SHOWN, pipelines, [NOTE]),
    figure=figure_of(
        "Schedules over the lower bound, equal passes", "microbatches of a step", "over the lower bound (%)", pipelines,
        name=lambda one: one.run.plan.schedule, at=lambda one: one.run.microbatches,
        ours=lambda one: over_at_equal(one) / PERCENT,
    ),
    cost=cost("4 min", "20 min, 8 GPUs with 80 GB"),
    deviations="Where no backward pass is split it counts as two halves; where some are, the shorter counts. Bounds "
    "differ where memory does. At `smoke` and `small` two ranks are measured on two cores; at `paper` a simulated run "
    "has equal passes only.",
    runs={
        "smoke": layouts(64, TWO, (8,)), "small": layouts(256, TWO, (8, 32)),
        "paper": [
            untested(ON_8[0], plan, replace(ON_8[1], global_batch=m), "bf16") for m in (16, 32, 64) for plan in EIGHT
        ],
    },
)  # fmt: skip
