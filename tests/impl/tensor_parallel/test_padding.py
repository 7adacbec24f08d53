"""A vocabulary that is padded trains as without padding, and its padding stays zero."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from impl.train import Trainer
from tests.impl.on_ranks import on_ranks

MODEL = ModelConfig(num_layers=1, hidden_size=24, num_heads=12, seq_len=24, dropout=0.1)
RECIPE = Recipe(steps=4, global_batch=2, microbatch=1, lr=1e-2, warmup_steps=1, weight_decay=0.1)
RUNS = [
    Run(model=replace(MODEL, family=family, vocab_size=vocab_size), train=RECIPE, precision="fp64")
    for family, vocab_size in (("gpt", 385), ("bert", 260))  # of 4 ranks with padding only: none, one
]


class Trained(NamedTuple):
    losses: list[float]
    padding_rows: int
    padding_is_zero: bool
    """Embedding, BERT's bias per token, and their Adam moments."""


def train(trainer: Trainer) -> Trained:
    run = trainer.run
    losses = [trainer.step(i).loss.item() for i in range(run.train.steps)]
    vocabulary = trainer.model.trunk.tokens
    assert vocabulary is not None
    names = ["trunk.tokens.weight", *(["token_bias"] if run.model.family == "bert" else [])]
    owned = {one.name: one.tensors for one in trainer.optimizer.owned()}
    padding = []
    for name in names:
        width = trainer.model.get_parameter(name).numel() // len(vocabulary.weight)
        padding += [t.view(-1, width)[vocabulary.tokens.count :] for t in owned[name].values()]
        assert owned[name]["exp_avg"].view(-1, width)[: vocabulary.tokens.count].all(), "a token's row has no gradient"
    return Trained(losses, len(padding[0]), not any(t.count_nonzero() for t in padding))


PLANS = [Plan(tp=3), Plan(tp=4, sequence_parallel=True)]


def test_any_vocabulary_gives_the_serial_losses_at_any_degree(data: Path) -> None:
    found = on_ranks(train, [replace(run, plan=plan) for run in RUNS for plan in (Plan(), *PLANS)], data)
    for run in RUNS:
        [serial], vocab_size = found[run], run.model.vocab_size
        assert vocab_size is not None
        assert serial.losses[-1] < serial.losses[0]
        for plan in (Plan(), *PLANS):
            ranks = found[replace(run, plan=plan)]
            assert sum(of_rank.padding_rows for of_rank in ranks) == -vocab_size % (128 * plan.tp)
            for of_rank in ranks:
                assert of_rank.losses == pytest.approx(serial.losses, rel=1e-10)
                assert of_rank.padding_is_zero
