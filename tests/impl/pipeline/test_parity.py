"""Pipeline-parallel training equals serial training, whatever the schedule: losses and every gradient."""

from dataclasses import replace
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from impl.evaluate import Evaluation
from impl.evaluation_config import EvaluationConfig
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Precision, Run
from impl.train import Trainer
from tests.impl.on_ranks import on_ranks
from tests.impl.parity import Found, assert_equal_gradients, assert_equal_steps, first_gradients, serial, steps
from tests.impl.pipeline import own_schedule

MODEL = ModelConfig(num_layers=5, hidden_size=16, num_heads=4, seq_len=16, dropout=0.1)
RECIPE = Recipe(steps=20, global_batch=6, microbatch=1, lr=1e-3, warmup_steps=3, clip_norm=0.5)

OWN = own_schedule.__name__
FAMILIES = ("gpt", "bert")
NORMS = ("pre", "post", "sandwich")


# Every gradient ------------------------------------------------------------------------------------------------------

NAMES = ("gpipe", "one_f_one_b", "interleaved", "zb_h1", f"{OWN}:two_ways", f"{OWN}:every_other")
CHUNKS = {"interleaved": 2, f"{OWN}:two_ways": 2}
LAYOUTS = [(2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (4, 2, 1), (4, 1, 2), (2, 2, 2)]
"""Degrees (pp, tp, dp)."""
HANDED_OVER = {1: [(False, True)], 2: [(False, True), (False, False), (True, True)]}
"""(plan.sequence_parallel, plan.scatter_gather) by plan.tp: parts that are gathered, the whole, parts that stay so."""


class Case(NamedTuple):
    schedule: str
    family: str
    layout: tuple[int, int, int]
    handed_over: tuple[bool, bool]

    def run(self) -> Run:
        """5 layers, or 9 in 8 stages; 3 or 6 microbatches of a rank, 4 or 8 where their number must be a multiple."""
        (pp, tp, dp), (sequence_parallel, scatter_gather) = self.layout, self.handed_over
        plan = Plan(
            pp=pp, tp=tp, dp=dp, schedule=self.schedule, chunks=CHUNKS.get(self.schedule, 1),
            sequence_parallel=sequence_parallel, scatter_gather=scatter_gather, bucket_bytes=20_000,
        )  # fmt: skip
        norm = NORMS[(NAMES.index(self.schedule) + LAYOUTS.index(self.layout)) % len(NORMS)]
        layers = 9 if plan.pp * plan.chunks > 4 else 5
        model = replace(MODEL, family=self.family, num_layers=layers, norm_placement=norm)
        recipe = replace(RECIPE, global_batch=8 if self.schedule == "interleaved" else 6)
        return Run(model=model, plan=plan, train=recipe, precision="fp64")


CASES = [
    Case(schedule, family, layout, way)
    for schedule, family, layout in product(NAMES, FAMILIES, LAYOUTS)
    for way in HANDED_OVER[layout[1]]
    if prod(layout) < 8 or NAMES.index(schedule) % 2 == FAMILIES.index(family)  # eight ranks take long
]


def name(case: Case) -> str:
    pp, tp, dp = case.layout
    way = {(False, True): "parts", (False, False): "whole", (True, True): "sequence"}[case.handed_over]
    return f"{case.schedule.split(':')[-1]}-{case.family}-pp={pp}-tp={tp}-dp={dp}-{way}"


@cache
def gradients_on(layout: tuple[int, int, int], data: Path) -> dict[Run, list[Found]]:
    return on_ranks(first_gradients, [case.run() for case in CASES if case.layout == layout], data)


@cache
def serial_gradients(data: Path) -> dict[Run, list[Found]]:
    return on_ranks(first_gradients, [serial(case.run()) for case in CASES], data)


@pytest.mark.parametrize("case", CASES, ids=name)
def test_every_gradient_equals_serial(case: Case, data: Path) -> None:
    run = case.run()
    [expected] = serial_gradients(data)[serial(run)]
    assert_equal_gradients(gradients_on(case.layout, data)[run], run.plan.tp, expected)


def test_every_schedule_is_tried_with_every_family_and_norm_placement() -> None:
    runs = [case.run() for case in CASES]
    tried = {(run.plan.schedule, run.model.family, run.model.norm_placement) for run in runs}
    assert tried == set(product(NAMES, FAMILIES, NORMS))


# Many steps ----------------------------------------------------------------------------------------------------------

PLANS = {
    "gpt": (
        Plan(pp=2), Plan(pp=4, schedule="gpipe"), Plan(pp=2, schedule="interleaved", chunks=2, dp=2),
        Plan(pp=2, schedule="zb_h1", tp=2, sequence_parallel=True), Plan(pp=2, schedule=f"{OWN}:every_other", dp=2),
    ),
    "bert": (
        Plan(pp=2, schedule="zb_h1"), Plan(pp=2, schedule=f"{OWN}:two_ways", chunks=2, tp=2), Plan(pp=4),
        Plan(pp=2, schedule="interleaved", chunks=2, tp=2, sequence_parallel=True), Plan(pp=2, schedule="gpipe"),
    ),
}  # fmt: skip
FP32: list[tuple[str, Plan, Precision]] = [(family, plan, "fp32") for family, plans in PLANS.items() for plan in plans]
LONG = FP32 + [(family, plan, "bf16") for family, plan, _ in FP32[::4]]
TOLERANCES: dict[Precision, tuple[float, float]] = {"fp32": (1e-5, 1e-4), "bf16": (5e-4, 1e-2)}
"""Relative, of a loss and of a gradient norm: bf16 has 8 bits, and what ranks sum is rounded in another order."""


def long_run(family: str, plan: Plan, precision: Precision) -> Run:
    recipe = replace(RECIPE, global_batch=4)
    return Run(model=replace(MODEL, family=family), plan=plan, train=recipe, precision=precision)


@cache
def long_runs(precision: Precision, data: Path) -> dict[Run, list[list[tuple[float, float]]]]:
    """All of them, and their serial ones."""
    runs = [long_run(family, plan, its) for family, plan, its in LONG if its == precision]
    return on_ranks(steps, [*runs, *map(serial, runs)], data)


@pytest.mark.parametrize(
    ("family", "plan", "precision"), LONG, ids=lambda value: str(getattr(value, "schedule", value))
)
def test_losses_and_norms_equal_serial_over_20_steps(family: str, plan: Plan, precision: Precision, data: Path) -> None:
    of_loss, of_norm = TOLERANCES[precision]
    run = long_run(family, plan, precision)
    [expected] = long_runs(precision, data)[serial(run)]
    assert_equal_steps(long_runs(precision, data)[run], expected, of_loss, of_norm)
    assert any(norm > run.train.clip_norm for _, norm in expected), "clipping was never at work"


# Evaluation ----------------------------------------------------------------------------------------------------------

EVALUATED = [
    Plan(pp=4), Plan(pp=2, schedule="interleaved", chunks=2, dp=2), Plan(pp=2, tp=2), Plan(pp=2, schedule="zb_h1"),
    Plan(pp=2, tp=2, sequence_parallel=True), Plan(pp=2, schedule=f"{OWN}:two_ways", chunks=2),
]  # fmt: skip
LENGTHS = (1, 7, 16)  # some of which 2 ranks do not divide


def predicted(one: Trainer) -> tuple[list[Evaluation], list[np.ndarray]]:
    """Evaluations after a step, and (GPT) nats of texts of several lengths."""
    one.step(0)
    evaluations, nats = one.evaluate(final=True), []
    if one.run.model.family == "gpt":
        text = np.asarray(one.data.tokens("valid")[:34], np.int64).reshape(2, 17)
        with torch.no_grad():
            nats = [one.next_token(text[:, :n], text[:, 1 : n + 1])[0].numpy() for n in LENGTHS]
    return evaluations, nats


def test_evaluation_equals_serial(data: Path) -> None:
    of_plans = [long_run(family, plan, "fp64") for family in FAMILIES for plan in EVALUATED]
    runs = [replace(run, evaluation=EvaluationConfig(sequences=5)) for run in of_plans]
    found = on_ranks(predicted, [*runs, *map(serial, runs)], data)
    for run in runs:
        [(expected, serial_nats)] = found[serial(run)]
        assert expected
        assert len(serial_nats) == (len(LENGTHS) if run.model.family == "gpt" else 0)
        for evaluations, nats in found[run]:
            for one, other in zip(evaluations, expected, strict=True):
                assert one.nats == pytest.approx(other.nats, rel=1e-6), run
                assert replace(one, nats=0.0) == replace(other, nats=0.0)
            for a, b in zip(nats, serial_nats, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-6)
