"""Data-parallel training equals serial training: losses and every gradient."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from impl.data.synthetic import SyntheticConfig, write_synthetic
from impl.data.tokens import TokenFolder
from impl.mesh import build_mesh
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Precision, Run
from impl.train import Trainer
from tests.ranks import run_ranks

MODEL = ModelConfig(num_layers=2, hidden_size=32, num_heads=2, seq_len=16)
RECIPE = Recipe(steps=20, global_batch=8, microbatch=2, lr=1e-3, warmup_steps=3, clip_norm=0.5)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens") / "synthetic"
    write_synthetic(folder, SyntheticConfig(train_tokens=20_000, valid_tokens=2_000))
    return folder


def trainer(run: Run, data: Path) -> Trainer:
    return Trainer(run, TokenFolder.open(data), build_mesh(run.plan, "cpu"), torch.device("cpu"))


def first_gradients(run: Run, data: Path) -> tuple[float, dict[str, np.ndarray]]:
    one = trainer(run, data)
    loss = one.backward(0).item()
    return loss, {name: one.gradients.of[p].numpy().copy() for name, p in one.model.named_parameters()}


def losses(run: Run, data: Path) -> list[tuple[float, float]]:
    one = trainer(run, data)
    steps = [one.step(i) for i in range(run.train.steps)]
    return [(step.loss.item(), step.grad_norm.item()) for step in steps]


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))


@pytest.mark.parametrize("norm", ["pre", "post", "sandwich"])
@pytest.mark.parametrize("family", ["gpt", "bert"])
@pytest.mark.parametrize("dp", [2, 4])
def test_every_gradient_equals_serial(family: str, norm: str, dp: int, data: Path) -> None:
    model = replace(MODEL, family=family, norm_placement=norm, dropout=0.1)
    tolerances: dict[Precision, float] = {"fp64": 1e-12, "fp32": 1e-5}
    for precision, tolerance in tolerances.items():
        serial = Run(model=model, train=RECIPE, precision=precision)
        parallel = replace(serial, plan=Plan(dp=dp, bucket_bytes=20_000))
        [(loss, gradients)] = run_ranks(1, first_gradients, serial, data)
        for rank_loss, rank_gradients in run_ranks(dp, first_gradients, parallel, data):
            assert rank_loss == pytest.approx(loss, rel=tolerance)
            assert rank_gradients.keys() == gradients.keys()
            for name, gradient in gradients.items():
                assert relative(rank_gradients[name], gradient) < tolerance, name


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-12), ("fp32", 1e-5)])
@pytest.mark.parametrize("overlap", [True, False])
def test_losses_equal_serial_over_20_steps(precision: Precision, tolerance: float, overlap: bool, data: Path) -> None:
    serial = Run(model=MODEL, train=RECIPE, precision=precision)
    parallel = replace(serial, plan=Plan(dp=2, bucket_bytes=20_000, overlap_grad_reduce=overlap))
    [expected] = run_ranks(1, losses, serial, data)
    for found in run_ranks(2, losses, parallel, data):
        for (loss, norm), (serial_loss, serial_norm) in zip(found, expected, strict=True):
            assert loss == pytest.approx(serial_loss, rel=tolerance)
            assert norm == pytest.approx(serial_norm, rel=10 * tolerance)
    assert expected[-1][0] < expected[0][0]
    assert any(norm > RECIPE.clip_norm for _, norm in expected), "clipping was never at work"
