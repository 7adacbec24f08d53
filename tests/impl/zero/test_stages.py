"""ZeRO's stages train as stage 0 does: losses, gradient norms and weights, in every layout.

Over more steps, in fp32 and with clipping, `test_zero_peers` holds them to stage 0 and to other engines.
"""

from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run, with_fields
from impl.train import Trainer
from tests.impl.blocks import BLOCKS
from tests.impl.on_ranks import on_ranks

MODEL = ModelConfig(num_layers=4, hidden_size=32, num_heads=4, seq_len=16, dropout=0.1, norm_placement="sandwich")
MODELS = [
    MODEL,
    *(replace(MODEL, norm_placement=placement) for placement in ("olmo2", "sub", "hybrid")),
    *(replace(MODEL, norm_placement=placement, norm="dyt") for placement in ("qk", "sub")),
    replace(BLOCKS["llama"], num_layers=4, kv_heads=1),
]
RECIPE = Recipe(steps=5, global_batch=8, microbatch=1, lr=1e-3, warmup_steps=1)
MUP = replace(RECIPE, parametrization="mup", base_hidden_size=16, base_layers=2)
SMALL: dict[str, Any] = {"bucket_bytes": 6_000}
STAGES = (1, 2, 3)


class Trained(NamedTuple):
    """What one rank has after some steps."""

    losses: list[float]
    norms: list[float]
    gradients: dict[tuple[str, int, int], np.ndarray]
    """Of the first step, of what it owns."""
    weights: dict[tuple[str, int, int], np.ndarray]
    """Master weights that it owns, by name and elements."""


def trained(one: Trainer) -> Trained:
    one.backward(0)
    places = [(bucket, *of) for bucket in one.buckets for of in bucket.places().items()]
    gradients = {(p.name, p.start, p.stop): bucket.gradient[at].numpy().copy() for bucket, p, at in places}
    steps = [one.step(i) for i in range(one.run.train.steps)]
    owned = {(o.name, o.start, o.stop): o.tensors["weight"].numpy().copy() for o in one.optimizer.owned()}
    return Trained([step.loss.item() for step in steps], [step.grad_norm.item() for step in steps], gradients, owned)


def same_elements(one: Trained, whole: Trained, of: str = "weights") -> list[tuple[np.ndarray, np.ndarray]]:
    """What a rank owns beside the same elements of a rank that owns all of its part of the model."""
    parameters = {name: values for (name, _, _), values in getattr(whole, of).items()}
    return [(values, parameters[name][start:stop]) for (name, start, stop), values in getattr(one, of).items()]


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_two_ranks_give_the_bits_of_stage_0(family: str, data: Path) -> None:
    """With one microbatch a rank, and clipping off: otherwise sums of more than two numbers change their order."""
    recipe = replace(RECIPE, microbatch=4, clip_norm=0.0)
    plans = [Plan(dp=2, zero_stage=stage, **SMALL) for stage in (0, *STAGES)]
    plans += [Plan(dp=2, zero_stage=3, overlap_grad_reduce=False, overlap_param_gather=False, **SMALL)]
    plans += [Plan(dp=2, zero_stage=2, zero_group=2, **SMALL)]  # all of them
    runs = [Run(model=replace(MODEL, family=family), plan=plan, train=recipe) for plan in plans]
    stage_0, *others = on_ranks(trained, runs, data).values()
    for ranks in others:
        for one, whole in zip(ranks, stage_0, strict=True):
            assert one.losses == whole.losses
            np.testing.assert_allclose(one.norms, whole.norms, rtol=1e-6)
            assert all(np.array_equal(mine, theirs) for mine, theirs in same_elements(one, whole))
        sizes = [sum(weights.size for weights in one.weights.values()) for one in ranks]
        assert sum(sizes) == sum(weights.size for weights in stage_0[0].weights.values())
        assert max(sizes) < 0.6 * sum(sizes), "nothing is divided"


LAYOUTS: list[Plan] = [
    Plan(dp=2),
    Plan(dp=4),
    Plan(dp=2, tp=2),
    Plan(dp=2, tp=2, sequence_parallel=True),
    Plan(tp=2, sequence_parallel=True),
    Plan(dp=2, pp=2, schedule="gpipe"),
    Plan(dp=2, pp=2, schedule="zb_h1"),
    Plan(dp=2, pp=2, schedule="interleaved", chunks=2),
    Plan(dp=2, pp=2, schedule="zbv", chunks=2),
    Plan(dp=4, tp=2, sequence_parallel=True),
    Plan(dp=2, tp=2, pp=2),
    Plan(dp=2, tp=2, pp=2, schedule="zb_h1", sequence_parallel=True),
    Plan(dp=2, pp=4),
    Plan(dp=4, zero_group=2),
    Plan(dp=4, tp=2, zero_group=2, sequence_parallel=True),
    Plan(dp=4, pp=2, schedule="gpipe", zero_group=2, overlap_grad_reduce=False),
    Plan(dp=4, pp=2, schedule="zb_h1", zero_group=2, offload_optimizer=True),
    Plan(dp=2, pp=2, zero_group=1),
]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_layout_trains_as_serial_stage_0(ranks: int, data: Path) -> None:
    models = dict(zip(LAYOUTS, cycle(MODELS), strict=False))
    recipes = dict(zip(LAYOUTS, cycle((MUP, RECIPE, RECIPE)), strict=False))
    plans = [plan for plan in LAYOUTS if plan.world_size == ranks]
    run = lambda plan, **how: Run(
        model=models[plan], plan=replace(Plan(**how) if how else plan, **SMALL), precision="fp64",
        train=replace(recipes[plan], steps=2, global_batch=plan.dp * max(2, plan.pp)),
    )  # fmt: skip
    undivided = {"plan.zero_stage": 0, "plan.zero_group": None}
    ways = [undivided, *({"plan.zero_stage": stage} for stage in STAGES)]
    runs = {plan: [with_fields(run(plan), way) for way in ways] for plan in plans}
    alone = {plan: run(plan, dp=1) for plan in plans}
    found = on_ranks(trained, [*alone.values(), *(one for some in runs.values() for one in some)], data)
    for plan, some in runs.items():
        (serial,) = found[alone[plan]]
        stage_0, *others = (found[one] for one in some)
        for ranks_of in (stage_0, *others):
            for one, whole in zip(ranks_of, stage_0, strict=True):
                np.testing.assert_allclose(one.losses, serial.losses, rtol=1e-12)
                np.testing.assert_allclose(one.norms, serial.norms, rtol=1e-12)
                for mine, theirs in same_elements(one, whole, "gradients"):
                    np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-12 * np.abs(theirs).max())
                for mine, theirs in same_elements(one, whole):
                    np.testing.assert_allclose(mine, theirs, rtol=1e-7, atol=1e-10)
