"""What does each overlap of communication with computation buy?

Three are built in. Gradients are reduced while the backward pass goes on; with ZeRO, parameters are gathered ahead of
their use; and input gradients of layers that ranks share are reduced while weight gradients are computed. Each is
switched off alone, next to the run that has all of them, and the two take turns: their ratio is what it buys.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from experiments.ours.engines import MODEL_7M, claimed, data_parallel, layers_shared, order, plan_name
from harness.analysis.render import Column, Table
from harness.analysis.tables import MARK, MILLI, MODEL, RANKS, RUNS, measured
from harness.experiment.claims import Check, Evidence, Row, tally
from harness.experiment.experiment import Experiment
from harness.experiment.pairs import Cell, cells, in_words
from harness.records.measures import about, frame
from harness.records.record import Record
from impl.evaluation_config import EvaluationConfig
from impl.model.config import ModelConfig
from impl.model.sizes import named
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Precision, Run

OVERLAPS = {
    "overlap_grad_reduce": "gradients' reductions, with the backward pass",
    "overlap_param_gather": "parameters' gathers, ahead of their use",
    "overlap_input_grad_reduce": "input gradients' reductions, with weight gradients",
}
"""Fields of the plan, and the communication and computation that each overlaps."""
SLOWER = 1.02
"""Ratio of step times that still counts as no slower; assumed, as repeats of one point differ."""


def overlaps_of(plan: Plan) -> list[str]:
    """Return the overlaps that have an effect on a plan."""
    found = ["overlap_grad_reduce"] if plan.dp > 1 else []
    found += ["overlap_param_gather"] if plan.zero_stage else []
    return found + (["overlap_input_grad_reduce"] if plan.tp > 1 else [])


def with_and_without(
    model: ModelConfig, plans: Sequence[Plan], recipe: Recipe, precisions: Sequence[Precision], repeats: int
) -> list[Run]:
    """Return each plan with all of its overlaps, then without one of them, in turn."""
    run = Run(model=model, train=recipe, evaluation=EvaluationConfig(sequences=None))
    return [
        replace(run, plan=replace(plan, **({without: False} if without else {})), precision=precision, repeat=repeat)
        for plan in plans
        for precision in precisions
        for repeat in range(repeats)
        for without in ("", *overlaps_of(plan))
    ]


def without(run: Run) -> str:
    """Return the overlap that a run lacks; empty if it has all."""
    return " ".join(name for name in OVERLAPS if not getattr(run.plan, name))


def compared(rows: Iterable[Mapping[Any, Any]]) -> list[dict[str, Any]]:
    """Return each overlap of each plan: a step with it, without it, and their ratio over the pairs of repeats."""
    found = cells(rows, *(f"plan.{name}" for name in OVERLAPS), choice=without)
    return [
        _compared(cell, name)
        for cell in sorted(found, key=lambda cell: (cell.first["parameters"], *order(cell.run)))
        for name in OVERLAPS
        if "" in cell.runs and name in cell.runs
    ]


def _compared(cell: Cell, name: str) -> dict[str, Any]:
    described = {of: cell.first[of] for of in ("model", "ranks", "device", "device_name", "backend")}
    on, off, ratio = cell.mean("", "step_seconds"), cell.mean(name, "step_seconds"), cell.ratio("", name)
    losses = [{row["losses"] for row in cell.runs[way].values()} for way in ("", name)]
    return described | {
        "plan": plan_name(cell.run.plan),
        "precision": cell.run.precision,
        "overlap": name,
        "overlapped": OVERLAPS[name],
        "with": on.mean,
        "with_half_width": _or_nan(on.half_width),
        "without": off.mean,
        "without_half_width": _or_nan(off.half_width),
        "ratio": ratio.mean,
        "ratio_half_width": _or_nan(ratio.half_width),
        "estimate": ratio,
        "same_losses": losses[0] == losses[1] if all(map(any, losses)) else None,
        "n": on.n,
        "oversubscribed": cell.is_crowded,
    }


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


STEP: dict[str, Any] = {"unit": "ms", "si": "s", "scale": MILLI}
SHOWN = (
    MODEL, RANKS,
    Column(key="plan", header="plan", text=True),
    Column(key="precision", header="precision", text=True),
    Column(key="overlapped", header="overlapped", text=True),
    Column(key="with", header="step", interval="with_half_width", **STEP),
    Column(key="without", header="step without it", interval="without_half_width", **STEP),
    Column(key="ratio", header="with / without", si="ratio", digits=3, interval="ratio_half_width"),
    RUNS, MARK,
)  # fmt: skip


def table(records: Sequence[Record]) -> Table:
    """Tabulate step time with all overlaps and without one of them, for each plan that has it."""
    title, found = f"What overlaps buy{about(records)}", compared(frame(records).to_dict("records"))
    if not found:
        return Table("overlap", title, (), pd.DataFrame())
    notes = (
        "Step: the median of a run's steps, mean over repeats; with all overlaps of the plan, and without the one of "
        "the row. With / without: mean over the pairs of repeats, with its 95% t-interval; below 1 it pays.",
    )
    return measured("overlap", title, SHOWN, pd.DataFrame(found).drop(columns=["estimate", "same_losses"]), notes)


def no_slower(name: str) -> Check:
    """Return a check that steps with an overlap take no more time than without it, but for SLOWER, on every plan."""

    def check(rows: Sequence[Row]) -> Evidence | None:
        found = [row for row in compared(rows) if row["overlap"] == name and not math.isnan(row["ratio"])]
        numbers = ", ".join(f"{in_words(row['estimate'])} ({row['plan']}, {row['precision']})" for row in found)
        return tally([row["ratio"] <= SLOWER for row in found], "plans", numbers)

    return check


def same_losses(rows: Sequence[Row]) -> Evidence | None:
    """Judge whether every step's loss is the same with and without each overlap, with any number of cores."""
    found = [row for row in compared(rows) if row["same_losses"] is not None]
    same = sum(row["same_losses"] for row in found)
    return Evidence(same == len(found), f"{same} of {len(found)} pairs") if found else None


CPU = Recipe(steps=13, global_batch=16, microbatch=4, lr=1e-4, warmup_steps=2)
GPU = Recipe(steps=30, global_batch=128, microbatch=2, lr=1.5e-4, warmup_steps=5)
ON_GPUS = replace(named("gpt-1.2b"), dropout=0.0)

EXPERIMENT = Experiment(
    source="our own; ZeRO 2019, section 7, and Megatron-LM 2019, section 3, say what is sent when",
    expectation="where ranks compute while others' bytes arrive, a step is shorter by up to what it communicates; two "
    "ranks on two cores share these with the threads that send, and gain little",
    claims=(
        claimed(
            text="reducing gradients during the backward pass makes no step over 2% slower",
            check=no_slower("overlap_grad_reduce"),
        ),
        claimed(
            text="gathering parameters ahead makes no step over 2% slower", check=no_slower("overlap_param_gather")
        ),
        claimed(
            text="reducing input gradients beside weight gradients makes no step over 2% slower",
            check=no_slower("overlap_input_grad_reduce"),
        ),
        claimed(text="overlaps change no loss, to the bit", check=same_losses),
    ),
    table=table,
    cost={"smoke": "1 min, 2 CPU cores", "small": "30 min, 2 CPU cores", "paper": "40 min, 64 GPUs with 80 GB"},
    deviations="At `smoke` and `small` collectives go through the memory of one machine, by threads that take turns "
    "with the ranks' own computation.",
    found="On two cores with 6.9M parameters: where ranks share layers, reducing input gradients beside the weight "
    "gradients' products makes a step 0.88 to 0.97 times as long, and the interval is below 1 on three of four plans. "
    "What data-parallel ranks overlap makes it 0.94 to 1.03 times as long; that it pays can be told in bf16 only, of "
    "ZeRO-1's gathers (0.945) and ZeRO-3's reductions (0.978): presumably loopback's transport needs the core that "
    "computes. No loss changes by a bit.",
    runs={
        "smoke": with_and_without(
            named("gpt-0.5m"), [Plan(dp=2, zero_stage=3), Plan(tp=2)], replace(CPU, steps=10), ["fp32"], 1
        ),
        "small": with_and_without(MODEL_7M, [*data_parallel(2), *layers_shared(2)], CPU, ["fp32", "bf16"], 3),
        "paper": [
            *with_and_without(ON_GPUS, data_parallel(64, bucket_bytes=2**27), GPU, ["bf16"], 3),
            *with_and_without(ON_GPUS, layers_shared(8), replace(GPU, global_batch=32, microbatch=4), ["bf16"], 3),
        ],
    },
)
