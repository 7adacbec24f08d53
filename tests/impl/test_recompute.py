"""What the backward pass computes anew is what the forward pass computed: gradients to the last bit."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from impl.device import Device
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.recompute import kept_by, recompute
from impl.run import Run, non_defaults
from impl.tensor_parallel.group import TensorParallel
from impl.train import Trainer
from tests.impl.on_ranks import on_ranks

MODEL = ModelConfig(num_layers=4, hidden_size=16, num_heads=4, seq_len=16)
RECIPE = Recipe(steps=1, global_batch=4, microbatch=2)


# The operation -------------------------------------------------------------------------------------------------------


class Calls:
    """tanh(linear(x)) + y, which knows how often it is called."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.linear, self.count = nn.Linear(3, 3), 0

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        self.count += 1
        return torch.tanh(self.linear(x)) + y

    def gradients(self, out: Tensor, *inputs: Tensor) -> list[Tensor | None]:
        self.linear.zero_grad()
        (out * out).sum().backward()
        return [t.grad for t in (*self.linear.parameters(), *inputs)]


@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True), (False, False)])
def test_gradients_are_those_of_the_function_itself(needed: tuple[bool, bool]) -> None:
    """Also where no input needs one: parameters inside do."""
    found: list[list[Tensor | None]] = []
    for does in (False, True):
        function = Calls()
        x, y = (torch.arange(6.0).view(2, 3).requires_grad_(needs) for needs in needed)
        found.append(function.gradients(recompute(function, x, y) if does else function(x, y), x, y))
        assert function.count == 1 + does
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


def test_without_gradients_it_is_a_call() -> None:
    function, x = Calls(), torch.ones(2, 3, requires_grad=True)
    with torch.no_grad():
        out = recompute(function, x, x)
    assert not out.requires_grad
    assert function.count == 1


def test_a_function_of_constants_has_no_gradient() -> None:
    x = torch.ones(3)
    recompute(lambda x: 2 * x, x).sum().backward()
    assert x.grad is None


def test_hosts_memory_is_where_a_cpus_activations_are(serial: TensorParallel) -> None:
    x, cpu = torch.ones(4, 2), Device(torch.device("cpu"))
    for partition in (False, True):
        kept = kept_by(serial.group, partition=partition, offload=cpu)
        assert torch.equal(kept.unpack(kept.pack(x)), x)
        assert (kept.pack(x).data_ptr() == x.data_ptr()) != partition, "a part is copied, to let the whole go"


# Training ------------------------------------------------------------------------------------------------------------

PLANS = [
    Plan(),
    Plan(tp=2),
    Plan(tp=2, sequence_parallel=True),
    Plan(dp=2, zero_stage=3, bucket_bytes=4096),
    Plan(pp=2, schedule="gpipe"),
    Plan(pp=2, schedule="interleaved", chunks=2),
    Plan(pp=2, schedule="zb_h1"),
    Plan(pp=2, tp=2),
    Plan(pp=2, tp=2, schedule="zb_h1", sequence_parallel=True),
    Plan(dp=2, tp=2, zero_stage=2),
]


class Found(NamedTuple):
    loss: float
    gradients: list[np.ndarray]
    """Of every bucket, what the rank owns."""


def measure(one: Trainer) -> Found:
    loss = one.backward(0).item()
    return Found(loss, [bucket.gradient.numpy().copy() for bucket in one.buckets])


def ways(plan: Plan) -> Iterator[Plan]:
    """The plan, recomputing ever more."""
    yield plan
    yield replace(plan, recompute="selective")
    yield replace(plan, recompute="full")
    if plan.tp > 1 and not plan.sequence_parallel:
        yield replace(plan, recompute="full", partition_activations=True)


def training_runs(plan: Plan) -> list[list[Run]]:
    """One list for a model; the first of each recomputes nothing."""
    kinds: list[tuple[Any, float]] = [("gpt", 0.0), ("bert", 0.1), ("gpt", 0.1), ("bert", 0.0)]
    here = slice(None) if plan == Plan() else slice(PLANS.index(plan) % 4, None, 4)
    models = [replace(MODEL, family=family, dropout=rate) for family, rate in kinds[here]]
    return [[Run(model=model, plan=way, train=RECIPE) for way in ways(plan)] for model in models]


def name(plan: Plan) -> str:
    return "-".join(f"{field}={value}" for field, value in non_defaults(plan).items()) or "serial"


@pytest.fixture(scope="module")
def found(data: Path) -> dict[Run, list[Found]]:
    return on_ranks(measure, [run for plan in PLANS for runs in training_runs(plan) for run in runs], data)


@pytest.mark.parametrize("plan", PLANS, ids=name)
def test_losses_and_gradients_are_equal_to_the_last_bit(plan: Plan, found: dict[Run, list[Found]]) -> None:
    for first, *others in training_runs(plan):
        for run in others:
            for one, other in zip(found[run], found[first], strict=True):
                assert one.loss == other.loss
                assert any(gradient.any() for gradient in one.gradients)
                for gradient, expected in zip(one.gradients, other.gradients, strict=True):
                    np.testing.assert_array_equal(gradient, expected, err_msg=str(run.plan))
