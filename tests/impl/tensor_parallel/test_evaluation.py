"""Evaluation of a split model equals that of the serial one, whatever the length of what is scored."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from impl.data.tokens import TokenFolder
from impl.evaluate import Evaluation
from impl.evaluation_config import EvaluationConfig
from impl.mesh import build_mesh
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from impl.train import Trainer
from tests.ranks import run_ranks

MODEL = ModelConfig(num_layers=2, hidden_size=24, num_heads=12, seq_len=24, dropout=0.1)
RECIPE = Recipe(steps=10, global_batch=8, microbatch=4, lr=1e-2, warmup_steps=2)
WORDS = " = Cats = \n \n The cat @-@ like <unk> sat , 's \n"
PASSAGES = ["one two three", "a long way to walk before the very end", "x yz", "so it is said"]
LENGTHS = (1, 7, 13, 24)  # some of which neither 2, 3 nor 4 ranks divide


class Predicted(NamedTuple):
    evaluations: list[Evaluation]
    scores: list[tuple[np.ndarray, np.ndarray]]
    """GPT: nats and whether the target is likeliest, for texts of several lengths."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> EvaluationConfig:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "words.txt").write_text(WORDS)
    (folder / "lambada.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in PASSAGES))
    texts = (str(folder / "words.txt"),)
    return EvaluationConfig(sequences=9, overlap=5, texts=texts, lambada=str(folder / "lambada.jsonl"))


def runs_of(files: EvaluationConfig, plan: Plan) -> tuple[Run, Run]:
    run = lambda family, evaluation: Run(
        model=replace(MODEL, family=family), train=RECIPE, evaluation=evaluation, plan=plan, precision="fp64"
    )
    return run("gpt", files), run("bert", EvaluationConfig(sequences=9))


def predict(runs: tuple[Run, Run], data: Path) -> list[Predicted]:
    return [_predict(run, data) for run in runs]


def _predict(run: Run, data: Path) -> Predicted:
    folder = TokenFolder.open(data)
    trainer = Trainer(run, folder, build_mesh(run.plan, "cpu"), torch.device("cpu"))
    for i in range(run.train.steps):
        trainer.step(i)
    evaluations = trainer.evaluate(final=True)
    scores = []
    if run.model.family == "gpt":
        tokens = np.asarray(folder.tokens("valid"), np.int64)
        for length in LENGTHS:
            text = tokens[: 2 * (length + 1)].reshape(2, length + 1)
            with torch.no_grad():
                nats, is_likeliest = trainer.next_token(text[:, :-1], text[:, 1:])
            scores.append((nats.numpy(), is_likeliest.numpy()))
    return Predicted(evaluations, scores)


@cache
def serial(files: EvaluationConfig, data: Path) -> list[Predicted]:
    [found] = run_ranks(1, predict, runs_of(files, Plan()), data)
    return found


@pytest.mark.parametrize("plan", [
    Plan(tp=2), Plan(tp=2, sequence_parallel=True), Plan(tp=3, sequence_parallel=True), Plan(tp=4),
    Plan(tp=4, sequence_parallel=True), Plan(tp=2, dp=2, sequence_parallel=True),
])  # fmt: skip
def test_evaluations_equal_serial(plan: Plan, files: EvaluationConfig, data: Path) -> None:
    for found in run_ranks(plan.world_size, predict, runs_of(files, plan), data):
        for one, expected in zip(found, serial(files, data), strict=True):
            for a, b in zip(one.evaluations, expected.evaluations, strict=True):
                assert a.nats == pytest.approx(b.nats, rel=1e-6)
                assert replace(a, nats=0.0) == replace(b, nats=0.0)
            for (nats, is_likeliest), (serial_nats, serial_likeliest) in zip(one.scores, expected.scores, strict=True):
                np.testing.assert_allclose(nats, serial_nats, rtol=1e-6)
                np.testing.assert_array_equal(is_likeliest, serial_likeliest)


def test_the_serial_model_has_something_to_tell(files: EvaluationConfig, data: Path) -> None:
    """Else the comparison above could not fail: some targets are the likeliest, some are not."""
    gpt, bert = serial(files, data)
    assert [e.kind for e in gpt.evaluations + bert.evaluations] == ["causal", "words", "last_word", "masked"]
    flags = np.concatenate([is_likeliest.ravel() for _, is_likeliest in gpt.scores])
    assert 0.05 < flags.mean() < 0.95
    assert [nats.shape for nats, _ in gpt.scores] == [(2, length) for length in LENGTHS]
