"""fp16 with a loss scale, gradients in the weights' type, and an optimizer in host memory."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.precision import LossScale
from impl.recipe import Recipe
from impl.run import Run
from impl.train import Trainer
from tests.impl.on_ranks import on_ranks

MODEL = ModelConfig(num_layers=2, hidden_size=32, num_heads=2, seq_len=16, dropout=0.1)
RECIPE = Recipe(steps=6, global_batch=4, microbatch=2, lr=1e-3, warmup_steps=0)


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 8))
def test_loss_scale_halves_at_an_overflow_and_doubles_after_a_window(overflows: list[bool], window: int) -> None:
    scale = LossScale(Recipe(initial_loss_scale=2.0**20, loss_scale_window=window), "fp16")
    in_a_row, exponent = 0, 20
    for overflowed in overflows:
        scale.update(overflowed=overflowed)
        in_a_row = 0 if overflowed else in_a_row + 1
        exponent += -1 if overflowed else in_a_row % window == 0
        assert scale.scale == 2.0**exponent
    assert scale.skipped == sum(overflows)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_other_precisions_have_no_loss_scale(precision: str) -> None:
    scale = LossScale(Recipe(loss_scale_window=1), precision)
    scale.update(overflowed=False)
    assert (scale.scale, scale.is_dynamic) == (1.0, False)


class Trained(NamedTuple):
    losses: list[float]
    norms: list[float]
    skipped: list[bool]
    weights: list[bytes]
    """Masters that the rank owns, after every step."""
    scale: float


def trained(one: Trainer) -> Trained:
    steps, weights = [], []
    for i in range(one.run.train.steps):
        steps.append(one.step(i))
        weights.append(b"".join(owned.tensors["weight"].numpy().tobytes() for owned in one.optimizer.owned()))
    losses, norms = [s.loss.item() for s in steps], [s.grad_norm.item() for s in steps]
    return Trained(losses, norms, [s.is_skipped for s in steps], weights, one.loss_scale.scale)


def test_fp16_skips_steps_that_overflow_and_trains_as_fp32_after_them(data: Path) -> None:
    recipe = replace(RECIPE, initial_loss_scale=2.0**22, steps=12)
    runs = [Run(model=MODEL, train=replace(RECIPE, steps=12))]
    runs += [
        Run(model=MODEL, train=recipe, precision="fp16", plan=plan, fp32_gradients=fp32)
        for plan, fp32 in ((Plan(), True), (Plan(dp=2, zero_stage=2), True), (Plan(), False))
    ]
    (fp32,), *others = on_ranks(trained, runs, data).values()
    for ranks in others:
        for one in ranks:
            count = sum(one.skipped)
            assert 0 < count < 12
            assert one.skipped == [True] * count + [False] * (12 - count), "an overflow after the scale had fallen"
            assert one.scale == 2.0 ** (22 - count)
            assert one.weights[count - 1] == one.weights[0], "a skipped step changed a weight"
            assert one.weights[count] != one.weights[0]
            assert all(not math.isfinite(norm) for norm in one.norms[:count])
            assert one.losses[0] == pytest.approx(fp32.losses[0], rel=1e-3)
            assert one.losses[-1] < one.losses[0] - 0.05


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_optimizer_in_host_memory_gives_the_same_bits(precision: Any, data: Path) -> None:
    plans = [Plan(dp=2, zero_stage=stage, offload_optimizer=offload) for stage in (0, 3) for offload in (False, True)]
    runs = [Run(model=MODEL, train=RECIPE, plan=plan, precision=precision) for plan in plans]
    here, there, divided, divided_there = on_ranks(trained, runs, data).values()
    for one, other in ((here, there), (divided, divided_there)):
        assert [rank.losses for rank in one] == [rank.losses for rank in other]
        assert [rank.weights[-1] for rank in one] == [rank.weights[-1] for rank in other]
