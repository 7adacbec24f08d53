"""What would moving LayerNorm change in a larger model than we can train, and how certain is that?

A family of small GPTs is trained for each norm placement, with several seeds, and validated along the way. The
learning rate is constant after its warm-up, so that each validation is what a run of that length would end with. To
every placement's losses Chinchilla's law L(N, D) = E + A / N^alpha + B / D^beta is fitted (Hoffmann et al. 2022,
section 3.3), many times with other draws of the runs, and extrapolated: what the placements differ by in models 10, 100
and 1000 times the largest, and in how many of the draws they differ in that direction.
"""

from collections.abc import Sequence
from dataclasses import replace

from experiments.megatron2019 import scaled
from experiments.megatron2019.layernorm_placement import NORMS
from experiments.ours import claim
from harness.analysis.placement_laws import table
from harness.experiment.kit import (
    AT_ONCE, NEEDS_TEXT, Claim, DataConfig, EvaluationConfig, Experiment, ModelConfig, Plan, Recipe, Run, cost,
)  # fmt: skip
from harness.experiment.placements import CLOSE, EXPONENT, as_chinchilla, described, higher_beyond, higher_here
from harness.figures.placements import of_laws as figure


def family(
    sizes: Sequence[tuple[int, int]], norms: Sequence[str], seeds: int, recipe: Recipe, every: int, dataset: str
) -> list[Run]:
    """Return models of these layers and hidden units, each placement of a seed in turn."""
    return [
        Run(
            model=scaled(layers, hidden, norm_placement=norm), seed=seed,
            train=recipe, data=DataConfig(dataset=dataset), evaluation=EvaluationConfig(every=every, sequences=128),
        )
        for seed in range(seeds)
        for layers, hidden in sizes
        for norm in norms
    ]  # fmt: skip


CPU = Recipe(steps=480, global_batch=8, microbatch=8, lr=2e-3, warmup_steps=40, decay="constant")
GPU = Recipe(steps=20_000, global_batch=256, microbatch=8, lr=3e-4, warmup_steps=500, decay="constant")
LARGE = ((6, 384), (8, 512), (12, 768), (16, 1024), (24, 1024))
"""Layers and hidden size of models from 30M to 360M parameters, with the embedding's."""

EXPERIMENT = Experiment(
    source="our own; the law and its fit: Hoffmann et al. 2022 (2203.15556), section 3.3; the question: Megatron-LM "
    "2019, figure 7",
    expectation="the law describes all placements; post-layernorm is worse at every size, by more than what the seeds "
    "differ by, and an extrapolation over a factor of ten is the last one that says anything",
    claims=(
        claim(
            "pre-layernorm reaches a lower loss than post-layernorm at every size that was trained",
            higher_here("post"),
        ),
        claim("so it does in models 10, 100 and 1000 times as large, by 95% of the draws", higher_beyond),
        claim("and than sandwich-layernorm at every size that was trained", higher_here("sandwich")),
        claim(
            "every placement's losses are within 2% of its law (root mean square over these very runs)", described,
            tolerance=CLOSE,
        ),
        Claim(
            "pre-layernorm's exponents are Chinchilla's, within 0.05", "Hoffmann et al. 2022, equation 10",
            as_chinchilla, published="alpha 0.34, beta 0.28", kind="quantitative", tolerance=EXPONENT,
        ),
    ),
    table=table,
    figure=figure,
    cost=cost("12 min", "2 days, 64 GPUs with 80 GB", note=AT_ONCE + NEEDS_TEXT),
    deviations="Hoffmann et al. have a cosine of each run's own length; here the rate is constant, and one run gives "
    "the losses of all shorter ones. At `small` models have 37 thousand to 0.8M parameters, and a vocabulary of bytes; "
    "initial weights are scaled with the width, so that what a block adds is as in the papers' models.",
    runs={
        "smoke": family(
            ((1, 32), (2, 32), (2, 64)), ("pre", "post"), 1, replace(CPU, steps=120, lr=4e-3, warmup_steps=12), 20,
            DataConfig().dataset,
        ),
        "small": family(((2, 32), (2, 64), (3, 96), (4, 128)), NORMS, 3, CPU, 48, "data/books-byte"),
        "paper": [
            Run(
                model=ModelConfig(
                    num_layers=layers, hidden_size=hidden, num_heads=hidden // 64, seq_len=1024, vocab_size=51200,
                    norm_placement=norm,
                ),
                plan=Plan(dp=8),
                train=GPU, data=DataConfig(dataset="data/openwebtext-gpt2"), precision="bf16", seed=seed,
                evaluation=EvaluationConfig(every=1000, sequences=1024),
            )
            for seed in range(3)
            for layers, hidden in LARGE
            for norm in NORMS
        ],
    },
)  # fmt: skip
