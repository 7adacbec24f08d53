"""What ranks send each other: the count of a real step is the formula, to the byte."""

from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from impl.collectives import counted
from impl.cost.parameters import count_parameters
from impl.cost.place import Place
from impl.cost.traffic import Count, Op, pipeline_traffic, state_traffic, step_traffic, tensor_parallel_traffic
from impl.instruments import named_groups
from impl.model.config import ModelConfig
from impl.plan import Plan, ZeroStage
from impl.recipe import Recipe
from impl.run import Precision, Run
from impl.train import Trainer
from tests.impl.blocks import BLOCKS
from tests.impl.on_ranks import on_ranks
from tests.impl.pipeline import own_schedule

MODEL = ModelConfig(hidden_size=32, num_heads=4, seq_len=16, dropout=0.1)
MODELS = [MODEL, *(replace(MODEL, norm_placement=placement) for placement in ("sub", "olmo2"))]
RECIPE = Recipe(steps=1, global_batch=4, microbatch=1)


def fitting(model: ModelConfig, plan: Plan) -> ModelConfig:
    """Return the model with a layer more than the plan has stages, and what its attention can do."""
    shares, rate = not plan.exchanges_heads, 0.0 if plan.is_ring else None
    groups = model.kv_heads if shares else max(model.groups, plan.tp * plan.cp)
    return replace(model, num_layers=plan.pp * plan.chunks + 1, attention_dropout=rate, kv_heads=groups)


class Moved(NamedTuple):
    """What one rank did in a step."""

    pp_rank: int
    counts: dict[str, dict[Op, Count]]
    """By axes of the mesh."""
    head_positions: int


def step(one: Trainer) -> Moved:
    names = named_groups(one)
    with counted() as counts:
        one.step(0)
    by_axes: dict[str, dict[Op, Count]] = {}
    for (group, op), count in counts.items():
        of_axes = by_axes.setdefault(names[group], {})
        of_axes[op] = of_axes.get(op, Count()) + count
    return Moved(one.pp_group.rank(), by_axes, one.head_positions)


WITHOUT_PIPELINE: list[tuple[Plan, Precision]] = [
    (Plan(), "fp32"),
    (Plan(dp=2), "bf16"),
    (Plan(tp=2), "fp64"),
    (Plan(tp=2), "bf16"),
    (Plan(tp=2, sequence_parallel=True), "fp32"),
    (Plan(tp=4, sequence_parallel=True), "bf16"),
    (Plan(dp=2, tp=2, sequence_parallel=True, bucket_bytes=10_000), "bf16"),
    (Plan(tp=2, recompute="selective"), "fp32"),
    (Plan(tp=2, sequence_parallel=True, recompute="full"), "bf16"),
    (Plan(tp=4, recompute="full", partition_activations=True), "fp32"),
]
PIPELINES: list[tuple[Plan, Precision]] = [
    (Plan(pp=2, schedule="gpipe"), "fp32"),
    (Plan(pp=4, schedule="zb_h1"), "bf16"),
    (Plan(pp=4, schedule="interleaved", chunks=2), "fp64"),
    (Plan(pp=2, dp=2, bucket_bytes=10_000), "bf16"),
    (Plan(pp=2, tp=2, scatter_gather=False, schedule="gpipe"), "fp32"),
    (Plan(pp=2, tp=2, schedule="interleaved", chunks=2), "bf16"),
    (Plan(pp=2, tp=2, schedule="zb_h1", sequence_parallel=True), "fp32"),
    (Plan(pp=2, dp=2, tp=2, schedule="interleaved", chunks=4, sequence_parallel=True), "fp64"),
    (Plan(pp=2, tp=2, schedule="zb_h1", recompute="full", partition_activations=True), "bf16"),
    (Plan(pp=2, tp=2, schedule="zb_h1", recompute="full", sequence_parallel=True), "fp32"),
    # rank 0 has both ends, rank 1 hands over to itself
    (Plan(pp=2, tp=2, schedule=f"{own_schedule.__name__}:two_ways", chunks=2), "fp32"),
    (Plan(pp=2, schedule="zbv", chunks=2), "bf16"),
]


SMALL: dict[str, Any] = {"bucket_bytes": 10_000}
ZERO: list[tuple[Plan, Precision]] = [
    (Plan(dp=2, zero_stage=1, **SMALL), "bf16"),
    (Plan(dp=2, zero_stage=3, **SMALL), "bf16"),
    (Plan(dp=2, tp=2, zero_stage=1, sequence_parallel=True), "fp32"),
    (Plan(dp=2, tp=2, zero_stage=3), "bf16"),
    (Plan(tp=2, zero_stage=3, sequence_parallel=True), "fp32"),
    (Plan(dp=2, pp=2, zero_stage=2, schedule="zb_h1", **SMALL), "bf16"),
    (Plan(dp=2, pp=2, zero_stage=3, schedule="interleaved", chunks=2, **SMALL), "fp32"),
    (Plan(dp=2, tp=2, pp=2, zero_stage=3, sequence_parallel=True, **SMALL), "fp32"),
    (Plan(dp=2, pp=2, zero_stage=3, schedule="v_half", chunks=2, **SMALL), "fp32"),
    (Plan(dp=4, zero_stage=3, zero_group=2, **SMALL), "bf16"),
    (Plan(dp=4, zero_stage=1, zero_group=2), "fp32"),
    (Plan(dp=2, tp=2, zero_stage=2, zero_group=1, sequence_parallel=True), "bf16"),
]

ULYSSES: dict[str, Any] = {"cp_attention": "ulysses"}
CONTEXT: list[tuple[Plan, Precision]] = [
    (Plan(cp=2), "bf16"),
    (Plan(cp=2, recompute="selective", **ULYSSES), "fp32"),
    (Plan(cp=2, dp=2, zero_stage=3, recompute="selective"), "fp32"),
    (Plan(cp=4, zero_stage=1, **ULYSSES), "bf16"),
    (Plan(cp=4, recompute="full", zero_stage=2, zero_group=2), "fp64"),
    (Plan(cp=2, tp=2, dp=2, sequence_parallel=True, zero_stage=2, **ULYSSES), "fp32"),
    (Plan(cp=2, pp=2, schedule="zb_h1"), "bf16"),
]


SHARED = replace(MODEL, shared_layers=True)
PLANS = {"pp = 1": WITHOUT_PIPELINE, "pp > 1": PIPELINES, "ZeRO": ZERO, "context": CONTEXT}
LLAMAS = [replace(BLOCKS["llama"], kv_heads=heads) for heads in (4, 1)]
CASES = [*(("gpt", of) for of in PLANS), ("bert", "pp = 1"), ("bert", "pp > 1"), ("llama", "ZeRO"), ("shared", "ZeRO")]
"""Llama's head is not tied. Random runs of ghosts, which do what real ranks do, have all families and blocks."""


def runs_of(family: Any, of: str) -> list[Run]:
    models = {"llama": LLAMAS, "shared": [SHARED]}.get(family) or [replace(model, family=family) for model in MODELS]
    plans = [one for one in PLANS[of] if one[0].pp == 1] if family == "shared" else PLANS[of]
    return [
        Run(model=fitting(model, plan), plan=plan, train=RECIPE, precision=precision)
        for (plan, precision), model in zip(plans[:: 1 if family == "gpt" else 4], cycle(models), strict=False)
    ]


def test_a_step_of_every_rank_sends_what_the_formulas_say(data: Path) -> None:
    runs = [run for case in CASES for run in runs_of(*case)]
    for run, ranks in on_ranks(step, runs, data).items():
        assert {found.pp_rank for found in ranks} == set(range(run.plan.pp))
        for found in ranks:
            place = Place(run, run.model.vocabulary(257), found.pp_rank)
            assert found.counts == step_traffic(place, found.head_positions), run


def test_tokens_that_do_not_divide_are_sent_whole(data: Path) -> None:
    plans = [Plan(pp=2, tp=2, schedule="gpipe", scatter_gather=scatters) for scatters in (True, False)]
    runs = [Run(model=fitting(replace(MODEL, seq_len=17), plan), plan=plan, train=RECIPE) for plan in plans]
    one, other = on_ranks(step, runs, data).values()
    assert one == other


@pytest.mark.parametrize(("stage", "volume"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_zero_moves_two_or_three_times_the_parameters(stage: ZeroStage, volume: int) -> None:
    """ZeRO, section 7: a rank of many sends and receives about as many elements as are scattered or gathered, and an
    all-reduce is both; embeddings, gathered once less, and padding are the rest."""
    model = ModelConfig(num_layers=24, hidden_size=1024, num_heads=16, seq_len=1024, vocab_size=8192)
    run = Run(
        model=model,
        plan=Plan(dp=64, zero_stage=stage),
        train=Recipe(global_batch=64, microbatch=1),
        precision="fp16",
        fp32_gradients=False,
    )
    counts = state_traffic(Place(run, 8192))["dp"]
    moved = sum(count.bytes * (2 if op == "all_reduce" else 1) for op, count in counts.items())
    parameters = count_parameters(model)
    assert moved / (2 * parameters) == pytest.approx(volume, rel=0.04 if stage == 3 else 0.001)


@pytest.mark.parametrize(
    ("is_split", "calls"), [(False, {"all_reduce": 4}), (True, {"reduce_scatter": 4, "all_gather": 6})]
)
def test_a_layer_moves_four_all_reduces_or_what_they_consist_of(is_split: bool, calls: dict[Op, int]) -> None:
    """Megatron-LM 2019, section 3; Korthikanti et al. 2022, section 4.2.2: two gathers more, in the backward pass."""
    model = ModelConfig(num_layers=1, hidden_size=12288, num_heads=96, seq_len=2048, vocab_size=51200)
    plan, recipe = Plan(tp=8, sequence_parallel=is_split), Recipe(global_batch=1, microbatch=1)
    runs = [Run(model=replace(model, num_layers=n), plan=plan, train=recipe, precision="bf16") for n in (1, 2)]
    one, two = (tensor_parallel_traffic(Place(run, 51200), 2048) for run in runs)
    layer = {op: two[op] + one[op] * -1 for op in calls}
    assert layer == {op: Count(count, count * 2048 * 12288 * 2) for op, count in calls.items()}


SCHEDULES = [("gpipe", 1), ("one_f_one_b", 1), ("zb_h1", 1), ("interleaved", 2), ("interleaved", 4)]


def sent(run: Run) -> list[int]:
    """Bytes that one tensor-parallel rank of each pipeline rank sends to its neighbours."""
    return [pipeline_traffic(Place(run, 51200, r)).get("send", Count()).bytes for r in range(run.plan.pp)]


def big(t: int, p: int = 4, schedule: str = "one_f_one_b", v: int = 1, **others: Any) -> Run:
    model = ModelConfig(num_layers=16, hidden_size=1024, num_heads=16, seq_len=512, vocab_size=51200)
    plan = Plan(tp=t, pp=p, schedule=schedule, chunks=v, **others)
    return Run(model=model, plan=plan, train=Recipe(global_batch=32, microbatch=2), precision="bf16")


@pytest.mark.parametrize(("schedule", "v"), SCHEDULES)
@pytest.mark.parametrize("p", [2, 4])
def test_scatter_gather_divides_what_is_sent_between_stages_by_t(p: int, schedule: str, v: int) -> None:
    """PTD-P, sections 3.2 and 4.1: b s h for each microbatch, direction and pair of neighbours, v times as many of
    these with interleaving; b s h / t scattered. Section 4.1 leaves both numbers to each of the t ranks."""
    b, s, h, m, element = 2, 512, 1024, 16, 2
    borders = p * v - 1
    for t in (1, 2, 8):
        whole = sent(big(t, p, schedule, v, scatter_gather=False))
        assert sum(whole) == 2 * m * borders * b * s * h * element
        assert [t * size for size in sent(big(t, p, schedule, v))] == whole
        if t > 1:
            split = sent(big(t, p, schedule, v, sequence_parallel=True))
            assert split == sent(big(t, p, schedule, v)), "sequence parallelism has its part already"
    if v == 1:  # the middle ranks send both ways, those at the ends one way
        assert whole == [(1 if rank in (0, p - 1) else 2) * m * b * s * h * element for rank in range(p)]
