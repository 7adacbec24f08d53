"""Does the number of attention heads change how well a model scales over the ranks that share its layers?

Megatron-LM divides the hidden size of its 8.3B model into 16, 24 and 32 heads, on 8 GPUs that share every layer
(appendix D, table 7). More heads mean smaller matrix products in self-attention and more numbers in its softmax, at the
same count of model FLOPs; efficiency is the rate of these per GPU over that of the 1.2B model on one.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from experiments.megatron2019 import CPU, IN_PRINT, MODELS, SHARE, efficiencies, on_v100s, speed
from harness.experiment.kit import (
    FLOP_RATE, MARK, MODEL, POINTS, RANKS, RUNS, Claim, Estimate, Evidence, Experiment, Plan, Point, Record, Run, Tier,
    cost, each, falls_along, flop_rate, known, of_run, published, repeated, table_of, within,
)  # fmt: skip

DEGREE: dict[Tier, int] = {"smoke": 2, "small": 2, "paper": 8}
HEADS: dict[Tier, tuple[int, int, int]] = {"smoke": (4, 6, 8), "small": (4, 6, 8), "paper": (16, 24, 32)}
"""Numbers of heads, in the paper's proportions."""
IN_PAPER = {
    replace(MODELS[tier][DEGREE[tier]], num_heads=n): theirs
    for tier, heads in HEADS.items() for n, theirs in zip(heads, HEADS["paper"], strict=True)
}  # fmt: skip
"""The paper's number of heads that stands in the same proportion, by model."""
SHOWN = (
    MODEL, of_run("heads", "heads", lambda run: run.model.num_heads),
    of_run("head_size", "head size", lambda run: run.model.hidden_size // run.model.num_heads), RANKS, FLOP_RATE, SHARE,
    IN_PRINT, RUNS, MARK,
)  # fmt: skip


def in_paper(one: Point) -> int:
    """Return the paper's number of heads for a point; 0 for the first model."""
    return IN_PAPER.get(one.run.model, 0)


def by_heads(records: Sequence[Record]) -> list[Point]:
    """Return timed points by heads, with their rate of model FLOPs per device over the first model's on one rank."""
    table_7 = published("megatron2019", "heads_scaling_efficiency").to_dict("records")
    printed = {int(row["note"].partition(" heads")[0]): row["value"] / 100 for row in table_7}
    is_first = lambda one: one.run.model in [models[1] for models in MODELS.values()]
    found = efficiencies(records, flop_rate, is_first, lambda one: printed.get(in_paper(one), math.nan))
    return sorted(found, key=lambda one: (in_paper(one), one.run.model.num_heads))


def runs(tier: Tier, repeats: int) -> list[Run]:
    """Return the first model on one rank, then the model of the highest degree with each number of heads, in turn."""
    tp, models = DEGREE[tier], MODELS[tier]
    every = [(models[1], 1), *((replace(models[tp], num_heads=n), tp) for n in HEADS[tier])]
    run_of = on_v100s if tier == "paper" else lambda model, tp: speed(model, Plan(tp=tp), CPU)
    return repeated([run_of(*one) for one in every], repeats)


def falls_with_heads(records: Sequence[Record]) -> Evidence | None:
    """Judge whether efficiency falls with every increase of the heads."""
    found = [one for one in known(by_heads(records)) if in_paper(one)]
    numbers = ", ".join(f"{one.relative:.1%} ({one.run.model.num_heads} heads)" for one in found)
    return falls_along([found], flop_rate, "steps", numbers)


def beside_table_7(records: Sequence[Record]) -> list[tuple[Estimate, float, int]]:
    """Return the efficiencies of the paper's numbers of heads, and the published, once all three are known."""
    ours = [one for one in known(by_heads(records)) if in_paper(one) and one.run.plan.tp == DEGREE["paper"]]
    return [(one.relative, one.printed["published"], one.run.model.num_heads) for one in ours if len(ours) == 3]


EXPERIMENT = Experiment(
    source="Megatron-LM 2019, appendix D, table 7",
    expectation="efficiency falls slightly with the number of heads: 82, 80 and 77% in the paper",
    claims=(
        Claim(
            "efficiency falls with every increase of the heads", "table 7", falls_with_heads,
            "82% (16 heads), 80% (24 heads), 77% (32 heads)", kind="direction", about="computing",
        ),
        Claim(
            "8.3B with 16, 24 and 32 heads on 8 GPUs is within 5 points of 82, 80 and 77%", "table 7",
            each(beside_table_7, within(POINTS), "points", "{0:.1%} with {2} (published {1:.0%})"),
            kind="quantitative", about="network", tolerance=POINTS,
        ),
    ),
    table=table_of("attention_heads", "Attention heads and efficiency", SHOWN, by_heads, [
        "Efficiency is the rate of model FLOPs per device over the first row's, one rank. Published: of 8.3B with 16, "
        "24 and 32 heads on 8 V100s (table 7), beside the heads here that stand in the same proportion."
    ]),
    cost=cost("8 min", "5 min, 8 GPUs with 32 GB"),
    deviations="At `smoke` and `small` models are 1000 times smaller, in fp32 and without recomputation, two ranks "
    "share a layer, and heads are 4, 6 and 8.",
    runs={"smoke": runs("smoke", 1), "small": runs("small", 8), "paper": runs("paper", 3)},
)  # fmt: skip
