"""Few random runs that have between them every pair of what a plan and a model may be: those that parity is tried with.

A factor is one choice, as the ZeRO stage; its levels are what may be chosen. A pair is two levels of two factors.
"""

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, islice
from typing import Any, get_args

import numpy as np

from impl.evaluation_config import EvaluationConfig
from impl.fields import divisors
from impl.model.config import MLPKind, ModelConfig, NormKind
from impl.model.norm_placement import PLACEMENTS
from impl.pipeline.schedules import SCHEDULES as PACKAGED
from impl.pipeline.schedules import WRITTEN, build
from impl.pipeline.written import written
from impl.plan import AXES, Plan, Recompute
from impl.recipe import Recipe
from impl.run import Run
from tests.impl.pipeline import own_schedule

SEED = int(os.environ.get("RANDOM_SEED", 1))
"""Others: `RANDOM_SEED=7 pytest tests/impl/test_parity.py -k pair`."""
EVERY = bool(os.environ.get("EVERY_SCHEDULE"))
"""True if each schedule is to meet all other choices, on up to 8 ranks: twice the runs."""
OWN = own_schedule.__name__
SEARCHED: dict[str, str] = dict(zip(WRITTEN, (own_schedule.SEARCHED, own_schedule.SEARCHED_V), strict=True))
"""What the written-out tables of runs are found by, before any rank starts."""
SCHEDULES = (*PACKAGED, f"{OWN}:two_ways", f"{OWN}:every_other", *SEARCHED)
CHUNKS = dict.fromkeys(("interleaved", "zbv", "v_half", "v_min", "dualpipe_v", SCHEDULES[-4], SCHEDULES[-1]), 2)
DRAWS = {4: 3000, 8: 4000 if EVERY else 300}
"""How many runs are looked at, by the most ranks that they may have."""
SERIAL = 1
"""What serial training costs beside a rank."""
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def drawn(random_: random.Random, most: int) -> Run:
    """A random run of up to this many ranks.

    Raises:
        ValueError: it cannot be.
    """
    one_of = lambda *values: random_.choice(values)
    schedule = one_of(*SCHEDULES)
    degrees = {"pp": one_of(1, 2, 2, 3, 4), "tp": one_of(1, 2, 2, 3, 4), "dp": one_of(1, 2, 4), "cp": one_of(1, 2, 4)}
    for axis in random_.sample(AXES, one_of(1, 2, 2)) if most <= 4 else ():
        degrees[axis] = 1
    recompute, stage = one_of(*get_args(Recompute)), one_of(0, 1, 2, 3)
    plan = Plan(
        **degrees, schedule=schedule, bucket_bytes=one_of(1000, 10_000, 10**6),
        chunks=1 if degrees["pp"] == 1 else {**CHUNKS, "interleaved": one_of(2, 2, 3)}.get(schedule, 1),
        cp_attention="ring" if degrees["cp"] == 1 else one_of("ring", "ulysses"),
        sequence_parallel=one_of(False, True), scatter_gather=one_of(False, True),
        overlap_grad_reduce=one_of(False, True), overlap_input_grad_reduce=one_of(False, True),
        overlap_param_gather=one_of(False, True), offload_optimizer=one_of(False, True), recompute=recompute,
        zero_stage=stage,
        zero_group=one_of(None, *divisors(degrees["dp"] * degrees["cp"])) if stage else None,
        ep=one_of(1, 1, 2, 4) if degrees["dp"] * degrees["cp"] > 1 else 1,
        partition_activations=recompute == "full" and one_of(False, True),
        offload_activations=recompute == "full" and one_of(False, True),
    )  # fmt: skip
    if not 1 <= plan.world_size <= most:
        raise ValueError("too many ranks")
    positions = one_of("learned", "rotary")
    heads = plan.tp * one_of(1, 2) * (plan.cp if plan.exchanges_heads else 1)
    dropout, experts = one_of(0.0, 0.1), one_of(0, 0, 0, 4) if plan.ep == 1 else 4
    of_experts = {
        "experts": experts, "experts_every": one_of(1, 2), "expert_prototypes": one_of(1, 2), "balance_bias": 0.01,
        "experts_per_token": one_of(1, 2), "expert_size": one_of(None, 4 * plan.tp), "balance_loss": 0.1,
        "shared_expert_size": one_of(0, 3 * plan.tp), "expert_capacity": None if plan.cp > 1 else one_of(None, 0.8),
    }  # fmt: skip
    model = ModelConfig(
        family=one_of("gpt", "bert"), num_layers=plan.pp * plan.chunks + one_of(0, 1) if plan.pp > 1 else 2,
        num_heads=heads, hidden_size=heads * (4 if positions == "rotary" else random_.randint(3, 5)),
        seq_len=one_of(8, 12), vocab_size=random_.randint(260, 400), norm_placement=one_of(*PLACEMENTS),
        norm=one_of(*get_args(NormKind)), kv_heads=one_of(None, *divisors(heads)), positions=positions,
        rotary_fraction=one_of(0.5, 1.0) if positions == "rotary" else 1.0,
        parallel_residual=one_of(False, False, True),
        mlp=one_of(*get_args(MLPKind)), mlp_size=one_of(None, plan.tp * random_.randint(5, 9)),
        biases=one_of(False, True), tied=one_of(False, True), dropout=dropout,
        attention_dropout=0.0 if plan.is_ring else None, **(of_experts if experts else {}),
        shared_layers=plan.pp == 1 and one_of(False, False, True),
    )  # fmt: skip
    microbatch, count = one_of(1, 2), one_of(1, 2, plan.pp + 1, 2 * plan.pp) if plan.pp > 1 else one_of(1, 2)
    recipe = Recipe(
        global_batch=microbatch * plan.dp * count, microbatch=microbatch, steps=1, warmup_steps=0, clip_norm=0.5,
        **one_of({}, {"parametrization": "mup", "base_hidden_size": 8, "base_layers": one_of(None, 2)}),
    )  # fmt: skip
    run = Run(model=model, plan=plan, train=recipe, precision="fp64", evaluation=EvaluationConfig(sequences=3))
    if schedule in SEARCHED:
        run = replace(run, plan=replace(plan, schedule=table_of(schedule, plan.pp, run.microbatches, plan.chunks)))
    if problems := run.problems():
        raise ValueError(problems[0])
    return run


@cache
def table_of(way: str, pp: int, microbatches: int, chunks: int) -> str:
    """The shortest table, written out."""
    return written(build(SEARCHED[way], pp, microbatches, chunks)) or ""


def draws(seed: int, most: int) -> Iterator[Run]:
    """Random runs without end."""
    random_ = random.Random(f"{seed} {most}")
    while True:
        try:
            yield drawn(random_, most)
        except ValueError:
            continue


@cache
def kind(schedule: str, pp: int, microbatches: int, chunks: int) -> str:
    """Whether backward passes are split, and whether one rank has both ends of the model."""
    table = build(schedule, pp, microbatches, chunks)
    folded = table.rank_of[0] == table.rank_of[pp * chunks - 1]
    return f"{'split' if table.is_split else 'whole'}, {'folded' if folded else f'{min(chunks, 2)} chunks'}"


def levels(run: Run) -> dict[str, Any]:
    """What was chosen, by factor; nothing where there was no choice."""
    plan, model = run.plan, run.model
    found: dict[str, Any] = {axis: getattr(plan, axis) > 1 for axis in AXES}
    found |= {f"degree of {axis}": getattr(plan, axis) for axis in AXES} | {
        "recompute": plan.recompute, "offload": plan.offload_optimizer, "bucket": plan.bucket_bytes,
        "placement": model.norm_placement, "family": model.family, "positions": model.positions, "mlp": model.mlp,
        "biases": model.biases, "tied": model.tied, "parallel": model.parallel_residual, "dropout": model.dropout,
        "heads": "whole" if model.kv_heads is None else "grouped" if model.sharing(plan.tp) == 1 else "shared",
        "parametrization": run.train.parametrization, "microbatch": run.train.microbatch,
        "experts": f"every {model.experts_every}" if model.experts else "none",
    }  # fmt: skip
    if model.norm_placement != "without":
        found["norm"] = model.norm
    if plan.recompute == "full":
        found |= {"inputs offloaded": plan.offload_activations, "inputs parted": plan.partition_activations}
    if plan.pp == 1:
        found["shared"] = model.shared_layers
    if plan.pp > 1:
        found["schedule"] = next((way for way in SEARCHED if plan.schedule.startswith(way)), plan.schedule)
        found["kind"] = kind(plan.schedule, plan.pp, run.microbatches, plan.chunks)
    if plan.cp > 1:
        found["attention"] = plan.cp_attention
    if plan.tp > 1:
        found |= {"sequence": plan.sequence_parallel, "input gradients": plan.overlap_input_grad_reduce}
    if plan.tp > 1 < plan.pp:
        found["scatter"] = plan.scatter_gather
    if plan.dp_cp > 1:
        found |= {"zero": plan.zero_stage, "reduce": plan.overlap_grad_reduce, "degree of ep": plan.ep}
    if plan.dp_cp > 1 and plan.zero_stage:
        found["group"] = "all" if plan.zero == plan.dp_cp else "one" if plan.zero == 1 else "some"
        found["gather"] = plan.overlap_param_gather
    if len(axes := [axis for axis in AXES if found[axis]]) > 2:
        found["together"] = " ".join(axes)
    return found


DEGREES = {f"degree of {axis}" for axis in AXES}
ONLY: dict[str, set[str]] = {
    "schedule": {*AXES},
    "together": {"sequence", "attention"},
    "degree of pp": {"kind", *DEGREES},
    "degree of tp": {"sequence", "heads", "scatter", "input gradients", *DEGREES},
    "degree of dp": {"zero", "group", *DEGREES},
    "degree of cp": {"attention", "zero", *DEGREES},
    "degree of ep": {*AXES, "sequence", "zero", "group", "recompute", "kind"},
    "experts": {*AXES, "sequence", "recompute", "kind", "zero", "mlp", "biases", "parallel", "dropout", "norm"},
    "placement": {*AXES, "sequence", "recompute", "norm", "family", "positions", "tied", "parallel", "heads", "mlp"},
}
"""What factors of many levels are crossed with; others with all. Of a schedule, its kind is crossed with the rest."""
ONLY["shared"] = {
    "dp", "tp", "cp", "sequence", "attention", "recompute", "zero", "group", "bucket", "microbatch", "reduce", "gather",
    "family", "norm", "biases", "dropout", "parametrization", "inputs parted",
}  # fmt: skip
if EVERY:
    del ONLY["schedule"]
    ONLY["together"] |= {"kind", "zero"}
    ONLY["degree of pp"] |= {"schedule"}


def pairs(run: Run) -> set[Pair]:
    """Pairs of levels; of more than 4 ranks only those of the degrees, and of three axes together."""
    kinds = combinations(sorted(levels(run).items()), 2)
    return {((a, x), (b, y)) for (a, x), (b, y) in kinds if is_crossed(a, b, run.plan.world_size)}


@cache
def is_crossed(a: str, b: str, ranks: int) -> bool:
    few = ranks <= 4 or {a, b} <= DEGREES or "together" in (a, b) or (EVERY and "schedule" in (a, b))
    is_one = {a, b} == {"kind", "schedule"}
    return few and not is_one and all(other in ONLY.get(one, {other}) for one, other in ((a, b), (b, a)))


def covering(seed: int = SEED) -> list[Run]:
    """As few random runs as a greedy choice needs for all their pairs: next is what has most new ones for its ranks.

    A pair counts by how few runs have it: rare ones come first, and the others come along with them.
    """
    runs = list(dict.fromkeys(run for most, count in DRAWS.items() for run in islice(draws(seed, most), count)))
    number: dict[Pair, int] = {}
    numbers = [[number.setdefault(pair, len(number)) for pair in pairs(run)] for run in runs]
    has = np.zeros((len(runs), len(number)), np.float32)
    for row, some in zip(has, numbers, strict=True):
        row[some] = 1
    costs, weights, chosen = [run.plan.world_size + SERIAL for run in runs], 1 / has.sum(0), set[int]()
    while weights.any():
        best = int(np.argmax(has @ weights / costs))
        chosen.add(best)
        weights[numbers[best]] = 0
    return [run for i, run in enumerate(runs) if i in chosen]
