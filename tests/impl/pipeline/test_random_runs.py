"""200 random valid runs over up to 8 ranks: none hangs, and each trains as serial does."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from impl.model.config import ModelConfig
from impl.pipeline.schedules import SCHEDULES
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from impl.train import Trainer
from tests.impl.on_ranks import on_ranks
from tests.impl.pipeline import own_schedule

COUNT, SEED = 200, 4
MOST_OF_8_RANKS = 20
"""Runs of more ranks than cores wait for each other most of the time."""
OWN = own_schedule.__name__
NAMES = [*SCHEDULES, f"{OWN}:two_ways", f"{OWN}:every_other"]


def draws(seed: int) -> Iterator[Run]:
    """Random runs without end, many of which cannot be."""
    random_ = random.Random(seed)
    one_of = lambda *values: random_.choice(values)
    while True:
        name = one_of(*NAMES)
        chunks = {"interleaved": one_of(1, 2, 3), f"{OWN}:two_ways": 2}.get(name, 1)
        plan = Plan(
            pp=one_of(1, 2, 2, 3, 4), tp=one_of(1, 2), dp=one_of(1, 2), schedule=name, chunks=chunks,
            sequence_parallel=one_of(False, True), scatter_gather=one_of(False, True),
            overlap_grad_reduce=one_of(False, True), overlap_input_grad_reduce=one_of(False, True),
            bucket_bytes=one_of(1000, 10_000, 10**6),
        )  # fmt: skip
        model = ModelConfig(
            family=one_of("gpt", "bert"), num_layers=plan.pp * chunks + random_.randrange(3), hidden_size=8,
            num_heads=2, seq_len=one_of(8, 9, 12), norm_placement=one_of("pre", "post", "sandwich"),
            dropout=one_of(0.0, 0.1),
        )  # fmt: skip
        microbatch = one_of(1, 2)
        recipe = Recipe(global_batch=microbatch * plan.dp * random_.randint(1, 6), microbatch=microbatch, steps=1)
        yield Run(model=model, plan=plan, train=recipe, precision="fp64")


def chosen() -> list[Run]:
    """The first valid ones, few of them on 8 ranks."""
    runs: dict[Run, None] = {}
    ranks: Counter[int] = Counter()
    for run in draws(SEED):
        size = run.plan.world_size
        if size <= 8 and run.why_invalid() is None and (size <= 4 or ranks[size] < MOST_OF_8_RANKS):
            runs[run] = None
            ranks = Counter(run.plan.world_size for run in runs)
        if len(runs) == COUNT:
            return list(runs)
    raise AssertionError("draws do not end")


def first_step(one: Trainer) -> tuple[float, float]:
    step = one.step(0)
    return step.loss.item(), step.grad_norm.item()


def test_200_random_runs_equal_serial(data: Path) -> None:
    runs = chosen()
    serial = {run: replace(run, plan=Plan()) for run in runs}
    assert {run.plan.schedule for run in runs} == set(NAMES)
    assert {run.plan.world_size for run in runs} == {1, 2, 3, 4, 6, 8}
    answers = on_ranks(first_step, [*runs, *serial.values()], data)
    for run in runs:
        [(loss, norm)] = answers[serial[run]]
        for found in answers[run]:
            assert found[0] == pytest.approx(loss, rel=1e-10), run
            assert found[1] == pytest.approx(norm, rel=1e-10), run
