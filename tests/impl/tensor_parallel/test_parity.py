"""Tensor- and sequence-parallel training equals serial training: losses and every gradient."""

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Precision, Run
from tests.impl.on_ranks import on_ranks
from tests.impl.parity import Found, assert_equal_gradients, assert_equal_steps, first_gradients, serial, steps

MODEL = ModelConfig(num_layers=2, hidden_size=32, num_heads=8, seq_len=16, dropout=0.1)
RECIPE = Recipe(steps=20, global_batch=4, microbatch=2, lr=1e-3, warmup_steps=3, clip_norm=0.5)
TOLERANCE: dict[Precision, float] = {"fp64": 1e-12, "fp32": 1e-5}


def assert_equals_serial(run: Run, found: dict[Run, list[Found]]) -> None:
    [expected] = found[serial(run)]
    assert_equal_gradients(found[run], run.plan.tp, expected, TOLERANCE[run.precision])


def of_degrees(dp: int, tp: int) -> list[Run]:
    """Every run of these degrees."""
    recipe = replace(RECIPE, microbatch=1) if dp > 1 else RECIPE
    plans = [Plan(dp=dp, tp=tp, sequence_parallel=split, bucket_bytes=20_000) for split in (False, True)]
    kinds: list[tuple[str, Precision]] = [("pre", "fp64"), ("pre", "fp32"), ("post", "fp64"), ("sandwich", "fp64")]
    kinds = kinds[:1] if dp > 1 else kinds
    return [
        Run(model=replace(MODEL, family=family, norm_placement=norm), plan=plan, train=recipe, precision=precision)
        for plan, family, (norm, precision) in product(plans, ("gpt", "bert"), kinds)
    ]


@cache
def serial_gradients(data: Path) -> dict[Run, list[Found]]:
    return on_ranks(first_gradients, [serial(run) for degrees in DEGREES for run in of_degrees(*degrees)], data)


@cache
def gradients_on(dp: int, tp: int, data: Path) -> dict[Run, list[Found]]:
    return on_ranks(first_gradients, of_degrees(dp, tp), data)


DEGREES = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 2)]
"""(dp, tp)"""


def name(run: Run) -> str:
    plan, model = run.plan, run.model
    split = "split" if plan.sequence_parallel else "whole"
    return f"dp={plan.dp}-tp={plan.tp}-{split}-{model.family}-{model.norm_placement}-{run.precision}"


@pytest.mark.parametrize("run", [run for degrees in DEGREES for run in of_degrees(*degrees)], ids=name)
def test_every_gradient_equals_serial(run: Run, data: Path) -> None:
    assert_equals_serial(run, serial_gradients(data) | gradients_on(run.plan.dp, run.plan.tp, data))


def test_overlap_changes_no_gradient(data: Path) -> None:
    plans = [Plan(tp=2, sequence_parallel=split) for split in (False, True)]
    runs = [Run(model=MODEL, plan=plan, train=RECIPE) for plan in plans]
    without = [replace(run, plan=replace(run.plan, overlap_input_grad_reduce=False)) for run in runs]
    found = on_ranks(first_gradients, [*runs, *without], data)
    for one, other in zip(runs, without, strict=True):
        for during, after in zip(found[one], found[other], strict=True):
            assert during.loss == after.loss
            for name, part in during.parts.items():
                np.testing.assert_array_equal(part, after.parts[name], err_msg=name)


def test_compiled_layers_equal_serial(data: Path) -> None:
    plan = Plan(tp=2, sequence_parallel=True)
    run = Run(model=replace(MODEL, num_layers=1), plan=plan, train=RECIPE, compile=True)
    assert_equals_serial(run, on_ranks(first_gradients, [run, serial(run)], data))


@st.composite
def odd_runs(draw: st.DrawFn, tp: int) -> Run:
    heads = tp * draw(st.integers(1, 2))
    family = draw(st.sampled_from(["gpt", "bert"]))
    tokens = tp * draw(st.integers(1, 3))
    model = ModelConfig(
        family="gpt" if family == "gpt" else "bert",
        num_layers=1,
        hidden_size=heads * draw(st.integers(1, 5)),
        num_heads=heads,
        seq_len=tokens if family == "gpt" else 4 * tokens,  # BERT needs room for two segments
        vocab_size=draw(st.integers(260, 800)),
        dropout=0.1,
    )
    batch = draw(st.integers(1, 2))
    recipe = replace(RECIPE, global_batch=batch, microbatch=batch)
    return Run(model=model, plan=Plan(tp=tp, sequence_parallel=draw(st.booleans())), train=recipe, precision="fp64")


@settings(max_examples=5)
@given(runs=st.sampled_from([2, 3, 4]).flatmap(lambda tp: st.lists(odd_runs(tp), min_size=3, max_size=6)))
def test_odd_sizes_equal_serial(runs: list[Run], data: Path) -> None:
    found = on_ranks(first_gradients, [*runs, *map(serial, runs)], data)
    for run in runs:
        assert_equals_serial(run, found)


LONG = [
    Run(model=replace(MODEL, family=family), plan=plan, train=replace(RECIPE, microbatch=1))
    for family, plan in [
        ("gpt", Plan(tp=2)), ("bert", Plan(tp=2)),
        ("gpt", Plan(tp=2, sequence_parallel=True)), ("bert", Plan(tp=2, sequence_parallel=True)),
        ("gpt", Plan(tp=4, sequence_parallel=True)), ("gpt", Plan(tp=2, dp=2, sequence_parallel=True)),
        ("bert", Plan(tp=2, dp=2)),
    ]
]  # fmt: skip


def test_losses_and_norms_equal_serial_over_20_steps(data: Path) -> None:
    all_steps = on_ranks(steps, [*LONG, *map(serial, LONG)], data)
    for run in LONG:
        [expected] = all_steps[serial(run)]
        assert_equal_steps(all_steps[run], expected, 1e-5, 1e-4)
        assert any(norm > RECIPE.clip_norm for _, norm in expected), "clipping was never at work"
