"""What our own experiments share: models, timed runs in turn, and plans over one axis with their names."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from harness.experiment.kit import (
    GIB, MILLI, MODEL, RANKS, Check, Claim, Column, EvaluationConfig, ModelConfig, Plan, Point, Precision, Recipe,
    Run, Tolerance, of_run,
)  # fmt: skip

MODEL_25M = ModelConfig(num_layers=6, hidden_size=512, num_heads=8, seq_len=256, vocab_size=8192)
MODEL_7M = replace(MODEL_25M, hidden_size=256, num_heads=4)
SLOWER = Tolerance(1.02, "repeats of one point differ by as much", "2026-11-21")
"""Ratio of step times that still counts as no slower."""
SCHEDULES = {"gpipe": "GPipe", "one_f_one_b": "1F1B", "interleaved": "interleaved"}


def claim(text: str, check: Check, **more: Any) -> Claim:
    """Return a claim of our own."""
    return Claim(text, "our own", check, **more)


def timed(model: ModelConfig, plan: Plan, train: Recipe, precision: Precision = "fp32") -> Run:
    """Return a run for speed only."""
    return Run(model=model, plan=plan, train=train, evaluation=EvaluationConfig(sequences=None), precision=precision)


def in_turn(variants: Callable[[Run], Sequence[Run]], runs: Iterable[Run], repeats: int) -> list[Run]:
    """Return the variants of each run, repeated in turn: A B C A B C."""
    return [replace(one, repeat=repeat) for run in runs for repeat in range(repeats) for one in variants(run)]


def in_both(model: ModelConfig, plans: Sequence[Plan], recipe: Recipe) -> list[Run]:
    """Return each plan in fp32 and in bf16."""
    return [run for plan in plans for run in (timed(model, plan, recipe), timed(model, plan, recipe, "bf16"))]


def data_parallel(n: int, **fields: Any) -> list[Plan]:
    """Return ZeRO's stages over n ranks; stage 0 divides nothing."""
    return [Plan(dp=n, zero_stage=stage, **fields) for stage in (0, 1, 2, 3)]


def layers_shared(n: int) -> list[Plan]:
    """Return tensor parallelism over n ranks, without and with sequence parallelism."""
    return [Plan(tp=n), Plan(tp=n, sequence_parallel=True)]


def pipelines(n: int, chunks: int) -> list[Plan]:
    """Return a pipeline of n ranks by each schedule; the interleaved one has several chunks a rank."""
    plain = [Plan(pp=n, schedule="gpipe"), Plan(pp=n, schedule="one_f_one_b")]
    return [*plain, Plan(pp=n, schedule="interleaved", chunks=chunks)]


def plan_name(plan: Plan) -> str:
    """Return the name of a plan over one axis: `dp`, `zero 3`, `tp, sequence parallel`, `pp, 1F1B`."""
    if plan.tp > 1:
        return "tp, sequence parallel" if plan.sequence_parallel else "tp"
    if plan.pp > 1:
        return f"pp, {SCHEDULES.get(plan.schedule, plan.schedule)}"
    return f"zero {plan.zero_stage}" if plan.zero_stage else "dp"


def by_plan(point: Point) -> tuple[Any, ...]:
    """Return the sort key of a point: by model size, then by plan as in `plan_name`, fp32 before bf16."""
    run, plan = point.run, point.run.plan
    schedule = [*SCHEDULES, plan.schedule].index(plan.schedule)
    axis = (plan.pp > 1, plan.tp > 1, plan.sequence_parallel, schedule, plan.zero_stage)
    return (point.parameters, *axis, run.precision != "fp32")


def where(point: Point) -> str:
    """Return plan and precision of a point: `zero 3, bf16`."""
    return f"{plan_name(point.run.plan)}, {point.run.precision}"


def milliseconds(key: str, header: str, of: Callable[[Any], Any] | None = None) -> Column:
    """Return a column of seconds, shown in milliseconds."""
    return Column(key=key, header=header, unit="ms", si="s", scale=MILLI, of=of)


def relative(header: str, key: str = "ratio") -> Column:
    """Return a column of the points' relative measure."""
    return Column(key=key, header=header, si="ratio", digits=3, of=lambda point: point.relative)


def gib(key: str, header: str, of: Callable[[Any], Any] | None = None) -> Column:
    """Return a column of bytes, shown in GiB."""
    return Column(key=key, header=header, unit="GiB", si="B", scale=GIB, digits=3, of=of)


PLAN = of_run("plan", "plan", lambda run: plan_name(run.plan), text=True)
PRECISION = of_run("precision", "precision", lambda run: run.precision, text=True)
SETUP = (MODEL, RANKS, PLAN, PRECISION)
"""Columns of what ran."""
