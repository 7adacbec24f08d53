"""Fine-tuning on RACE: parallel equals serial, weights come from pretraining in any layout, answers are counted."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from impl.checkpoint import Checkpoints
from impl.data.batches import Batch
from impl.data.config import OPTIONS, DataConfig
from impl.data.tokens import TokenFolder
from impl.errors import InputError
from impl.evaluate import Evaluation, evaluate
from impl.evaluation_config import EvaluationConfig
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from impl.start import start_from
from impl.train import Trainer
from tests.impl.data.race_files import QUESTIONS, write_race
from tests.impl.on_ranks import on_ranks, own_group, trainer
from tests.impl.parity import assert_equal_gradients, first_gradients, serial
from tests.ranks import run_ranks

MODEL = ModelConfig(family="bert", num_layers=2, hidden_size=16, num_heads=4, seq_len=32, dropout=0.1)
PRETRAINING = Run(model=MODEL, train=Recipe(steps=2, global_batch=4, microbatch=2, warmup_steps=1))
ANSWERING = replace(
    PRETRAINING,
    train=Recipe(steps=2, global_batch=16, microbatch=4, warmup_steps=0),
    data=DataConfig(race="synthetic"),
    evaluation=EvaluationConfig(sequences=8),
    precision="fp64",
)
PLANS = {
    "tensor parallel": Plan(tp=2),
    "sequence parallel": Plan(tp=2, sequence_parallel=True),
    "data parallel": Plan(dp=2),
    "ZeRO 3, recomputed": Plan(dp=2, zero_stage=3, recompute="full", bucket_bytes=2000),
}


def test_every_gradient_equals_serial(data: Path) -> None:
    runs = [replace(ANSWERING, plan=plan) for plan in PLANS.values()]
    in_full = [run for run in runs if run.plan.zero_stage == 0]
    found = on_ranks(first_gradients, [*in_full, ANSWERING], data)
    [expected] = found[serial(ANSWERING)]
    assert {"choice.weight", "pooler.weight", "trunk.tokens.weight"} <= expected.parts.keys()
    assert np.abs(expected.parts["choice.weight"]).sum() > 0
    for run in in_full:
        if run.plan.tp > 1:
            assert_equal_gradients(found[run], run.plan.tp, expected)
        for rank in found[run]:
            assert rank.loss == pytest.approx(expected.loss, rel=1e-12)


def trained_and_asked(one: Trainer) -> tuple[list[float], list[Evaluation]]:
    return [one.step(i).loss.item() for i in range(2)], one.evaluate(final=True)


def test_training_and_answers_equal_serial(data: Path, tmp_path: Path) -> None:
    """On few questions, that evaluation is quick."""
    run = replace(ANSWERING, data=DataConfig(race=str(write_race(tmp_path))))
    found = on_ranks(trained_and_asked, [run, *(replace(run, plan=plan) for plan in PLANS.values())], data)
    [(losses, answers)] = found.pop(run)
    assert [one.name for one in answers] == ["RACE dev", "RACE test", "RACE test middle", "RACE test high"]
    assert [(one.tokens, one.total) for one in answers] == [(2, 2), (3, 3), (2, 2), (1, 1)]
    assert losses[0] == pytest.approx(math.log(OPTIONS), rel=0.05)
    for of_ranks in found.values():
        for other_losses, other in of_ranks:
            assert other_losses == pytest.approx(losses, rel=1e-9)
            for a, b in zip(other, answers, strict=True):
                assert a.nats == pytest.approx(b.nats, rel=1e-6)
                assert replace(a, nats=0.0) == replace(b, nats=0.0)


# Weights of a checkpoint ---------------------------------------------------------------------------------------------


def weights(one: Trainer) -> dict[str, list[float]]:
    return {own.name: own.tensors["weight"].tolist() for own in one.optimizer.owned()}


def pretrained(run: Run, folder: Path, data: Path) -> None:
    one = trainer(run, data)
    for i in range(run.train.steps):
        one.step(i)
    checkpoints = Checkpoints(folder, one, own_group())
    checkpoints.save(run.train.steps)
    checkpoints.wait()


def started(runs: list[Run], folder: Path, data: Path) -> list[Any]:
    """The weights of each run's trainer before and after it takes over those of a checkpoint, or why it cannot."""
    group, found = own_group(), []
    for run in runs:
        one = trainer(run, data)
        before = weights(one)
        try:
            assert start_from(folder, one, group) == PRETRAINING.train.steps
            assert one.optimizer.updates == 0
            found.append((before, weights(one)))
        except InputError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("tp", [1, 2])
def test_fine_tuning_starts_from_the_weights_of_any_layout(tp: int, data: Path, tmp_path: Path) -> None:
    run_ranks(tp, pretrained, replace(PRETRAINING, plan=Plan(tp=tp)), tmp_path, data)
    answering = replace(ANSWERING, precision="fp32", seed=5)
    others = [
        replace(answering, model=replace(MODEL, **changed)) for changed in ({"hidden_size": 32}, {"dropout": 0.0})
    ]
    runs = [answering, *others, replace(PRETRAINING, seed=5)]
    [[(before, after), smaller, undropped, (_, again)]] = run_ranks(1, started, runs, tmp_path, data)
    assert "checkpoint of another model: model.hidden_size 16, here 32" in smaller
    assert isinstance(undropped, tuple)
    for name in after:
        is_new = name.startswith("choice.")
        assert (after[name] == before[name]) is (is_new or not any(after[name])), name
        assert is_new or after[name] == again[name]


def test_no_checkpoint_is_named(data: Path, tmp_path: Path, one_rank: dist.ProcessGroup) -> None:
    with pytest.raises(InputError, match=f"start: no checkpoint in {tmp_path}"):
        start_from(tmp_path, trainer(ANSWERING, data), one_rank)


# Answers, counted ----------------------------------------------------------------------------------------------------


class Knows:
    """A scorer that finds the option with these bytes likeliest."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer

    def next_token(self, inputs: np.ndarray, targets: np.ndarray) -> tuple[Tensor, Tensor]:
        raise AssertionError("no text is asked about")

    def nats(self, batch: Batch) -> Tensor:
        said = [self.answer in bytes(i for i in row.tolist() if i < 256) for row in batch.inputs]
        p = torch.tensor(said, dtype=torch.float64).view(-1, OPTIONS) * 0.5 + 0.125
        return -p.log()


def test_answers_are_counted_by_school(data: Path, tmp_path: Path, one_rank: dist.ProcessGroup) -> None:
    spec = str(write_race(tmp_path, QUESTIONS))
    run = replace(ANSWERING, data=DataConfig(race=spec), model=replace(MODEL, seq_len=96))
    found = evaluate(run, TokenFolder.open(data), Knows(b"rain"), one_rank, final=True, batch=4)
    by_name = {one.name: one for one in found}
    # the passage says it too, so that all options of the middle school's questions do: the first one is taken
    assert {name: (one.correct, one.total) for name, one in by_name.items()} == {
        "RACE dev": (1, 2), "RACE test": (1, 3), "RACE test middle": (1, 2), "RACE test high": (0, 1),
    }  # fmt: skip
    found = evaluate(run, TokenFolder.open(data), Knows(b"is d , "), one_rank, final=True, batch=4)
    assert [(one.correct, one.accuracy) for one in found if one.name == "RACE test high"] == [(1, 1.0)]
    assert found[-1].nats == pytest.approx(-math.log(0.625))
