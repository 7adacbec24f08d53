"""Which degrees and microbatches train 175 billion parameters fastest on 128 GCDs, and which of them matter most?

Frontier's authors let a tuner propose degrees, microbatches, how many of them make a step, and whether optimizer states
are divided; what runs out of memory is a failure. Shapley values of the tuner's model of the results say how much each
choice moves the rate. Here the space is small enough to be tried whole, so that the values are exact, and Optuna's
sampler searches the same results as the authors' DeepHyper did.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

from experiments.ptdp2021 import timed
from harness.experiment.kit import (
    Check, Claim, Estimate, Experiment, ModelConfig, Plan, Record, Tolerance, cost, each, flop_rate,
)  # fmt: skip
from harness.predict.published_scaling import on_frontier
from harness.tune.space import figure, spaces, table

GPUS = 128
SPACE = {"tp": (4, 8), "pp": (4, 8, 16), "microbatch": (1, 4, 16), "microbatches": (5, 10), "zero_stage": (0, 1)}
"""Values tried of each knob: within the authors' ranges as far as these are known, and their script's microbatch."""
SMOKE = {"tp": (1, 2), "pp": (1, 2), "microbatch": (1, 8), "microbatches": (4,), "zero_stage": (0,)}
SMALL = {"tp": (1, 2), "pp": (1, 2), "microbatch": (1, 4, 16), "microbatches": (2, 8), "zero_stage": (0, 1)}
MODEL = ModelConfig(num_layers=4, hidden_size=128, num_heads=4, seq_len=64)
FOUND = Tolerance(0.05, "assumed", "2026-11-22")
"""Share by which the sampler's best rate may be below the best."""


def moves(knob: str, *, falls: bool) -> Check:
    """Return a check that a larger value of a knob lowers (or raises) the rate, all else equal."""
    ratios = lambda records: [(b.over(a, flop_rate),) for space in spaces(records) for a, b in space.steps(knob)]
    holds = lambda ratio: ratio.scaled(-1) - -1 if falls else ratio - 1
    return each(ratios, holds, "pairs", "{:.2f}", is_brief=True, after=" times")


def searched(records: Sequence[Record]) -> Iterator[tuple[Estimate, bool]]:
    """Yield each search's best rate over that of the best plan, and whether both are of one plan."""
    for space in spaces(records):
        best = space.runs[space.best]
        for at in space.searches:
            yield space.runs[at].over(best, flop_rate), at == space.best


def plans(space: Mapping[str, Sequence[int]], ranks: int) -> Iterator[tuple[Plan, int, int]]:
    """Yield plan, batch and microbatch of the combinations of a space that divide the ranks."""
    for tp, pp, microbatch, microbatches, stage in itertools.product(*space.values()):
        if ranks % (tp * pp) == 0:
            plan = Plan(tp=tp, pp=pp, dp=ranks // tp // pp, zero_stage=1 if stage else 0, recompute="full")
            yield plan, plan.dp * microbatch * microbatches, microbatch


EXPERIMENT = Experiment(
    source="Frontier 2023 (Dash et al.), section IV, table IV",
    expectation="the microbatch moves the rate most; fewer ranks to a layer and to a pipeline are faster wherever they "
    "fit, and more microbatches a step",
    claims=(
        Claim(
            "more ranks to a layer lower the rate, all else equal", "section III (from memory)",
            moves("tp", falls=True), kind="direction", about="network",
        ),
        Claim(
            "more microbatches a step raise the rate, all else equal", "section III (from memory)",
            moves("microbatches", falls=False), kind="direction", about="bubble",
        ),
        Claim(
            "more pipeline ranks lower the rate at as many microbatches, all else equal", "section III (from memory)",
            moves("pp", falls=True), kind="direction", about="bubble",
        ),
        Claim(
            "a third of the plans is enough for a sampler to be within 5% of the best, by the rates of these very runs",
            "our own; section IV",
            each(
                searched, lambda share, is_best: is_best or share - (1 - FOUND), "searches", "{:.1%}", is_brief=True,
                after=" of the best",
            ),
            tolerance=FOUND,
        ),
    ),
    table=table, figure=figure, cost=cost("4 min", "12 h, 128 GCDs with 64 GB"),
    deviations="The authors' ranges are known to us by memory only, and their number of nodes is left out, as 12 nodes "
    "cannot be divided into the deeper pipelines. Every plan is tried, where DeepHyper tries a part and learns the "
    "rest. A step has 5 or 10 microbatches, so that its batch grows with them. At `smoke` and `small` two ranks, one "
    "model, and a single run of each plan.",
    runs={
        "smoke": [timed(MODEL, *one) for one in plans(SMOKE, 2)],
        "small": [timed(MODEL, *one) for one in plans(SMALL, 2)],
        "paper": [
            on_frontier("frontier-175b", plan.tp, plan.pp, plan.dp, *sizes, zero_stage=plan.zero_stage)
            for plan, *sizes in plans(SPACE, GPUS)
        ],
    },
)  # fmt: skip
