"""Does everything work here: how fast are one and two ranks, and how near does a small model come to the best possible?

Trains GPTs on a synthetic language whose entropy is known exactly, so every perplexity stands beside the floor that no
model can beat; and the same model on one and two data-parallel ranks, with the global batch constant (strong scaling)
and growing with the ranks (weak scaling).
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from experiments.megatron2019.layernorm_placement import PRE_BEATS_POST
from experiments.ours.data_parallel_scaling import sweep
from harness.experiment.claims import Claim, Evidence, Row, mean_by
from harness.experiment.experiment import Experiment
from impl.evaluation_config import EvaluationConfig
from impl.model.config import ModelConfig
from impl.model.sizes import named
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Precision, Run

QUALITY = Recipe(steps=400, global_batch=16, microbatch=8, lr=3e-3, warmup_steps=80)
SPEED = Recipe(steps=20, global_batch=8, microbatch=4, warmup_steps=5)

TINY = replace(named("gpt-0.5m"), hidden_size=64, num_heads=1)


def perplexity(sizes: list[ModelConfig], recipe: Recipe, precision: Precision = "fp32") -> list[Run]:
    """Return each size with LayerNorm before and after its blocks."""
    return [
        Run(
            model=replace(size, norm_placement=norm),
            plan=Plan(dp=2),
            train=recipe,
            evaluation=EvaluationConfig(every=recipe.steps // 4, sequences=512),
            precision=precision,
        )
        for size in sizes
        for norm in ("pre", "post")
    ]


def near_floor(rows: Sequence[Row]) -> Evidence | None:
    above = mean_by(rows, "above_floor", lambda row: (row["parameters"], row["id"]))
    if not above:
        return None
    largest = max(parameters for parameters, _ in above)
    best = min(value for (parameters, _), value in above.items() if parameters == largest)
    return Evidence(best < 0.10, f"{best:.1%} above the floor")


def none_below_floor(rows: Sequence[Row]) -> Evidence | None:
    known = [row for row in rows if not math.isnan(row["above_floor"])]
    if not known:
        return None
    lowest = min((row["token_perplexity"] - row["floor"]) / row["floor_standard_error"] for row in known)
    return Evidence(lowest > -2, f"lowest: {lowest:+.1f} standard errors from the floor")


EXPERIMENT = Experiment(
    source="Megatron-LM 2019, figures 5 and 7, table 3, in miniature",
    expectation="perplexity falls with size towards the floor; two ranks are nearly twice as fast as one",
    claims=(
        Claim(
            text="the largest model comes within 10% of the perplexity floor",
            source="our own",
            check=near_floor,
        ),
        Claim(
            text="no perplexity is below the floor by more than its sampling error",
            source="our own",
            check=none_below_floor,
        ),
        PRE_BEATS_POST,
    ),
    cost={
        "smoke": "1 min, 2 CPU cores",
        "small": "3 min, 2 CPU cores",
        "paper": "1 h, 8 GPUs",
    },
    runs={
        "smoke": [
            *perplexity([TINY], replace(QUALITY, steps=100)),
            *sweep(named("gpt-2m"), (1, 2), SPEED),
        ],
        "small": [
            *perplexity([TINY, named("gpt-0.5m")], QUALITY),
            *sweep(named("gpt-2m"), (1, 2), SPEED),
        ],
        "paper": [
            *perplexity([named("gpt-8m"), named("gpt-25m")], replace(QUALITY, steps=4000, global_batch=64), "bf16"),
            *sweep(named("gpt-355m"), (1, 2, 4, 8), replace(SPEED, global_batch=32), "bf16"),
        ],
    },
)
