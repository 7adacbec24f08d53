"""Is it better to compute LayerNorm, dropout and residuals on every rank, or once and send what they give?

Ranks that share a layer's matrices all need what lies between them. Megatron-LM computes it on each of them again,
rather than on one and send it (section 3). Computed by each rank for its part of the tokens and gathered, it would cost
two gathers more in each pass of a layer. Sequence parallelism (Korthikanti et al. 2022) has it computed once for none:
its gathers and scatters take the place of all-reduces. Here both of the two that are built run side by side, and are
simulated over model sizes, ranks that share a layer, and networks; what the gathers would add follows from the same
curves.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from operator import attrgetter
from typing import Any

import pandas as pd

from experiments.ours.engines import claimed
from harness.analysis.render import Column, Table
from harness.analysis.tables import DEVICE, MARK, MILLI, MODEL, PERCENT, RANKS, RUNS, measured
from harness.experiment.claims import Claim, Evidence, Row, tally
from harness.experiment.experiment import Experiment
from harness.experiment.pairs import Cell, cells
from harness.experiment.published import published
from harness.predict.systems import load_system, names
from harness.records.measures import about, frame
from harness.records.record import Record
from impl.cost.parameters import ELEMENT_BYTES
from impl.evaluation_config import EvaluationConfig
from impl.model.config import ModelConfig
from impl.model.sizes import named
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Precision, Run
from impl.simulator.seconds import collective, group

SLOWER = 1.02
"""Ratio of step times that still counts as no slower; assumed, as repeats of one point differ."""
NEAR = 0.02
"""Largest difference from a published ratio that counts as the same; assumed."""
GATHERS = 4
"""Gathers that computing once adds to a layer and microbatch: for attention and MLP, forward and backward."""
OF_TABLE_4 = "korthikanti-22b"
SPLIT = "plan.sequence_parallel"


def both(model: ModelConfig, tp: int, recipe: Recipe, precision: Precision = "fp32", repeats: int = 1) -> list[Run]:
    """Return runs with the work between split matrices done by every rank in full, or by each for its part, in turn."""
    run = Run(model=model, train=recipe, evaluation=EvaluationConfig(sequences=None), precision=precision)
    return [
        replace(run, plan=Plan(tp=tp, sequence_parallel=is_split), repeat=repeat)
        for repeat in range(repeats)
        for is_split in (False, True)
    ]


def compared(rows: Iterable[Mapping[Any, Any]]) -> list[dict[str, Any]]:
    """Return every model on each number of ranks, with both ways' steps and their ratio, by device."""
    found = [
        _compared(cell) for cell in cells(rows, SPLIT, choice=attrgetter(SPLIT)) if {False, True} <= cell.runs.keys()
    ]
    return sorted(found, key=lambda row: (str(row["system"] or ""), row["parameters"], row["ranks"]))


def _compared(cell: Cell) -> dict[str, Any]:
    described = ("model", "ranks", "device", "device_name", "backend", "system", "parameters", "source")
    own: dict[str, Any] = {of: cell.first[of] for of in described}
    again, split, ratio = cell.mean(False, "step_seconds"), cell.mean(True, "step_seconds"), cell.ratio(True, False)
    gathered = split.mean + gathers(cell) if own["source"] == "simulated" else math.nan
    return own | {
        "duplicated": again.mean,
        "duplicated_half_width": _or_nan(again.half_width),
        "split": split.mean,
        "split_half_width": _or_nan(split.half_width),
        "ratio": ratio.mean,
        "ratio_half_width": _or_nan(ratio.half_width),
        "gathered": gathered,
        "gathered_ratio": gathered / again.mean,
        "published": published_ratio() if is_of_table_4(cell) else math.nan,
        "n": again.n,
        "oversubscribed": cell.is_crowded,
    }


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def gathers(cell: Cell) -> float:
    """Return seconds of a step's GATHERS of all tokens' hidden states, by the curves of the system; NaN: unknown."""
    if cell.first["system"] not in names():
        return math.nan
    run, system = cell.run, _system(cell.first["system"])
    size = run.train.microbatch * run.model.seq_len * run.model.hidden_size * ELEMENT_BYTES[run.precision]
    one = float(collective(system, "all_gather", size, group(("tp",), run.plan, system.node.size.value)))
    return GATHERS * run.model.num_layers * run.microbatches * one


_system = cache(load_system)


def is_of_table_4(cell: Cell) -> bool:
    """Return True if a cell is the layer that Korthikanti et al. time: of 22B parameters, 8 GPUs, four sequences."""
    run = cell.run
    same = replace(named(OF_TABLE_4), num_layers=run.model.num_layers) == run.model
    return same and run.plan.tp == 8 and run.train.microbatch == 4


@cache
def published_ratio() -> float:
    """Return a layer's time forward and back with sequence parallelism over that without (table 4)."""
    both = ("", "_sequence_parallel")
    plain, split = (published("korthikanti2022", f"layer_combined_milliseconds{way}")["value"].iloc[0] for way in both)
    return split / plain


STEP: dict[str, Any] = {"unit": "ms", "si": "s", "scale": MILLI}
SHARE: dict[str, Any] = {"unit": "%", "si": "fraction", "scale": PERCENT, "digits": 3}
SHOWN = (
    MODEL, DEVICE, RANKS,
    Column(key="duplicated", header="step, computed on every rank", interval="duplicated_half_width", **STEP),
    Column(key="split", header="step, each its part", interval="split_half_width", **STEP),
    Column(key="ratio", header="each its part, of every rank", interval="ratio_half_width", **SHARE),
    Column(key="published", header="published", **SHARE),
    Column(key="gathered", header="step, once and gathered", **STEP),
    Column(key="gathered_ratio", header="once and gathered, of every rank", **SHARE),
    RUNS, MARK,
)  # fmt: skip


def table(records: Sequence[Record]) -> Table:
    """Tabulate steps of both ways, and of the third by formula, by model, ranks and system."""
    title, found = f"Duplicate or communicate{about(records)}", compared(frame(records).to_dict("records"))
    if not found:
        return Table("redundant_compute", title, (), pd.DataFrame())
    simulated = ", ".join(dict.fromkeys(row["system"] for row in found if row["source"] == "simulated"))
    notes = (
        "What lies between a layer's split matrices (LayerNorm, dropout, residuals): computed on every rank, as in "
        "Megatron-LM; by each rank for its part of the tokens, as in sequence parallelism; once and gathered: the "
        "latter's step and two gathers of all hidden states in each pass of a layer, by the system's curves. "
        "Published: one layer of 22B (Korthikanti et al. 2022, table 4).",
        *([f"Simulated for {simulated}; nothing was run there."] if simulated else []),
    )
    return measured("redundant_compute", title, SHOWN, pd.DataFrame(found).drop(columns=["source", "system"]), notes)


def timed(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [row for row in compared(rows) if not math.isnan(row["ratio"])]


def beats_gathering(rows: Sequence[Row]) -> Evidence | None:
    """Judge whether computing on every rank is faster than computing once and gathering."""
    found = [row for row in timed(rows) if not math.isnan(row["gathered_ratio"])]
    return tally([row["gathered_ratio"] > 1 for row in found], "points", _ends(found, "gathered_ratio"))


def no_slower(rows: Sequence[Row]) -> Evidence | None:
    """Judge whether splitting makes no step slower, but for SLOWER."""
    found = timed(rows)
    return tally([row["ratio"] <= SLOWER for row in found], "points", _ends(found, "ratio"))


def saves_as_published(rows: Sequence[Row]) -> Evidence | None:
    """Judge whether splitting saves as much as in table 4, within NEAR, on table 4's hardware."""
    found = [row for row in timed(rows) if not math.isnan(row["published"])]
    numbers = ", ".join(f"{1 - row['ratio']:.1%}" for row in found)
    return tally([abs(row["ratio"] - row["published"]) <= NEAR for row in found], "points", f"saves {numbers}")


def grows_with_ranks(rows: Sequence[Row]) -> Evidence | None:
    """Judge whether splitting saves more with more ranks that share a model, as the divided work shrinks."""
    lines: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in timed(rows):
        lines.setdefault((row["device_name"], row["model"]), []).append(row)
    pairs = [pair for line in lines.values() for pair in pairwise(sorted(line, key=lambda row: row["ranks"]))]
    return tally([b["ratio"] < a["ratio"] for a, b in pairs], "steps from fewer ranks to more")


def _ends(found: Sequence[dict[str, Any]], ratio: str) -> str:
    """Return the smallest and the largest ratio, and where they are."""
    if not found:
        return ""
    low, high = (of(found, key=lambda row: row[ratio]) for of in (min, max))
    where = lambda row: f"{row[ratio]:.3f} ({row['model']} on {row['ranks']}{_on(row)})"
    return f"{where(low)} to {where(high)}"


def _on(row: Mapping[str, Any]) -> str:
    return f" of {row['system']}" if row["source"] == "simulated" else ""


CPU = Recipe(steps=13, global_batch=8, microbatch=8, lr=1e-4, warmup_steps=2)
GPU = Recipe(steps=30, global_batch=4, microbatch=4, lr=1e-4, warmup_steps=5)
SMOKE = ModelConfig(num_layers=2, hidden_size=128, num_heads=4, seq_len=128, dropout=0.1)
SMALL = [replace(SMOKE, num_layers=4, hidden_size=hidden, num_heads=hidden // 32) for hidden in (128, 256, 512)]
UP_TO_TWO_NODES = (2, 4, 8, 16)
PAPER = {
    "gpt-1.2b": (4, UP_TO_TWO_NODES),
    "gpt-8b": (4, UP_TO_TWO_NODES),
    OF_TABLE_4: (4, UP_TO_TWO_NODES),
    "korthikanti-1t": (2, (8, 16)),
}
"""Layers that are left of a model, as one layer decides a step; and ranks that share them, of nodes with 8 or 16."""

EXPERIMENT = Experiment(
    source="our own; Megatron-LM 2019, section 3; Korthikanti et al. 2022, section 4, table 4",
    expectation="computing again is faster than gathering on every network, by far on slow ones; splitting saves 3% of "
    "a layer of 22B on 8 GPUs, more on more ranks and less in wider models",
    claims=(
        Claim(
            text="to compute LayerNorm and dropout on every rank is faster than to compute them once and gather",
            source="Megatron-LM 2019, section 3",
            check=beats_gathering,
        ),
        Claim(
            text="to split them over the tokens saves what table 4 says of a layer of 22B, within two points",
            source="Korthikanti et al. 2022, table 4",
            check=saves_as_published,
            published="3.1%: 19.0 ms of 19.6",
            hardware="A100",
        ),
        claimed(text="to split them makes no step over 2% slower", check=no_slower),
        claimed(text="the more ranks share a layer, the more splitting saves", check=grows_with_ranks),
    ),
    found="Simulated for V100s, A100s, H100s and Frontier: computing once and gathering would make every step longer "
    "than computing on every rank, by up to 27%, so that Megatron-LM's choice holds on all of these networks; in wide "
    "models on two ranks by no more than 2%. Splitting saves 4.3% of a step of 22B on 8 A100s (3.1% of a layer "
    "published), 8% on 16. Narrow models on many ranks are 10 to 20% slower split: there a step takes as long as the "
    "host takes to launch it, and split layers have twice the collectives. So more ranks save more in wide models "
    "only. Measured on two ranks of two cores, splitting is slower by 9 ± 26, 0 ± 14 and 7.6 ± 4.6% in models of 0.8M, "
    "3.3M and 13M parameters: gloo's gather and reduce-scatter take longer than its all-reduce, and there is little to "
    "save.",
    table=table,
    cost={"smoke": "1 min, 2 CPU cores", "small": "4 min, 2 CPU cores", "paper": "10 min, 16 GPUs with 80 GB"},
    deviations="Computing once and gathering is not built; it is told from the split step and the time of its gathers. "
    "The papers' models have two or four layers here, nothing is recomputed; bf16, and fp16 where there is no bf16.",
    runs={
        "smoke": [run for model in (SMOKE, replace(SMOKE, hidden_size=256)) for run in both(model, 2, CPU)],
        "small": [run for model in SMALL for run in both(model, 2, CPU, repeats=3)],
        "paper": [
            run
            for name, (layers, degrees) in PAPER.items()
            for tp in degrees
            for run in both(replace(named(name), num_layers=layers), tp, GPU, "bf16")
        ],
    },
)
