"""Parallel training against serial: what a run's ranks find out, and what must be equal."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from impl.collectives import all_gather
from impl.plan import Plan
from impl.run import Run
from impl.tensor_parallel.group import Part
from impl.tensor_parallel.shards import Shard, shards_of
from impl.train import Trainer


class Found(NamedTuple):
    """What one rank has after the first backward passes."""

    loss: float
    parts: dict[str, np.ndarray]
    shards: dict[str, Shard]


def serial(run: Run) -> Run:
    return replace(run, plan=Plan(), compile=False)


class FirstStep(NamedTuple):
    """What one rank has of a first optimizer step, and after it."""

    found: Found
    norm: float
    nats: float
    """Of the next validation."""
    state: dict[str, float]
    """Sums of squares of weights and moments, by parameter and kind; of elements that no rank before this one owns."""


def first_gradients(one: Trainer) -> Found:
    return Found(one.backward(0).item(), gradients(one), shards_of(one.model))


def first_step(one: Trainer) -> FirstStep:
    taken: dict[str, np.ndarray] = {}
    norm = one.gradients.norm

    def noted() -> torch.Tensor:
        """Before they are clipped."""
        taken.update(gradients(one))
        return norm()

    one.gradients.norm = noted
    step = one.step(0)
    state: dict[str, float] = {}
    for owned in one.optimizer.owned():
        for kind, values in owned.tensors.items() if owned.is_writer else ():
            key = f"{owned.name} {kind}"
            state[key] = state.get(key, 0.0) + values.square().sum().item()
    [evaluation] = one.evaluate(final=True)
    found = Found(step.loss.item(), taken, shards_of(one.model))
    return FirstStep(found, step.grad_norm.item(), evaluation.nats, state)


def gradients(one: Trainer) -> dict[str, np.ndarray]:
    """Whole of data-parallel and context-parallel ranks, by name; those of tensor-parallel ones have their parts."""
    parts: dict[str, np.ndarray] = {}
    for bucket in one.buckets:
        whole = all_gather(bucket.gradient, bucket.reduction.group) if bucket.stage else bucket.gradient
        named = zip(bucket.layout.names, bucket.views(whole), strict=True)
        parts |= {name: part.numpy().copy() for name, part in named}
    return parts


def steps(one: Trainer) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step."""
    reports = [one.step(i) for i in range(one.run.train.steps)]
    return [(step.loss.item(), step.grad_norm.item()) for step in reports]


def assert_equal_gradients(answers: Sequence[Found], tp: int, serial: Found, tolerance: float = 1e-12) -> None:
    for found in answers:
        assert found.loss == pytest.approx(serial.loss, rel=tolerance)
        assert found.shards, "nothing is split"
    gradients, expected = whole_gradients(answers, tp), whole_gradients([serial], 1)
    assert gradients.keys() == expected.keys()
    # terms may be as large as the whole gradient, and are rounded: a sum that cancels out to less is known no better
    rounding = max(float(np.finfo(gradient.dtype).eps) for gradient in expected.values())
    whole = math.hypot(*(float(np.linalg.norm(gradient)) for gradient in expected.values()))
    for name, gradient in expected.items():
        assert gradients[name].shape == gradient.shape
        assert relative(gradients[name], gradient, whole * rounding / tolerance) < tolerance, name


def assert_equal_first_steps(answers: Sequence[FirstStep], tp: int, serial: FirstStep) -> None:
    """In fp64: gradients, their norm, the optimizer's state after the step, and what the new weights predict."""
    assert_equal_gradients([one.found for one in answers], tp, serial.found)
    for one in answers:
        assert (one.norm, one.nats) == pytest.approx((serial.norm, serial.nats), rel=1e-12)
    together: dict[str, float] = {}
    for key, squares in (item for one in answers for item in one.state.items()):
        together[key] = together.get(key, 0.0) + squares
    assert together == pytest.approx(serial.state, rel=1e-9, abs=1e-24)


def assert_equal_steps(
    answers: Sequence[list[tuple[float, float]]], serial: list[tuple[float, float]], of_loss: float, of_norm: float
) -> None:
    """Losses and norms of all ranks, with these tolerances; training has done something."""
    for found in answers:
        for (loss, norm), (serial_loss, serial_norm) in zip(found, serial, strict=True):
            assert loss == pytest.approx(serial_loss, rel=of_loss)
            assert norm == pytest.approx(serial_norm, rel=of_norm)
    assert serial[-1][0] < serial[0][0]


def whole_gradients(answers: Sequence[Found], tp: int) -> dict[str, np.ndarray]:
    """Every gradient of the model; those of several pipeline or data-parallel ranks agree to the last bit."""
    gradients: dict[str, np.ndarray] = {}
    for first in range(0, len(answers), tp):
        group = answers[first : first + tp]
        for name in group[0].parts:
            gradient = _whole(name, group)
            np.testing.assert_array_equal(gradients.setdefault(name, gradient), gradient, err_msg=name)
    return gradients


def _whole(name: str, group: Sequence[Found]) -> np.ndarray:
    """A gradient, from all tensor-parallel ranks that share it; where each has it whole they agree to the last bit."""
    parts, shard = [found.parts[name] for found in group], group[0].shards.get(name)
    if shard:
        whole = shard.join([torch.from_numpy(part) for part in parts])
        for rank, found in enumerate(group):  # as some have the same
            own = found.shards[name].take(whole, Part(rank, len(group)))
            np.testing.assert_array_equal(own.numpy(), found.parts[name], err_msg=name)
        return whole.numpy()
    for part in parts[1:]:
        np.testing.assert_array_equal(part, parts[0], err_msg=name)
    return parts[0]


def relative(a: np.ndarray, b: np.ndarray, nothing: float = 1e-30) -> float:
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), nothing))
