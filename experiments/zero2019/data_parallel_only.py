"""How large a model trains well with data parallelism alone, when ranks divide gradients and optimizer states?

Without model parallelism, which models have to be written for, 128 V100s with 32 GB train up to 13 billion parameters
with ZeRO-100B, up to 10 billion at over 40 TFLOP/s each; plain data parallelism ends at 1.4 billion, at 18 TFLOP/s
(ZeRO, section 10.4, figure 4). The larger the model, the less room is left for sequences, down to two a rank at 13
billion.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from experiments.zero2019 import OF_ZERO_100B, PRINTED_RATE, V100, bars, compared, on_v100s, timed
from harness.experiment.kit import (
    BATCH, FLOP_RATE, MARK, MICROBATCH, MODEL, PERCENT, POINTS, RANKS, RUNS, ZERO_STAGE, Claim, Evidence, Experiment,
    ModelConfig, Plan, Point, Printed, Record, Run, cost, figure_of, flop_rate, known, larger, measured_only, points,
    relative_to, repeated, share, table_of, tally, with_printed, within_points,
)  # fmt: skip
from harness.records.measures import model_names, shape

SIZES = ((2, 96, 8), (4, 128, 4), (6, 192, 2))
"""Layers, hidden size, and sequences of a rank: the larger a model, the fewer."""
SHOWN = (
    MODEL, RANKS, ZERO_STAGE, MICROBATCH, BATCH, FLOP_RATE, PRINTED_RATE,
    share("relative", "relative", lambda one: one.relative),
    share("published_relative", "published, relative", lambda one: in_print(one)), RUNS, MARK,
)  # fmt: skip
NOTE = (
    "Relative: to the smallest model with divided states. Rates: ours counts model FLOPs (palm_12). Published: "
    "figure 4, read off the plot, on V100s with 32 GB; the paper does not say whether recomputed FLOPs count, and "
    "only relative rates are to be compared."
)


def run_of(printed: Printed) -> Run:
    return on_v100s(printed, zero_stage=OF_ZERO_100B if printed["quantity"] == "flop_rate_zero_dp" else 0)


PAPER = bars(run_of, "figure 4")
SMALLEST = next(one.printed["published_rate"] for one in PAPER.values() if one.model == "GPT 1.5B")
TOO_LARGE = next(run for run, one in PAPER.items() if one.model == "GPT 2.5B")
PLAIN = replace(TOO_LARGE, plan=replace(TOO_LARGE.plan, zero_stage=0))
"""Smallest of figure 4's models that does not fit with undivided states, of 16 bytes a parameter."""


def in_print(one: Point) -> float:
    """Return the published rate over that of the smallest model with divided states; NaN if there is none."""
    return one.printed.get("published_rate", math.nan) / SMALLEST


def is_divided(one: Point) -> bool:
    return one.run.plan.zero_stage > 0


def relative(records: Sequence[Record]) -> list[Point]:
    """Return timed points relative to the device's smallest model with divided states, those with them first."""
    alone = [one for one in points(records, flop_rate) if one.run.plan.dp == one.run.plan.world_size > 1]
    found = relative_to(sorted(alone, key=lambda one: one.parameters), is_divided, flop_rate)
    return with_printed(sorted(found, key=lambda one: not is_divided(one)), PAPER)


def fits_the_larger(records: Sequence[Record]) -> Evidence | None:
    """Judge whether figure 4's models fit 32 GB as in the paper, and 2.5B only with divided states; by prediction."""
    names, runs = model_names(records), {*PAPER, PLAIN}
    found = [one for one in records if one.point in runs and one.is_memory_predicted]
    is_plain = lambda one: one.run.plan.zero_stage == 0 and one.parameters > 2e9
    numbers = (
        f"{one.peak_memory_bytes / 1e9:.0f} GB ({names[shape(one.run)]}{', undivided' * is_plain(one)})"
        for one in sorted(found, key=lambda one: (one.run.plan.zero_stage, one.parameters))
        if is_plain(one) or one.parameters > 12e9
    )
    return tally([(one.peak_memory_bytes > V100) == is_plain(one) for one in found], "models", ", ".join(numbers))


def as_published(records: Sequence[Record]) -> Evidence | None:
    pairs = ((one.relative, in_print(one)) for one in compared(relative(records)))
    return within_points(pairs, POINTS, "points")


def falls_at_the_end(records: Sequence[Record]) -> Evidence | None:
    """Judge whether the largest model, with the fewest sequences a rank, is slower per device than the fastest."""
    found = [one for one in known(relative(records)) if is_divided(one)]
    if len(found) < 3:
        return None
    best, last = max(found[:-1], key=lambda one: one.relative.mean), found[-1]
    numbers = ", ".join(f"{one.relative:.0%} ({one.model})" for one in (best, last))
    return tally([larger(best, last, flop_rate)], "", numbers)


def divided_is_no_slower(records: Sequence[Record]) -> Evidence | None:
    """Judge whether the fastest model with divided states is faster than every model with undivided ones."""
    found = known(relative(records))
    divided, plain = ([one for one in found if is_divided(one) is wanted] for wanted in (True, False))
    if not divided or not plain:
        return None
    best = max(divided, key=lambda one: one.relative.mean)
    others = ", ".join(f"{one.relative:.0%}" for one in plain)
    numbers = f"{best.relative:.0%} with divided states, {others} with undivided ones"
    return tally([larger(best, one, flop_rate) for one in plain], "models", numbers)


def small_runs(unit: int, seq_len: int, repeats: int) -> list[Run]:
    """Return growing models with divided states, and the smallest ones with undivided ones, on two ranks."""
    divided = Plan(dp=2, zero_stage=OF_ZERO_100B, recompute="full", bucket_bytes=2**19)
    model = lambda layers, size: ModelConfig(num_layers=layers, hidden_size=size, num_heads=size // 32, seq_len=seq_len)
    plans = [(divided, SIZES), (replace(divided, zero_stage=0), SIZES[:2])]
    every = [timed(model(layers, h * unit), plan, batch) for plan, sizes in plans for layers, h, batch in sizes]
    return repeated(every, repeats)


EXPERIMENT = Experiment(
    source="ZeRO 2019, section 10.4, figure 4, table 10",
    expectation="up to 13B on 128 GPUs without model parallelism, over 40 TFLOP/s up to 10B; 1.4B with undivided "
    "states",
    claims=(
        Claim(
            "the models of the figure fit 32 GB, and 2.5B only with divided states, by prediction", "figure 4",
            fits_the_larger, "13B with divided states; 1.4B is the largest without", kind="arithmetic",
        ),
        Claim(
            "the largest model, with the fewest sequences a rank, is slower than the fastest", "figure 4",
            falls_at_the_end, "116% (8B), 53% (13B) of 1.5B's rate", kind="direction", about="network",
        ),
        Claim(
            "rates relative to 1.5B's are within 5 points of the published", "figure 4", as_published,
            kind="quantitative", about="network", tolerance=POINTS,
        ),
        Claim(
            "the fastest model with divided states is faster than all with undivided ones", "figure 4",
            measured_only(divided_is_no_slower), kind="direction",
        ),
    ),
    table=table_of("data_parallel_only", "Data parallelism alone", SHOWN, relative, [NOTE]),
    figure=figure_of(
        "Data parallelism alone", "billions of parameters", "rate per device (% of the smallest)", relative,
        name=lambda one: "divided states (stage 2)" if is_divided(one) else "undivided states",
        at=lambda one: one.parameters / 1e9,
        ours=lambda one: one.relative.mean / PERCENT,
        published=lambda one: in_print(one) / PERCENT,
    ),
    cost=cost("4 min", "30 min, 128 GPUs with 32 GB"),
    deviations="No dropout; fused attention in what runs, none in simulated steps; vocabulary and sequence, 51,200 "
    "and 1,024, are assumed, and that all layers are recomputed. The appendix's numbering of figures is older: its "
    "table 10 is for figure 4. At `smoke` and `small` fp32 and three small models on two ranks, with 8, 4 and 2 "
    "sequences each; memory is no limit there.",
    runs={"smoke": small_runs(1, 64, 1), "small": small_runs(2, 128, 8), "paper": [*PAPER, PLAIN]},
)  # fmt: skip
