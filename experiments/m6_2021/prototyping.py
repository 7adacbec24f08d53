"""Does it pay that each token meets k experts, and that k prototypes choose one each instead of all experts k?

M6-T divides the experts of a layer into k prototypes, in each of which a token meets its best expert. Its abstract has
three findings: how many experts a token meets makes a difference, and how many tokens an expert may take; imbalance of
the experts may not matter; k prototypes improve quality at constant cost. Here every way is trained on the same text,
with all tokens taken, or with as many in all as one expert a token would take.
"""

from dataclasses import replace

from experiments.m6_2021 import LAST_LOSS, at_most, by_seed, in_abstract, last_loss
from experiments.megatron2019 import scaled
from experiments.ours import NO_SLOWER, SMALL, claim
from harness.experiment.kit import (
    AT_ONCE, DEVICE, MARK, NEEDS_TEXT, PARAMETERS, RUNS, STEP, DataConfig, EvaluationConfig, Experiment, ModelConfig,
    Plan, Recipe, Run, cost, of_run, points, step_seconds, table_of,
)  # fmt: skip

BALANCE = 0.01
"""Coefficient of the loss of balance, Switch Transformer's (2101.03961)."""


def way(run: Run) -> str:
    """Return in words how tokens choose their experts."""
    model = run.model
    if not model.experts:
        return "dense"
    chosen = f"top-{model.experts_per_token}"
    prototypes = f"{model.expert_prototypes} {chosen}" if model.expert_prototypes > 1 else chosen
    return prototypes + ", limited" * (model.expert_capacity is not None) + ", unbalanced" * (not model.balance_loss)


def ways(base: ModelConfig, experts: int, most: int) -> list[ModelConfig]:
    """Return the model without experts and with them, one to `most` a token; limited ones take as many in all."""
    one = replace(base, experts=experts, balance_loss=BALANCE)
    several = [k for k in (2, 4) if k <= most]
    limited = [
        replace(one, expert_capacity=1.0),
        *(replace(one, expert_capacity=1 / k, experts_per_token=k) for k in several),
        *(replace(one, expert_capacity=1 / k, expert_prototypes=k) for k in several),
    ]
    free = [replace(model, expert_capacity=None) for model in limited]
    return [base, replace(one, balance_loss=0.0), *free, *limited]


losses, seconds = by_seed(way, last_loss), by_seed(way, step_seconds)
SHOWN = (
    of_run("way", "experts of a token", way, text=True), DEVICE, PARAMETERS, LAST_LOSS, STEP, RUNS, MARK,
)  # fmt: skip
SIZE = scaled(2, 64)
LOSS = "loss"
EXPERIMENT = Experiment(
    source="M6-T, Yang et al. 2021 (2105.15082), abstract",
    expectation="more experts a token lower the loss; prototypes do so at the cost of one; imbalance matters little",
    claims=(
        in_abstract("two experts a token end lower than one", at_most(losses, "top-2", "top-1", LOSS)),
        in_abstract(
            "where experts take as many tokens in all, two prototypes end lower than one",
            at_most(losses, "2 top-1, limited", "top-1, limited", LOSS),
        ),
        in_abstract(
            "two prototypes end at most 1% above two of all experts",
            at_most(losses, "2 top-1", "top-2", LOSS, SMALL), SMALL,
        ),
        in_abstract(
            "without a loss of balance one expert a token ends at most 1% above",
            at_most(losses, "top-1, unbalanced", "top-1", LOSS, SMALL), SMALL,
        ),
        claim("one of eight experts a token ends lower than an MLP", at_most(losses, "top-1", "dense", LOSS)),
        claim(
            "two prototypes take no longer a step than two of all experts",
            at_most(seconds, "2 top-1", "top-2", "step time", NO_SLOWER), about="computing", tolerance=NO_SLOWER,
        ),
    ),
    table=table_of("prototyping", "Ways to choose experts", SHOWN, lambda records: points(records, last_loss), [
        "top-k: the k best of all experts; k top-1: the best of each of k prototypes; limited: an expert takes no more "
        "tokens of a sequence than, of all, one a token would be; unbalanced: without a loss of balance. All are as "
        "wide as the MLP of the dense model."
    ]),
    cost=cost("15 min", "days, 32 GPUs with 32 GB", note=AT_ONCE + NEEDS_TEXT),
    deviations="At `small`, a GPT of 0.1M parameters without its experts sees 0.8M bytes of books. Shapes of `paper` "
    "are M6-T's base model, from memory: 5 layers of 1024, 32 experts of 4096; its text is not public. An expert's "
    "limit is counted by sequence, not by a rank's tokens.",
    runs={
        "smoke": [
            Run(model=model, train=Recipe(steps=30, global_batch=8, microbatch=8, warmup_steps=4),
                evaluation=EvaluationConfig(sequences=32))
            for model in ways(scaled(1, 32), 4, 2)
        ],
        "small": [
            Run(
                model=model, seed=seed, data=DataConfig(dataset="data/books-byte"),
                train=Recipe(steps=800, global_batch=8, microbatch=8, lr=3e-3, min_lr=3e-4, warmup_steps=40),
                evaluation=EvaluationConfig(every=200, sequences=128),
            )
            for seed in range(3) for model in ways(SIZE, 8, 4)
        ],
        "paper": [
            Run(
                model=model, seed=seed, plan=Plan(dp=32, ep=32 if model.experts else 1), precision="bf16",
                data=DataConfig(dataset="data/openwebtext-gpt2"),
                train=Recipe(steps=30_000, global_batch=1024, microbatch=8, lr=8e-5, warmup_steps=500),
                evaluation=EvaluationConfig(every=1000, sequences=1024),
            )
            for seed in range(3)
            for model in ways(ModelConfig(num_layers=5, hidden_size=1024, num_heads=16, seq_len=1024), 32, 4)
        ],
    },
)  # fmt: skip
