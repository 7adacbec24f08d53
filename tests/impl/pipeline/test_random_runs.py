"""150 random valid runs over up to 8 ranks: none hangs, and each has every gradient that serial has."""

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
from tests.impl.parity import Found, assert_equal_gradients, first_gradients
from tests.impl.pipeline import own_schedule

COUNT, SEED = 150, 4
MOST_OF_8_RANKS = 15
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
            pp=one_of(1, 2, 2, 3, 4), tp=one_of(1, 1, 2, 2, 3, 4), dp=one_of(1, 2), schedule=name, chunks=chunks,
            sequence_parallel=one_of(False, True), scatter_gather=one_of(False, True),
            overlap_grad_reduce=one_of(False, True), overlap_input_grad_reduce=one_of(False, True),
            bucket_bytes=one_of(1000, 10_000, 10**6),
        )  # fmt: skip
        heads = plan.tp * one_of(1, 2)
        model = ModelConfig(
            family=one_of("gpt", "bert"), num_layers=plan.pp * chunks + random_.randrange(3),
            hidden_size=heads * random_.randint(1, 5), num_heads=heads, seq_len=one_of(8, 9, 12),
            vocab_size=random_.randint(260, 800), norm_placement=one_of("pre", "post", "sandwich"),
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
    serial = {run: replace(run, plan=Plan()) for run in runs}
    assert {run.plan.schedule for run in runs} == set(NAMES)
    assert {run.plan.world_size for run in runs} >= {1, 2, 3, 4, 6, 8}
    assert {run.plan.tp for run in runs} == {1, 2, 3, 4}
    answers = on_ranks(gradients_and_norm, [*runs, *serial.values()], data)
    for run in runs:
        [(expected, norm)] = answers[serial[run]]
        assert_equal_gradients([found for found, _ in answers[run]], run.plan.tp, expected)
        assert [one for _, one in answers[run]] == pytest.approx([norm] * run.plan.world_size, rel=1e-10), run
