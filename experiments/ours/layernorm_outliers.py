"""Does the placement of LayerNorm decide whether a few dimensions of the hidden state stand out from all others?

Kovaleva et al. 2021 (BERT Busters) find, in trained BERTs and their like, a few dimensions whose weights in the output
LayerNorms are unusually large, the same ones in most layers; without them the model loses what it does not lose
without as many others, and they are there early in its training. BERT has its norms after each block. Here models are
trained for each placement and looked at as they learn: the size of every dimension of what each layer hands on, the
weights of its norms, and what the loss is without the dimension that stands out most, or an average one.
"""

from collections.abc import Sequence
from dataclasses import replace

from experiments.megatron2019 import scaled
from experiments.megatron2019.layernorm_placement import NORMS
from experiments.ours import claim
from harness.analysis.outliers import table
from harness.experiment import placements
from harness.experiment.kit import (
    AT_ONCE, NEEDS_TEXT, Claim, DataConfig, EvaluationConfig, Experiment, ModelConfig, Plan, Recipe, Run, cost,
)  # fmt: skip
from harness.figures.placements import of_outliers as figure


def watched(norms: Sequence[str], families: Sequence[str], seeds: int, shape: tuple[int, int], every: int) -> list[Run]:
    """Return runs of small models whose dimensions are looked at six times, after so many steps each."""
    return [
        Run(
            model=scaled(*shape, family=family, norm_placement=norm), seed=seed,
            train=Recipe(steps=6 * every, global_batch=8, microbatch=8, lr=2e-3, min_lr=2e-4, warmup_steps=every // 2),
            data=DataConfig(dataset="data/books-byte") if seeds > 1 else DataConfig(),
            evaluation=EvaluationConfig(every=every, sequences=128, dimensions=True),
        )
        for seed in range(seeds) for family in families for norm in norms
    ]  # fmt: skip


KOVALEVA = "Kovaleva et al. 2021, abstract"
BERT_110M = ModelConfig(
    family="bert", num_layers=12, hidden_size=768, num_heads=12, seq_len=512, vocab_size=30592, dropout=0.1
)

EXPERIMENT = Experiment(
    source="our own; Kovaleva et al. 2021 (2105.06990), abstract",
    expectation="with post-layernorm a few dimensions over three standard deviations out, the same in most layers; "
    "with pre-layernorm larger ones, as nothing scales what the layers add up to",
    claims=(
        Claim(
            "every run with LayerNorm after its blocks ends with outlier dimensions", KOVALEVA,
            placements.has_outliers("post"), kind="direction",
        ),
        Claim(
            "in every such run of BERT the norms' furthest weights are over three standard deviations out, in the same "
            "dimension of most", KOVALEVA, placements.same_in_most_norms, kind="direction",
        ),
        Claim(
            "in every run the dimension that stands out most is worth over ten times as much loss as an average one",
            KOVALEVA, placements.worth_more, kind="direction", tolerance=placements.WORTH,
        ),
        Claim(
            "outliers are there after half of the training, in every run that ends with some", KOVALEVA,
            placements.there_early, kind="direction", tolerance=placements.EARLY,
        ),
        claim("pre-layernorm has them too, in every run", placements.has_outliers("pre")),
        claim(
            "the largest dimension stands out more with pre-layernorm than with post-layernorm",
            placements.most_without_end_norm,
        ),
    ),
    table=table,
    figure=figure,
    cost=cost("8 min", "4 days, 64 GPUs with 80 GB", note=AT_ONCE + NEEDS_TEXT),
    deviations="Kovaleva et al. look at the weights of trained models of 110M parameters and more; here small ones are "
    "trained, and what layers hand on is looked at as well, which pre-layernorm does not scale at a layer's end. They "
    "zero a dimension's weight and bias in every output LayerNorm, here it is zero in what the layers hand on. At "
    "`small`, six layers of 64 hidden units on bytes of books.",
    runs={
        "smoke": watched(("pre", "post"), ("gpt", "bert"), 1, (2, 64), 20),
        "small": watched(NORMS, ("gpt", "bert"), 3, (6, 64), 100),
        "paper": [
            Run(
                model=replace(BERT_110M, norm_placement=norm), plan=Plan(dp=8), precision="bf16", seed=seed,
                train=Recipe(steps=100_000, global_batch=256, lr=1e-4, warmup_steps=10_000, decay="linear"),
                data=DataConfig(dataset="data/wikipedia-bert"),
                evaluation=EvaluationConfig(every=2000, sequences=1024, dimensions=True),
            )
            for seed in range(3) for norm in NORMS
        ],
    },
)  # fmt: skip
