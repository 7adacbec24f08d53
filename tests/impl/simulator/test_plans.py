"""All plans as columns, against every combination of knobs tried one by one."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from impl.errors import InputError
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from impl.simulator.plans import DEFAULTS, FLAGS, KNOBS, NAMES, Plans, every, run_of

MODEL = ModelConfig(num_layers=4, hidden_size=32, num_heads=4, seq_len=8, vocab_size=100)
BASE = Run(model=MODEL, train=Recipe(global_batch=4, microbatch=1))


def rows(plans: Plans) -> set[tuple[object, ...]]:
    return {tuple(plans.row(i).values()) for i in range(len(plans))}


ALONE = {
    "dp": {"zero_stage", "overlap_param_gather"},
    "tp": {"sequence_parallel", "scatter_gather", "overlap_input_grad_reduce"}, "pp": {"scatter_gather", "schedule"},
}  # fmt: skip
"""Knobs that make no difference without ranks of an axis."""


def changes_nothing(row: dict[str, Any]) -> bool:
    """A knob that makes no difference, and is not as a plan has it by default."""
    chunked = row["schedule"] == "interleaved"
    return (
        chunked != (row["chunks"] != 1)
        or (row["sequence_parallel"] and not row["scatter_gather"])
        or (row["zero_stage"] == 0 and not row["overlap_param_gather"])
    )


GROUPED, SHARED = replace(MODEL, num_heads=8, kv_heads=2), replace(MODEL, kv_heads=1)


@pytest.mark.parametrize(
    ("model", "devices"), [(MODEL, 2), (GROUPED, 4), (SHARED, 2), (replace(MODEL, experts=2, num_layers=2), 2)]
)
def test_they_are_all_valid_plans_there_are(model: ModelConfig, devices: int) -> None:
    plans, base = every(model, devices, 4, node=2), replace(BASE, model=model)
    choices = dict.fromkeys(FLAGS, (False, True)) | NAMES | {"microbatch": (1, 2, 4), "chunks": (1, 2, 4)}
    choices |= {"zero_stage": range(4), "offload_optimizer": (False,), "overlap_grad_reduce": (True,)}
    expected = set()
    for tp, cp, pp, dp in (d for d in itertools.product((1, 2, 4), repeat=4) if np.prod(d) == devices):
        groups = (None, 2) if (tp, dp * cp) == (1, 4) else (None,)  # smaller ones that divide
        here = choices | {"zero_group": groups, "ep": (1, 2, 4) if model.experts else (1,)}
        here |= {"tp": (tp,), "cp": (cp,), "pp": (pp,), "dp": (dp,)}
        for axis, ranks in {"dp": dp * cp, "tp": tp, "pp": pp}.items():
            here |= {knob: (DEFAULTS[knob],) for knob in ALONE[axis] if ranks == 1}
        for values in itertools.product(*map(here.__getitem__, KNOBS)):
            row = dict(zip(KNOBS, values, strict=True))
            if not changes_nothing(row) and not run_of(row, base).problems():
                expected.add(values)
    usual = plans.take((plans["offload_optimizer"] == 0) & (plans["overlap_grad_reduce"] == 1))
    assert rows(usual) == expected
    assert len(usual) == len(expected)
    assert len(plans) > 2 * len(expected)


def test_a_row_is_a_run() -> None:
    plans = every(MODEL, 4, 4)
    i = next(i for i in range(len(plans)) if plans.row(i)["schedule"] == "interleaved")
    run = plans.run(i, BASE)
    assert (run.plan.schedule, run.plan.world_size, run.model) == ("interleaved", 4, MODEL)
    assert run.train == replace(BASE.train, microbatch=plans.row(i)["microbatch"])
    plain = int(np.argmin(plans.oddity))
    assert replace(plans.run(plain, BASE).plan, tp=1, pp=1, dp=1) == Plan()
    assert plans.oddity[i] >= 2


def test_a_seventeenth_device_is_no_use() -> None:
    with pytest.raises(InputError, match="no plan puts 4 sequences of this model on 17 devices"):
        every(MODEL, 17, 4)


def test_sequences_are_shared_among_as_many_ranks_as_are_asked_for() -> None:
    assert set(every(MODEL, 4, 4)["cp"]) == {1, 2, 4}
    assert set(every(MODEL, 4, 4, sharing=2)["cp"]) == {1, 2}
