"""What a rank measures of its own trainer."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from harness.rank.instruments import Inspection, Measured, Stopwatch
from impl.cost.place import Place
from impl.cost.traffic import Count, step_traffic
from impl.mesh import build_mesh
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from impl.train import Trainer
from tests.impl.on_ranks import on_ranks

MODEL = ModelConfig(num_layers=2, hidden_size=16, num_heads=4, seq_len=8)
PLANS = [
    Plan(dp=2, tp=2, sequence_parallel=True, zero_stage=3, zero_group=1), Plan(dp=2, pp=2, zero_stage=2),
    Plan(dp=2, cp=2, zero_stage=3), Plan(tp=4, tp3=(2, 2, 1)), Plan(dp=4, zero_stage=1, zero_group=2),
]  # fmt: skip


def inspected(one: Trainer) -> tuple[dict[str, Any], dict[str, Any]]:
    """The traffic of a rank's first step by axes, as its record has it, and as the formulas do."""
    measured, mesh = Measured(), build_mesh(one.run.plan, "cpu")
    Inspection(one, mesh, Stopwatch(torch.device("cpu"))).step(0, measured)
    expected: dict[str, dict[str, Any]] = {}
    for axes, ops in step_traffic(Place(one.run, one.vocab_size, one.pp_group.rank()), one.head_positions).items():
        is_joint = axes == "ends" or ("_" in axes and axes != "dp_cp")
        of = expected.setdefault("joint" if is_joint else axes, {})
        of |= {op: asdict(count + Count(**of.get(op, {}))) for op, count in ops.items()}
    return measured.traffic, expected


def test_traffic_is_recorded_by_the_axes_that_the_formulas_name(tokens: Path) -> None:
    runs = [Run(model=MODEL, plan=plan, train=Recipe(steps=1, global_batch=4, microbatch=1)) for plan in PLANS]
    for run, ranks in on_ranks(inspected, runs, tokens).items():
        assert all(found == expected for found, expected in ranks), run.plan
