"""How well is a step's time predicted on the machine that trains it?

`calibrate` measures a machine: its products, its links, and a few small runs. Here are other runs, of shapes and plans
that it has not seen: every way to share a model over two ranks, each simulated for the machine's file and trained on
the machine. What counts is how far the two are apart, and whether they put the runs in the same order, which is what a
search for the fastest plan lives on.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from experiments.ours.engines import claimed, plan_name
from harness.analysis.render import Column, Table
from harness.analysis.tables import MARK, MILLI, MODEL, PERCENT, RANKS, RUNS, measured
from harness.experiment.claims import Evidence, Row
from harness.experiment.experiment import Experiment
from harness.experiment.pairs import cells
from harness.records.measures import about, frame
from harness.records.record import Record
from impl.evaluation_config import EvaluationConfig
from impl.model.config import ModelConfig
from impl.model.sizes import named
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run

OFF, SAME_ORDER = 0.10, 0.85
"""Goals: largest mean of the errors' sizes, and least Kendall's tau."""


def training(
    shape: tuple[int, int, int, int], plan: Plan, microbatch: int, microbatches: int, repeats: int
) -> list[Run]:
    """Return timed runs of a model with these layers, hidden size, heads and tokens, which differ in repeat only."""
    layers, hidden, heads, seq_len = shape
    model = ModelConfig(num_layers=layers, hidden_size=hidden, num_heads=heads, seq_len=seq_len)
    recipe = replace(CPU, global_batch=microbatch * microbatches * plan.dp, microbatch=microbatch)
    run = Run(model=model, plan=plan, train=recipe, evaluation=EvaluationConfig(sequences=None))
    return [replace(run, repeat=repeat) for repeat in range(repeats)]


def compared(rows: Iterable[Mapping[Any, Any]]) -> list[dict[str, Any]]:
    """Return every point both trained and simulated: its step's seconds, and the error of the simulated ones."""
    sources: dict[str, list[Mapping[Any, Any]]] = {}
    for row in rows:
        sources.setdefault(row["source"], []).append(row)
    ran = {cell.run: cell for cell in cells(sources.get("measured", []), choice=lambda _: "") if cell.runs}
    found = []
    for cell in cells(sources.get("simulated", []), choice=lambda _: ""):
        if cell.runs and (other := ran.get(cell.run)) is not None:
            step, predicted = other.mean("", "step_seconds"), cell.mean("", "step_seconds").mean
            first = other.first
            found.append({
                **{of: first[of] for of in ("model", "ranks", "device", "device_name", "backend", "microbatches")},
                "plan": _plan(cell.run.plan),
                "step": step.mean,
                "step_half_width": math.nan if step.half_width is None else step.half_width,
                "predicted": predicted,
                "off": predicted / step.mean - 1,
                "system": cell.first["system"],
                "n": step.n,
                "oversubscribed": other.is_crowded,
            })  # fmt: skip
    return found


def _plan(plan: Plan) -> str:
    again = "" if plan.recompute == "none" else f", {plan.recompute} recomputation"
    return plan_name(plan) + (", zero-bubble" if plan.schedule == "zb_h1" else "") + again


STEP: dict[str, Any] = {"unit": "ms", "si": "s", "scale": MILLI}
SHOWN = (
    MODEL, RANKS,
    Column(key="plan", header="plan", text=True),
    Column(key="microbatches", header="microbatches"),
    Column(key="predicted", header="step, simulated", **STEP),
    Column(key="step", header="step, measured", interval="step_half_width", **STEP),
    Column(key="off", header="simulated / measured - 1", unit="%", si="fraction", scale=PERCENT, digits=2),
    RUNS, MARK,
)  # fmt: skip


def table(records: Sequence[Record]) -> Table:
    """Tabulate the step of every point that was trained and simulated, and the error of the prediction."""
    title, found = f"Predicted and measured{about(records)}", compared(frame(records).to_dict("records"))
    if not found:
        return Table("predicted", title, (), pd.DataFrame())
    systems = ", ".join(dict.fromkeys(row["system"] for row in found))
    notes = (
        f"Simulated for {systems}. Measured: the median of a run's steps, mean over repeats.",
        f"{len(found)} points: {_errors(found).numbers}; {_order(found).numbers}.",
    )
    return measured("predicted", title, SHOWN, pd.DataFrame(found).drop(columns="system"), notes)


def _errors(found: Sequence[Mapping[str, Any]]) -> Evidence:
    sizes = [abs(row["off"]) for row in found]
    mean, worst = sum(sizes) / len(sizes), max(found, key=lambda row: abs(row["off"]))
    text = f"{mean:.1%} off on average, {worst['off']:+.1%} at most ({worst['model']}, {worst['plan']})"
    return Evidence(mean <= OFF, text)


def _order(found: Sequence[Mapping[str, Any]]) -> Evidence:
    if len(found) < 2:
        return Evidence(False, "one point has no order")
    predicted, step = (pd.Series([row[name] for row in found]) for name in ("predicted", "step"))
    tau = predicted.corr(step, method="kendall")
    return Evidence(tau >= SAME_ORDER, f"Kendall's tau {tau:.2f}")


def close(rows: Sequence[Row]) -> Evidence | None:
    """Judge whether predictions are off by OFF on average, or less."""
    found = compared(rows)
    return _errors(found) if found else None


def in_order(rows: Sequence[Row]) -> Evidence | None:
    """Judge whether predicted and measured steps are in the same order, but for a few pairs."""
    found = compared(rows)
    return _order(found) if len(found) > 1 else None


CPU = Recipe(steps=15, lr=1e-4, warmup_steps=2)
POINTS: list[tuple[tuple[int, int, int, int], Plan, int, int]] = [
    ((2, 384, 6, 128), Plan(tp=2), 4, 2),
    ((3, 192, 6, 192), Plan(tp=2, sequence_parallel=True), 4, 2),
    ((4, 320, 10, 96), Plan(tp=2, recompute="full"), 2, 4),
    ((6, 192, 6, 128), Plan(pp=2), 4, 8),
    ((4, 320, 5, 128), Plan(pp=2, schedule="gpipe"), 2, 6),
    ((8, 160, 5, 192), Plan(pp=2, schedule="interleaved", chunks=2), 2, 4),
    ((6, 256, 8, 96), Plan(pp=2, schedule="zb_h1"), 4, 6),
    ((3, 384, 6, 160), Plan(dp=2), 4, 2),
    ((6, 192, 3, 256), Plan(dp=2, zero_stage=1), 2, 3),
    ((4, 320, 5, 96), Plan(dp=2, zero_stage=2), 4, 2),
    ((5, 256, 4, 192), Plan(dp=2, zero_stage=3), 4, 2),
    ((2, 512, 8, 64), Plan(dp=2, recompute="selective"), 8, 1),
]
"""Layers, hidden size, heads and tokens; plan; microbatch, and microbatches of a rank in a step."""
ON_8 = replace(named("gpt-1.2b"), dropout=0.0)

EXPERIMENT = Experiment(
    source="our own",
    expectation="errors of 10% on average, as constants fitted to small runs carry to shapes that differ by a factor "
    "of two; the same order but for points whose steps take about as long",
    claims=(
        claimed(text="predicted steps are off by 10% on average, or less", check=close, compares=True),
        claimed(
            text="predicted and measured steps are in the same order: Kendall's tau 0.85 or more",
            check=in_order,
            compares=True,
        ),
    ),
    table=table,
    cost={"smoke": "1 min, 2 CPU cores", "small": "8 min, 2 CPU cores", "paper": "20 min, 8 GPUs with 80 GB"},
    found="Twelve runs are off by 7.0% on average; the worst have tensor parallelism: a small step is told 17% too "
    "short, a recomputed one 13%. Their order is the measured one up to neighbours (tau 0.88). The machine itself "
    "drifts: repeats minutes apart differ by 5 to 10%.",
    deviations="The machine's file is measured by `lmscale calibrate` just before, the points are simulated "
    "for it by `lmscale predict`.",
    runs={
        "smoke": [run for point in (POINTS[0], POINTS[4], POINTS[10]) for run in training(*point, repeats=1)],
        "small": [run for repeat in range(3) for point in POINTS for run in training(*point, repeats=3)[repeat:][:1]],
        "paper": [
            Run(
                model=ON_8,
                plan=replace(plan, bucket_bytes=2**27),
                train=replace(CPU, steps=30, global_batch=64, microbatch=2),
                precision="bf16",
                evaluation=EvaluationConfig(sequences=None),
            )
            for plan in (
                Plan(dp=8), Plan(dp=8, zero_stage=1), Plan(dp=8, zero_stage=3), Plan(dp=4, tp=2), Plan(tp=8),
                Plan(tp=8, sequence_parallel=True), Plan(pp=8), Plan(pp=8, schedule="interleaved", chunks=5),
                Plan(pp=8, schedule="zb_h1"), Plan(pp=4, tp=2), Plan(dp=2, tp=2, pp=2), Plan(dp=8, recompute="full"),
            )
        ],
    },
)  # fmt: skip
