"""Training on a grid of tensor-parallel ranks equals serial training."""

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from impl.evaluation_config import EvaluationConfig
from impl.grid import GridShard
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from impl.tensor_parallel.group import Part
from impl.tensor_parallel.shards import Shard
from tests.impl.blocks import BLOCKS
from tests.impl.covering import draws
from tests.impl.on_ranks import on_ranks
from tests.impl.parity import assert_equal_first_steps, assert_equal_steps, first_step, serial, steps
from tests.impl.test_checkpoint import RUN, check

MODEL = ModelConfig(num_layers=2, hidden_size=32, num_heads=4, seq_len=8, vocab_size=300, dropout=0.1)
LLAMA = replace(BLOCKS["llama"], num_layers=2, seq_len=8)
SMALL: dict[str, Any] = {"bucket_bytes": 2000}
RUNS: list[tuple[ModelConfig, Plan]] = [
    (MODEL, Plan(tp=2, tp3=(1, 2, 1))),
    (MODEL, Plan(tp=4, tp3=(4, 1, 1), sequence_parallel=True)),
    (MODEL, Plan(tp=4, tp3=(1, 4, 1), recompute="full", overlap_input_grad_reduce=False)),
    (MODEL, Plan(tp=4, tp3=(2, 2, 1), dp=2, zero_stage=1, **SMALL)),
    (MODEL, Plan(tp=4, tp3=(2, 2, 2), dp=2, zero_stage=3, zero_group=2)),
    (replace(MODEL, dropout=0.0, kv_heads=1), Plan(tp=8, tp3=(2, 4, 1), recompute="full", partition_activations=True)),
    (LLAMA, Plan(tp=4, tp3=(2, 2, 1), pp=2, schedule="zb_h1", **SMALL)),
    (LLAMA, Plan(tp=2, tp3=(1, 2, 2), dp=4, zero_stage=3, zero_group=2, overlap_param_gather=False, **SMALL)),
    (replace(LLAMA, norm_placement="sub", norm="layernorm"), Plan(tp=4, tp3=(2, 2, 1), dp=2, zero_stage=2)),
    (replace(LLAMA, norm_placement="qk", kv_heads=1), Plan(tp=4, tp3=(4, 1, 1), dp=2, zero_stage=2, zero_group=1)),
    (replace(LLAMA, norm_placement="qk", kv_heads=1, tied=True), Plan(tp=4, tp3=(2, 2, 1), dp=2)),
    (
        replace(LLAMA, norm_placement="peri", parallel_residual=True),
        Plan(tp=4, tp3=(2, 2, 1), cp=2, recompute="selective"),
    ),
    (replace(MODEL, norm_placement="post"), Plan(tp=2, tp3=(1, 2, 1), pp=2, dp=2, zero_stage=3, schedule="gpipe")),
    (replace(MODEL, norm_placement="hybrid"), Plan(tp=2, tp3=(1, 2, 1), cp=2, cp_attention="ulysses", zero_stage=1)),
    (MODEL, Plan(tp=4, tp3=(2, 2, 1), pp=2, schedule="interleaved", recompute="full", partition_activations=True)),
    (replace(LLAMA, shared_layers=True), Plan(tp=4, tp3=(2, 2, 1), dp=2, zero_stage=3)),
]
COUNT, SEED = (int(os.environ.get(name, usual)) for name, usual in (("GRID_RUNS", 6), ("GRID_SEED", 1)))
"""Random runs; more of them, or others: `GRID_RUNS=40 GRID_SEED=7 pytest tests/impl/test_grid.py`."""
MUP: dict[str, Any] = {"parametrization": "mup", "base_hidden_size": 8}


def run_of(model: ModelConfig, plan: Plan) -> Run:
    batch = 2 * plan.dp * plan.pp
    recipe = Recipe(global_batch=batch, microbatch=1, steps=1, warmup_steps=0, clip_norm=0.5, **MUP)
    return Run(model=model, plan=plan, train=recipe, precision="fp64", evaluation=EvaluationConfig(sequences=3))


def random_grids(seed: int) -> Iterator[Run]:
    """Random runs on up to 8 ranks whose hidden features are divided too, without end."""
    for run, y in zip(draws(seed, 8), cycle((2, 4, 3)), strict=False):
        plan, model = run.plan, replace(run.model, family="gpt", hidden_size=run.model.hidden_size * y)
        z = plan.zero if plan.zero_stage == 3 else 1
        plan = replace(plan, tp=plan.tp * y, tp3=(plan.tp, y, z), sequence_parallel=False)
        grid = replace(run, model=model, plan=plan)
        if plan.world_size <= 8 and not grid.problems():
            yield grid


def test_first_steps_on_grids_equal_serial(data: Path, subtests: pytest.Subtests) -> None:
    runs = [*(run_of(*kind) for kind in RUNS), *islice(random_grids(SEED), COUNT)]
    print(f"seed {SEED}, {COUNT} runs")
    answers = on_ranks(first_step, [*runs, *map(serial, runs)], data)
    for run in runs:
        with subtests.test(str(run.plan)):
            assert_equal_first_steps(answers[run], run.plan.tp, answers[serial(run)][0])


def test_losses_and_norms_in_fp32_and_bf16_equal_serial_over_many_steps(data: Path) -> None:
    recipe = Recipe(steps=6, global_batch=4, microbatch=1, lr=1e-3, warmup_steps=3, clip_norm=0.5)
    runs = [
        Run(model=MODEL, plan=Plan(tp=4, tp3=(2, 2, 1), **SMALL), train=recipe, precision=precision)
        for precision in ("fp32", "bf16")
    ]
    found = on_ranks(steps, [*runs, *map(serial, runs)], data)
    for run, tolerances in zip(runs, ((1e-5, 1e-4), (5e-4, 2e-2)), strict=True):
        assert_equal_steps(found[run], found[serial(run)][0], *tolerances)


def test_training_goes_on_from_a_grid_and_on_one(data: Path, tmp_path: Path) -> None:
    grid, other = Plan(tp=2, tp3=(1, 2, 2), dp=2, zero_stage=3), Plan(tp=4, tp3=(2, 2, 1), bucket_bytes=2000)
    pairs = [(grid, other), (Plan(pp=2), grid)]
    check([(replace(RUN, plan=before), replace(RUN, plan=after)) for before, after in pairs], data, tmp_path)


@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from((0, 1)), st.integers(0, 5), st.booleans(), st.booleans())
def test_a_parameter_is_whole_again_from_all_parts(
    x: int, y: int, dim: int, padding: int, is_over_x: bool, is_over_y: bool
) -> None:
    rows = [6 * x * y, 6 * x * y]
    rows[dim] -= padding
    whole = torch.arange(rows[0] * rows[1]).view(rows)
    over_x = Shard(dim, rows[dim], padding=padding) if is_over_x else None
    over_y = Shard(1 - dim, rows[1 - dim]) if is_over_y else None
    if padding:
        over_x = Shard(dim, rows[dim], padding=padding)
    shards = [GridShard(over_x, over_y, (Part(rank % x, x), Part(rank // x, y))) for rank in range(x * y)]
    parts = [shard.take(whole, Part(0, 1)) for shard in shards]
    assert torch.equal(shards[0].join(parts), whole)
    for shard, part in zip(shards, parts, strict=True):
        assert list(shard.whole_shape(part.shape)) == list(whole.shape)
        taken = [shard.take_rows(some, first, Part(0, 1)) for first, some in ((0, whole[:5]), (5, whole[5:]))]
        assert torch.equal(torch.cat(taken), part[: sum(map(len, taken))])
