"""How much of a pipeline's idle time goes away when data parallelism takes ranks from it?

With n ranks, d of them data-parallel and none tensor-parallel, a pipeline is n / d deep and has B' / d of the batch's
B' microbatches: its bubble is (n - d) / B', which falls with d to nothing (PTD-P, section 3.3.1). Figure 6 draws that
for 32 and 128 ranks and batches of 1 to 4 times as many microbatches.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter

from experiments.ptdp2021 import DEVIATIONS, layouts, on_selene
from harness.experiment.comparison import BUBBLE_NOTE
from harness.experiment.kit import (
    BUBBLE, DP, MARK, MODEL, PERCENT, PP, PREDICTED_BUBBLE, RANKS, RATE, RUNS, Check, Claim, Column, Evidence,
    Experiment, ModelConfig, Plan, Point, Record, Run, Tolerance, as_expected, cost, falls_along, figure_of, grouped,
    of_run, points, share, table_of,
)  # fmt: skip

CURVES = ((32, 32), (32, 128), (128, 128), (128, 512))
"""Ranks, and microbatches of a batch, of figure 6's curves."""
LAYERS, VOCABULARY = ModelConfig(num_layers=128, hidden_size=2048, num_heads=16), 2048
"""Model, and a vocabulary so small, by assumption, that the output head takes almost none of the last rank's time."""
NEAR = Tolerance(0.1, "the formula has neither transfers nor uneven stages", "2026-11-21")
"""Largest difference of a bubble from the formula's."""
TITLE = "The bubble and data parallelism"
measured = attrgetter("bubble")


def formula(run: Run) -> float:
    """Return idle over computing time. Source: PTD-P (2104.04473), section 3.3.1, with t = 1."""
    return (run.plan.world_size - run.plan.dp) / (run.plan.dp * run.microbatches)


TOTAL = of_run("total", "micro-batches of a batch", lambda run: run.plan.dp * run.microbatches)
FORMULA = share("formula", "published", lambda point: formula(point.run))
COLUMNS = (MODEL, RANKS, TOTAL, PP, DP, BUBBLE, PREDICTED_BUBBLE, FORMULA, RATE, RUNS, MARK)
NOTE = f"{BUBBLE_NOTE} Published: (n - d) / B', which figure 6 draws."


def pipelines(records: Sequence[Record]) -> list[Point]:
    """Return the points without tensor parallelism, by ranks, microbatches of a batch and pipelines."""
    order = lambda one: (one.run.plan.world_size, one.run.plan.dp * one.run.microbatches, one.run.plan.dp)
    return sorted((one for one in points(records, measured) if one.run.plan.tp == 1), key=order)


def fair(records: Sequence[Record]) -> list[Point]:
    """Return the pipelines whose ranks share no cores."""
    return [one for one in pipelines(records) if not one.is_oversubscribed]


def falls(what: str, *alike: Column, quoted: Callable[[Run], bool] = lambda _: False) -> Check:
    """Return a check that the bubble falls from point to point where these fields are alike, with some lines' ends."""

    def check(records: Sequence[Record]) -> Evidence | None:
        lines = [line for line in grouped(fair(records), *alike) if len(line) > 1]
        ends = (
            f"{line[0].mean(measured):.0%} to {line[-1].mean(measured):.0%} "
            f"(ranks {line[0].run.plan.world_size}, dp {line[0].run.plan.dp})"
            for line in lines
            if quoted(line[0].run)
        )
        return falls_along(lines, measured, what, ", ".join(ends))

    return check


EXPERIMENT = Experiment(
    source="PTD-P 2021, section 3.3.1, figure 6",
    expectation="a bubble of (n - d) / B': with 32 ranks and as many microbatches 97% at d = 1, 50% at 16",
    claims=(
        Claim(
            "the bubble is (n - d) / B', within 10 points",
            "figure 6",
            as_expected(
                fair,
                lambda one: one.estimate(measured),
                lambda one: formula(one.run),
                NEAR,
                "pipelines",
                are_shares=True,
            ),
            published="97% of the computing time at n = B' = 32, d = 1, and 24% with 128 microbatches",
            kind="self-consistency",
            tolerance=NEAR,
        ),
        Claim(
            "every increase of the data-parallel degree lowers it, with as many ranks and microbatches",
            "figure 6",
            falls("increases of d", RANKS, TOTAL),
            kind="self-consistency",
        ),
        Claim(
            "more microbatches lower it, with as many ranks and pipelines",
            "figure 6",
            falls("larger batches", RANKS, DP, quoted=lambda run: run.plan.dp == 1),
            kind="self-consistency",
        ),
    ),
    table=table_of("bubble", TITLE, COLUMNS, pipelines, [NOTE]),
    figure=figure_of(
        TITLE,
        "data-parallel ranks d",
        "bubble (% of the computing time)",
        fair,
        name=lambda one: f"n = {one.run.plan.world_size}, B' = {one.run.plan.dp * one.run.microbatches}",
        at=lambda one: one.run.plan.dp,
        ours=lambda one: one.mean(measured) / PERCENT,
        published=lambda one: formula(one.run) / PERCENT,
    ),
    cost=cost("7 min", "30 min, 128 GPUs with 80 GB"),
    deviations=DEVIATIONS + "The figure is of a formula and names no model: at `paper` it is one of 6.4B with a layer "
    "for each of 128 ranks, and a small vocabulary. At `smoke` and `small` a pipeline is two ranks deep; two of "
    "them at `small`, four ranks, share two cores, and their bubble says nothing.",
    runs={
        "smoke": layouts(128, [Plan(pp=2)], (8, 32)),
        "small": layouts(256, [Plan(pp=2), Plan(pp=2, dp=2)], (8, 16, 32), repeats=8),
        "paper": [
            on_selene({"tp": 1, "pp": n >> i, "dp": 2**i, "global_batch": batch}, LAYERS, 1, VOCABULARY)
            for n, batch in CURVES
            for i in range(n.bit_length() - 1)
        ],
    },
)
