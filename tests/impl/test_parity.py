"""Parallel training equals serial training, whatever the plan: losses, every gradient, and what becomes of weights."""

from dataclasses import replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any, get_args

import pytest

from impl.model.config import MLPKind, ModelConfig
from impl.model.norm_placement import PLACEMENTS
from impl.plan import AXES, Plan
from impl.recipe import Recipe
from impl.run import Precision, Run, non_defaults
from impl.train import Trainer
from tests.impl.blocks import BLOCKS
from tests.impl.covering import OWN, SCHEDULES, covering, is_crossed, pairs
from tests.impl.on_ranks import on_ranks
from tests.impl.parity import (
    Found,
    assert_equal_first_steps,
    assert_equal_gradients,
    assert_equal_steps,
    first_gradients,
    first_step,
    serial,
    steps,
)  # fmt: skip

# Every pair of choices -----------------------------------------------------------------------------------------------

WITH = {"schedule": "pp", "kind": "pp", "attention": "cp", "sequence": "tp"}
"""Factors of a plan that are there with one axis only."""
FACTORS = {
    *AXES, *WITH, "recompute", "offload", "bucket", "microbatch", "parametrization", "family", "placement", "norm",
    "positions", "mlp", "heads", "biases", "tied", "parallel", "dropout", "experts", "shared",
}  # fmt: skip
SUMS = ("post", "deepnorm", "hybrid")
IMPOSSIBLE = {
    (("family", "bert"), ("mlp", "swiglu")), (("family", "bert"), ("tied", False)),
    (("attention", "ulysses"), ("heads", "shared")), (("heads", "shared"), ("tp", False)),
    *((("parallel", True), ("placement", placement)) for placement in SUMS),
    *((("norm", norm), ("placement", "without")) for norm in ("layernorm", "rmsnorm", "dyt")),
}  # fmt: skip
"""Ulysses needs a head of keys for each rank; parallel blocks have no norm of each one's sum."""


@cache
def runs() -> list[Run]:
    return covering()


def test_every_pair_of_choices_is_tried() -> None:
    tried = set().union(*map(pairs, runs()))
    every = {choice for pair in tried for choice in pair if choice[0] in FACTORS}
    missing = {
        (one, other)
        for one, other in combinations(sorted(every, key=str), 2)
        if one[0] != other[0] and is_crossed(one[0], other[0], 4)
        if WITH.get(one[0]) != other[0] and WITH.get(other[0]) != one[0]
    } - tried
    assert missing == IMPOSSIBLE
    for factor, names in {"schedule": SCHEDULES, "placement": PLACEMENTS, "mlp": get_args(MLPKind)}.items():
        assert {name for of, name in every if of == factor} == set(names)
    plans = [run.plan for run in runs()]
    for axis in AXES:
        assert {getattr(plan, axis) for plan in plans} >= ({1, 2, 4} if axis in ("dp", "cp") else {1, 2, 3, 4})
    assert {plan.world_size for plan in plans} >= {2, 3, 4, 6, 8}
    assert {(plan.zero_stage, plan.zero < plan.dp_cp) for plan in plans if plan.dp_cp > 1} == {
        (0, False), *product((1, 2, 3), (False, True))
    }  # fmt: skip
    assert max(run.model.sharing(run.plan.tp) for run in runs()) > 2


def test_first_steps_of_every_pair_equal_serial(data: Path, subtests: pytest.Subtests) -> None:
    answers = on_ranks(first_step, [*runs(), *map(serial, runs())], data)
    for run in runs():
        with subtests.test(name(run)):
            assert_equal_first_steps(answers[run], run.plan.tp, answers[serial(run)][0])


def name(run: Run) -> str:
    return " ".join(f"{key}={value}" for of in (run.plan, run.model) for key, value in non_defaults(of).items())


# Compiled layers -----------------------------------------------------------------------------------------------------

MODEL = ModelConfig(num_layers=5, hidden_size=16, num_heads=8, seq_len=16, dropout=0.1)
RECIPE = Recipe(steps=6, global_batch=4, microbatch=1, lr=1e-3, warmup_steps=3, clip_norm=0.5)
SHARED = {"kv_heads": 1, "parallel_residual": True, "rotary_fraction": 0.5}


def compiled_gradients(one: Trainer) -> Found:
    """Compiled to machine code is one model; of others what is traced, whose code would take as long again."""
    from torch._dynamo import config as of_tracing
    from torch._inductor import config

    of_tracing.fail_on_recompile_limit_hit = True  # else it goes on uncompiled
    config.compile_threads = 1  # no processes that compile for this one, and import PyTorch first
    for layer in one.model.trunk.layers.values() if one.run.model.mlp == MODEL.mlp else ():
        layer.compile(backend="aot_eager")
    return first_gradients(one)


def test_compiled_layers_equal_serial(data: Path) -> None:
    one_layer = (replace(model, num_layers=1) for model in (MODEL, replace(BLOCKS["llama"], **SHARED)))
    split = Plan(tp=2, sequence_parallel=True)
    runs = [Run(model=model, plan=split, train=RECIPE, compile=True) for model in one_layer]
    shared = replace(MODEL, num_layers=2, shared_layers=True, norm_placement="scaled")  # by depth, which is not shared
    again = replace(split, recompute="full")
    runs.append(Run(model=shared, plan=again, train=RECIPE, precision="fp64", compile=True))
    found = on_ranks(compiled_gradients, runs, data) | on_ranks(first_gradients, map(serial, runs), data)
    for run in runs:
        assert_equal_gradients(found[run], 2, found[serial(run)][0], 1e-12 if run.precision == "fp64" else 1e-5)


# Many steps ----------------------------------------------------------------------------------------------------------

TOLERANCES: dict[Precision, tuple[float, float]] = {"fp64": (1e-12, 1e-11), "fp32": (1e-5, 1e-4), "bf16": (5e-4, 1e-2)}
"""Relative, of a loss and of a gradient norm: bf16 has 8 bits, and what ranks sum is rounded in another order."""
LONG_PLANS: list[tuple[str, Precision, Plan]] = [
    ("gpt", "fp32", Plan(tp=2, dp=2, sequence_parallel=True)), ("bert", "fp32", Plan(tp=2)),
    ("gpt", "fp64", Plan(dp=2, overlap_grad_reduce=False)), ("gpt", "fp32", Plan(pp=4, schedule="gpipe")),
    ("bert", "fp32", Plan(pp=2, tp=2, schedule=f"{OWN}:two_ways", chunks=2)), ("gpt", "bf16", Plan(pp=2)),
    ("gpt", "bf16", Plan(pp=2, tp=2, schedule="zb_h1", sequence_parallel=True)),
    ("bert", "bf16", Plan(pp=2, tp=2, schedule="interleaved", chunks=2, sequence_parallel=True)),
]  # fmt: skip


def long_run(family: Any, precision: Precision, plan: Plan) -> Run:
    model = replace(MODEL, family=family, num_layers=plan.pp * plan.chunks + 1)
    return Run(model=model, plan=replace(plan, bucket_bytes=20_000), train=RECIPE, precision=precision)


LONG = [long_run(*kind) for kind in LONG_PLANS]


def test_losses_and_norms_equal_serial_over_many_steps(data: Path, subtests: pytest.Subtests) -> None:
    found = on_ranks(steps, [*LONG, *map(serial, LONG)], data)
    for run in LONG:
        [expected] = found[serial(run)]
        with subtests.test(f"{run.precision} {name(run)}"):
            assert_equal_steps(found[run], expected, *TOLERANCES[run.precision])
            assert any(norm > run.train.clip_norm for _, norm in expected), "clipping was never at work"
