"""How large a model fits, when data-parallel ranks divide its states among themselves?

Table 2 gives the largest model on V100s with 32 GB, for one to 16 tensor-parallel ranks and 64 data-parallel ones: from
2 to 32 billion parameters without ZeRO, to 2 trillion with all three stages, by the memory of the model's states alone.
Here the memory is small and all of it counts, activations and buffers too: the deepest model that is predicted to fit
is trained, and one with two layers more, and the memory of all their tensors is counted in a step.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pandas as pd

from harness.analysis.render import Column, Table, shown
from harness.experiment.claims import Claim, Evidence, Row, tally
from harness.experiment.experiment import Experiment
from harness.experiment.published import published
from harness.records.measures import about, frame
from harness.records.record import Record
from impl.cost.memory import model_state_bytes
from impl.evaluation_config import EvaluationConfig
from impl.model.config import ModelConfig
from impl.plan import Plan, ZeroStage
from impl.recipe import Recipe
from impl.run import Run

STAGES: tuple[ZeroStage, ...] = (0, 1, 2, 3)
V100 = 32e9
"""Bytes."""
LIMIT = 20e6
"""Bytes that a rank may take here."""
SHAPE = ModelConfig(hidden_size=128, num_heads=4, seq_len=64, vocab_size=512)
CLOSE = 0.05
"""Relative tolerance of counted bytes against the predicted."""


def deep(layers: int, tp: int, zero_stage: ZeroStage, dp: int = 2) -> Run:
    """Return a run of two steps, for the memory only; the precisions are the paper's."""
    return Run(
        model=replace(SHAPE, num_layers=layers),
        plan=Plan(tp=tp, dp=dp, zero_stage=zero_stage, bucket_bytes=2**16),
        train=Recipe(steps=2, global_batch=dp, microbatch=1, warmup_steps=0),
        evaluation=EvaluationConfig(sequences=None),
        precision="fp16",
        fp32_gradients=False,
    )


DEEPEST: dict[tuple[int, ZeroStage], int] = {
    **{(1, 0): 5, (1, 1): 8, (1, 2): 8, (1, 3): 10},
    **{(2, 0): 10, (2, 1): 16, (2, 2): 18, (2, 3): 21},
}
"""Layers of the largest model that is predicted to take at most LIMIT, by tensor-parallel ranks and stage."""
MORE = 2


def both_sides(degrees: Sequence[int], stages: Sequence[ZeroStage]) -> list[Run]:
    """Return runs predicted to fit, and runs predicted not to."""
    return [
        deep(layers + more, tp, stage)
        for (tp, stage), layers in DEEPEST.items()
        if tp in degrees and stage in stages
        for more in (0, MORE)
    ]


def on_v100s(billions: float, hidden_size: int, tp: int, zero_stage: ZeroStage) -> Run:
    """Return one of the models that were trained according to table 2; the shapes are near those of tables 5 to 10."""
    layers = round(billions * 1e9 / (12 * hidden_size**2))
    model = ModelConfig(
        num_layers=layers, hidden_size=hidden_size, num_heads=hidden_size // 128, seq_len=1024, vocab_size=51200
    )
    return Run(
        model=model,
        plan=Plan(tp=tp, dp=64, zero_stage=zero_stage, recompute="full", partition_activations=tp > 1),
        train=Recipe(steps=2, global_batch=64, microbatch=1, warmup_steps=0),
        evaluation=EvaluationConfig(sequences=None),
        precision="fp16",
        fp32_gradients=False,
    )


MEASURED: dict[ZeroStage, dict[int, tuple[float, int]]] = {
    0: {1: (1.3, 1536), 2: (2.5, 2048), 4: (5, 3072), 8: (10, 4096), 16: (20, 6144)},
    1: {1: (6.2, 3072), 2: (12.5, 4096), 4: (25, 6144), 8: (50, 6144), 16: (100, 8192)},
}
"""Table 2's measured columns: billions of parameters, with a hidden size, by tensor-parallel ranks."""


def largest(tp: int, dp: int, zero_stage: ZeroStage, memory: float = V100) -> float:
    """Return parameters whose states fill a device's memory: table 2's analysis."""
    return tp * memory / model_state_bytes(deep(1, tp, zero_stage, dp), 1)


def of_the_paper() -> list[dict[str, Any]]:
    """Return table 2's analysis, as printed and by formula."""
    rows = []
    for printed in published("zero2019").to_dict("records"):
        if printed["where"] == "table 2" and "measured" not in printed["quantity"]:
            stage = STAGES[int(printed["quantity"].rpartition("_")[2])]
            known = {"tp": printed["tp"], "dp": printed["dp"], "zero_stage": stage, "limit": V100}
            size = {"formula": largest(printed["tp"], printed["dp"], stage), "published": printed["value"] * 1e9}
            rows.append(known | size)
    return sorted(rows, key=lambda row: (row["tp"], row["zero_stage"]))


def counted(rows: Sequence[Row]) -> list[dict[Any, Any]]:
    """Return the points whose tensors were counted, by layout and size."""
    found = [{**row, "limit": LIMIT} for row in rows if not math.isnan(row["memory_bytes"])]
    return sorted(found, key=lambda row: (row["tp"], row["zero_stage"], row["parameters"]))


BYTES: dict[str, Any] = {"unit": "GB", "si": "B", "scale": 1e9}
BILLIONS: dict[str, Any] = {"unit": "billion", "si": "", "scale": 1e9}
COLUMNS = (
    Column(key="tp", header="t"),
    Column(key="dp", header="N"),
    Column(key="zero_stage", header="ZeRO stage"),
    Column(key="limit", header="memory", **BYTES),
    Column(key="layers", header="layers"),
    Column(key="parameters", header="parameters", **BILLIONS),
    Column(key="memory_bytes", header="all, counted", **BYTES),
    Column(key="predicted_memory_bytes", header="all, predicted", **BYTES),
    Column(key="formula", header="largest, formula", **BILLIONS),
    Column(key="published", header="largest, published", **BILLIONS),
)


def table(records: Sequence[Record]) -> Table:
    """Tabulate models at the edge of a small memory, counted and predicted; and table 2, printed and by formula."""
    title = f"The largest model that fits{about(records)}"
    rows = frame(records)
    found = counted(rows.to_dict("records")) if not rows.empty else []
    if not found:
        return Table("max_model_size", title, (), pd.DataFrame())
    rows = pd.DataFrame(found + of_the_paper())
    notes = (
        "Counted: storages of all tensors on the fullest rank, at the fullest moment of the first step. Predicted: the "
        "same by `lmscale memory`.",
        "Largest: parameters whose states alone fill the memory. Published: table 2, maximum theoretical model size.",
    )
    return Table("max_model_size", title, shown(COLUMNS, rows), rows, notes)


def edge_is_where_predicted(rows: Sequence[Row]) -> Evidence | None:
    """Judge whether the runs predicted to fit do, and the others do not."""
    found = [row for row in counted(rows) if row["dp"] == 2]
    if not found:
        return None
    right = [(row["memory_bytes"] <= LIMIT) == (row["predicted_memory_bytes"] <= LIMIT) for row in found]
    closest = min(abs(row["memory_bytes"] / LIMIT - 1) for row in found)
    return tally(right, "points", f"the nearest is {closest:.1%} from the edge")


def as_predicted(rows: Sequence[Row]) -> Evidence | None:
    ratios = [row["memory_bytes"] / row["predicted_memory_bytes"] for row in counted(rows)]
    if not ratios:
        return None
    numbers = f"{min(ratios):.3f} to {max(ratios):.3f} times the prediction"
    return tally([abs(ratio - 1) <= CLOSE for ratio in ratios], "points", numbers)


def grows_with_the_stage(rows: Sequence[Row]) -> Evidence | None:
    """Judge whether the largest model that was counted to fit is larger, or as large, with every stage."""
    fits: dict[tuple[int, int], dict[int, int]] = {}
    for row in counted(rows):
        if row["dp"] == 2 and row["memory_bytes"] <= LIMIT:
            of_layout = fits.setdefault((row["tp"], row["dp"]), {})
            of_layout[row["zero_stage"]] = max(of_layout.get(row["zero_stage"], 0), int(row["layers"]))
    whole = {layout: layers for layout, layers in fits.items() if len(layers) == len(STAGES)}
    numbers = [f"{', '.join(str(layers[s]) for s in STAGES)} layers (t={tp})" for (tp, _), layers in whole.items()]
    held = [layers[a] <= layers[b] for layers in whole.values() for a, b in pairwise(STAGES)]
    return tally(held, "steps", "; ".join(numbers))


EXPERIMENT = Experiment(
    source="ZeRO (Rajbhandari et al. 2019), sections 5.4 and 10.3, table 2",
    expectation="64 data-parallel ranks with 32 GB hold 2B parameters, and 7.6B, 14.4B and 128B with stages 1 to 3",
    claims=(
        Claim(text="fits what is predicted to, and nothing else", source="table 2", check=edge_is_where_predicted),
        Claim(text="a step takes as much memory as predicted, within 5%", source="section 3", check=as_predicted),
        Claim(
            text="no stage fits less than the one before",
            source="table 2",
            check=grows_with_the_stage,
            published="2, 7.6, 14.4 and 128 billion parameters (t=1, N=64)",
        ),
    ),
    found="All 16 models end on the side of the limit where they were predicted, the nearest 0.8% from it, and memory "
    "is at most 1.7% under the prediction. Within 20 MB, two ranks fit 5, 8, 8 and 10 layers in stages 0 to 3, and 10, "
    "16, 18 and 21 where two ranks share a layer. Table 2's sizes follow from the formulas within 2.4%.",
    table=table,
    cost={"smoke": "1 min, 2 CPU cores", "small": "2 min, 2 CPU cores", "paper": "20 min, 1024 GPUs with 32 GB"},
    deviations="What is trained at `smoke` and `small` is small, with 20 MB for each of 2 and 4 ranks, that share two "
    "cores. At `paper` the models that table 2 says were trained run, without ZeRO and with stage 1, with full "
    "recomputation; the theoretical sizes are in the table by formula. The paper writes 512, 1,024 and 2,048 billion "
    "as 0.5T, 1T and 2T.",
    runs={
        "smoke": both_sides([1], (0, 3)),
        "small": both_sides([1, 2], STAGES),
        "paper": [
            on_v100s(billions, hidden, tp, stage)
            for stage, sizes in MEASURED.items()
            for tp, (billions, hidden) in sizes.items()
        ],
    },
)
