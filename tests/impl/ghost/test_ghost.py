"""Ghosts do what real ranks do: the same order, sizes, waits and memory, of random plans; and what the formulas say."""

import ast
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import impl
from impl.cost.flops import hardware_flops
from impl.cost.memory import memory
from impl.errors import InputError
from impl.ghost.checks import cast, complaints
from impl.ghost.rank import Executed, execute
from impl.ghost.recorder import WHOLE, Recorder
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Precision, Run
from tests.impl.blocks import BLOCKS
from tests.impl.covering import draws
from tests.impl.ghost.ranks import ghosts, numbered, real_ranks
from tests.ranks import run_ranks

COUNT, SEED = (int(os.environ.get(name, usual)) for name, usual in (("GHOST_RUNS", 8), ("GHOST_SEED", 5)))
"""More of them, or others: `GHOST_RUNS=40 GHOST_SEED=7 pytest tests/impl/ghost`."""
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp64", "fp16")
MOST_LARGE, MOST_PASSES = 0.1, 12
"""Part of the runs that are on more than four ranks, and passes of all stages: more take longer."""


def random_runs(seed: int) -> Iterator[Run]:
    """Random runs on several ranks without end; gradients do not overflow, as ghosts assume.

    What ranks send experts of others, and what experts leave out, depends on values, which ghosts do not have.
    """
    found = large = 0
    for run, precision in zip(draws(seed, 8), cycle(PRECISIONS), strict=False):
        run = replace(run, precision=precision, train=replace(run.train, initial_loss_scale=1.0))
        is_large, passes = run.plan.world_size > 4, run.plan.pp * run.plan.chunks * run.microbatches
        depends = run.plan.ep > 1 or run.model.expert_capacity is not None
        fits = not depends and 2 <= run.plan.world_size <= 8 and large + is_large <= max(1, MOST_LARGE * found)
        if fits and passes <= MOST_PASSES and not run.problems():
            found, large = found + 1, large + is_large
            yield run


def test_ghosts_are_as_real_ranks(data: Path) -> None:
    runs = list(islice(random_runs(SEED), COUNT))
    print(f"seed {SEED}, {COUNT} runs")
    assert {run.plan.world_size > 4 for run in runs} == {True, False}
    real, found = real_ranks(runs, data), ghosts(runs, device="cpu", backend="gloo")
    alike = list[bool]()
    for run in runs:
        for rank, (one, ghost) in enumerate(zip(real[run], found[run], strict=True)):
            assert numbered(ghost.log) == numbered(one.log), (run, rank)
            assert ghost.early == [], run
            assert ghost.memory.keys() == one.memory.keys()
            states, total = ("parameters", "gradients", "optimizer"), sum(one.memory.values())
            assert [ghost.memory[name] for name in states] == [one.memory[name] for name in states], (run, rank)
            assert sum(ghost.memory.values()) == pytest.approx(total, rel=0.05), (run, rank, ghost.memory, one.memory)
            near = {name: max(0.05 * size, 0.01 * total) for name, size in one.memory.items()}
            alike.append(all(abs(ghost.memory[name] - one.memory[name]) <= most for name, most in near.items()))
        found_wrong = complaints(run, run.model.vocabulary(257), cast(run.plan), dict(enumerate(found[run])))
        assert not any(found_wrong.values()), (run, found_wrong)
    # which transfers have ended at a real rank's fullest moment, or which of two moments that is, is chance
    assert sum(alike) >= 0.9 * len(alike)


MODEL = ModelConfig(num_layers=4, hidden_size=32, num_heads=4, seq_len=16, vocab_size=512)
REPEATING: list[dict[str, Any]] = [
    {"tp": 2, "pp": 4, "recompute": "full"}, {"pp": 2, "schedule": "zbv", "chunks": 2},
    {"pp": 2, "schedule": "interleaved", "chunks": 2, "dp": 2, "zero_stage": 1},
]  # fmt: skip


def run_of(microbatches: int = 16, **plan: Any) -> Run:
    recipe = Recipe(steps=1, global_batch=microbatches * plan.get("dp", 1), microbatch=1)
    return Run(model=MODEL, plan=Plan(**plan), train=recipe, precision="bf16")


def with_and_without_repeats() -> list[tuple[Executed, Executed]]:
    dist.destroy_process_group()
    runs = [run_of(12, **plan) for plan in REPEATING]
    ranks = [(run, rank) for run in runs for rank in (0, run.plan.world_size // 2)]
    return [(execute(run, rank, 257), execute(run, rank, 257, repeats=False)) for run, rank in ranks]


def test_passes_that_repeat_others_are_as_if_they_were_executed() -> None:
    [found] = run_ranks(1, with_and_without_repeats)
    for repeating, executed in found:
        assert repeating.repeated > len(executed.passes) / 5
        assert sum(repeating.memory.values()) == sum(executed.memory.values())
        assert replace(repeating, repeated=0, memory=executed.memory) == executed


def of_gpus(runs: list[Run]) -> list[tuple[int, int]]:
    """Bytes that the first rank of each run needs: its ghost's, and by the formula."""
    dist.destroy_process_group()
    done = [execute(run, 0, 257) for run in runs]
    formula = [memory(run, 512, 0, one.head_positions).total for run, one in zip(runs, done, strict=True)]
    return [(sum(one.memory.values()), total) for one, total in zip(done, formula, strict=True)]


def test_ghosts_of_gpus_need_what_the_formula_says() -> None:
    """Norms too, which keep what the kernels of GPUs do."""
    models = [replace(MODEL, hidden_size=256, seq_len=512), replace(BLOCKS["llama"], hidden_size=256, seq_len=512)]
    plans = [{}, {"tp": 2, "sequence_parallel": True}, {"dp": 8, "zero_stage": 3}, {"recompute": "selective"}]
    runs = [replace(run_of(2, **plan), model=replace(m, vocab_size=512)) for m in models for plan in plans]
    [found] = run_ranks(1, of_gpus, runs)
    for run, (needed, total) in zip(runs, found, strict=True):
        assert total == pytest.approx(needed, rel=0.05), run


def some_of_many(run: Run) -> tuple[dict[str, list[str]], int, float]:
    """What is wrong with a run of which only some ranks are executed, how many, and FLOPs of all."""
    dist.destroy_process_group()
    chosen = cast(run.plan)
    done = {rank: execute(run, rank, 257) for rank in (*chosen.first, *chosen.last)}
    flops = sum(done[rank].flops for rank in chosen.first) * run.plan.world_size / len(chosen.first)
    return complaints(run, 512, chosen, done), len(done), flops


EXPERTS = replace(MODEL, experts=8, experts_per_token=2, experts_every=2, expert_capacity=1.0, balance_loss=0.01)


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (MODEL, {"tp": 4, "pp": 4, "dp": 8, "recompute": "full"}),
        (MODEL, {"tp": 2, "pp": 2, "dp": 8, "zero_stage": 3, "zero_group": 4, "sequence_parallel": True}),
        (MODEL, {"cp": 4, "pp": 2, "dp": 4, "schedule": "zb_h1", "zero_stage": 2}),
        (EXPERTS, {"pp": 2, "dp": 32, "ep": 4, "schedule": "zb_h1", "zero_stage": 2}),
        (EXPERTS, {"tp": 2, "dp": 32, "ep": 8, "recompute": "full", "sequence_parallel": True}),
    ],
)
def test_some_ranks_of_many_stand_for_all(model: ModelConfig, plan: dict[str, Any]) -> None:
    run = replace(run_of(4, **plan), model=model)
    [(found, executed, flops)] = run_ranks(1, some_of_many, run)
    assert not any(found.values()), found
    assert executed < run.plan.world_size / 2
    recompute = run.plan.recompute
    if run.plan.cp == 1:  # behind a causal mask a ring's kernels leave out what others count
        expected = hardware_flops("palm_12", model, run.train.global_batch, 512, recompute=recompute)
        each, is_full = 2 * run.tokens_per_step * model.expert_layers * model.hidden_size, recompute == "full"
        router = (run.plan.tp - 1) * (3 + is_full) * model.experts  # which each tensor-parallel rank does in full
        assert flops == pytest.approx(expected + each * router, rel=1e-12)


def test_what_is_not_executed_is_refused_by_name() -> None:
    for change, words in [
        ({"compile": True}, "compile True"),
        ({"engine": "torch"}, "engine torch"),
        ({"plan": Plan(offload_optimizer=True)}, "plan.offload_optimizer"),
        ({"precision": "fp8"}, "fp8"),
    ]:
        with pytest.raises(InputError, match=words):
            execute(replace(run_of(4), **change), 0, 257)


def test_all_that_the_engine_asks_of_its_groups_is_recorded() -> None:
    """No other module begins anything in a step, and the recorder has all that these two use."""
    asked = {"isend", "irecv", "broadcast", "batch_isend_irecv", "P2POp", "get_backend", *WHOLE}
    users: dict[str, set[str]] = {}
    for path in sorted(Path(impl.__path__[0]).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "dist":
                users.setdefault(path.name, set()).add(node.attr)
    types = {"ProcessGroup", "Work", "new_group", "get_rank", "get_world_size"}
    of_step = {name: used - types for name, used in users.items() if name in ("collectives.py", "context_parallel.py")}
    assert set.union(*of_step.values()) <= asked
    assert all(hasattr(Recorder("nccl", is_real=False), name) for name in asked)
    others = {"evaluate.py", "recorder.py", "rank.py", *of_step}  # evaluation is no part of a step
    peers = {path.name for path in (Path(impl.__path__[0]) / "peers").glob("*.py")}
    assert all(not used & asked for name, used in users.items() if name not in others | peers), users
