"""The checker finds every planted error and names it in one line; by NCCL's rules random plans do not hang."""

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import pytest
import torch.distributed as dist

from impl.ghost.checks import cast, complaints
from impl.ghost.events import Begin, Log, Wait
from impl.ghost.orders import hang, problems
from impl.ghost.rank import execute
from impl.model.config import ModelConfig
from impl.recipe import Recipe
from impl.run import Run
from tests.impl.ghost.mutants import MUTANTS, planted
from tests.impl.ghost.ranks import ghosts
from tests.impl.ghost.test_ghost import random_runs
from tests.ranks import run_ranks

COUNT, SEED = (int(os.environ.get(name, usual)) for name, usual in (("ORDERED_RUNS", 8), ("GHOST_SEED", 6)))
"""More of them, or others: `ORDERED_RUNS=200 GHOST_SEED=7 pytest tests/impl/ghost -k random`."""
MODEL = ModelConfig(hidden_size=16, num_heads=2, seq_len=8)


def run_of(name: str) -> Run:
    """As small as it can be: a layer for each pipeline rank, and a microbatch after the first."""
    plan = MUTANTS[name].plan
    recipe = Recipe(steps=1, global_batch=2 * plan.dp, microbatch=1)
    return Run(model=replace(MODEL, num_layers=plan.pp), plan=plan, train=recipe)


def mutants(names: Sequence[str]) -> dict[str, list[str]]:
    """What is found of every mutant; of its run without it, nothing."""
    dist.destroy_process_group()
    found: dict[str, list[str]] = {}
    for run in dict.fromkeys(map(run_of, names)):
        assert wrong(run) == [], run.plan
    for name in names:
        with planted(name):
            found[name] = wrong(run_of(name))
    return found


def wrong(run: Run) -> list[str]:
    """What the orders and uses of a run's ranks have that they must not."""
    done = {rank: execute(run, rank, 257) for rank in range(run.plan.world_size)}
    return [
        *problems({rank: one.log for rank, one in done.items()}),
        *(line for one in done.values() for line in one.early),
    ]


def test_every_planted_error_is_found_and_named() -> None:
    assert len(MUTANTS) >= 10
    [found] = run_ranks(1, mutants, list(MUTANTS))
    named = {name: any(MUTANTS[name].words in line for line in lines) for name, lines in found.items()}
    assert all(named.values()), {name: found[name] for name, is_so in named.items() if not is_so}
    assert all("\n" not in line and len(line) < 500 for lines in found.values() for line in lines), found


def test_random_plans_fit_together_and_are_as_the_formulas_say() -> None:
    print(f"seed {SEED}, {COUNT} runs")
    on_host = {"offload_optimizer": False, "offload_activations": False}  # not executed for GPUs
    runs = [replace(run, plan=replace(run.plan, **on_host)) for run in islice(random_runs(SEED), COUNT)]
    for run, ranks in ghosts(runs).items():
        found = complaints(run, run.model.vocabulary(257), cast(run.plan), dict(enumerate(ranks)))
        assert not any(found.values()), (run, found)


def both(*pair: Sequence[Begin | Wait]) -> dict[int, Log]:
    return dict(enumerate(pair))


A, B = (Begin("all_reduce", name, (0, 1), 4, "float32") for name in "ab")
SEND = Begin("send", "a", (0, 1), 4, "float32", 1)
RECEIVE = Begin("receive", "a", (0, 1), 4, "float32", 0)
BACK, FROM = SEND._replace(peer=0), RECEIVE._replace(peer=1)

as_one = lambda *transfers: [transfer._replace(batch=0) for transfer in transfers]


@pytest.mark.parametrize(
    ("logs", "by_group", "in_one"),
    [
        (both([A, B], [B, A]), False, True),  # not awaited: only one queue is in one order
        (both([A, Wait(0), B], [B, Wait(0), A]), True, True),
        (both([A, B, Wait(0)], [B, A, Wait(1)]), False, True),
        (both([SEND, RECEIVE._replace(peer=1)], [BACK, RECEIVE]), True, True),  # both send first
        (both(as_one(SEND, FROM), as_one(BACK, RECEIVE)), False, False),
        (both([SEND, FROM], [RECEIVE, BACK]), False, False),
        (both([SEND], [A._replace(group="c"), Wait(0), RECEIVE]), True, True),
    ],
)  # fmt: skip
def test_what_hangs_by_the_rules_of_nccl(logs: dict[int, Log], by_group: bool, in_one: bool) -> None:
    assert (hang(logs) is not None, hang(logs, one_queue=True) is not None) == (by_group, in_one)
