"""Which microbatch is fastest, when a larger one means larger matrix products and a larger bubble?

PTD-P trains 91B parameters on 64 GPUs, eight to a layer and eight deep, with microbatches of 1, 2, 4 and 8 sequences at
batches of 128 and 512 (section 5.5, figure 16). A step takes (B/b + p - 1) (t_f(b) + t_b(b)) (equation 1): what a
sequence takes falls with b, and the bubble, (p - 1) b / B, rises.
"""

from collections.abc import Sequence

from experiments.ptdp2021 import DEVIATIONS, cost, layouts, on_selene
from harness.experiment.kit import (
    AS_SIMULATED, BATCH, MICROBATCH, PP, TP, Claim, Comparison, Evidence, Experiment, ModelConfig, Plan, Point,
    Printed, Record, Run, in_words, tally,
)  # fmt: skip

SIZES = (1, 2, 4, 8)
BEST = 2
"""Best microbatch of the paper (section 5.5)."""


def run_of(printed: Printed) -> Run:
    microbatch = int(printed["quantity"].rpartition("_")[2])
    return on_selene(printed, ModelConfig(num_layers=32, hidden_size=15360, num_heads=128), microbatch)


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


def lies_between(records: Sequence[Record]) -> Evidence | None:
    """Judge whether neither the smallest nor the largest microbatch is fastest, at every batch."""
    lines = [line for line in FIGURE.lines(records, MICROBATCH) if len(line) > 2]
    held = [max(line, key=lambda one: one.relative.mean) in line[1:-1] for line in lines]
    return tally(held, "batches", "; ".join(in_words(line, MICROBATCH) for line in lines))


def best_is_two(records: Sequence[Record]) -> Evidence | None:
    lines = [line for line in FIGURE.groups(records, printed=True) if any(size(one) == BEST for one in line)]
    best = [size(max(line, key=lambda one: one.relative.mean)) for line in lines]
    numbers = ", ".join(f"{b} at batch {line[0].run.train.global_batch}" for b, line in zip(best, lines, strict=True))
    return tally([one == BEST for one in best], "batches", numbers)


def size(one: Point) -> int:
    return one.run.train.microbatch


EXPERIMENT = Experiment(
    source="PTD-P 2021, sections 3.4 and 5.5, figure 16",
    expectation="2 sequences are fastest, and 8 slower than 1: by 23% at batch 128, 5% at batch 512",
    claims=(
        Claim(
            "neither the smallest microbatch is fastest nor the largest",
            "figure 16",
            lies_between,
            published=FIGURE.in_print(MICROBATCH),
        ),
        Claim("the paper's model is fastest with 2 sequences", "section 5.5", best_is_two),
        Claim("91B on 64 GPUs has relative rates within 5 points of the published", "figure 16", FIGURE.near_published),
        AS_SIMULATED,
    ),
    table=FIGURE.table,
    cost=cost("3 min", "10 min, 64 GPUs"),
    deviations=DEVIATIONS + "At `smoke` and `small` the pipeline is two ranks deep, of a model of eight small layers.",
    runs={
        "smoke": layouts(128, [Plan(pp=2)], (32,), microbatches=SIZES),
        "small": layouts(128, [Plan(pp=2)], (32, 128), repeats=2, microbatches=SIZES),
        "paper": FIGURE.runs,
    },
)
