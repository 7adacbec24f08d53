"""A vocabulary that is padded trains as without padding, and its padding stays zero."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from impl.data.tokens import TokenFolder
from impl.mesh import build_mesh
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from impl.train import Trainer
from tests.ranks import run_ranks

MODEL = ModelConfig(num_layers=1, hidden_size=24, num_heads=12, seq_len=24, dropout=0.1)
RECIPE = Recipe(steps=4, global_batch=2, microbatch=1, lr=1e-2, warmup_steps=1, weight_decay=0.1)
RUNS = [
    Run(model=replace(MODEL, family=family, vocab_size=vocab_size), train=RECIPE, precision="fp64")
    for family in ("gpt", "bert")
    for vocab_size in (260, 384, 385, 700)  # of 4 ranks: one with padding only, one more, none, none
]


class Trained(NamedTuple):
    losses: list[float]
    padding_rows: int
    padding_is_zero: bool
    """Embedding, BERT's bias per token, and their Adam moments."""


def train(runs: list[Run], data: Path) -> list[Trained]:
    return [_train(run, data) for run in runs]


def _train(run: Run, data: Path) -> Trained:
    trainer = Trainer(run, TokenFolder.open(data), build_mesh(run.plan, "cpu"), torch.device("cpu"))
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


@cache
def serial(data: Path) -> list[Trained]:
    [found] = run_ranks(1, train, RUNS, data)
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_any_vocabulary_gives_the_serial_losses_at_any_degree(tp: int, sequence_parallel: bool, data: Path) -> None:
    plan = Plan(tp=tp, sequence_parallel=sequence_parallel)
    answers = run_ranks(tp, train, [replace(run, plan=plan) for run in RUNS], data)
    for of_run, expected, run in zip(zip(*answers, strict=True), serial(data), RUNS, strict=True):
        vocab_size = run.model.vocab_size
        assert vocab_size is not None
        assert sum(found.padding_rows for found in of_run) == -vocab_size % (128 * tp)
        for found in of_run:
            assert found.losses == pytest.approx(expected.losses, rel=1e-10)
            assert found.padding_is_zero
        assert expected.losses[-1] < expected.losses[0]
