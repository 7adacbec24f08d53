"""Does validation perplexity fall as the model grows, all else equal?

Megatron-LM trains GPT-2 with 355M, 2.5B and 8.3B parameters on the same text for as many steps, and reports that larger
models reach lower WikiText103 perplexity and higher LAMBADA accuracy (section 5.3, table 3, figure 6). Here the same
question at a scale that fits: sizes differ, and data, order of data, batch, steps and learning rate are the same.
"""

from experiments.megatron2019 import scaled
from harness.experiment.kit import (
    AT_ONCE, NEEDS_TEXT, Claim, DataConfig, EvaluationConfig, Experiment, ModelConfig, Plan, Recipe, Run, cost, named,
    with_size,
)  # fmt: skip

SMOKE_SIZES = [*(ModelConfig(hidden_size=h, num_heads=1) for h in (32, 64)), named("gpt-0.5m")]
SMALL_SIZES = [scaled(2, hidden, seq_len=256) for hidden in (32, 64, 128)]
PAPER_SIZES = {"gpt-355m": 1, "gpt-2.5b": 2, "gpt-8.3b": 8}
"""Tensor-parallel degrees with which 64 data-parallel ranks make table 2's numbers of GPUs."""

EXPERIMENT = Experiment(
    source="Megatron-LM 2019, section 5.3, table 3, figure 6",
    expectation="validation and word perplexity fall strictly with size, LAMBADA accuracy rises",
    cost=cost("12 min", "weeks, 64, 128 and 512 GPUs", note=AT_ONCE + NEEDS_TEXT),
    claims=(
        Claim(
            "validation loss falls with model size", "section 5.3, figure 6",
            with_size(lambda last: last.per("tokens"), "valid", "nats a token"), kind="direction",
        ),
        Claim(
            "bits per byte of WikiText fall with model size", "table 3",
            with_size(lambda last: last.bits_per_byte, "wikitext2.test.txt", "bits"),
            "word perplexity 19.31 (355M), 12.76 (2.5B), 10.81 (8.3B), on WikiText103", kind="direction",
        ),
        Claim(
            "the loss of LAMBADA's last words falls with model size", "table 3",
            with_size(lambda last: last.per("words"), "lambada", "nats a word"),
            "accuracy 45.18% (355M), 61.73% (2.5B), 66.51% (8.3B)", kind="direction",
        ),
    ),
    deviations="The text is books, not OpenWebText and others. At `small`, models are 1000 times smaller, have a "
    "vocabulary of 2,048 and see 2.9M tokens; their initial weights are scaled with the width. WikiText-2's test "
    "articles, which are WikiText103's, are read with a quarter of a window of context kept, where the paper keeps all "
    "but 32 tokens.",
    runs={
        "smoke": [
            Run(model=size, plan=Plan(dp=2), train=Recipe(steps=250, lr=4e-3, warmup_steps=25)) for size in SMOKE_SIZES
        ],
        "small": [
            Run(
                model=size,
                train=Recipe(steps=1400, global_batch=8, microbatch=8, lr=2e-3, min_lr=2e-4, warmup_steps=70),
                data=DataConfig(dataset="data/books-bpe2k"),
                evaluation=EvaluationConfig(
                    every=350, sequences=128, overlap=64, texts=("data/wikitext2.test.txt",),
                    lambada="data/lambada_test.jsonl",
                ),
                seed=seed,
            )
            for seed in range(3)
            for size in SMALL_SIZES
        ],
        "paper": [
            Run(
                model=named(name),
                plan=Plan(dp=64, tp=tp),
                train=Recipe(steps=300_000, global_batch=512, microbatch=8, lr=1.5e-4, min_lr=1e-5, warmup_steps=3000),
                data=DataConfig(dataset="data/openwebtext-gpt2"),
                evaluation=EvaluationConfig(
                    every=1000, sequences=1024, overlap=992, texts=("data/wikitext103.test.txt",),
                    lambada="data/lambada_test.jsonl",
                ),
                precision="bf16",
            )
            for name, tp in PAPER_SIZES.items()
        ],
    },
)  # fmt: skip
