"""Does everything work here: how fast are one and two ranks, and how near does a small model come to the best possible?

Trains GPTs on a synthetic language whose entropy is known exactly, so every perplexity stands beside the floor that no
model can beat; and the same model on one and two data-parallel ranks, with the global batch constant (strong scaling)
and growing with the ranks (weak scaling).
"""

from dataclasses import replace

from experiments.ours.data_parallel_scaling import sweep
from harness.experiment import Experiment
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
    """Each size with LayerNorm before and after its blocks."""
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


EXPERIMENT = Experiment(
    source="Megatron-LM 2019, figures 5 and 7, table 3, in miniature",
    expectation="perplexity falls with size towards the floor; two ranks are nearly twice as fast as one",
    cost={
        "smoke": "3 min, 2 CPU cores",
        "small": "25 min, 2 CPU cores, or 2 min, one GPU",
        "paper": "1 h, 8 GPUs",
    },
    runs={
        "smoke": [
            *perplexity([TINY, named("gpt-0.5m")], QUALITY),
            *sweep(named("gpt-2m"), (1, 2), SPEED),
        ],
        "small": [
            *perplexity([named("gpt-0.5m"), named("gpt-2m")], replace(QUALITY, steps=1000)),
            *sweep(named("gpt-8m"), (1, 2), SPEED),
        ],
        "paper": [
            *perplexity([named("gpt-8m"), named("gpt-25m")], replace(QUALITY, steps=4000, global_batch=64), "bf16"),
            *sweep(named("gpt-355m"), (1, 2, 4, 8), replace(SPEED, global_batch=32), "bf16"),
        ],
    },
)
