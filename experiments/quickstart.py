"""Does everything work here: how fast are one and two ranks, and how near does a small model come to the best possible?

Trains GPTs on a synthetic language whose entropy is known exactly, so every perplexity stands beside the floor that no model
can beat; and the same model on one and two data-parallel ranks, with the global batch constant (strong scaling) and growing
with the ranks (weak scaling).
"""

from dataclasses import replace

from harness.experiment import Experiment
from impl.evaluation_config import EvaluationConfig
from impl.model.sizes import named
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run

QUALITY = Recipe(steps=400, global_batch=16, microbatch=8, lr=4e-3, warmup_steps=40)
SPEED = Recipe(steps=20, global_batch=16, microbatch=8, lr=1e-3, warmup_steps=5)

TINY = replace(named("gpt-0.5m"), hidden_size=64, num_heads=1)


def perplexity(sizes, recipe, precision="fp32"):
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


def scaling(size, recipe, degrees, precision="fp32"):
    batch = recipe.global_batch
    strong = {(dp, batch) for dp in degrees}
    weak = {(dp, batch * dp // degrees[0]) for dp in degrees}
    return [
        Run(model=size, plan=Plan(dp=dp), train=replace(recipe, global_batch=b), precision=precision)
        for dp, b in sorted(strong | weak)
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
            *scaling(named("gpt-2m"), SPEED, (1, 2)),
        ],
        "small": [
            *perplexity([named("gpt-0.5m"), named("gpt-2m")], replace(QUALITY, steps=1000)),
            *scaling(named("gpt-8m"), replace(SPEED, microbatch=4), (1, 2)),
        ],
        "paper": [
            *perplexity([named("gpt-8m"), named("gpt-25m")], replace(QUALITY, steps=4000, global_batch=64), "bf16"),
            *scaling(named("gpt-355m"), replace(SPEED, global_batch=32, microbatch=4), (1, 2, 4, 8), "bf16"),
        ],
    },
)
