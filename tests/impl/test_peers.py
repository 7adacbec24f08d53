"""Peer engines do the same work as ours: equal losses and gradient norms on the same run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from impl.data.synthetic import SyntheticConfig, write_synthetic
from impl.data.tokens import TokenFolder
from impl.errors import InputError
from impl.mesh import build_mesh
from impl.model.config import ModelConfig
from impl.peers.dtensor import DTensorTrainer, why_invalid
from impl.peers.gpt import rearranged
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from impl.tensor_parallel.shards import Shard, shards_of
from impl.train import Trainer
from tests.ranks import run_ranks

MODEL = ModelConfig(num_layers=2, hidden_size=64, num_heads=4, seq_len=16)
RECIPE = Recipe(steps=20, global_batch=4, microbatch=2, lr=1e-3, warmup_steps=3, clip_norm=0.5)
PLANS = [Plan(tp=2), Plan(tp=2, sequence_parallel=True)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens") / "synthetic"
    write_synthetic(folder, SyntheticConfig(train_tokens=20_000, valid_tokens=2_000))
    return folder


def trainers(run: Run, data: Path) -> tuple[Trainer, DTensorTrainer]:
    mesh, folder, cpu = build_mesh(run.plan, "cpu"), TokenFolder.open(data), torch.device("cpu")
    return Trainer(run, folder, mesh, cpu), DTensorTrainer(run, folder, mesh, cpu)


def steps(run: Run, data: Path) -> list[np.ndarray]:
    """Loss, gradient norm and learning rate of every step, ours and the peer's."""
    numbers = lambda step: [step.loss.item(), step.grad_norm.item(), step.lr]
    both = trainers(run, data)
    return [np.array([numbers(one.step(i)) for i in range(run.train.steps)]) for one in both]


def first_gradients(run: Run, data: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, Shard]]:
    ours, peer = trainers(run, data)
    ours.backward(0)
    peer.backward(0)
    theirs = {name: peer.masters[p].grad for name, p in peer.model.named_parameters()}
    return (
        {name: ours.gradients.of[p].numpy() for name, p in ours.model.named_parameters()},
        {name: grad.numpy() for name, grad in theirs.items() if grad is not None},
        shards_of(ours.model),
    )


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("changes", [{}, {"clip_norm": 0.0, "microbatch": 4}, {"microbatch": 1}])
def test_dtensor_equals_ours_over_20_steps(plan: Plan, changes: dict[str, Any], data: Path) -> None:
    run = Run(model=MODEL, plan=plan, train=replace(RECIPE, **changes))
    for ours, theirs in run_ranks(2, steps, run, data):
        np.testing.assert_allclose(theirs[:, 0], ours[:, 0], rtol=1e-5)
        np.testing.assert_allclose(theirs[:, 1], ours[:, 1], rtol=1e-4)
        np.testing.assert_array_equal(theirs[:, 2], ours[:, 2])
        assert ours[-1, 0] < ours[0, 0]
        assert (ours[:, 1] > RECIPE.clip_norm).any(), "clipping was never at work"


@pytest.mark.parametrize("plan", PLANS)
def test_dtensor_equals_ours_in_bf16(plan: Plan, data: Path) -> None:
    run = Run(model=MODEL, plan=plan, train=RECIPE, precision="bf16")
    for ours, theirs in run_ranks(2, steps, run, data):
        np.testing.assert_allclose(theirs[:, 0], ours[:, 0], rtol=1e-3)
        np.testing.assert_allclose(theirs[:, 1], ours[:, 1], rtol=1e-2)


@pytest.mark.parametrize("vocab_size", [512, 301])
@pytest.mark.parametrize("plan", PLANS)
def test_every_gradient_of_dtensor_equals_ours(plan: Plan, vocab_size: int, data: Path) -> None:
    """An outside oracle for our layers. DTensor splits 301 tokens unevenly, we pad them."""
    run = Run(model=replace(MODEL, vocab_size=vocab_size), plan=plan, train=RECIPE, precision="fp64")
    answers = run_ranks(2, first_gradients, run, data)
    shards = answers[0][2]
    parts = lambda engine, name: [torch.from_numpy(answer[engine][name]) for answer in answers]
    ours = {name: shards[name].join(parts(0, name)) if name in shards else parts(0, name)[0] for name in answers[0][0]}
    expected = rearranged(ours, run.model, vocab_size)
    del expected["head.weight"]  # tied
    assert expected.keys() == answers[0][1].keys()
    for name, gradient in expected.items():
        found = torch.cat(parts(1, name), shards[name].dim) if name in shards else parts(1, name)[0]
        assert found.shape == gradient.shape, name
        assert (found - gradient).norm() < 1e-12 * gradient.norm(), name


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model": ModelConfig(family="bert")}, "bert"),
        ({"model": ModelConfig(norm_placement="post")}, "post"),
        ({"model": ModelConfig(dropout=0.1)}, "dropout 0.1"),
        ({"plan": Plan(dp=2)}, "dp 2"),
        ({"plan": Plan(pp=2)}, "pp 2"),
        ({"compile": True}, "compile"),
    ],
)
def test_what_dtensor_lacks_is_refused(changes: dict[str, Any], word: str, data: Path) -> None:
    run = replace(Run(), **changes)
    assert why_invalid(Run()) is None
    assert word in (why_invalid(run) or "")
    with pytest.raises(InputError, match=word):
        DTensorTrainer(run, TokenFolder.open(data), None, torch.device("cpu"))  # pyright: ignore[reportArgumentType]
