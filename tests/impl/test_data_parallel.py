"""Data-parallel training equals serial training: losses and every gradient."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from impl.data.synthetic import SyntheticConfig, write_synthetic
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Precision, Run
from tests.impl.on_ranks import on_ranks
from tests.impl.parity import assert_equal_gradients, assert_equal_steps, first_gradients, serial, steps

MODEL = ModelConfig(num_layers=2, hidden_size=32, num_heads=2, seq_len=16)
RECIPE = Recipe(steps=20, global_batch=8, microbatch=2, lr=1e-3, warmup_steps=3, clip_norm=0.5)
TOLERANCES: dict[Precision, float] = {"fp64": 1e-12, "fp32": 1e-5}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens") / "synthetic"
    write_synthetic(folder, SyntheticConfig(train_tokens=20_000, valid_tokens=2_000))
    return folder


@pytest.mark.parametrize("dp", [2, 4])
def test_every_gradient_equals_serial(dp: int, data: Path) -> None:
    plan = Plan(dp=dp, bucket_bytes=20_000)
    models = [
        replace(MODEL, family=family, norm_placement=norm, dropout=0.1)
        for family, norm in product(("gpt", "bert"), ("pre", "post", "sandwich"))
    ]
    runs = [
        Run(model=model, plan=plan, train=RECIPE, precision=precision)
        for model, precision in product(models, TOLERANCES)
    ]
    found = on_ranks(first_gradients, [*runs, *map(serial, runs)], data)
    for run in runs:
        [expected] = found[serial(run)]
        assert_equal_gradients(found[run], 1, expected, TOLERANCES[run.precision])


def test_losses_equal_serial_over_20_steps(data: Path) -> None:
    runs = [
        Run(
            model=MODEL,
            plan=Plan(dp=2, bucket_bytes=20_000, overlap_grad_reduce=overlap),
            train=RECIPE,
            precision=precision,
        )
        for precision, overlap in product(TOLERANCES, (True, False))
    ]
    found = on_ranks(steps, [*runs, *map(serial, runs)], data)
    for run in runs:
        tolerance, [expected] = TOLERANCES[run.precision], found[serial(run)]
        assert_equal_steps(found[run], expected, tolerance, 10 * tolerance)
        assert any(norm > RECIPE.clip_norm for _, norm in expected), "clipping was never at work"
