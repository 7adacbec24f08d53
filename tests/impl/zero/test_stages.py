"""On two ranks ZeRO's stages give the bits of stage 0: losses and weights over several steps.

`test_parity` holds one step of every stage in every layout to serial training, and `test_zero_peers` more steps, in
fp32 and with clipping, to stage 0 and to other engines.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from impl.train import Trainer
from tests.impl.on_ranks import on_ranks

MODEL = ModelConfig(num_layers=4, hidden_size=32, num_heads=4, seq_len=16, dropout=0.1, norm_placement="sandwich")
BERT = replace(MODEL, family="bert", num_layers=2)
RECIPE = Recipe(steps=4, global_batch=8, microbatch=4, clip_norm=0.0, lr=1e-3, warmup_steps=1)
SMALL: dict[str, Any] = {"bucket_bytes": 6_000}
STAGES = (1, 2, 3)


class Trained(NamedTuple):
    """What one rank has after some steps."""

    losses: list[float]
    norms: list[float]
    weights: dict[tuple[str, int, int], np.ndarray]
    """Master weights that it owns, by name and elements."""


def trained(one: Trainer) -> Trained:
    steps = [one.step(i) for i in range(one.run.train.steps)]
    owned = {(o.name, o.start, o.stop): o.tensors["weight"].numpy().copy() for o in one.optimizer.owned()}
    return Trained([step.loss.item() for step in steps], [step.grad_norm.item() for step in steps], owned)


def same_elements(one: Trained, whole: Trained) -> list[tuple[np.ndarray, np.ndarray]]:
    """What a rank owns beside the same elements of a rank that owns all of its part of the model."""
    parameters = {name: values for (name, _, _), values in whole.weights.items()}
    return [(values, parameters[name][start:stop]) for (name, start, stop), values in one.weights.items()]


def test_two_ranks_give_the_bits_of_stage_0(data: Path) -> None:
    """With one microbatch a rank, and clipping off: otherwise sums of more than two numbers change their order."""
    plans = [Plan(dp=2, zero_stage=stage, **SMALL) for stage in (0, *STAGES)]
    more = [Plan(dp=2, zero_stage=3, overlap_grad_reduce=False, overlap_param_gather=False, **SMALL)]
    more += [Plan(dp=2, zero_stage=2, zero_group=2, **SMALL)]  # all of them
    of = lambda model, plans: [Run(model=model, plan=plan, train=RECIPE) for plan in plans]
    found = on_ranks(trained, [*of(MODEL, plans + more), *of(BERT, plans)], data)
    for run, ranks in found.items():
        stage_0 = found[replace(run, plan=plans[0])]
        if run.plan == plans[0]:
            continue
        for one, whole in zip(ranks, stage_0, strict=True):
            assert one.losses == whole.losses
            np.testing.assert_allclose(one.norms, whole.norms, rtol=1e-6)
            assert all(np.array_equal(mine, theirs) for mine, theirs in same_elements(one, whole))
        sizes = [sum(weights.size for weights in one.weights.values()) for one in ranks]
        assert sum(sizes) == sum(weights.size for weights in stage_0[0].weights.values())
        assert max(sizes) < 0.6 * sum(sizes), "nothing is divided"
