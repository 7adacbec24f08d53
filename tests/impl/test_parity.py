"""Parallel training equals serial training, whatever the plan: losses and every gradient."""

import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from impl.fields import divisors
from impl.model.config import ModelConfig, NormKind
from impl.model.norm_placement import PLACEMENTS
from impl.pipeline.schedules import SCHEDULES as PACKAGED
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Precision, Run, non_defaults
from impl.train import Trainer
from tests.impl.blocks import BLOCKS
from tests.impl.on_ranks import on_ranks
from tests.impl.parity import Found, assert_equal_gradients, assert_equal_steps, first_gradients, serial, steps
from tests.impl.pipeline import own_schedule

MODEL = ModelConfig(num_layers=5, hidden_size=16, num_heads=8, seq_len=16, dropout=0.1)
RECIPE = Recipe(steps=8, global_batch=6, microbatch=1, lr=1e-3, warmup_steps=3, clip_norm=0.5)
OWN = own_schedule.__name__
FAMILIES, NORMS = ("gpt", "bert"), ("pre", "post", "sandwich")
KINDS: tuple[NormKind, ...] = ("rmsnorm", "dyt", "layernorm")
SCHEDULES = ("gpipe", "one_f_one_b", "interleaved", "zb_h1", f"{OWN}:two_ways", f"{OWN}:every_other")
CHUNKS = {"interleaved": 2, f"{OWN}:two_ways": 2, "zbv": 2, "v_half": 2, "v_min": 2, "dualpipe_v": 2}
CHUNKS |= {own_schedule.SEARCHED_V: 2}
HOLD_MORE = ("interleaved", "zb_h2", "zbv", "v_half", "v_min", "dualpipe_v")
"""Schedules that begin more microbatches than there are pipeline ranks before they end one, or need a multiple."""


def run_of(plan: Plan, family: Any, norm: str = "pre", precision: Precision = "fp64") -> Run:
    """2 layers, or a layer more than stages; 2 microbatches of a rank, or more than there are stages."""
    layers = 2 if plan.pp == 1 else plan.pp * plan.chunks + 1
    microbatches = 2 if plan.pp == 1 else 2 * plan.pp if plan.schedule in HOLD_MORE else plan.pp + 1
    model = replace(MODEL, family=family, norm_placement=norm, num_layers=layers)
    return Run(model=model, plan=plan, train=replace(RECIPE, global_batch=microbatches * plan.dp), precision=precision)


def of(schedule: str = "one_f_one_b", **fields: Any) -> Plan:
    return Plan(schedule=schedule, chunks=CHUNKS.get(schedule, 1), bucket_bytes=20_000, **fields)


def name(run: Run) -> str:
    fields = {name: str(value).split(":")[-1] for name, value in non_defaults(run.plan).items()}
    plan = "-".join(f"{name}={value}" for name, value in fields.items() if name not in ("bucket_bytes", "chunks"))
    block = f"{run.model.family}-{run.model.norm_placement}-{run.model.norm}-{run.model.mlp}-{run.model.dropout}"
    return f"{plan}-{block}-{run.precision}"


# Every gradient ------------------------------------------------------------------------------------------------------

SPLIT: list[dict[str, Any]] = [{"tp": tp, "sequence_parallel": parts} for tp, parts in product((2, 4), (False, True))]
DATA: list[dict[str, Any]] = [{"dp": 2}, {"dp": 4}]
MIXED: list[dict[str, Any]] = [
    {"dp": dp, "tp": tp, "sequence_parallel": parts}
    for (dp, tp), parts in product([(1, 8), (2, 2), (2, 4), (4, 2)], (False, True))
]
LAYOUTS = [(2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (4, 2, 1), (4, 1, 2), (2, 2, 2)]
"""Degrees (pp, tp, dp) of pipelines."""
HANDED_OVER = {1: [(False, True)], 2: [(False, True), (False, False), (True, True)]}
"""(plan.sequence_parallel, plan.scatter_gather) by plan.tp: parts that are gathered, the whole, parts that stay so."""
WAYS = [(*degrees, *way) for degrees in LAYOUTS for way in HANDED_OVER[degrees[1]]]
PIPELINES = [
    run_of(
        of(schedule, pp=pp, tp=tp, dp=dp, sequence_parallel=parts, scatter_gather=scatters),
        FAMILIES[(k + i) % len(FAMILIES)],
        NORMS[(k + i) % len(NORMS)],
    )
    for k, schedule in enumerate(SCHEDULES)
    for i, (pp, tp, dp, parts, scatters) in enumerate(WAYS)
]
"""Every schedule in every layout; families and placements take turns, so that each schedule meets each pair."""
LESS_BUBBLE: list[dict[str, Any]] = [
    *({"schedule": "zb_h2", "pp": 4}, {"schedule": "zb_h2", "pp": 2, "dp": 2, "zero_stage": 2}),
    *({"schedule": "zbv", "pp": 4}, {"schedule": "zbv", "pp": 2, "dp": 2, "zero_stage": 3}),
    {"schedule": "zbv", "pp": 2, "tp": 2, "recompute": "full"},
    *({"schedule": "v_half", "pp": 3}, {"schedule": "v_half", "pp": 2, "tp": 2, "scatter_gather": False}),
    *({"schedule": "v_min", "pp": 4}, {"schedule": "v_min", "pp": 2, "dp": 2, "zero_stage": 1}),
    *({"schedule": "dualpipe_v", "pp": 3}, {"schedule": "dualpipe_v", "pp": 2, "dp": 2, "zero_stage": 3}),
    {"schedule": "dualpipe_v", "pp": 2, "tp": 2, "sequence_parallel": True, "recompute": "selective"},
    *({"schedule": own_schedule.SEARCHED, "pp": 4}, {"schedule": own_schedule.SEARCHED, "pp": 2, "tp": 2}),
    {"schedule": own_schedule.SEARCHED_V, "pp": 2, "dp": 2, "zero_stage": 2},
]
"""Of the schedules that are not crossed with everything; the random runs below have them too."""
ATLAS_PLANS: list[dict[str, Any]] = [
    {"tp": 2},
    {"tp": 4, "sequence_parallel": True},
    {"dp": 2, "tp": 2},
    {"tp": 2, "recompute": "full"},
    {"tp": 2, "sequence_parallel": True, "recompute": "selective"},
    {"pp": 2, "schedule": "zb_h1", "tp": 2},
    {"pp": 2, "schedule": "interleaved", "dp": 2},
]
ATLAS = [
    replace(run, model=replace(run.model, norm=KINDS[i % 3]))
    for i, run in enumerate(
        run_of(of(**how), FAMILIES[(k + j) % 2], norm)
        for k, norm in enumerate(PLACEMENTS)
        for j, how in enumerate(ATLAS_PLANS)
    )
]
"""Every norm placement under every axis, the functions that norms may be in turn."""
BLOCK_PLANS: list[dict[str, Any]] = [
    *({"tp": 2}, {"tp": 4, "sequence_parallel": True}, {"dp": 2}, {"tp": 2, "recompute": "full"}),
    *({"tp": 2, "recompute": "selective"}, {"pp": 2}, {"pp": 2, "tp": 2, "schedule": "zb_h1"}),
    {"pp": 3, "dp": 2, "schedule": "gpipe"},
]
OTHER_BLOCKS = [replace(run_of(of(**how), "gpt"), model=model) for model, how in product(BLOCKS.values(), BLOCK_PLANS)]
"""Blocks other than GPT-2's, untied output heads among them."""
ULYSSES: dict[str, Any] = {"cp_attention": "ulysses"}
CONTEXT_PLANS: list[dict[str, Any]] = [
    {"cp": 2}, {"cp": 2, **ULYSSES}, {"cp": 4, "recompute": "selective"}, {"cp": 4, "recompute": "full", **ULYSSES},
    {"cp": 2, "tp": 2, "sequence_parallel": True}, {"cp": 2, "tp": 2, "sequence_parallel": True, **ULYSSES},
    {"cp": 2, "dp": 2, "zero_stage": 3, "recompute": "full"}, {"cp": 2, "dp": 2, "zero_stage": 1, "zero_group": 2},
    {"cp": 4, "dp": 2, "zero_stage": 2, "zero_group": 4}, {"cp": 2, "tp": 2, "pp": 2, "schedule": "zb_h1"},
    {"cp": 2, "dp": 2, "pp": 2, "schedule": "interleaved", "zero_stage": 2, **ULYSSES},
]  # fmt: skip
"""Every sequence on several ranks: in a ring, whose attention has no dropout, or by exchanging heads."""


def context_run(how: dict[str, Any], model: ModelConfig) -> Run:
    run = run_of(of(**how), model.family)
    model = replace(model, num_layers=run.model.num_layers)
    return replace(run, model=model if "cp_attention" in how else replace(model, attention_dropout=0.0))


CONTEXT = [
    context_run(how, model)
    for how in CONTEXT_PLANS
    for model in (MODEL, replace(MODEL, family="bert"), BLOCKS["grouped queries, dropout"])
    if replace(model, num_layers=2).groups_of(how.get("tp", 1)) % how["cp"] == 0 or "cp_attention" not in how
]
RUNS = [
    *(
        run_of(of(**how), family, NORMS[i % len(NORMS)])
        for i, (how, family) in enumerate(product([*DATA, *SPLIT, *MIXED], FAMILIES))
    ),
    *(run_of(of(**how), family, "pre", "fp32") for how, family in product([*DATA[:1], *SPLIT[:2]], FAMILIES)),
    *PIPELINES,
    *(run_of(of(**how), FAMILIES[i % 2], NORMS[i % 3]) for i, how in enumerate(LESS_BUBBLE)),
    *ATLAS,
    *OTHER_BLOCKS,
    *CONTEXT,
]


@cache
def gradients(data: Path) -> dict[Run, list[Found]]:
    return on_ranks(first_gradients, [*RUNS, *map(serial, RUNS)], data)


@pytest.mark.parametrize("run", RUNS, ids=name)
def test_every_gradient_equals_serial(run: Run, data: Path) -> None:
    found = gradients(data)
    [expected] = found[serial(run)]
    assert_equal_gradients(found[run], run.plan.tp, expected, 1e-12 if run.precision == "fp64" else 1e-5)


def test_every_schedule_is_tried_with_every_family_and_norm_placement() -> None:
    tried = {(run.plan.schedule, run.model.family, run.model.norm_placement) for run in PIPELINES}
    assert tried == set(product(SCHEDULES, FAMILIES, NORMS))


SHARED = {"kv_heads": 1, "parallel_residual": True, "rotary_fraction": 0.5}


@pytest.mark.parametrize("model", [MODEL, replace(BLOCKS["llama"], **SHARED)], ids=["gpt", "llama"])
def test_compiled_layers_equal_serial(model: ModelConfig, data: Path) -> None:
    run = run_of(of(tp=2, sequence_parallel=True), "gpt", "pre", "fp32")
    run = replace(run, model=replace(model, num_layers=1), compile=True)
    found = on_ranks(first_gradients, [run, serial(run)], data)
    assert_equal_gradients(found[run], 2, found[serial(run)][0], 1e-5)


# Many steps ----------------------------------------------------------------------------------------------------------

TOLERANCES: dict[Precision, tuple[float, float]] = {"fp64": (1e-12, 1e-11), "fp32": (1e-5, 1e-4), "bf16": (5e-4, 1e-2)}
"""Relative, of a loss and of a gradient norm: bf16 has 8 bits, and what ranks sum is rounded in another order."""
LONG_PLANS: list[tuple[str, Precision, Plan]] = [
    ("gpt", "fp32", of(tp=2, dp=2, sequence_parallel=True)), ("bert", "fp32", of(tp=2)),
    ("gpt", "fp32", of(dp=2)), ("gpt", "fp64", of(dp=2, overlap_grad_reduce=False)),
    ("gpt", "fp32", of("gpipe", pp=4)), ("bert", "fp32", of(f"{OWN}:two_ways", pp=2, tp=2)),
    ("gpt", "bf16", of(pp=2)), ("gpt", "bf16", of("zb_h1", pp=2, tp=2, sequence_parallel=True)),
    ("bert", "bf16", of("interleaved", pp=2, tp=2, sequence_parallel=True)),
]  # fmt: skip


def long_run(family: str, precision: Precision, plan: Plan) -> Run:
    run = run_of(plan, family, precision=precision)
    return replace(run, train=replace(RECIPE, global_batch=4))


LONG = [long_run(*kind) for kind in LONG_PLANS]


@cache
def many_steps(data: Path) -> dict[Run, list[list[tuple[float, float]]]]:
    return on_ranks(steps, [*LONG, *map(serial, LONG)], data)


@pytest.mark.parametrize("run", LONG, ids=name)
def test_losses_and_norms_equal_serial_over_many_steps(run: Run, data: Path) -> None:
    found = many_steps(data)
    [expected] = found[serial(run)]
    assert_equal_steps(found[run], expected, *TOLERANCES[run.precision])
    assert any(norm > run.train.clip_norm for _, norm in expected), "clipping was never at work"


# Random runs ---------------------------------------------------------------------------------------------------------

COUNT, SEED = (int(os.environ.get(name, usual)) for name, usual in (("RANDOM_RUNS", 75), ("RANDOM_SEED", 96)))
"""More of them, or others: `RANDOM_RUNS=300 RANDOM_SEED=7 pytest tests/impl/test_parity.py -k random`."""
EVERY = tuple(dict.fromkeys([*SCHEDULES, *PACKAGED]))
NORMED = [name for name in PLACEMENTS if name != "without"]
"""Without norms, or with dynamic tanh, first tokens are alike at first: gradients of BERT's sentence head cancel out. A
norm over two features would have two values, and gradients of 1e-28."""
MOST_OF_8_RANKS = 15
"""Runs of more ranks than cores wait for each other most of the time."""


def draws(seed: int) -> Iterator[Run]:
    """Random runs without end, many of which cannot be."""
    random_ = random.Random(seed)
    one_of = lambda *values: random_.choice(values)
    while True:
        name = one_of(*EVERY)
        chunks = {**CHUNKS, "interleaved": one_of(1, 2, 3)}.get(name, 1)
        plan = Plan(
            pp=one_of(1, 2, 2, 3, 4), tp=one_of(1, 1, 2, 2, 3, 4), dp=one_of(1, 2, 4, 4), schedule=name, chunks=chunks,
            cp=(cp := one_of(1, 1, 2, 2, 4)), cp_attention="ring" if cp == 1 else one_of("ring", "ulysses"),
            sequence_parallel=one_of(False, True), scatter_gather=one_of(False, True),
            overlap_grad_reduce=one_of(False, True), overlap_input_grad_reduce=one_of(False, True),
            bucket_bytes=one_of(1000, 10_000, 10**6), zero_stage=one_of(0, 1, 2, 2, 3, 3),
        )  # fmt: skip
        groups = None, (plan.dp_cp + 1) // 2, *divisors(plan.dp_cp)
        plan = replace(plan, zero_group=one_of(*groups) if plan.zero_stage else None)
        heads = plan.tp * one_of(1, 2)
        placement = one_of(*NORMED)
        of_sums = PLACEMENTS[placement].attention.sum or PLACEMENTS[placement].mlp.sum
        model = ModelConfig(
            family=one_of("gpt", "bert"), num_layers=plan.pp * chunks + random_.randrange(3),
            hidden_size=heads * random_.randint(3, 7), num_heads=heads, seq_len=one_of(8, 9, 12),
            vocab_size=random_.randint(260, 800), norm_placement=placement, norm=one_of("layernorm", "rmsnorm"),
            dropout=one_of(0.0, 0.1), kv_heads=one_of(None, *divisors(heads)),
            parallel_residual=one_of(False, not of_sums),
            attention_dropout=0.0 if cp > 1 and plan.cp_attention == "ring" else None,
        )  # fmt: skip
        microbatch = one_of(1, 2)
        recipe = Recipe(
            global_batch=microbatch * plan.dp * random_.randint(1, 6), microbatch=microbatch, steps=1,
            **one_of({}, {"parametrization": "mup", "base_hidden_size": 8, "base_layers": one_of(None, 2)}),
        )  # fmt: skip
        yield Run(model=model, plan=plan, train=recipe, precision="fp64")


def chosen() -> list[Run]:
    """The first valid ones, few of them on 8 ranks."""
    runs: dict[Run, None] = {}
    ranks: Counter[int] = Counter()
    for run in draws(SEED):
        size = run.plan.world_size
        if size <= 8 and not run.problems() and (size <= 4 or ranks[size] < MOST_OF_8_RANKS):
            runs[run] = None
            ranks = Counter(run.plan.world_size for run in runs)
        if len(runs) == COUNT:
            return list(runs)
    raise AssertionError("draws do not end")


def gradients_and_norm(one: Trainer) -> tuple[Found, float]:
    return first_gradients(one), one.step(0).grad_norm.item()


def test_random_runs_equal_serial(data: Path) -> None:
    runs = chosen()
    assert {run.plan.schedule for run in runs if run.plan.pp > 1} == set(EVERY)
    assert {run.plan.world_size for run in runs} >= {1, 2, 3, 4, 6, 8}
    assert {run.plan.tp for run in runs} == {1, 2, 3, 4}
    assert {run.plan.zero_stage for run in runs if run.plan.zero > 1 < run.plan.replicas} == {1, 2, 3}
    assert {run.plan.cp_attention for run in runs if run.plan.cp > 1} == {"ring", "ulysses"}
    assert {run.model.sharing(run.plan.tp) for run in runs} >= {1, 2, 4}
    answers = on_ranks(gradients_and_norm, [*runs, *map(serial, runs)], data)
    for run in runs:
        [(expected, norm)] = answers[serial(run)]
        assert_equal_gradients([found for found, _ in answers[run]], run.plan.tp, expected)
        assert [one for _, one in answers[run]] == pytest.approx([norm] * run.plan.world_size, rel=1e-10), run
