"""PyTorch's pipelining does the same work as our pipeline: equal losses, norms and gradients on the same run."""

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
from impl.peers.gpt import rearranged
from impl.peers.pipelining import PipeliningTrainer, why_invalid
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from impl.train import Trainer
from tests.ranks import run_ranks

MODEL = ModelConfig(num_layers=5, hidden_size=64, num_heads=4, seq_len=16)
RECIPE = Recipe(steps=20, global_batch=8, microbatch=2, lr=1e-3, warmup_steps=3, clip_norm=0.5)
PLANS = {
    "gpipe": Plan(pp=2, schedule="gpipe"),
    "1F1B": Plan(pp=2, schedule="one_f_one_b"),
    "interleaved": Plan(pp=2, schedule="interleaved", chunks=2),
    "zb_h1": Plan(pp=2, schedule="zb_h1"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens") / "synthetic"
    write_synthetic(folder, SyntheticConfig(train_tokens=20_000, valid_tokens=2_000))
    return folder


def trainers(run: Run, data: Path) -> tuple[Trainer, PipeliningTrainer]:
    mesh, folder, cpu = build_mesh(run.plan, "cpu"), TokenFolder.open(data), torch.device("cpu")
    return Trainer(run, folder, mesh, cpu), PipeliningTrainer(run, folder, mesh, cpu)


def steps(run: Run, data: Path) -> list[np.ndarray]:
    """Loss, gradient norm and learning rate of every step, ours and the peer's."""
    numbers = lambda step: [step.loss.item(), step.grad_norm.item(), step.lr]
    both = trainers(run, data)
    return [np.array([numbers(one.step(i)) for i in range(run.train.steps)]) for one in both]


def first_gradients(run: Run, data: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """This rank's, ours and the peer's, by the peer's names without its stages."""
    ours, peer = trainers(run, data)
    ours.backward(0)
    peer.backward(0)
    theirs = {name.partition(".")[2]: peer.masters[p].grad for name, p in peer.model.named_parameters()}
    return (
        {name: ours.gradients.of[p].numpy() for name, p in ours.model.named_parameters()},
        {name: grad.numpy() for name, grad in theirs.items() if grad is not None},
    )


@pytest.mark.parametrize("plan", PLANS)
def test_pipelining_equals_ours_over_20_steps(plan: str, data: Path) -> None:
    run = Run(model=MODEL, plan=PLANS[plan], train=RECIPE)
    for ours, theirs in run_ranks(2, steps, run, data):
        np.testing.assert_allclose(theirs[:, 0], ours[:, 0], rtol=1e-5)
        np.testing.assert_allclose(theirs[:, 1], ours[:, 1], rtol=1e-4)
        np.testing.assert_array_equal(theirs[:, 2], ours[:, 2])
        assert ours[-1, 0] < ours[0, 0]
        assert (ours[:, 1] > RECIPE.clip_norm).any(), "clipping was never at work"


@pytest.mark.parametrize("plan", ["gpipe", "1F1B"])
def test_pipelining_equals_ours_in_bf16(plan: str, data: Path) -> None:
    run = Run(model=MODEL, plan=PLANS[plan], train=RECIPE, precision="bf16")
    for ours, theirs in run_ranks(2, steps, run, data):
        np.testing.assert_allclose(theirs[:, 0], ours[:, 0], rtol=1e-3)
        np.testing.assert_allclose(theirs[:, 1], ours[:, 1], rtol=1e-2)


@pytest.mark.parametrize(
    ("plan", "ranks"), [*((plan, 2) for plan in PLANS.values()), (Plan(pp=4, schedule="one_f_one_b"), 4)]
)
def test_every_gradient_of_pipelining_equals_ours(plan: Plan, ranks: int, data: Path) -> None:
    """An outside oracle for our engine. Torch's model has the vocabulary of 301 tokens, we pad it."""
    run = Run(model=replace(MODEL, vocab_size=301), plan=plan, train=RECIPE, precision="fp64")
    seen: set[str] = set()
    for ours, theirs in run_ranks(ranks, first_gradients, run, data):
        whole = {"trunk.tokens.weight": np.zeros((384, 64)), **ours}
        expected = rearranged({name: torch.from_numpy(grad) for name, grad in whole.items()}, run.model, 301)
        assert theirs.keys() - {"head.weight"} == ours.keys() - {"trunk.tokens.weight"} | (
            {"trunk.tokens.weight"} & theirs.keys()
        )
        for name, found in theirs.items():
            assert found.shape == expected[name].shape, name
            assert np.linalg.norm(found - expected[name].numpy()) < 1e-12 * expected[name].norm(), name
        seen |= theirs.keys()
    assert {"head.weight", "trunk.tokens.weight", "trunk.final_norm.bias", "trunk.layers.4.mlp.up.weight"} <= seen


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model": ModelConfig(family="bert")}, "bert"),
        ({"model": ModelConfig(norm_placement="post")}, "post"),
        ({"model": ModelConfig(dropout=0.1)}, "dropout 0.1"),
        ({"plan": Plan(pp=2, dp=2)}, "dp 2"),
        ({"plan": Plan(pp=2, tp=2)}, "tp 2"),
        ({"plan": Plan()}, "pp 1"),
        ({"plan": Plan(pp=2, schedule="mine:rows")}, "mine:rows"),
        ({"plan": Plan(pp=2, schedule="zb_h1"), "precision": "bf16"}, "zb_h1 in bf16"),
        ({"train": Recipe(global_batch=8, microbatch=8)}, "fewer microbatches"),
        ({"compile": True}, "compile"),
    ],
)
def test_what_pipelining_lacks_is_refused(changes: dict[str, Any], word: str, data: Path) -> None:
    valid = Run(plan=Plan(pp=2))
    assert why_invalid(valid) is None
    run = replace(valid, **changes)
    assert word in (why_invalid(run) or "")
    with pytest.raises(InputError, match=word):
        PipeliningTrainer(run, TokenFolder.open(data), None, torch.device("cpu"))  # pyright: ignore[reportArgumentType]
