"""How much of a pipeline step is idle, and how many activations are kept, under which schedule?

GPipe runs all forward passes before any backward pass; 1F1B alternates as soon as it can, with the same bubble,
(p - 1) / m, and p microbatches in flight, not m; interleaving v chunks a rank divides the bubble by v (PTD-P, section
2.2, figures 3 and 4). Zero bubble's H1 puts weight gradients off into the idle time, at 1F1B's memory: a third of the
bubble is left where a forward pass, an input gradient and a weight gradient take equally long (Qi et al. 2023,
section 2.3). What is measured is the last step of every run; beside it stands the same schedule, simulated with the
run's own times.
"""

from collections.abc import Sequence
from operator import attrgetter

from experiments.ptdp2021 import DEVIATIONS, closed_bubble, closed_in_flight, layouts, on_selene
from harness.experiment.kit import (
    AS_SIMULATED, BUBBLE, CHUNKS, MARK, MICROBATCHES, MODEL, PP, PREDICTED_BUBBLE, RANKS, RATE, RUNS, SCHEDULE, TP,
    Check, Claim, Column, Experiment, Plan, Point, Record, Tolerance, best_over, cost, each, mebibytes, named, of_run,
    points, share, table_of, within,
)  # fmt: skip

SCHEDULES = ("gpipe", "one_f_one_b", "interleaved", "zb_h1")
POINTS = Tolerance(0.1, "the closed form has neither transfers nor uneven stages", "2026-11-21")
bubble, in_flight = attrgetter("bubble"), attrgetter("microbatches_in_flight")
CLOSED = share("closed_bubble", "published", lambda point: float(closed_bubble(point.run)))
SHOWN = (
    MODEL, RANKS, TP, PP, SCHEDULE, CHUNKS, MICROBATCHES, BUBBLE, PREDICTED_BUBBLE, CLOSED,
    Column(key="microbatches_in_flight", header="in flight"),
    of_run("closed_in_flight", "in flight, published", lambda run: float(closed_in_flight(run))),
    mebibytes("in_flight_bytes", "activations", digits=3), RATE, RUNS, MARK,
)  # fmt: skip
NOTES = (
    "Bubble: idle over computing time of all pipeline ranks in the last step. Simulated: the same schedule with "
    "the median times of the run's own passes, and transfers that take none. Published: the papers' closed "
    "forms, for even stages and passes of T_F = T_B = T_W.",
    "In flight: the most microbatches that a rank keeps activations of, in parts where it has several chunks; "
    "activations: that many times the bytes it keeps of one.",
)


def pipelines(records: Sequence[Record]) -> list[Point]:
    """Return the points of SCHEDULES, by microbatches and schedule."""
    order = lambda one: (one.run.microbatches, SCHEDULES.index(one.run.plan.schedule))
    return sorted((one for one in points(records, bubble) if one.run.plan.schedule in SCHEDULES), key=order)


def fair(records: Sequence[Record], schedules: Sequence[str]) -> list[Point]:
    """Return the points of some schedules whose ranks share no cores."""
    return [one for one in pipelines(records) if one.run.plan.schedule in schedules and not one.is_oversubscribed]


def smaller_than_1f1b(schedule: str) -> Check:
    """Return a check that a schedule has a smaller bubble than 1F1B, at every count of microbatches."""
    both = lambda records: (fair(records, [schedule]), fair(records, ["one_f_one_b"]))
    return each(
        lambda records: best_over(*both(records), bubble, PP, MICROBATCHES),
        lambda _, ratio: ratio.scaled(-1) - -1, "counts", "{1:.2f} (m={0.run.microbatches})", after=" of 1F1B's",
    )  # fmt: skip


TWO_DEEP = [Plan(pp=2, schedule=one, chunks=2 if one == "interleaved" else 1) for one in SCHEDULES]

EXPERIMENT = Experiment(
    source="PTD-P 2021, section 2.2, figures 3 and 4; Zero Bubble Pipeline Parallelism (Qi et al. 2023), section 2.3",
    expectation="a bubble of (p - 1) / m under GPipe and 1F1B, 1/v of that interleaved, a third under ZB-H1; m, p, "
    "p + (p - 1) / v and p microbatches in flight",
    claims=(
        Claim(
            "the bubble of GPipe and 1F1B is (p - 1) / m, within 10 points", "PTD-P 2021, section 2.2.1",
            each(
                lambda records: [
                    (one.estimate(bubble), float(closed_bubble(one.run)), one.run)
                    for one in fair(records, SCHEDULES[:2])
                ],
                within(POINTS), "points", "{2.plan.schedule} {0:.1%} (m={2.microbatches}: {1:.1%})",
            ),
            "(p - 1) / m", kind="self-consistency", tolerance=POINTS,
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
            each(
                lambda records: [(one.mean(in_flight), one.run) for one in pipelines(records)],
                lambda count, run: count == closed_in_flight(run), "points",
                "{1.plan.schedule} {0:g} (m={1.microbatches})",
            ),
            kind="self-consistency",
        ),
        AS_SIMULATED,
    ),
    table=table_of("pipeline_schedules", "Pipeline schedules", SHOWN, pipelines, NOTES),
    cost=cost("13 min", "10 min, 96 GPUs with 80 GB"),
    deviations=DEVIATIONS + "The papers state closed forms, not measurements: `paper` is GPT-3 on 96 GPUs as in "
    "figure 12, with four chunks a rank. At `smoke` and `small` the pipeline is two ranks deep, of a model of eight "
    "small layers, with two chunks a rank.",
    runs={
        "smoke": layouts(128, TWO_DEEP, (8, 16)), "small": layouts(256, TWO_DEEP, (8, 16, 32), repeats=8),
        "paper": [
            on_selene(
                {"tp": 8, "pp": 12, "dp": 1, "global_batch": batch}, named("gpt-175b"), schedule=one,
                chunks=4 if one == "interleaved" else 1,
            )
            for batch in (12, 60)
            for one in SCHEDULES
        ],
    },
)  # fmt: skip
