"""What ranks send each other: the count of a real step is the formula, to the byte."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from impl.collectives import counted
from impl.cost.traffic import Count, Op, gradient_bytes, tensor_parallel_traffic
from impl.data.synthetic import SyntheticConfig, write_synthetic
from impl.data.tokens import TokenFolder
from impl.mesh import build_mesh
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Precision, Run
from impl.train import Trainer
from tests.ranks import run_ranks

MODEL = ModelConfig(num_layers=3, hidden_size=32, num_heads=4, seq_len=16, dropout=0.1)
RECIPE = Recipe(steps=1, global_batch=8, microbatch=2)
LOSS = Count(1, 8)
"""The loss is one float64."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens") / "synthetic"
    write_synthetic(folder, SyntheticConfig(train_tokens=20_000, valid_tokens=2_000))
    return folder


def step(run: Run, data: Path) -> tuple[dict[str, dict[Op, Count]], dict[str, int], int]:
    """Counts by axes of the mesh, buckets by axes, and the positions that the head scores."""
    mesh = build_mesh(run.plan, "cpu")
    one = Trainer(run, TokenFolder.open(data), mesh, torch.device("cpu"))
    with counted() as counts:
        one.step(0)
    names = {str(mesh.get_group(axis).group_name): axis for axis in ("dp", "tp")}
    by_axes: dict[str, dict[Op, Count]] = {}
    for (group, op), count in counts.items():
        by_axes.setdefault(names.get(group, "dp_tp"), {})[op] = count
    buckets = [names.get(b.group.group_name, "dp_tp") for b in one.gradients.buckets if b.group.size() > 1]
    return by_axes, {axes: buckets.count(axes) for axes in set(buckets)}, one.head_positions


@pytest.mark.parametrize("family", ["gpt", "bert"])
@pytest.mark.parametrize(
    ("plan", "precision"),
    [
        (Plan(), "fp32"),
        (Plan(dp=2), "bf16"),
        (Plan(tp=2), "fp64"),
        (Plan(tp=2), "bf16"),
        (Plan(tp=2, sequence_parallel=True), "fp32"),
        (Plan(tp=4, sequence_parallel=True), "bf16"),
        (Plan(dp=2, tp=2), "fp32"),
        (Plan(dp=2, tp=2, sequence_parallel=True, bucket_bytes=10_000), "bf16"),
    ],
)
def test_a_step_sends_what_the_formulas_say(plan: Plan, precision: Precision, family: str, data: Path) -> None:
    run = Run(model=replace(MODEL, family=family), plan=plan, train=RECIPE, precision=precision)
    vocab_size = run.model.vocabulary(257)
    for counts, buckets, head_positions in run_ranks(plan.world_size, step, run, data):
        expected: dict[str, dict[Op, Count]] = {}
        if traffic := tensor_parallel_traffic(run, head_positions):
            expected["tp"] = traffic
        reduced = gradient_bytes(run, vocab_size)
        assert reduced.keys() == buckets.keys()
        for axes, size in reduced.items():
            sums = expected.setdefault(axes, {})
            sums["all_reduce"] = sums.get("all_reduce", Count()) + Count(buckets[axes], size)
        if plan.dp > 1:
            expected["dp"]["all_reduce"] += LOSS
        assert counts == expected


def test_a_layer_of_gpt_3_moves_four_all_reduces_of_its_activations() -> None:
    model = ModelConfig(num_layers=1, hidden_size=12288, num_heads=96, seq_len=2048, vocab_size=51200)
    recipe = Recipe(global_batch=1, microbatch=1)
    runs = [Run(model=replace(model, num_layers=n), plan=Plan(tp=8), train=recipe, precision="bf16") for n in (1, 2)]
    one, two = (tensor_parallel_traffic(run, 2048)["all_reduce"] for run in runs)
    assert two.calls - one.calls == 4  # Megatron-LM 2019, section 3
    assert two.bytes - one.bytes == 4 * 2048 * 12288 * 2


def test_sequence_parallelism_moves_as_many_bytes_but_for_the_gather_in_the_backward_pass() -> None:
    """Korthikanti et al. 2022, section 4.2.2: an all-reduce is a reduce-scatter and an all-gather."""
    plan = Plan(tp=8, sequence_parallel=True)
    model = ModelConfig(hidden_size=64, num_heads=8, seq_len=64, vocab_size=1024)
    runs = [
        Run(model=replace(model, num_layers=n), plan=plan, train=Recipe(global_batch=1, microbatch=1)) for n in (1, 2)
    ]
    one, two = (tensor_parallel_traffic(run, 64) for run in runs)
    layer = {op: two[op].calls - one[op].calls for op in two}
    assert layer == {"all_reduce": 0, "reduce_scatter": 4, "all_gather": 4 + 2}
