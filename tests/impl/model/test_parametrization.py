"""The maximal update parametrization: its factors are the papers', and what it is for holds."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from impl.model.config import ModelConfig
from impl.model.parametrization import norm_before_head
from impl.optim import learning_rate
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from impl.train import Trainer
from tests.impl.blocks import LLAMA
from tests.impl.on_ranks import on_ranks

BASE_HIDDEN, BASE_LAYERS = 16, 2
MODEL = ModelConfig(num_layers=6, hidden_size=64, num_heads=8, seq_len=16)
STANDARD = Recipe(
    steps=4, global_batch=4, microbatch=4, lr=3e-3, warmup_steps=2, weight_decay=0.3, clip_norm=0.0, eps=1e-30
)  # fmt: skip
MUP = replace(STANDARD, parametrization="mup", base_hidden_size=BASE_HIDDEN, base_layers=BASE_LAYERS)
MODELS = {
    **{placement: replace(MODEL, norm_placement=placement) for placement in ("pre", "post", "sandwich", "olmo2")},
    "dyt": replace(MODEL, norm="dyt", norm_placement="peri"),
    "hybrid": replace(MODEL, norm_placement="hybrid"),
    "bert": replace(MODEL, family="bert", norm_placement="post"),
    "llama": replace(LLAMA, num_layers=6, hidden_size=64, mlp_size=None),
    "without": replace(MODEL, norm_placement="without", tied=False),
}


def trained(one: Trainer) -> list[float]:
    return [one.step(i).loss.item() for i in range(one.run.train.steps)]


def explicit(one: Trainer) -> list[float]:
    """Losses of a standard run with factors in the forward pass, as the papers' tables have them, and torch's AdamW."""
    config, recipe, named = one.run.model, one.run.train, dict(one.model.named_parameters())
    width, depth = config.hidden_size / BASE_HIDDEN, config.num_layers / BASE_LAYERS
    is_hidden = lambda name: named[name].dim() > 1 and any(part in name for part in ("layers.", "dense", "pooler"))
    with torch.no_grad():
        for name in filter(is_hidden, named):
            named[name] *= width**-0.5
            if name.endswith(("projection.weight", "down.weight")):  # Megatron's law, at the base's depth
                named[name] *= depth**0.5
    model: Any = one.model
    for layer in model.trunk.layers.values():
        for norms in (layer.attention_norms, layer.mlp_norms):
            norms.output.register_forward_hook(lambda _, __, out: out / depth)
    over_width = lambda _, inputs: (inputs[0] / width, *inputs[1:])
    if before := norm_before_head(config):
        model.get_submodule(before).register_forward_hook(lambda _, __, out: out / width)
    else:
        model.trunk.final_norm.register_forward_pre_hook(over_width)
    if config.family == "bert":
        model.next_sentence.register_forward_pre_hook(over_width)
    group = lambda name: {
        "params": [named[name]],
        "weight_decay": recipe.weight_decay * (width if is_hidden(name) else 1) * (named[name].dim() > 1),
        "factor": 1 / width if is_hidden(name) else 1.0,
    }
    optimizer = torch.optim.AdamW([group(name) for name in named], eps=recipe.eps)
    losses = []
    for i in range(recipe.steps):
        losses.append(one.backward(i).item())
        for parameter in named.values():
            parameter.grad = one.gradients.of[parameter].view_as(parameter).clone()
        for one_group in optimizer.param_groups:
            one_group["lr"] = learning_rate(recipe, i) * one_group["factor"]
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_trains_as_with_factors_in_the_forward_pass(data: Path) -> None:
    """Yang et al. 2022, table 8, and Dey et al. 2025, table 1."""
    runs = [Run(model=model, train=STANDARD, precision="fp64") for model in MODELS.values()]
    in_ours = lambda run: replace(run, train=MUP)
    found = on_ranks(trained, [*map(in_ours, runs), *runs], data)
    expected = on_ranks(explicit, runs, data)
    for run in runs:
        [ours], [standard] = found[in_ours(run)], found[run]
        assert ours == pytest.approx(expected[run][0], rel=1e-9), run.model
        assert abs(ours[-1] - standard[-1]) > 1e-3, "the parametrization changed nothing"


def test_is_the_standard_one_at_its_base(data: Path) -> None:
    base = replace(MODEL, num_layers=BASE_LAYERS, hidden_size=BASE_HIDDEN)
    runs = [Run(model=base, train=recipe) for recipe in (STANDARD, MUP, replace(MUP, base_layers=None))]
    found = on_ranks(trained, runs, data)
    assert found[runs[0]] == found[runs[1]] == found[runs[2]]


def test_every_rank_has_its_part(data: Path) -> None:
    run = Run(model=MODELS["llama"], train=replace(MUP, eps=1e-8, microbatch=2), precision="fp64")
    plans = [Plan(tp=2, sequence_parallel=True), Plan(dp=2, zero_stage=3), Plan(pp=2)]
    found = on_ranks(trained, [run, *(replace(run, plan=plan) for plan in plans)], data)
    for plan in plans:
        assert found[replace(run, plan=plan)] == [pytest.approx(found[run][0], rel=1e-9)] * plan.world_size


# The coordinate check: Yang et al. 2022, appendix D.1 ----------------------------------------------------------------

WIDTHS, DEPTHS, STEPS = (32, 64, 128), (2, 4, 8), 4
CHECKED = Recipe(
    steps=STEPS, global_batch=8, microbatch=8, lr=1e-2, warmup_steps=0, decay="constant", weight_decay=0.0
)  # fmt: skip


def moved(one: Trainer) -> dict[str, float]:
    """How far training moved each activation of one batch, as a root mean square."""
    before = _activations(one)
    for i in range(one.run.train.steps):
        one.step(i)
    return {name: (now - before[name]).square().mean().sqrt().item() for name, now in _activations(one).items()}


def _activations(one: Trainer) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def keep(name: str, _: nn.Module, __: Any, out: Tensor) -> None:
        found[name] = out.detach().clone()

    trunk: Any = one.model.trunk
    last = trunk.layers[str(len(trunk.layers) - 1)]
    modules = {"qkv": last.attention.qkv, "attention": last.attention, "mlp": last.mlp, "stream": last}
    hooks = [module.register_forward_hook(partial(keep, name)) for name, module in modules.items()]
    inputs = one.batch(np.arange(8)).inputs
    with torch.no_grad():
        x = None
        for block in trunk.blocks(one.stages[0], (torch.from_numpy(inputs), None), inputs.shape[1], None):
            x = block.run(x)
        found["logits"] = trunk.final_norm(x) @ trunk.head.weight.T
    for hook in hooks:
        hook.remove()
    return found


def slopes(sizes: Sequence[int], runs: Sequence[Run], data: Path) -> dict[str, float]:
    """By how much each activation's change grows with the size, as an exponent."""
    found = on_ranks(moved, runs, data)
    changes = [found[run][0] for run in runs]
    logs = lambda values: np.log(np.asarray(values))
    return {
        name: float(np.polyfit(logs(sizes), logs([change[name] for change in changes]), 1)[0]) for name in changes[0]
    }


@pytest.mark.parametrize("norm_placement", ["pre", "sandwich"])
def test_activations_change_alike_at_every_width(norm_placement: str, data: Path) -> None:
    def of(recipe: Recipe) -> dict[str, float]:
        shape = ModelConfig(num_layers=2, seq_len=32, norm_placement=norm_placement)
        models = [replace(shape, hidden_size=width, num_heads=width // 16) for width in WIDTHS]
        return slopes(WIDTHS, [Run(model=model, train=recipe) for model in models], data)

    mup = of(replace(CHECKED, parametrization="mup", base_hidden_size=WIDTHS[0]))
    assert max(abs(mup[name]) for name in ("stream", "logits")) < 0.1, mup
    assert max(abs(slope) for slope in mup.values()) < 0.3, mup  # within a layer, far from the limit of width
    assert of(CHECKED)["logits"] > 0.4


def test_the_stream_changes_alike_at_every_depth(data: Path) -> None:
    def of(recipe: Recipe) -> dict[str, float]:
        models = [ModelConfig(num_layers=layers, hidden_size=64, num_heads=4, seq_len=32) for layers in DEPTHS]
        return slopes(DEPTHS, [Run(model=model, train=recipe) for model in models], data)

    mup = of(replace(CHECKED, parametrization="mup", base_hidden_size=64, base_layers=DEPTHS[0]))
    assert max(abs(mup[name]) for name in ("stream", "logits")) < 0.1, mup
    assert of(CHECKED)["stream"] > 0.4
