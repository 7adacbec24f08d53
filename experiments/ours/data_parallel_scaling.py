"""How much of every added device does data parallelism turn into speed?

Weak scaling keeps the sequences per rank, strong scaling the global batch (as in Megatron-LM 2019, section 5.1, and
ZeRO, figure 3). Gradients are all-reduced in buckets while the backward pass runs; each point is also measured with the
reduction after it, so that the difference is what overlap buys.
"""

from dataclasses import replace

from harness.experiment import Experiment
from impl.evaluation_config import EvaluationConfig
from impl.model.config import ModelConfig
from impl.model.sizes import named
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Precision, Run


def sweep(
    size: ModelConfig, degrees: tuple[int, ...], recipe: Recipe, precision: Precision = "fp32", *, overlap: bool = True
) -> list[Run]:
    """Weak and strong scaling over the degrees, for speed only; `recipe.global_batch` is what one rank has."""
    strong = {(dp, recipe.global_batch) for dp in degrees}
    weak = {(dp, recipe.global_batch * dp) for dp in degrees}
    return [
        Run(
            model=size,
            plan=Plan(dp=dp, overlap_grad_reduce=overlap),
            train=replace(recipe, global_batch=batch),
            evaluation=EvaluationConfig(sequences=None),
            precision=precision,
        )
        for dp, batch in sorted(strong | weak)
    ]


def with_and_without_overlap(
    size: ModelConfig, degrees: tuple[int, ...], recipe: Recipe, repeats: int, precision: Precision = "fp32"
) -> list[Run]:
    """The sweep, reduced during and after the backward pass, measured `repeats` times in turn."""
    during = sweep(size, degrees, recipe, precision)
    after = sweep(size, degrees, recipe, precision, overlap=False)
    return [replace(run, repeat=repeat) for repeat in range(repeats) for run in (*during, *after)]


EXPERIMENT = Experiment(
    source="Megatron-LM 2019, section 5.1; ZeRO 2019, figure 3; data parallelism alone",
    expectation="weak scaling stays near 100% while gradients are small against compute; strong scaling falls behind",
    cost={
        "smoke": "1 min, 2 CPU cores",
        "small": "15 min, 2 CPU cores",
        "paper": "20 min, 64 GPUs",
    },
    runs={
        "smoke": with_and_without_overlap(
            named("gpt-0.5m"), (1, 2), Recipe(steps=15, global_batch=8, microbatch=4, warmup_steps=2), 1
        ),
        "small": with_and_without_overlap(
            named("gpt-8m"), (1, 2), Recipe(steps=16, global_batch=8, microbatch=4, warmup_steps=2), 3
        ),
        "paper": with_and_without_overlap(
            named("gpt-1.2b"),
            (1, 2, 4, 8, 16, 32, 64),
            Recipe(steps=100, global_batch=64, microbatch=1, lr=1.5e-4, warmup_steps=10),
            3,
            "bf16",
        ),
    },
)
