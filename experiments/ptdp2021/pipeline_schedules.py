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

from experiments.ptdp2021 import DEVIATIONS, cost, layouts, on_selene
from harness.experiment.checks import best_of_both, within_points
from harness.experiment.kit import (
    AS_SIMULATED, BUBBLE, CHUNKS, MARK, MIB, MICROBATCHES, MODEL, PP, PREDICTED_BUBBLE, RANKS, RATE, RUNS, SCHEDULE, TP,
    Check, Claim, Column, Evidence, Experiment, Plan, Record, Run, Tolerance, named, of_run, share, tally,
)  # fmt: skip
from harness.experiment.listing import Listing

SCHEDULES = ("gpipe", "one_f_one_b", "interleaved", "zb_h1")
POINTS = Tolerance(0.1, "the closed form has neither transfers nor uneven stages", "2026-11-21")
"""Largest difference of a bubble from the closed form."""


def closed_bubble(run: Run) -> Fraction:
    """Return idle over computing time with even stages and T_F = T_B = T_W.

    Source: PTD-P (2104.04473), section 2.2; zero bubble (2401.10241), table 2, with m less than p as in
    `impl.pipeline.schedules.zb_h1`.
    """
    p, m = run.plan.pp, run.microbatches
    if run.plan.schedule == "zb_h1":
        return Fraction(2 * (p - 1) - (min(p, m) - 1), 3 * m)
    return Fraction(p - 1, m * run.plan.chunks)


def closed_in_flight(run: Run) -> Fraction:
    """Return microbatches that the fullest rank holds; source: as above, and Korthikanti et al. 2022, section 4.2.3."""
    p, m, v = run.plan.pp, run.microbatches, run.plan.chunks
    if run.plan.schedule == "gpipe" or m <= p:
        return Fraction(m)
    return p + Fraction(p - 1, v) if v > 1 else Fraction(p)


CLOSED_BUBBLE = share("closed_bubble", "published", lambda point: float(closed_bubble(point.run)))
SHOWN = (
    MODEL, RANKS, TP, PP, SCHEDULE, CHUNKS, MICROBATCHES, BUBBLE, PREDICTED_BUBBLE, CLOSED_BUBBLE,
    Column(key="microbatches_in_flight", header="in flight"),
    of_run("closed_in_flight", "in flight, published", lambda run: float(closed_in_flight(run))),
    Column(key="in_flight_bytes", header="activations", unit="MiB", si="B", scale=MIB, digits=3), RATE, RUNS, MARK,
)  # fmt: skip
PIPELINES = Listing(
    name="pipeline_schedules",
    title="Pipeline schedules",
    measure=lambda record: record.bubble,
    formula=CLOSED_BUBBLE,
    keep=lambda run: run.plan.schedule in SCHEDULES,
    order=lambda run: (run.microbatches, SCHEDULES.index(run.plan.schedule)),
    columns=SHOWN,
    notes=(
        "Bubble: idle over computing time of all pipeline ranks in the last step. Simulated: the same schedule with "
        "the median times of the run's own passes, and transfers that take none. Published: the papers' closed "
        "forms, for even stages and passes of T_F = T_B = T_W.",
        "In flight: the most microbatches that a rank keeps activations of, in parts where it has several chunks; "
        "activations: that many times the bytes it keeps of one.",
    ),
)


def as_closed(records: Sequence[Record]) -> Evidence | None:
    """Judge whether GPipe's and 1F1B's bubbles are (p - 1) / m, within POINTS."""
    both = [one for one in PIPELINES.fair(records) if one.run.plan.schedule in SCHEDULES[:2]]
    pairs = [(one.estimate(PIPELINES.measure), float(closed_bubble(one.run))) for one in both]
    numbers = (
        f"{one.run.plan.schedule} {bubble:.1%} (m={one.run.microbatches}: {closed:.1%})"
        for one, (bubble, closed) in zip(both, pairs, strict=True)
    )
    return within_points(pairs, POINTS, "points", ", ".join(numbers))


def against_one_f_one_b(schedule: str) -> Check:
    """Return a check that a schedule has a smaller bubble than 1F1B, at every count of microbatches."""

    def check(records: Sequence[Record]) -> Evidence | None:
        of = lambda name: [one for one in PIPELINES.fair(records) if one.run.plan.schedule == name]
        both = best_of_both(of(schedule), of("one_f_one_b"), PIPELINES.measure, PP, MICROBATCHES)
        ratios = [(a.over(b, PIPELINES.measure), a.run.microbatches) for a, b in both]
        numbers = ", ".join(f"{ratio:.2f} (m={m})" for ratio, m in ratios)
        return tally([ratio.scaled(-1) - -1 for ratio, _ in ratios], "counts", f"{numbers} of 1F1B's")

    return check


def in_flight_as_published(records: Sequence[Record]) -> Evidence | None:
    """Judge whether ranks keep as many activations as in the closed forms; counts hold with any number of cores."""
    found = [(one.run, one.mean(lambda record: record.microbatches_in_flight)) for one in PIPELINES.points(records)]
    numbers = [f"{run.plan.schedule} {count:g} (m={run.microbatches})" for run, count in found]
    return tally([count == closed_in_flight(run) for run, count in found], "points", ", ".join(numbers))


def chunked(schedule: str, chunks: int) -> dict[str, Any]:
    return {"schedule": schedule, "chunks": chunks if schedule == "interleaved" else 1}


TWO_DEEP = [Plan(pp=2, **chunked(one, 2)) for one in SCHEDULES]

EXPERIMENT = Experiment(
    source="PTD-P 2021, section 2.2, figures 3 and 4; Zero Bubble Pipeline Parallelism (Qi et al. 2023), section 2.3",
    expectation="a bubble of (p - 1) / m under GPipe and 1F1B, 1/v of that interleaved, a third under ZB-H1; m, p, "
    "p + (p - 1) / v and p microbatches in flight",
    claims=(
        Claim(
            "the bubble of GPipe and 1F1B is (p - 1) / m, within 10 points",
            "PTD-P 2021, section 2.2.1",
            as_closed,
            published="(p - 1) / m",
            kind="self-consistency",
            tolerance=POINTS,
        ),
        Claim(
            "interleaved has a smaller bubble than 1F1B",
            "PTD-P 2021, section 2.2.2",
            against_one_f_one_b("interleaved"),
            kind="self-consistency",
        ),
        Claim(
            "ZB-H1 has a smaller bubble than 1F1B",
            "Qi et al. 2023, table 2",
            against_one_f_one_b("zb_h1"),
            kind="self-consistency",
        ),
        Claim(
            "every schedule keeps as many activations in flight as its source says, exactly",
            "PTD-P 2021, section 2.2; Qi et al. 2023, table 2",
            in_flight_as_published,
            kind="self-consistency",
        ),
        AS_SIMULATED,
    ),
    table=PIPELINES.table,
    cost=cost("3 min", "10 min, 96 GPUs"),
    deviations=DEVIATIONS + "The papers state "
    "closed forms, not measurements: `paper` is GPT-3 on 96 GPUs as in figure 12, with four chunks a rank. At `smoke` "
    "and `small` the pipeline is two ranks deep, of a model of eight small layers, with two chunks a rank.",
    runs={
        "smoke": layouts(128, TWO_DEEP, (8, 16)),
        "small": layouts(256, TWO_DEEP, (8, 16, 32), repeats=2),
        "paper": [
            on_selene({"tp": 8, "pp": 12, "dp": 1, "global_batch": batch}, named("gpt-175b"), **chunked(one, 4))
            for batch in (12, 60)
            for one in SCHEDULES
        ],
    },
)
