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
from harness.claims import Check, Claim, Evidence, Row, tally
from harness.experiment import Experiment
from harness.labels import point
from harness.measures import Record, about, frame
from harness.published import published
from harness.published_scaling import STUDIES, run_of
from harness.rate_figures import COLUMNS, combine
from harness.render import Column, Table
from harness.scaling import ratio
from harness.tables import EFFICIENCY, FLOP_RATE, MARK, MODEL, PUBLISHED, RANKS, RUNS, measured
from impl.evaluation_config import EvaluationConfig
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.run import Run, to_dict

KINDS = ("weak", "strong")
BETWEEN = {"frontier-175b": (2, 4, 8, 16), "frontier-1t": (1, 2, 4, 6)}
"""Replicas, from the study's fewest to its most."""
NEAR = {"weak": 0.03, "strong": 0.05}
"""How far an efficiency may be from the published one to count as the same; assumed, as batches are."""
SMALL = ModelConfig(num_layers=4, hidden_size=192, num_heads=6, seq_len=128)
SMOKE = ModelConfig(num_layers=2, hidden_size=64, num_heads=2, seq_len=64)


def on_cpus(model: ModelConfig, kind: str, dp: int, repeat: int = 0) -> Run:
    """A replica on each rank, which has 16 sequences, or its part of 16."""
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
def _points() -> dict[str, tuple[str, str, int, float]]:
    """Kind, study, replicas and published efficiency of every point of the experiment, by the point of its run."""
    found: dict[str, tuple[str, str, int, float]] = {}
    for study in STUDIES:
        for kind in KINDS:
            rows = published("frontier2023", f"{kind}_scaling_efficiency")
            (value,) = rows.loc[rows["model"] == study.model, "value"]
            for dp in BETWEEN[study.model]:
                printed = value / 100 if dp == study.many else math.nan
                found[point(to_dict(run_of(study, kind, dp)))] = kind, study.model, dp, printed
    for model in (SMOKE, SMALL):
        for kind in KINDS:
            for dp in (1, 2):
                found[point(to_dict(on_cpus(model, kind, dp)))] = kind, "", dp, math.nan
    return found


def scaled(rows: pd.DataFrame) -> list[dict[Any, Any]]:
    """Timed points, each with its rate per device over that of the fewest replicas on the same device."""
    known = [(row, _points()[row["point"]]) for row in combine(rows) if row["point"] in _points()]
    points = [row | {"kind": kind, "published": printed} for row, (kind, _, _, printed) in known]
    out = []
    for row in points:
        same = [other for other in points if all(other[k] == row[k] for k in ("kind", "model", "device_name"))]
        estimate = ratio(row, min(same, key=lambda other: other["ranks"]), FLOP_RATE.key)
        width = math.nan if estimate.half_width is None else estimate.half_width
        line = f"{row['kind']}, {row['model']}"
        out.append(row | {"efficiency": estimate.mean, "efficiency_half_width": width, "line": line})
    return sorted(out, key=lambda row: (row["parameters"], row["kind"] != "weak", row["ranks"]))


KIND = Column(key="kind", header="scaling", text=True)
SHOWN = (
    KIND, MODEL, RANKS, *(COLUMNS[name] for name in ("tp", "pp", "dp", "microbatch", "global_batch")), FLOP_RATE,
    EFFICIENCY, PUBLISHED, RUNS, MARK,
)  # fmt: skip


def table(records: Sequence[Record]) -> Table:
    """The rate per device of every number of replicas, and what is left of the fewest's."""
    title, rows = f"Frontier's scaling{about(records)}", pd.DataFrame(scaled(frame(records)))
    if rows.empty:
        return Table("scaling_of_replicas", title, (), rows)
    notes = [
        "Efficiency: the rate per device over that of the fewest replicas, at as many sequences of a replica (weak), "
        "or of all (strong). Published: the abstract's, which names the most devices only.",
    ]
    return measured("scaling_of_replicas", title, SHOWN, rows, notes)


def lines(rows: Sequence[Row], kind: str) -> list[list[dict[Any, Any]]]:
    """Points of a kind whose efficiency is known, by model, each from its fewest replicas on."""
    found: dict[str, list[dict[Any, Any]]] = {}
    for row in scaled(pd.DataFrame(list(rows))):
        if row["kind"] == kind and not math.isnan(row["efficiency"]):
            found.setdefault(row["model"], []).append(row)
    return [line for line in found.values() if len(line) > 1]


def told(found: Sequence[Row]) -> str:
    return ", ".join(f"{row['efficiency']:.1%} on {row['ranks']:,} ({row['model']})" for row in found)


def as_published(kind: str) -> Check:
    """A check that the most devices keep the published share of the rate."""

    def check(rows: Sequence[Row]) -> Evidence | None:
        found = [row for line in lines(rows, kind) for row in line if not math.isnan(row["published"])]
        return tally((abs(row["efficiency"] - row["published"]) <= NEAR[kind] for row in found), "models", told(found))

    return check


def strong_falls(rows: Sequence[Row]) -> Evidence | None:
    """Whether every increase of the replicas lowers the rate per device, at the same batch of all."""
    found = lines(rows, "strong")
    pairs = [(a, b) for line in found for a, b in pairwise(line)]
    return tally((b["efficiency"] < a["efficiency"] for a, b in pairs), "increases", told([line[-1] for line in found]))


def weak_is_better(rows: Sequence[Row]) -> Evidence | None:
    """Whether more is left of the rate with a batch that grows, on as many devices of the same model."""
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
            check=as_published("strong"),
            published="89% (175B, 1,024), 87% (1T, 3,072)",
        ),
        Claim(
            text="weak scaling leaves the published share of the rate, within 3 points",
            source="abstract",
            check=as_published("weak"),
            published="100% (175B, 1,024), 100% (1T, 3,072)",
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
    found="By simulation 90.7 and 87.2% of strong scaling and over 99.6% of weak scaling, under the assumptions below. "
    "Measured on two cores, 86 ± 8% is left of strong scaling and 97 ± 36% of weak.",
    cost={"smoke": "1 min, 2 CPU cores", "small": "2 min, 2 CPU cores", "paper": "6 h, 3072 GCDs with 64 GB"},
    deviations="The abstract has neither batches nor where scaling begins: 320 and 1,600 sequences of a replica, 8,000 "
    "and 8,016 of all, from 128 and 512 GCDs on are assumed, and microbatches of 1 (weak, as the launch scripts) and 4 "
    "(strong, as the DeepSpeed configuration beside them), with which the bubble is that of the published strong "
    "scaling. With 4 the inputs of recomputed layers are divided among the tensor-parallel ranks, as 1T does not fit "
    "64 GiB by prediction otherwise. At `smoke` and `small` a replica is one rank, without a pipeline: what is lost is "
    "communication alone.",
    runs={
        "smoke": on_two(SMOKE, 1),
        "small": on_two(SMALL, 3),
        "paper": [run_of(study, kind, dp) for study in STUDIES for kind in KINDS for dp in BETWEEN[study.model]],
    },
)
