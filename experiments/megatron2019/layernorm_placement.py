"""Where should LayerNorm stand: does moving it before each block let larger models train at all?

Megatron-LM rearranges BERT's residual blocks so that LayerNorm comes before attention and MLP, and finds that only then
a model larger than BERT-large trains stably and to a lower loss (section 5.4, figure 7). Here pre, post and sandwich
placement, for GPT and BERT, over depth and learning rate. A run diverged whose loss is NaN, ends above where it began,
or shows no more learnt than the frequencies of letters.
"""

from collections.abc import Sequence
from dataclasses import replace

from experiments.megatron2019 import BERT, scaled
from harness.experiment import placements
from harness.experiment.kit import (
    AT_ONCE, NEEDS_TEXT, Claim, DataConfig, EvaluationConfig, Experiment, ModelConfig, Plan, Recipe, Run, cost, named,
)  # fmt: skip

NORMS = ("pre", "post", "sandwich")
SMOKE = ModelConfig(num_layers=2, hidden_size=64, num_heads=1)
SHALLOW, DEEP = scaled(2, 64), scaled(12, 64)
LARGE = named("bert-336m")
LARGER = replace(LARGE, num_layers=36, hidden_size=1280, num_heads=20)  # assumed: the paper gives 752M, not the shape


def models_and_rates(sizes: Sequence[ModelConfig], rates: Sequence[float]) -> list[tuple[ModelConfig, float]]:
    """Return every placement of GPT and BERT of each size at each learning rate."""
    return [
        (replace(size, family=family, norm_placement=norm), lr)
        for family in ("gpt", "bert")
        for size in sizes
        for lr in rates
        for norm in NORMS
    ]


EXPERIMENT = Experiment(
    source="Megatron-LM 2019, section 5.4, figure 7",
    expectation="pre and sandwich train at every depth and learning rate; post fails first as either grows",
    claims=(
        Claim(
            "BERT with LayerNorm before each block reaches a lower perplexity than after it, at every size and rate",
            "figure 7", placements.pre_beats_post("bert"),
            "pre has the lower loss at 336M and 752M; post is unstable at 752M", kind="direction",
        ),
        Claim("so does GPT", "our own; the paper compares BERTs", placements.pre_beats_post("gpt")),
        Claim(
            "with LayerNorm after each block some run diverges, and none with it before", "figure 7",
            placements.only_post_diverges, kind="direction",
        ),
        Claim(
            "with LayerNorm after each block every deeper model ends over 5% worse than shallow ones", "figure 7",
            placements.deep_post_fails, kind="direction", tolerance=placements.WORSE,
        ),
        Claim(
            "a higher learning rate costs more with LayerNorm after each block than before it, in every model",
            "our own; section 5.4 has instability for larger models only", placements.rate_hurts_post_more,
        ),
    ),
    cost=cost("25 min", "days, 64 GPUs with 32 GB", note=AT_ONCE + NEEDS_TEXT),
    deviations="GPT and sandwich placement are additions. The shape of the paper's 752M model is not stated: 36 layers "
    "of hidden size 1280 are assumed. The second head predicts the next sentence, not sentence order, and masks fall "
    "on single tokens, not on n-grams of whole words. At `small`, models of 64 hidden units see 360,000 bytes "
    "of books; their initial weights are scaled with the width, so that a block adds to its input what it does in "
    "the paper's.",
    runs={
        "smoke": [
            Run(model=model, plan=Plan(dp=2), train=Recipe(steps=150, lr=lr, warmup_steps=15))
            for model, lr in models_and_rates((SMOKE,), (3e-3,))
        ],
        "small": [
            Run(
                model=model, seed=seed, data=DataConfig(dataset="data/books-byte"),
                train=Recipe(steps=350, global_batch=8, microbatch=8, lr=lr, min_lr=lr / 10, warmup_steps=35),
                evaluation=EvaluationConfig(every=50, sequences=128),
            )
            for seed in range(3)
            for model, lr in models_and_rates((SHALLOW, DEEP), (1e-3, 4e-3))
        ],
        "paper": [
            Run(
                model=model, plan=Plan(dp=64), data=DataConfig(dataset="data/wikipedia-gpt2"), precision="bf16",
                train=replace(BERT, lr=lr), evaluation=EvaluationConfig(every=1000, sequences=4096),
            )
            for model, lr in models_and_rates((LARGE, LARGER), (1e-4, 4e-4))
        ],
    },
)  # fmt: skip
