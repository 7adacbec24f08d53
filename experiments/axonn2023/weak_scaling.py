"""How much of the peak do grids of ranks reach, as model and GPUs double, and how far ahead of Megatron-LM are they?

AxoNN trains 80B on 1,024 GPUs of Perlmutter at 57% of their peak, 26% faster than Megatron-LM. Here models from 5B on
64 GPUs to 80B on 1,024 have the fastest of all grids, and beside it the fastest of all plans that Megatron-LM has:
layers shared within a node and as pipelines, optimizer states divided. Both recompute every layer, as in the job
scripts of both; further plans are the fastest that recompute nothing.
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

from experiments.axonn2023 import SHAPES, WHOLE, on_grid, on_perlmutter
from experiments.ours import claim
from experiments.ptdp2021 import timed
from harness.experiment.contests import plan_in_words
from harness.experiment.kit import (
    DEVICE, FLOP_RATE, MARK, MODEL, POINTS, RANKS, RUNS, TERA, Check, Claim, Estimate, Evidence, Experiment,
    ModelConfig, Plan, Point, Record, Run, Tolerance, best_over, cost, each, flop_rate, less, of_run, points,
    published_number, rate_with_recomputation, repeated, share, table_of, tally, within,
)  # fmt: skip

Way = Literal["grid", "Megatron-LM", "grid, recomputing nothing", "Megatron-LM, recomputing nothing"]
GRID, MEGATRON, GRID_FREE, MEGATRON_FREE = get_args(Way)
PEAK = 312 * TERA
KEPT = Tolerance(0.1, "assumed", "2026-11-27")
"""Share of its rate that a device may lose from 64 to 1,024 of them."""


def interleaved(chunks: int) -> dict[str, Any]:
    return {"schedule": "interleaved", "chunks": chunks}


TP4: dict[str, Any] = {"tp": 4, "sequence_parallel": True, "zero_stage": 1}
ZERO1: dict[str, Any] = {"zero_stage": 1, "microbatch": 2}
FOUND: dict[int, dict[Way, dict[str, Any]]] = {
    5: {
        GRID: {"grid": (1, 1, 64, 1), "microbatch": 16}, GRID_FREE: {"grid": (1, 1, 32, 2), "microbatch": 4},
        MEGATRON: {**ZERO1, "microbatch": 16}, MEGATRON_FREE: ZERO1,
    },
    10: {
        GRID: {"grid": (1, 1, 64, 2), "microbatch": 8}, GRID_FREE: {"grid": (1, 1, 32, 4), "microbatch": 2},
        MEGATRON: {**ZERO1, "pp": 2, **interleaved(4)}, MEGATRON_FREE: {**TP4, "microbatch": 8},
    },
    20: {
        GRID: {"grid": (1, 1, 128, 2), "microbatch": 4}, GRID_FREE: {"grid": (1, 1, 64, 4), "microbatch": 2},
        MEGATRON: {**TP4, "microbatch": 16}, MEGATRON_FREE: {**TP4, "microbatch": 4},
    },
    40: {
        GRID: {"grid": (1, 1, 128, 4), "microbatch": 2}, MEGATRON: {**TP4, "pp": 4, "microbatch": 4, **interleaved(5)},
        MEGATRON_FREE: {**TP4, "pp": 4, "microbatch": 4, **interleaved(5)},
    },
    80: {
        GRID: {"grid": (4, 1, 16, 16), "microbatch": 4}, MEGATRON: {**TP4, "pp": 4, "microbatch": 4, **interleaved(6)},
        MEGATRON_FREE: {**TP4, "pp": 4, "microbatch": 2, **interleaved(6)},
    },
}  # fmt: skip
"""Fastest plans by prediction for `perlmutter`, of all that fit, by billions of parameters and way. Grids of 40B and
80B gain nothing by recomputing nothing, as microbatches are small then."""
GPUS = {size: 64 * size // 5 for size in FOUND}
"""As many for a parameter as 80B's 1,024, which the abstract has; those of smaller models are our own choice."""


def plan_of(size: int, way: Way) -> Run:
    fields = dict(FOUND[size][way])
    more = {"recompute": "full" if way in (GRID, MEGATRON) else "none", "bucket_bytes": WHOLE}
    microbatch, grid = fields.pop("microbatch"), fields.pop("grid", None)
    others = fields.get("tp", 1) * fields.get("pp", 1)
    plan = on_grid(grid, **more) if grid else Plan(**{"dp": GPUS[size] // others, **more, **fields})
    return on_perlmutter(SHAPES[size], plan, microbatch)


def way(run: Run) -> Way:
    all_again = run.plan.recompute == "full"
    if run.plan.tp3:
        return GRID if all_again else GRID_FREE
    return MEGATRON if all_again else MEGATRON_FREE


def rate_alike(one: Point) -> Estimate:
    """Return the share of the peak, with the recomputed forward pass counted, as AxoNN's code does."""
    return rate_with_recomputation(one).scaled(1 / PEAK)


def grids(records: Sequence[Record]) -> list[Point]:
    """Return the grids, of the smallest model first."""
    return sorted((one for one in points(records, flop_rate) if way(one.run) == GRID), key=lambda one: one.parameters)


def largest(records: Sequence[Record]) -> list[tuple[Estimate, float]]:
    """Return the share of the peak of 80B's grid, and the published one."""
    printed = published_number("axonn2023", "hardware_flop_share")
    return [(rate_alike(one), printed / 100) for one in grids(records) if one.run.model == SHAPES[80]]


def gains(records: Sequence[Record], *, recomputing: bool = True) -> list[tuple[Estimate, Point]]:
    """Return how much faster the fastest grid of each model is than the fastest other plan, on as many devices.

    Args:
        recomputing: whether all plans compute every layer again; else as is faster, if some recompute nothing.
    """
    found = [one for one in points(records, flop_rate) if not one.is_oversubscribed]
    if not recomputing and {way(one.run) for one in found} <= {GRID, MEGATRON}:
        return []
    ours, theirs = (
        [one for one in found if way(one.run) in (all_again, *([] if recomputing else [nothing]))]
        for all_again, nothing in ((GRID, GRID_FREE), (MEGATRON, MEGATRON_FREE))
    )
    return [(gain - 1, one) for one, gain in best_over(ours, theirs, flop_rate, MODEL, RANKS)]


def as_published(records: Sequence[Record]) -> list[tuple[Estimate, float]]:
    """Return the gain of 80B's grid, and the published one."""
    printed = published_number("axonn2023", "gain_over_megatron")
    return [(gain, printed / 100) for gain, one in gains(records) if one.run.model == SHAPES[80]]


def is_faster(*, recomputing: bool) -> Check:
    found = lambda records: [(gain, one.model) for gain, one in gains(records, recomputing=recomputing)]
    return each(found, lambda gain, _: gain, "models", "{:+.1%} ({})")


def keeps(records: Sequence[Record]) -> Evidence | None:
    """Judge whether the largest model's devices keep their rate but for KEPT, each model with its fastest grid."""
    best: dict[int, Point] = {}
    for one in grids(records):
        ranks = one.run.plan.world_size
        if not one.is_oversubscribed and (ranks not in best or one.mean(flop_rate) > best[ranks].mean(flop_rate)):
            best[ranks] = one
    if len(best) < 2:
        return None
    few, many = best[min(best)], best[max(best)]
    kept = many.over(few, flop_rate)
    numbers = f"{kept.mean:.1%} on {max(best):,} of the rate on {min(best)}"
    return tally([less(1 - KEPT, kept)], "", numbers)


SHOWN = (
    MODEL, DEVICE, RANKS, of_run("way", "way", way, text=True), of_run("plan", "plan", plan_in_words, text=True),
    of_run("grid", "x, y, z", lambda run: " x ".join(map(str, run.plan.tp3 or ())), text=True), FLOP_RATE,
    share("counted", "of the peak, recomputation counted", lambda one: rate_alike(one).mean), RUNS, MARK,
)  # fmt: skip


def on_cpus(hidden: int, repeats: int) -> list[Run]:
    """Return a model on one rank and a twice as deep one on two: as each grid, and by each of Megatron's ways."""
    model = lambda ranks: ModelConfig(num_layers=2 * ranks, hidden_size=hidden, num_heads=4, seq_len=64)
    plans = [on_grid(one) for one in ((1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2))]
    others = [Plan(recompute="full", **more) for more in ({"tp": 2}, {"pp": 2}, {"dp": 2, "zero_stage": 1})]  # type: ignore[arg-type]
    every = [*plans, *others]
    return repeated(
        [timed(model(one.world_size), one, 16, 8 // one.dp if one.pp == 1 else 2) for one in every], repeats
    )


EXPERIMENT = Experiment(
    source="AxoNN 2023, abstract",
    expectation="57% of the peak on 1,024 GPUs, 26% faster than Megatron-LM",
    claims=(
        Claim(
            "80B on 1,024 GPUs reaches the published share of the peak, within 5 points", "abstract",
            each(largest, within(POINTS), "", "{:.1%} (published {:.0%})"), "57%, 182 PFLOP/s", kind="quantitative",
            about="network", tolerance=POINTS, hardware="A100",
        ),
        Claim(
            "80B on 1,024 GPUs is faster than Megatron-LM by as much as published, within 5 points", "abstract",
            each(as_published, within(POINTS), "", "{:+.1%} (published {:+.0%})"), "26%", kind="quantitative",
            about="bubble", tolerance=POINTS, hardware="A100",
        ),
        Claim(
            "the fastest grid is faster than Megatron-LM's fastest plan", "abstract", is_faster(recomputing=True),
            "+26%", kind="direction", about="bubble",
        ),
        claim("it is faster if both may recompute nothing", is_faster(recomputing=False)),
        claim("a device keeps its rate from the fewest to the most, but for 10%", keeps, tolerance=KEPT),
    ),
    table=table_of("weak_scaling", "Grids and Megatron-LM's plans", SHOWN, lambda records: sorted(
        points(records, flop_rate), key=lambda one: (one.device, one.parameters, way(one.run))
    ), ["At `paper` plans are the fastest by prediction, of all that fit 40 GB, at 1,024 sequences for all models."]),
    cost=cost("15 min", "1 h, 1024 GPUs with 40 GB", smoke="2 min"),
    deviations="Of the paper only the abstract was read: neither batch, grids, Megatron-LM's plan nor GPUs of smaller "
    "models are known. Shapes are the repository's. Megatron-LM may share layers that do not come out even, and the "
    "tokens between them, which favours it; its job script has neither sequence parallelism nor divided states. A grid "
    "trains in one microbatch. At `smoke` and `small` two layers a rank on one and two ranks.",
    runs={"smoke": on_cpus(64, 1), "small": on_cpus(256, 8),
          "paper": [plan_of(size, one) for size in FOUND for one in FOUND[size]]},
)  # fmt: skip
