"""Which microbatch is fastest, when a larger one means larger matrix products and a larger bubble?

PTD-P trains 91B parameters on 64 GPUs, eight to a layer and eight deep, with microbatches of 1, 2, 4 and 8 sequences at
batches of 128 and 512 (section 5.5, figure 16). A step takes (B/b + p - 1) (t_f(b) + t_b(b)) (equation 1): what a
sequence takes falls with b, and the bubble, (p - 1) b / B, rises.
"""

from experiments.ptdp2021 import DEVIATIONS, layouts, microbatch_of, on_selene
from harness.experiment.kit import (
    BATCH, MICROBATCH, PP, TP, Comparison, Experiment, ModelConfig, Plan, Printed, Run, cost,
)  # fmt: skip

SIZES = (1, 2, 4, 8)
BEST = 2
"""Best microbatch of the paper (section 5.5)."""


def run_of(printed: Printed) -> Run:
    return on_selene(printed, ModelConfig(num_layers=32, hidden_size=15360, num_heads=128), microbatch_of(printed))


FIGURE = Comparison(
    paper="ptdp2021",
    where="figure 16",
    name="microbatch_size",
    title="Microbatch sizes",
    run_of=run_of,
    shown=(TP, PP, BATCH, MICROBATCH),
    baseline=lambda point: point.run.train.microbatch,
    relative_to="the smallest microbatch at the same batch",
)


EXPERIMENT = Experiment(
    source="PTD-P 2021, sections 3.4 and 5.5, figure 16",
    expectation="2 sequences are fastest, and 8 slower than 1: by 23% at batch 128, 5% at batch 512",
    claims=(
        FIGURE.direction(
            "neither the smallest microbatch is fastest nor the largest",
            FIGURE.inner_is_fastest(MICROBATCH),
            "computing",
            FIGURE.in_print(MICROBATCH),
        ),
        FIGURE.direction(
            "the paper's model is fastest with 2 sequences", FIGURE.fastest(MICROBATCH, BEST), "computing"
        ),
        FIGURE.quantitative("91B on 64 GPUs has relative rates within 5 points of the published", "bubble"),
    ),
    table=FIGURE.table,
    cost=cost("3 min", "10 min, 64 GPUs with 80 GB"),
    deviations=DEVIATIONS + "At `smoke` and `small` the pipeline is two ranks deep, of a model of eight small layers.",
    runs={
        "smoke": layouts(128, [Plan(pp=2)], (32,), microbatches=SIZES),
        "small": layouts(128, [Plan(pp=2)], (32, 128), repeats=2, microbatches=SIZES),
        "paper": FIGURE.runs,
    },
)
