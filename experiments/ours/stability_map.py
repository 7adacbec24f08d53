"""Where should LayerNorm stand, by how deep a model is, how fast it learns and how slowly it begins?

Megatron-LM finds that BERT with LayerNorm after its blocks is unstable beyond BERT-large, and trains with LayerNorm
before them (section 5.4, figure 7). It shows two sizes at one learning rate. Here small GPTs of 2 to 24 layers are
trained for each placement over five learning rates and two warm-ups, with three seeds: up to which rate does each
train, and which is best at its own best rate?
"""

from collections.abc import Sequence
from dataclasses import replace

from experiments.megatron2019 import scaled
from experiments.megatron2019.layernorm_placement import NORMS
from experiments.ours import claim
from harness.analysis.stability import table
from harness.experiment import placements
from harness.experiment.kit import (
    AT_ONCE, NEEDS_TEXT, Claim, DataConfig, EvaluationConfig, Experiment, ModelConfig, Plan, Recipe, Run, cost,
)  # fmt: skip
from harness.figures.placements import of_stability as figure

RATES, WARMUPS = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2), (8, 80)
DEPTHS = [scaled(layers, 64) for layers in (2, 6, 12, 24)]
PAPER = ModelConfig(hidden_size=1024, num_heads=16, seq_len=1024, vocab_size=51200)


def grid(
    models: Sequence[ModelConfig], rates: Sequence[float], warmups: Sequence[int], recipe: Recipe, seeds: int, run: Run
) -> list[Run]:
    """Return every placement of each model at each rate and warm-up, a seed after the other."""
    return [
        replace(
            run, seed=seed, model=replace(model, norm_placement=norm),
            train=replace(recipe, lr=lr, min_lr=lr / 10, warmup_steps=warmup),
        )
        for seed in range(seeds) for model in models for lr in rates for warmup in warmups for norm in NORMS
    ]  # fmt: skip


EXPERIMENT = Experiment(
    source="our own; the question: Megatron-LM 2019, section 5.4; warm-up: Xiong et al. 2020 (2002.04745)",
    expectation="pre and sandwich train at every depth up to the same high rate; post's largest stable rate falls with "
    "depth, and rises with a longer warm-up",
    claims=(
        claim(
            "with 12 layers and more, LayerNorm before each block trains at higher rates than after it, by the runs "
            "that diverge", placements.stable_at_higher_rates(12),
        ),
        claim(
            "at each placement's best rate, LayerNorm before each block ends lower than after it, at every depth",
            placements.best_beats("pre", "post"),
        ),
        claim(
            "the largest stable rate with LayerNorm after each block is lower with 24 layers than with 2, by the runs "
            "that diverge", placements.falls_with_depth("post"),
        ),
        Claim(
            "with 12 layers and more, a longer warm-up lets LayerNorm after each block train at a higher rate, by the "
            "runs that diverge",
            "Xiong et al. 2020, section 3.2", placements.warmup_helps("post", 12), kind="direction",
        ),
        claim(
            "sandwich trains at all rates that pre trains at, by the runs that diverge",
            placements.as_stable("sandwich", "pre"),
        ),
        claim(
            "at each placement's best rate, pre ends lower than sandwich, at every depth",
            placements.best_beats("pre", "sandwich"),
        ),
    ),
    table=table,
    figure=figure,
    cost=cost("2 h", "a week, 64 GPUs with 80 GB", note=AT_ONCE + NEEDS_TEXT),
    deviations="The paper's models are BERTs; these are GPTs on bytes of books, 64 hidden units, 410,000 tokens: "
    "stability of the first steps, not of long training. Initial weights are scaled with the width. Every run goes to "
    "its end, on a plateau too. A placement's best rate is chosen by the text that it is compared on.",
    runs={
        "smoke": grid(
            [scaled(1, 32), scaled(4, 32)], (3e-3, 1e-1), (2, 20), Recipe(steps=60, global_batch=8, microbatch=8), 1,
            Run(evaluation=EvaluationConfig(sequences=32)),
        ),
        "small": grid(
            DEPTHS, RATES, WARMUPS, Recipe(steps=400, global_batch=8, microbatch=8), 3,
            Run(data=DataConfig(dataset="data/books-byte"), evaluation=EvaluationConfig(every=100, sequences=128)),
        ),
        "paper": grid(
            [replace(PAPER, num_layers=layers) for layers in (12, 24, 48, 96)], (1e-4, 3e-4, 1e-3, 3e-3), (20, 2000),
            Recipe(steps=20_000, global_batch=256, microbatch=8), 3,
            Run(
                plan=Plan(dp=8), data=DataConfig(dataset="data/openwebtext-gpt2"), precision="bf16",
                evaluation=EvaluationConfig(every=1000, sequences=1024),
            ),
        ),
    },
)  # fmt: skip
