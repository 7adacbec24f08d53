"""Norms: the functions against PyTorch's, every placement against its paper's equation, and one that is new."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from impl.cost.memory import memory_of_ranks
from impl.cost.parameters import count_parameters
from impl.model.build import build_model
from impl.model.config import ModelConfig
from impl.model.gelu import gelu
from impl.model.gpt import GPT
from impl.model.layers import Layer
from impl.model.norm_placement import PLACEMENTS, BlockNorms, NormPlacement
from impl.model.norms import DyT, RMSNorm
from impl.plan import Plan
from impl.run import Run
from impl.simulator.step import predict
from impl.tensor_parallel.group import TensorParallel
from tests.impl.model.test_models import trunk_output
from tests.impl.simulator.made_up import SYSTEM

CONFIG = ModelConfig(num_layers=3, hidden_size=32, num_heads=4, seq_len=16)
LAYER = 1
EXTENDING = Path(__file__).resolve().parents[3] / "docs" / "extending.md"


def built(config: ModelConfig, serial: TensorParallel) -> GPT:
    model = build_model(config, 50, 0, torch.float64, serial)
    assert isinstance(model, GPT)
    return model


def reference(norm: Any, x: Tensor) -> Tensor:
    size = x.shape[-1:]
    if isinstance(norm, RMSNorm):
        return functional.rms_norm(x, size, norm.weight, norm.epsilon)
    y = norm.weight * torch.tanh(norm.alpha * x)
    return y if norm.bias is None else y + norm.bias


@pytest.mark.parametrize("which", ["rms", "dyt", "dyt without bias"])
@pytest.mark.parametrize(("precision", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_a_norm_and_its_gradients_are_pytorchs(which: str, precision: torch.dtype, tolerance: float) -> None:
    makes: dict[str, Callable[[], Any]] = {
        "rms": lambda: RMSNorm(24, 1e-5), "dyt": lambda: DyT(24, bias=True),
        "dyt without bias": lambda: DyT(24, bias=False),
    }  # fmt: skip
    norm = makes[which]().to(precision)
    generator = torch.Generator().manual_seed(0)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    x = torch.randn(2, 5, 24, dtype=precision, generator=generator, requires_grad=True)
    grad = torch.randn(2, 5, 24, dtype=precision, generator=generator)
    wanted = [x, *norm.parameters()]
    for found, expected in zip(
        [norm(x), *torch.autograd.grad(norm(x), wanted, grad)],
        [reference(norm, x), *torch.autograd.grad(reference(norm, x), wanted, grad)],
        strict=True,
    ):
        assert (found - expected).norm() <= tolerance * expected.norm()


def normal(x: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:])


Block = Callable[[Tensor], Tensor]
EQUATIONS: dict[str, Callable[[Tensor, Block, Block], Tensor]] = {
    "pre": lambda x, a, m: (y := x + a(normal(x))) + m(normal(y)),
    "post": lambda x, a, m: normal((y := normal(x + a(x))) + m(y)),
    "sandwich": lambda x, a, m: (y := x + normal(a(normal(x)))) + normal(m(normal(y))),
    "peri": lambda x, a, m: (y := x + normal(a(normal(x)))) + normal(m(normal(y))),
    "olmo2": lambda x, a, m: (y := x + normal(a(x))) + normal(m(y)),
    "qk": lambda x, a, m: (y := x + a(normal(x))) + m(normal(y)),
    "deepnorm": lambda x, a, m: normal(6**0.25 * (y := normal(6**0.25 * x + a(x))) + m(y)),
    "sub": lambda x, a, m: (y := x + a(normal(x))) + m(normal(y)),
    "scaled": lambda x, a, m: (y := x + a(normal(x) / math.sqrt(2))) + m(normal(y) / math.sqrt(2)),
    "hybrid": lambda x, a, m: (y := normal(x + a(x))) + m(y),
    "without": lambda x, a, m: (y := x + a(x)) + m(y),
}
"""Output of the second of three layers by attention and MLP, in the papers' letters; N = 3, l = 2."""


def attention(layer: Layer, placement: NormPlacement, x: Tensor) -> Tensor:
    """One sequence through attention, by PyTorch's own functions."""
    own, norms = layer.attention, placement.attention
    q, k, v = functional.linear(x, own.qkv.weight, own.qkv.bias).view(len(x), 3, own.heads, -1).permute(1, 2, 0, 3)
    q, k, v = (normal(part) if name in norms.heads else part for name, part in zip("qkv", (q, k, v), strict=True))
    context = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
    return functional.linear(normal(context) if norms.inner else context, own.projection.weight, own.projection.bias)


def mlp(layer: Layer, placement: NormPlacement, x: Tensor) -> Tensor:
    own = layer.mlp
    wide = gelu(functional.linear(x, own.up.weight, own.up.bias))
    return functional.linear(normal(wide) if placement.mlp.inner else wide, own.down.weight, own.down.bias)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_layer_is_its_papers_equation(name: str, serial: TensorParallel) -> None:
    layer = built(replace(CONFIG, norm_placement=name), serial).trunk.layers[str(LAYER)]
    assert isinstance(layer, Layer)
    x = torch.randn(16, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    blocks = (lambda y: attention(layer, PLACEMENTS[name], y)), (lambda y: mlp(layer, PLACEMENTS[name], y))
    expected = EQUATIONS[name](x, *blocks)
    assert (layer(x, 16, None) - expected).norm() < 1e-12 * expected.norm()


@pytest.mark.parametrize(("name", "factor"), [("deepnorm", (8 * 8) ** -0.25), ("sub", math.sqrt(math.log(16)))])
def test_initial_weights_have_the_placements_factor(name: str, factor: float, serial: TensorParallel) -> None:
    """Values, projections and both of the MLP's matrices; queries and keys as ever."""
    config = replace(CONFIG, hidden_size=128, num_layers=8, norm_placement=name)
    weights = dict(built(config, serial).named_parameters())
    of = lambda name: weights[f"trunk.layers.3.{name}.weight"]
    scaled = [of("attention.qkv")[256:], of("attention.projection"), of("mlp.up"), of("mlp.down")]
    assert [w.std().item() / 0.02 for w in scaled] == pytest.approx([factor] * 4, rel=0.03)
    assert of("attention.qkv")[:256].std().item() / 0.02 == pytest.approx(1, rel=0.03)


def test_a_new_placement_trains_and_is_simulated_and_priced(
    serial: TensorParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry that docs/extending.md adds."""
    [line] = [line[1:] for line in EXTENDING.read_text().splitlines() if line.startswith('+    "output"')]
    [(name, placement)] = eval(f"{{{line}}}", {"NormPlacement": NormPlacement, "BlockNorms": BlockNorms}).items()
    assert name not in PLACEMENTS
    monkeypatch.setitem(PLACEMENTS, name, placement)
    config = replace(CONFIG, norm_placement=name, vocab_size=128)
    model = build_model(config, 128, 0, torch.float64, serial)
    assert isinstance(model, GPT)
    assert sum(p.numel() for p in model.parameters()) == count_parameters(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(128, (4, 17), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(10):
        loss = model.loss(trunk_output(model, tokens[:, :-1]), tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    big = Run(
        model=replace(config, hidden_size=4096, num_layers=8, seq_len=1024), plan=Plan(tp=2, pp=2), precision="bf16"
    )
    both = {which: replace(big, model=replace(big.model, norm_placement=which)) for which in ("pre", name, "sandwich")}
    total = lambda run: sum(rank.total for rank in memory_of_ranks(run, 128, 1024))
    seconds = lambda run: predict(run, 128, SYSTEM).seconds
    for law in (total, seconds):
        found = {which: law(run) for which, run in both.items()}
        assert 0.98 * found["pre"] < found[name] < found["sandwich"], found
