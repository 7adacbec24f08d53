"""How much of a pipeline step is idle, and how many activations are kept, under which schedule?

GPipe runs all forward passes before any backward pass; 1F1B alternates as soon as it can, with the same bubble,
(p - 1) / m, and p microbatches in flight, not m; interleaving v chunks a rank divides the bubble by v (PTD-P, section
2.2, figures 3 and 4). Zero bubble's H1 puts weight gradients off into the idle time, at 1F1B's memory: a third of the
bubble is left where a forward pass, an input gradient and a weight gradient take equally long (Qi et al. 2023,
section 2.3). What is measured is the last step of every run; beside it stands the same schedule, simulated with the
run's own times.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from experiments.ptdp2021 import DEVIATIONS, closed_bubble, closed_in_flight, cost, layouts, on_selene
from harness.experiment.checks import best_of_both, each, within
from harness.experiment.kit import (
    AS_SIMULATED, BUBBLE, CHUNKS, MARK, MIB, MICROBATCHES, MODEL, PP, PREDICTED_BUBBLE, RANKS, RATE, RUNS, SCHEDULE, TP,
    Check, Claim, Column, Estimate, Experiment, Plan, Record, Tolerance, named, of_run, share,
)  # fmt: skip
from harness.experiment.listing import Listing

SCHEDULES = ("gpipe", "one_f_one_b", "interleaved", "zb_h1")
POINTS = Tolerance(0.1, "the closed form has neither transfers nor uneven stages", "2026-11-21")
"""Largest difference of a bubble from the closed form."""
CLOSED = share("closed_bubble", "published", lambda point: float(closed_bubble(point.run)))
PIPELINES = Listing(
    name="pipeline_schedules", title="Pipeline schedules", measure=lambda record: record.bubble, formula=CLOSED,
    keep=lambda run: run.plan.schedule in SCHEDULES,
    order=lambda run: (run.microbatches, SCHEDULES.index(run.plan.schedule)),
    columns=(
        MODEL, RANKS, TP, PP, SCHEDULE, CHUNKS, MICROBATCHES, BUBBLE, PREDICTED_BUBBLE, CLOSED,
        Column(key="microbatches_in_flight", header="in flight"),
        of_run("closed_in_flight", "in flight, published", lambda run: float(closed_in_flight(run))),
        Column(key="in_flight_bytes", header="activations", unit="MiB", si="B", scale=MIB, digits=3), RATE, RUNS, MARK,
    ),
    notes=(
        "Bubble: idle over computing time of all pipeline ranks in the last step. Simulated: the same schedule with "
        "the median times of the run's own passes, and transfers that take none. Published: the papers' closed "
        "forms, for even stages and passes of T_F = T_B = T_W.",
        "In flight: the most microbatches that a rank keeps activations of, in parts where it has several chunks; "
        "activations: that many times the bytes it keeps of one.",
    ),
)  # fmt: skip


def bubbles(records: Sequence[Record]) -> list[tuple[Estimate, float, str, int]]:
    """Return the bubbles of GPipe and 1F1B with those of the closed form, schedules and counts of microbatches."""
    both = [one for one in PIPELINES.fair(records) if one.run.plan.schedule in SCHEDULES[:2]]
    named = lambda one: (float(closed_bubble(one.run)), one.run.plan.schedule, one.run.microbatches)
    return [(one.estimate(PIPELINES.measure), *named(one)) for one in both]


def smaller_than_1f1b(schedule: str) -> Check:
    """Return a check that a schedule has a smaller bubble than 1F1B, at every count of microbatches."""

    def ratios(records: Sequence[Record]) -> list[tuple[Estimate, int]]:
        of = lambda name: [one for one in PIPELINES.fair(records) if one.run.plan.schedule == name]
        both = best_of_both(of(schedule), of("one_f_one_b"), PIPELINES.measure, PP, MICROBATCHES)
        return [(a.over(b, PIPELINES.measure), a.run.microbatches) for a, b in both]

    return each(ratios, lambda ratio, _: ratio.scaled(-1) - -1, "counts", "{:.2f} (m={})", after=" of 1F1B's")


def in_flight(records: Sequence[Record]) -> list[tuple[float, Fraction, str, int]]:
    """Return what ranks keep activations of, counted with any number of cores, as `bubbles`."""
    counted = lambda one: one.mean(lambda record: record.microbatches_in_flight)
    found = [(one.run, counted(one)) for one in PIPELINES.points(records)]
    return [(count, closed_in_flight(run), run.plan.schedule, run.microbatches) for run, count in found]


def chunked(schedule: str, chunks: int) -> dict[str, Any]:
    return {"schedule": schedule, "chunks": chunks if schedule == "interleaved" else 1}


TWO_DEEP = [Plan(pp=2, **chunked(one, 2)) for one in SCHEDULES]

EXPERIMENT = Experiment(
    source="PTD-P 2021, section 2.2, figures 3 and 4; Zero Bubble Pipeline Parallelism (Qi et al. 2023), section 2.3",
    expectation="a bubble of (p - 1) / m under GPipe and 1F1B, 1/v of that interleaved, a third under ZB-H1; m, p, "
    "p + (p - 1) / v and p microbatches in flight",
    claims=(
        Claim(
            "the bubble of GPipe and 1F1B is (p - 1) / m, within 10 points", "PTD-P 2021, section 2.2.1",
            each(bubbles, within(POINTS), "points", "{2} {0:.1%} (m={3}: {1:.1%})"), "(p - 1) / m",
            kind="self-consistency", tolerance=POINTS,
        ),
        Claim(
            "interleaved has a smaller bubble than 1F1B", "PTD-P 2021, section 2.2.2",
            smaller_than_1f1b("interleaved"), kind="self-consistency",
        ),
        Claim(
            "ZB-H1 has a smaller bubble than 1F1B", "Qi et al. 2023, table 2", smaller_than_1f1b("zb_h1"),
            kind="self-consistency",
        ),
        Claim(
            "every schedule keeps as many activations in flight as its source says, exactly",
            "PTD-P 2021, section 2.2; Qi et al. 2023, table 2",
            each(in_flight, lambda count, closed, *_: count == closed, "points", "{2} {0:g} (m={3})"),
            kind="self-consistency",
        ),
        AS_SIMULATED,
    ),
    table=PIPELINES.table, cost=cost("3 min", "10 min, 96 GPUs"),
    deviations=DEVIATIONS + "The papers state closed forms, not measurements: `paper` is GPT-3 on 96 GPUs as in "
    "figure 12, with four chunks a rank. At `smoke` and `small` the pipeline is two ranks deep, of a model of eight "
    "small layers, with two chunks a rank.",
    runs={
        "smoke": layouts(128, TWO_DEEP, (8, 16)),
        "small": layouts(256, TWO_DEEP, (8, 16, 32), repeats=2),
        "paper": [
            on_selene({"tp": 8, "pp": 12, "dp": 1, "global_batch": batch}, named("gpt-175b"), **chunked(one, 4))
            for batch in (12, 60)
            for one in SCHEDULES
        ],
    },
)  # fmt: skip
