"""Layers that share their weights; that all their layouts equal serial, and what they cost, other tests have too."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from impl.cost.activations import layer_bytes, stage_bytes
from impl.cost.parameters import count_parameters
from impl.cost.place import Place
from impl.errors import InputError
from impl.hugging_face import config_to
from impl.instruments import activation_bytes
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from impl.simulator.step import predict
from impl.train import Trainer
from tests.impl.on_ranks import on_ranks
from tests.impl.parity import gradients, relative
from tests.impl.simulator.made_up import SYSTEM, longer, run_of

OWN = ModelConfig(num_layers=3, hidden_size=16, num_heads=4, seq_len=16, norm_placement="scaled", dropout=0.1)
SHARED = replace(OWN, shared_layers=True)
RECIPE = Recipe(steps=1, global_batch=4, microbatch=1)


def first_layers_weights_in_all(one: Trainer) -> dict[str, Any]:
    """Gradients of a model whose layers have the first one's weights, if they have any."""
    named = dict(one.model.named_parameters())
    for name, parameter in named.items():
        prefix, _, rest = name.partition("layers.")
        if rest:
            parameter.data.copy_(named[f"{prefix}layers.0.{rest.partition('.')[2]}"].data)
    one.backward(0)
    return gradients(one)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_gradient_is_the_sum_over_all_depths(recompute: Any, data: Path) -> None:
    plan = Plan(recompute=recompute)
    runs = [Run(model=model, plan=plan, train=RECIPE, precision="fp64") for model in (OWN, SHARED)]
    found = on_ranks(first_layers_weights_in_all, runs, data)
    [own], [shared] = (found[run] for run in runs)
    assert len(own) - len(shared) == 2 * sum(".layers.0." in name for name in shared)
    assert not any(".layers.1." in name for name in shared)
    for name, gradient in shared.items():
        depths = [name.replace("layers.0", f"layers.{i}") for i in range(3 if "layers.0" in name else 1)]
        assert relative(gradient, np.sum([own[one] for one in depths], 0)) < 1e-12, name


def kept(one: Trainer) -> tuple[int, int]:
    return activation_bytes(one)[:2]


def test_activations_are_kept_of_every_depth(data: Path) -> None:
    plans = Plan(), Plan(tp=2, recompute="full"), Plan(dp=2, zero_stage=3, recompute="selective")
    runs = [Run(model=SHARED, plan=plan, train=RECIPE) for plan in plans]
    for run, ranks in on_ranks(kept, runs, data).items():
        [stage] = Place(run, 257).stages
        assert set(ranks) == {(sum(stage_bytes(run, 257, stage, SHARED.seq_len).values()), layer_bytes(run))}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_predicted_step_computes_as_much_and_holds_and_reduces_less(recompute: Any, stage: Any) -> None:
    run = run_of(dp=8, zero_stage=stage, recompute=recompute)
    own, shared = (predict(longer(run, shared_layers=are), 51200, SYSTEM) for are in (False, True))
    assert shared.parts[0]["compute"] == pytest.approx(own.parts[0]["compute"])
    assert shared.parts[0]["optimizer"] < own.parts[0]["optimizer"]
    assert shared.seconds < own.seconds
    assert shared.memory[0].activations == own.memory[0].activations
    parameters = [count_parameters(longer(run, shared_layers=are).model) for are in (False, True)]
    states = own.memory[0].states, shared.memory[0].states
    assert states[1] / states[0] == pytest.approx(parameters[1] / parameters[0], rel=1e-3)


def test_transformers_has_no_such_model() -> None:
    with pytest.raises(InputError, match="no architecture known here"):
        config_to(ModelConfig(shared_layers=True), 257)
