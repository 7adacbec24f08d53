"""How much of its rate per GCD does a model keep on thousands of them, at a batch that grows and at a constant one?

Frontier's authors add replicas of one pipeline: of 175B parameters up to 1,024 GCDs, of 1T up to 3,072. With the same
sequences for each replica (weak scaling) nothing is lost; with the same for all (strong scaling) each has fewer
microbatches to fill its pipeline with, and 89 and 87% of the rate per GCD are left.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pandas as pd

from experiments.ptdp2021.pipeline_weak_scaling import CPU
from harness.analysis.render import Column, Table
from harness.analysis.scaling import ratio
from harness.analysis.tables import EFFICIENCY, FLOP_RATE, MARK, MODEL, PUBLISHED, RANKS, RUNS, measured
from harness.experiment.claims import Claim, Evidence, Row, tally
from harness.experiment.comparison import COLUMNS, combine
from harness.experiment.experiment import Experiment
from harness.predict.published_scaling import FITTED, MICROBATCH, STUDIES, Kind, published_efficiency, run_of
from harness.records.measures import about, frame
from harness.records.record import Record, point
from impl.evaluation_config import EvaluationConfig
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.run import Run

KINDS: tuple[Kind, ...] = ("weak", "strong")
"""Kinds that verdicts are about; the fitted one is shown in the table only."""
BETWEEN = {"frontier-175b": (2, 4, 8, 16), "frontier-1t": (1, 2, 4, 6)}
"""Replicas, from the study's fewest to its most."""
NEAR = 0.05
"""Largest difference from a published efficiency that counts as the same; assumed, as batches are."""
SMALL = ModelConfig(num_layers=4, hidden_size=192, num_heads=6, seq_len=128)
SMOKE = ModelConfig(num_layers=2, hidden_size=64, num_heads=2, seq_len=64)


def on_cpus(model: ModelConfig, kind: Kind, dp: int, repeat: int = 0) -> Run:
    """Return a run with a replica on each rank, which has 16 sequences (weak scaling) or its part of 16 (strong)."""
    batch = 16 * dp if kind == "weak" else 16
    microbatch = 2 if kind == "weak" else 4
    return Run(
        model=model,
        plan=Plan(dp=dp, zero_stage=1, recompute="full"),
        train=replace(CPU, global_batch=batch, microbatch=microbatch),
        evaluation=EvaluationConfig(sequences=None),
        repeat=repeat,
    )


@cache
def _points() -> dict[Run, tuple[Kind, str, int, float]]:
    """Return kind, study, replicas and published efficiency of every point of the experiment, by its run's point."""
    found: dict[Run, tuple[Kind, str, int, float]] = {}
    for study in STUDIES:
        for kind in MICROBATCH:
            for dp in BETWEEN[study.model]:
                printed = published_efficiency(study.model, kind) / 100 if dp == study.many else math.nan
                found[point(run_of(study, kind, dp))] = kind, study.model, dp, printed
    for model in (SMOKE, SMALL):
        for kind in KINDS:
            for dp in (1, 2):
                found[point(on_cpus(model, kind, dp))] = kind, "", dp, math.nan
    return found


def scaled(rows: pd.DataFrame) -> list[dict[Any, Any]]:
    """Return timed points, each with its rate per device over that of the fewest replicas on the same device."""
    known = [(row, _points()[row["point"]]) for row in combine(rows) if row["point"] in _points()]
    points = [row | {"kind": kind, "published": printed} for row, (kind, _, _, printed) in known]
    out = []
    for row in points:
        same = [other for other in points if all(other[k] == row[k] for k in ("kind", "model", "device_name"))]
        estimate = ratio(row, min(same, key=lambda other: other["ranks"]), FLOP_RATE.key)
        width = math.nan if estimate.half_width is None else estimate.half_width
        line = f"{row['kind']}, {row['model']}"
        out.append(row | {"efficiency": estimate.mean, "efficiency_half_width": width, "line": line})
    kinds = list(MICROBATCH)
    return sorted(out, key=lambda row: (row["parameters"], kinds.index(row["kind"]), row["ranks"]))


KIND = Column(key="kind", header="scaling", text=True)
SHOWN = (
    KIND, MODEL, RANKS, *(COLUMNS[name] for name in ("tp", "pp", "dp", "microbatch", "global_batch")), FLOP_RATE,
    EFFICIENCY, PUBLISHED, RUNS, MARK,
)  # fmt: skip


def table(records: Sequence[Record]) -> Table:
    """Tabulate the rate per device of every number of replicas, and its share of the rate with the fewest."""
    title, rows = f"Frontier's scaling{about(records)}", pd.DataFrame(scaled(frame(records)))
    if rows.empty:
        return Table("scaling_of_replicas", title, (), rows)
    notes = [
        "Efficiency: the rate per device over that of the fewest replicas, at as many sequences of a replica (weak), "
        "or of all (strong). Published: the abstract's, which names the most devices only.",
    ]
    if any(rows["kind"].isin(FITTED)):
        notes.append("Fitted: the microbatch was picked to match the published strong scaling; no verdict uses it.")
    return measured("scaling_of_replicas", title, SHOWN, rows, notes)


def lines(rows: Sequence[Row], kind: Kind) -> list[list[dict[Any, Any]]]:
    """Return points of a kind whose efficiency is known, by model, each from its fewest replicas on."""
    found: dict[str, list[dict[Any, Any]]] = {}
    for row in scaled(pd.DataFrame(list(rows))):
        if row["kind"] == kind and not math.isnan(row["efficiency"]):
            found.setdefault(row["model"], []).append(row)
    return [line for line in found.values() if len(line) > 1]


def told(found: Sequence[Row]) -> str:
    return ", ".join(f"{row['efficiency']:.1%} on {row['ranks']:,} ({row['model']})" for row in found)


def as_published(rows: Sequence[Row]) -> Evidence | None:
    """Judge whether the most devices keep the published share of the rate in strong scaling."""
    found = [row for line in lines(rows, "strong") for row in line if not math.isnan(row["published"])]
    return tally((abs(row["efficiency"] - row["published"]) <= NEAR for row in found), "models", told(found))


def strong_falls(rows: Sequence[Row]) -> Evidence | None:
    """Judge whether every increase of the replicas lowers the rate per device, at the same batch of all."""
    found = lines(rows, "strong")
    pairs = [(a, b) for line in found for a, b in pairwise(line)]
    return tally((b["efficiency"] < a["efficiency"] for a, b in pairs), "increases", told([line[-1] for line in found]))


def weak_is_better(rows: Sequence[Row]) -> Evidence | None:
    """Judge whether weak scaling keeps more of the rate than strong, on as many devices of the same model."""
    ends = [{line[-1]["model"]: line[-1] for line in lines(rows, kind)} for kind in KINDS]
    both = [(weak, ends[1][model]) for model, weak in ends[0].items() if model in ends[1]]
    both = [(weak, strong) for weak, strong in both if weak["ranks"] == strong["ranks"]]
    numbers = ", ".join(f"{a['efficiency']:.1%} and {b['efficiency']:.1%} ({a['model']})" for a, b in both)
    return tally((a["efficiency"] > b["efficiency"] for a, b in both), "models", numbers)


def on_two(model: ModelConfig, repeats: int) -> list[Run]:
    return [on_cpus(model, kind, dp, repeat) for repeat in range(repeats) for kind in KINDS for dp in (1, 2)]


EXPERIMENT = Experiment(
    source="Frontier 2023 (Dash et al.), abstract, section V",
    expectation="100% weak scaling, and 89 and 87% strong scaling, of 175B on 1,024 GCDs and 1T on 3,072",
    claims=(
        Claim(
            text="strong scaling leaves the published share of the rate, within 5 points",
            source="abstract",
            check=as_published,
            published="89% (175B, 1,024), 87% (1T, 3,072)",
        ),
        Claim(
            text="every increase of the devices lowers the rate per device at the same batch",
            source="section V",
            check=strong_falls,
        ),
        Claim(
            text="weak scaling leaves more of the rate than strong scaling",
            source="abstract",
            check=weak_is_better,
        ),
    ),
    table=table,
    found="Simulated with microbatches of 1, the launch scripts' value, strong scaling leaves 97.3% (175B) and 96.3% "
    "(1T) of the rate, where 89 and 87% are published: not reproduced, 8 and 9 points off. With microbatches of 4 it "
    "leaves 90.7 and 87.2%, but 4 was picked because it matches (2 gives 94.9 and 93.0%): these are fitted, stand in "
    "the table under `strong, fitted`, and have no verdict. Weak scaling leaves 99.6 and 99.9% (100% published), "
    "which has no verdict either: a machine whose network is free passes as well. Measured on two cores, 86 ± 8% is "
    "left of strong scaling and 97 ± 36% of weak.",
    cost={"smoke": "1 min, 2 CPU cores", "small": "2 min, 2 CPU cores", "paper": "6 h, 3072 GCDs with 64 GB"},
    deviations="The abstract has neither batches nor where scaling begins: 320 and 1,600 sequences of a replica, "
    "8,000 and 8,016 of all, from 128 and 512 GCDs on are assumed. Microbatches are 1, as in the launch scripts; "
    "`strong, fitted` has 4, as in the DeepSpeed configuration stored with them, picked because its pipeline bubble "
    "gives the published strong scaling. With 4 the inputs of recomputed layers are divided among the tensor-parallel "
    "ranks, as 1T does not fit 64 GiB by prediction otherwise. At `smoke` and `small` a replica is one rank, without "
    "a pipeline: what is lost is communication alone.",
    runs={
        "smoke": on_two(SMOKE, 1),
        "small": on_two(SMALL, 3),
        "paper": [run_of(study, kind, dp) for study in STUDIES for kind in MICROBATCH for dp in BETWEEN[study.model]],
    },
)
