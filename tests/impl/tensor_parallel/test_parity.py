"""Tensor- and sequence-parallel training equals serial training: losses and every gradient."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from impl.data.tokens import TokenFolder
from impl.mesh import build_mesh
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Precision, Run
from impl.tensor_parallel.shards import Shard, shards_of
from impl.train import Trainer
from tests.ranks import run_ranks

MODEL = ModelConfig(num_layers=2, hidden_size=32, num_heads=8, seq_len=16, dropout=0.1)
RECIPE = Recipe(steps=20, global_batch=4, microbatch=2, lr=1e-3, warmup_steps=3, clip_norm=0.5)
TOLERANCE: dict[Precision, float] = {"fp64": 1e-12, "fp32": 1e-5}

Gradients = dict[str, np.ndarray]


def trainer(run: Run, data: Path) -> Trainer:
    return Trainer(run, TokenFolder.open(data), build_mesh(run.plan, "cpu"), torch.device("cpu"))


def first_gradients(run: Run, data: Path) -> tuple[float, Gradients, dict[str, Shard]]:
    one = trainer(run, data)
    loss = one.backward(0).item()
    parts = {name: one.gradients.of[p].numpy().copy() for name, p in one.model.named_parameters()}
    return loss, parts, shards_of(one.model)


@cache
def serial_gradients(run: Run, data: Path) -> tuple[float, Gradients]:
    [(loss, parts, shards)] = run_ranks(1, first_gradients, run, data)
    return loss, {name: whole(name, [part], shards) for name, part in parts.items()}


def whole(name: str, parts: list[np.ndarray], shards: dict[str, Shard]) -> np.ndarray:
    """The whole gradient from the ranks' parts; where all ranks have it whole they must agree to the last bit."""
    if name in shards:
        return shards[name].join([torch.from_numpy(part) for part in parts]).numpy()
    for part in parts[1:]:
        np.testing.assert_array_equal(part, parts[0], err_msg=name)
    return parts[0]


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))


def assert_equals_serial(run: Run, data: Path) -> None:
    tolerance = TOLERANCE[run.precision]
    loss, expected = serial_gradients(replace(run, plan=Plan(), compile=False), data)
    answers = run_ranks(run.plan.world_size, first_gradients, run, data)
    for first in range(0, len(answers), run.plan.tp):
        group = answers[first : first + run.plan.tp]
        shards = group[0][2]
        assert shards, "nothing is split"
        for rank_loss, _, _ in group:
            assert rank_loss == pytest.approx(loss, rel=tolerance)
        assert group[0][1].keys() == expected.keys()
        for name, gradient in expected.items():
            found = whole(name, [parts[name] for _, parts, _ in group], shards)
            assert found.shape == gradient.shape
            assert relative(found, gradient) < tolerance, name


@pytest.mark.parametrize("norm", ["pre", "post", "sandwich"])
@pytest.mark.parametrize("family", ["gpt", "bert"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_every_gradient_equals_serial(tp: int, sequence_parallel: bool, family: str, norm: str, data: Path) -> None:
    model = replace(MODEL, family=family, norm_placement=norm)
    plan = Plan(tp=tp, sequence_parallel=sequence_parallel)
    for precision in TOLERANCE if norm == "pre" else ("fp64",):
        assert_equals_serial(Run(model=model, plan=plan, train=RECIPE, precision=precision), data)


@pytest.mark.parametrize("family", ["gpt", "bert"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (2, 4), (4, 2)])
def test_every_gradient_equals_serial_with_data_parallelism(
    dp: int, tp: int, sequence_parallel: bool, family: str, data: Path
) -> None:
    plan = Plan(dp=dp, tp=tp, sequence_parallel=sequence_parallel, bucket_bytes=20_000)
    recipe = replace(RECIPE, global_batch=4, microbatch=1)
    assert_equals_serial(Run(model=replace(MODEL, family=family), plan=plan, train=recipe, precision="fp64"), data)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_overlap_changes_no_gradient(sequence_parallel: bool, data: Path) -> None:
    plan = Plan(tp=2, sequence_parallel=sequence_parallel)
    run = Run(model=MODEL, plan=plan, train=RECIPE)
    during = run_ranks(2, first_gradients, run, data)
    after = run_ranks(2, first_gradients, replace(run, plan=replace(plan, overlap_input_grad_reduce=False)), data)
    for (loss, parts, _), (other_loss, other_parts, _) in zip(during, after, strict=True):
        assert loss == other_loss
        for name, part in parts.items():
            np.testing.assert_array_equal(part, other_parts[name], err_msg=name)


def test_compiled_layers_equal_serial(data: Path) -> None:
    plan = Plan(tp=2, sequence_parallel=True)
    assert_equals_serial(Run(model=replace(MODEL, num_layers=1), plan=plan, train=RECIPE, compile=True), data)


@settings(max_examples=15)
@given(
    tp=st.sampled_from([2, 3, 4]),
    heads_per_rank=st.integers(1, 2),
    head_size=st.integers(1, 5),
    tokens_per_rank=st.integers(1, 3),
    vocab_size=st.integers(260, 800),
    batch=st.integers(1, 2),
    family=st.sampled_from(["gpt", "bert"]),
    sequence_parallel=st.booleans(),
)
def test_odd_sizes_equal_serial(
    tp: int,
    heads_per_rank: int,
    head_size: int,
    tokens_per_rank: int,
    vocab_size: int,
    batch: int,
    family: str,
    sequence_parallel: bool,
    data: Path,
) -> None:
    heads = tp * heads_per_rank
    seq_len = tp * tokens_per_rank if family == "gpt" else 4 * tp * tokens_per_rank  # BERT needs room for two segments
    model = ModelConfig(
        family="gpt" if family == "gpt" else "bert", num_layers=1, hidden_size=heads * head_size, num_heads=heads,
        seq_len=seq_len, vocab_size=vocab_size, dropout=0.1,
    )  # fmt: skip
    plan = Plan(tp=tp, sequence_parallel=sequence_parallel)
    recipe = replace(RECIPE, global_batch=batch, microbatch=batch)
    assert_equals_serial(Run(model=model, plan=plan, train=recipe, precision="fp64"), data)


def losses(run: Run, data: Path) -> list[tuple[float, float]]:
    one = trainer(run, data)
    steps = [one.step(i) for i in range(run.train.steps)]
    return [(step.loss.item(), step.grad_norm.item()) for step in steps]


@pytest.mark.parametrize(("family", "plan"), [
    ("gpt", Plan(tp=2)), ("bert", Plan(tp=2)),
    ("gpt", Plan(tp=2, sequence_parallel=True)), ("bert", Plan(tp=2, sequence_parallel=True)),
    ("gpt", Plan(tp=8, sequence_parallel=True)), ("gpt", Plan(tp=2, dp=2, sequence_parallel=True)),
    ("bert", Plan(tp=2, dp=4)),
])  # fmt: skip
def test_losses_and_norms_equal_serial_over_20_steps(plan: Plan, family: str, data: Path) -> None:
    recipe = replace(RECIPE, microbatch=1)
    serial = Run(model=replace(MODEL, family=family), train=recipe)
    [expected] = run_ranks(1, losses, serial, data)
    for found in run_ranks(plan.world_size, losses, replace(serial, plan=plan), data):
        for (loss, norm), (serial_loss, serial_norm) in zip(found, expected, strict=True):
            assert loss == pytest.approx(serial_loss, rel=1e-5)
            assert norm == pytest.approx(serial_norm, rel=1e-4)
    assert expected[-1][0] < expected[0][0]
    assert any(norm > recipe.clip_norm for _, norm in expected), "clipping was never at work"
