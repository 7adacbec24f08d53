"""Does perplexity fall with model size, where each size has its own learning rate and enough text?

Megatron-LM finds lower perplexity in larger models (section 5.3, table 3, figure 6), each trained on 157B tokens.
Small experiments answer otherwise as soon as tokens are few, or the learning rate suits one size only. Here five sizes
from 0.25M to 12M parameters are trained on 5 and on 25 million tokens of books, at the rate that is best for each on a
validation text, and measured on other books, on WikiText-2 and on LAMBADA.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from experiments.megatron2019 import scaled
from experiments.ours import claim
from harness.experiment.kit import (
    AT_ONCE, NEEDS_TEXT, Claim, DataConfig, EvaluationConfig, Experiment, ModelConfig, Plan, Recipe, Run, cost, named,
)  # fmt: skip
from harness.experiment.loss_by_size import (
    MEASURED, falls, falls_faster_with_more_tokens, figure, largest_is_worse, table,
)  # fmt: skip

SIZES = [scaled(layers, hidden, seq_len=256) for layers, hidden in ((2, 64), (3, 128), (4, 192), (6, 256), (6, 384))]
RATES, GPU_RATES = (1e-3, 2e-3, 4e-3, 8e-3), (1e-4, 2e-4, 4e-4)
FEW, MANY = 1220, 6100
"""Steps of 4,096 tokens: 5 and 25 million tokens."""
BEST: dict[int, float] = {64: 8e-3, 128: 4e-3, 192: 4e-3, 256: 2e-3, 384: 1e-3}
"""Rate of each hidden size with the lowest validation loss after FEW steps; other seeds and MANY steps have it."""
SOURCES = ("Megatron-LM 2019, section 5.3, figure 6", *["Megatron-LM 2019, table 3"] * 2)


def trained(
    run: Run, models: Iterable[ModelConfig], rates: Sequence[float], steps: int, seeds: Iterable[int]
) -> list[Run]:
    """Return runs of every seed, model and rate, validated four times on the way."""
    return [
        replace(
            run, seed=seed, model=model, train=replace(run.train, steps=steps, lr=lr, min_lr=lr / 10),
            evaluation=replace(run.evaluation, every=steps // 4),
        )
        for seed in seeds for model in models for lr in rates
    ]  # fmt: skip


CPU = Run(
    train=Recipe(global_batch=16, microbatch=16, warmup_steps=60), precision="bf16",
    data=DataConfig(dataset="data/books-bpe2k"),
    evaluation=EvaluationConfig(
        sequences=512, overlap=64, texts=("data/books.test.txt", "data/wikitext2.test.txt"),
        lambada="data/lambada_test.jsonl",
    ),
)  # fmt: skip
GPU = Run(
    plan=Plan(dp=8), train=Recipe(global_batch=512, microbatch=8, warmup_steps=300), precision="bf16",
    data=DataConfig(dataset="data/openwebtext-gpt2"),
    evaluation=EvaluationConfig(
        sequences=1024, overlap=256, texts=("data/wikitext103.test.txt",), lambada="data/lambada_test.jsonl"
    ),
)  # fmt: skip
TINY = Run(train=Recipe(global_batch=8, microbatch=8), evaluation=EvaluationConfig(sequences=32))
TINY_SIZES = [scaled(1, 32), scaled(2, 64)]


def at_best(steps: int, seeds: Iterable[int]) -> list[Run]:
    """Return runs of every seed and size at its best rate; the longest have two threads, or each takes 3 hours."""
    return [
        replace(run, threads=2 if (steps, one) == (MANY, SIZES[-1]) else 1)
        for seed in seeds for one in SIZES for run in trained(CPU, [one], [BEST[one.hidden_size]], steps, [seed])
    ]  # fmt: skip


EXPERIMENT = Experiment(
    source="our own; the question: Megatron-LM 2019, section 5.3, table 3, figure 6",
    expectation="after 25M tokens every loss falls with size; after 5M the largest model is worse than a smaller one",
    claims=(
        *(
            Claim(
                f"with enough text, the loss of {what} falls with model size", source, falls(name, of, unit),
                kind="direction",
            )
            for source, (name, of, what, unit) in zip(SOURCES, MEASURED, strict=True)
        ),
        claim("loss falls faster with size after 25M tokens than after 5M", falls_faster_with_more_tokens),
        claim("after 5M tokens the largest model is worse than a smaller one", largest_is_worse),
    ),
    table=table,
    figure=figure,
    cost=cost("9 h", "a month, 64 GPUs with 80 GB", note=AT_ONCE + NEEDS_TEXT),
    deviations="Models are 30 times smaller than the paper's smallest and more, the text is books, and weights have "
    "16 bits, their masters 32. The rate is chosen from four after 5M tokens, with one seed; the best after 25M may be "
    "lower. Initial weights are scaled with the width.",
    runs={
        "smoke": [run for steps in (60, 240) for run in trained(TINY, TINY_SIZES, [4e-3], steps, [0])],
        "small": [*trained(CPU, SIZES, RATES, FEW, [0]), *at_best(FEW, [1, 2]), *at_best(MANY, [0, 1, 2])],
        "paper": [
            run
            for steps in (15_000, 75_000)
            for run in trained(GPU, list(map(named, ("gpt-355m", "gpt-1.2b", "gpt-2.5b"))), GPU_RATES, steps, range(3))
        ],
    },
)  # fmt: skip
