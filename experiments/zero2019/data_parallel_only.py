"""How large a model trains well with data parallelism alone, when ranks divide gradients and optimizer states?

Without model parallelism, which models have to be written for, 128 V100s with 32 GB train up to 13 billion parameters
with ZeRO-100B, up to 10 billion at over 40 TFLOP/s each; plain data parallelism ends at 1.4 billion, at 18 TFLOP/s
(ZeRO, section 10.4, figure 4). The larger the model, the less room is left for sequences, down to two a rank at 13
billion.
"""

from dataclasses import replace

from experiments.zero2019 import (
    FIGURE_4, OF_ZERO_100B, PLAIN, PRINTED_RATE, as_figure_4, divided_is_no_slower, fits_the_larger, is_divided,
    last_is_slower, of_figure_4, over_smallest, timed,
)  # fmt: skip
from harness.experiment.checks import measured_only
from harness.experiment.kit import (
    BATCH, FLOP_RATE, MARK, MICROBATCH, MODEL, PERCENT, POINTS, RANKS, RUNS, ZERO_STAGE, Claim, Experiment, ModelConfig,
    Plan, Run, share, table_of,
)  # fmt: skip
from harness.figures.style import figure_of

SIZES = ((2, 96, 8), (4, 128, 4), (6, 192, 2))
"""Layers, hidden size, and sequences of a rank: the larger a model, the fewer."""
SHOWN = (
    MODEL, RANKS, ZERO_STAGE, MICROBATCH, BATCH, FLOP_RATE, PRINTED_RATE,
    share("relative", "relative", lambda one: one.relative),
    share("published_relative", "published, relative", lambda one: over_smallest(one)), RUNS, MARK,
)  # fmt: skip
NOTE = (
    "Relative: to the smallest model with divided states. Rates: ours counts model FLOPs (palm_12). Published: "
    "figure 4, read off the plot, on V100s with 32 GB; the paper does not say whether recomputed FLOPs count, and "
    "only relative rates are to be compared."
)


def small_runs(unit: int, seq_len: int, repeats: int) -> list[Run]:
    """Return growing models with divided states, and the smallest ones with undivided ones, on two ranks."""
    divided = Plan(dp=2, zero_stage=OF_ZERO_100B, recompute="full", bucket_bytes=2**19)
    models = [
        (ModelConfig(num_layers=layers, hidden_size=h * unit, num_heads=h * unit // 32, seq_len=seq_len), batch)
        for layers, h, batch in SIZES
    ]
    every = [(divided, *one) for one in models] + [(replace(divided, zero_stage=0), *one) for one in models[:2]]
    return [timed(model, plan, batch, repeat) for repeat in range(repeats) for plan, model, batch in every]


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
            last_is_slower, "116% (8B), 53% (13B) of 1.5B's rate", kind="direction", about="network",
        ),
        Claim(
            "rates relative to 1.5B's are within 5 points of the published", "figure 4", as_figure_4,
            kind="quantitative", about="network", tolerance=POINTS,
        ),
        Claim(
            "the fastest model with divided states is faster than all with undivided ones", "figure 4",
            measured_only(divided_is_no_slower), kind="direction",
        ),
    ),
    table=table_of("data_parallel_only", "Data parallelism alone", SHOWN, of_figure_4, [NOTE]),
    figure=figure_of(
        "Data parallelism alone", "billions of parameters", "rate per device (% of the smallest)", of_figure_4,
        name=lambda one: "divided states (stage 2)" if is_divided(one) else "undivided states",
        at=lambda one: one.parameters / 1e9,
        ours=lambda one: one.relative.mean / PERCENT,
        published=lambda one: over_smallest(one) / PERCENT,
    ),
    cost={"smoke": "1 min, 2 CPU cores", "small": "2 min, 2 CPU cores", "paper": "30 min, 128 GPUs with 32 GB"},
    deviations="No dropout, with fused attention; vocabulary and sequence, 51,200 and 1,024, are assumed, and that all "
    "layers are recomputed. The appendix's numbering of figures is older: its table 10 is for figure 4. At `smoke` and "
    "`small` fp32 and three small models on two ranks, with 8, 4 and 2 sequences each; memory is no limit there.",
    runs={"smoke": small_runs(1, 64, 1), "small": small_runs(2, 128, 3), "paper": [*FIGURE_4, PLAIN]},
)  # fmt: skip
