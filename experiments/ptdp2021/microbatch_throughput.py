"""How much faster does a GPU compute with larger microbatches, and which is best once a pipeline's bubble is counted?

PTD-P times a model of a billion parameters on one GPU with microbatches of 1 to 16 sequences: the rate rises by a
third (section 3.4, figure 7). With these times, t_f(b) + t_b(b), equation 1 estimates a pipeline's step as
(B'/b + p - 1) (t_f(b) + t_b(b)): what larger microbatches gain they lose again in the bubble, and 2 to 4 sequences are
best (figure 8).
"""

import math
from collections.abc import Sequence
from functools import partial

from experiments.ptdp2021 import DEVIATIONS, microbatch_of, on_selene, timed
from harness.experiment.kit import (
    MICROBATCH, Claim, Column, Comparison, Estimate, Evidence, Experiment, ModelConfig, Plan, Point, Printed, Record,
    Run, Tolerance, all_hold, as_expected, cost, each, flop_rate, published, repeated, tally,
)  # fmt: skip

SIZES = (1, 2, 4, 8, 16)
BATCHES, DEPTH = (128, 512), 8
"""B' of figure 8, sequences of a pipeline in a step, and its p."""
NEAR = Tolerance(0.1, "plots are read to a hundredth; the rest is assumed", "2026-11-21")
"""Largest difference from a published estimate, relative to microbatch 1, that counts as the same."""

SMOKE = ModelConfig(num_layers=2, hidden_size=128, num_heads=4, seq_len=128)
SMALL = ModelConfig(num_layers=4, hidden_size=256, num_heads=8, seq_len=256)


def run_of(printed: Printed) -> Run:
    at = {"tp": 1, "pp": 1, "dp": 1, "global_batch": SIZES[-1]}
    return on_selene(at, ModelConfig(num_layers=4, hidden_size=4096, num_heads=128), microbatch_of(printed))


FIGURE_8 = {
    (row["global_batch"], microbatch_of(row)): row["value"]
    for row in published("ptdp2021").query("where == 'figure 8'").to_dict("records")
}
"""Estimates by batch and microbatch."""


def share(point: Point, batch: int) -> float:
    """Return computing time over that of a step of a pipeline, relative to that with microbatches of one sequence.

    Source: PTD-P (2104.04473), equation 1: (B'/b + p - 1) (t_f(b) + t_b(b)) seconds a step.
    """
    return (batch + DEPTH - 1) / (batch + (DEPTH - 1) * point.run.train.microbatch)


def estimate(point: Point, batch: int) -> Estimate:
    """Return a pipeline's rate relative to that with microbatches of one sequence."""
    return point.relative.scaled(share(point, batch))


def printed_estimate(point: Point, batch: int) -> float:
    return FIGURE_8.get((batch, point.run.train.microbatch), math.nan)


ESTIMATES = tuple(
    Column(
        key=f"{key}_{batch}", header=f"estimated at batch {batch}{text}", si="ratio", digits=3,
        of=partial(of, batch=batch),
    )
    for batch in BATCHES
    for key, text, of in (
        ("estimate", "", lambda point, batch: estimate(point, batch).mean),
        ("published", ", published", printed_estimate),
    )
)  # fmt: skip
FIGURE = Comparison(
    paper="ptdp2021", where="figure 7", name="microbatch_throughput", title="Microbatches on one GPU", run_of=run_of,
    shown=(MICROBATCH,), baseline=lambda point: point.run.train.microbatch, relative_to="the smallest microbatch",
    line=(), more=ESTIMATES,
    notes=(
        f"Estimated: equation 1 with the row's own rate, for a pipeline {DEPTH} deep and batches of "
        f"{' and '.join(map(str, BATCHES))}, relative to microbatch 1; published: figure 8, read off the plot.",
    ),
)  # fmt: skip


def lines(records: Sequence[Record]) -> list[tuple[int, list[Point]]]:
    """Return every batch with the points of each device on which one sequence and others were timed."""
    lines = [line for line in FIGURE.lines(records, MICROBATCH) if line[0].run.train.microbatch == 1]
    return [(batch, line) for line in lines for batch in BATCHES]


def lies_between(records: Sequence[Record]) -> Evidence | None:
    """Judge whether neither the smallest nor the largest microbatch is best once the bubble is counted."""
    found = [(batch, line) for batch, line in lines(records) if len(line) > 2]
    best = lambda line, batch: max(line, key=lambda one: estimate(one, batch).mean)
    over = lambda one, other, batch: one.over(other, flop_rate).scaled(share(one, batch) / share(other, batch))
    inner = [(best(line[1:-1], batch), line, batch) for batch, line in found]
    margins = [all_hold([over(one, end, batch) - 1 for end in (line[0], line[-1])]) for one, line, batch in inner]
    numbers = (f"{best(line, batch).run.train.microbatch} at batch {batch}" for batch, line in found)
    return tally(margins, "batches", f"best: {', '.join(numbers)}")


EXPERIMENT = Experiment(
    source="PTD-P 2021, section 3.4, figures 7 and 8",
    expectation="a third more from 1 sequence to 16 on one GPU; with the bubble of 8 ranks 2 to 4 sequences are best "
    "at batch 128, 4 at 512",
    claims=(
        FIGURE.direction(
            "a device computes faster with the largest microbatch than with the smallest",
            each(
                lambda records: [(line[-1].relative, line[-1].run) for line in FIGURE.lines(records, MICROBATCH)],
                lambda gain, _: gain - 1, "devices", "{0:.2f} times at {1.train.microbatch}",
            ),
            "computing", "1.34 times at 16",
        ),
        FIGURE.quantitative("the paper's model has relative rates within 5 points of the published", "computing"),
        Claim(
            "once the bubble is counted, neither the smallest microbatch is best nor the largest", "figure 8",
            lies_between, "2 and 4 at batch 128, 4 at 512", kind="direction", about="computing",
        ),
        Claim(
            "estimates from the rates of the paper's model are within 10% of the published", "figure 8",
            as_expected(
                lambda records: [(one, batch) for batch, line in lines(records) for one in line[1:] if one.printed],
                lambda at: estimate(*at), lambda at: printed_estimate(*at), NEAR, "estimates",
            ),
            kind="quantitative", about="computing", tolerance=NEAR,
        ),
    ),
    table=FIGURE.table,
    cost=cost("9 min", "5 min, 1 GPU with 80 GB", cores="1 CPU core"),
    deviations=DEVIATIONS + "A step has 16 sequences, whatever the microbatch. At `smoke` and `small` the model is "
    "small, and a CPU's rate depends less on how many rows a product has than a GPU's.",
    runs={
        "smoke": [timed(SMOKE, Plan(), SIZES[-1], size) for size in SIZES],
        "small": repeated([timed(SMALL, Plan(), SIZES[-1], size) for size in SIZES], 8),
        "paper": FIGURE.runs,
    },
)  # fmt: skip
