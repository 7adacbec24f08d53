"""Does a step's time grow as the FLOPs of the model?

One rank trains GPT models of 8M to 400M parameters, with as many tokens a step: were time proportional to the model
FLOPs, then each would have the same rate. What stands against it is what a small model spends between its products, and
what a large one has to fetch from memory. Beside that, 1, 2, 4 and 8 data-parallel ranks with as many sequences each:
more ranks than cores take turns, and say nothing of scaling but that.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from experiments.ours.engines import claimed
from harness.analysis.render import Column, Table
from harness.analysis.tables import FLOP_RATE, MARK, MILLI, MODEL, PERCENT, RUNS, TERA, measured
from harness.experiment.claims import Evidence, Row
from harness.experiment.experiment import Experiment
from harness.records.measures import about, combine, frame, size_name
from harness.records.record import Record
from impl.evaluation_config import EvaluationConfig
from impl.model.config import ModelConfig
from impl.model.sizes import named
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Precision, Run

LINEAR = 0.15
"""Relative tolerance of a step's time against time proportional to its FLOPs."""
LEAST, SPAN = 7e6, 20
"""Parameters of the smallest model that counts, and the least ratio of the largest to it for a law."""
NO_FASTER = 1.05
"""Ratio of rates that still counts as no faster; assumed, as repeats of one point differ."""


def one_rank(models: Sequence[ModelConfig], recipe: Recipe, repeats: int, precision: Precision = "fp32") -> list[Run]:
    run = Run(train=recipe, evaluation=EvaluationConfig(sequences=None), precision=precision)
    return [replace(run, model=model, repeat=repeat) for repeat in range(repeats) for model in models]


def in_ranks(
    degrees: Sequence[int], model: ModelConfig, recipe: Recipe, repeats: int, precision: Precision = "fp32"
) -> list[Run]:
    """Return runs of data-parallel ranks with a batch of `recipe.global_batch` each."""
    return [
        replace(run, plan=Plan(dp=dp), train=replace(recipe, global_batch=recipe.global_batch * dp))
        for run in one_rank([model], recipe, repeats, precision)
        for dp in degrees
    ]


def sizes(rows: pd.DataFrame) -> list[list[dict[Any, Any]]]:
    """Return models of one rank with the same tokens a step on one device, by parameters, next to proportional time.

    `flops` are a step's model FLOPs, `over` is its time over c times these, less 1: c is the geometric mean of
    time over FLOPs, so that the models deviate to both sides.
    """
    if not rows.empty:
        rows = pd.DataFrame(rows[(rows["status"] == "ok") & (rows["ranks"] == 1) & rows[FLOP_RATE.key].notna()])
    if rows.empty:
        return []
    made = combine(rows.drop_duplicates("id"), ("point", "source", "device_name"), MEASURES)
    groups: dict[tuple[Any, ...], list[dict[Any, Any]]] = {}
    for row in sorted(made, key=lambda row: row["parameters"]):
        groups.setdefault((row["device_name"], row["tokens_per_step"], row["engine"]), []).append(row)
    return [_beside_proportional(group) for group in groups.values() if len(group) > 1]


def _beside_proportional(group: Sequence[dict[Any, Any]]) -> list[dict[Any, Any]]:
    mean = math.exp(math.fsum(math.log(row[FLOP_RATE.key]) for row in group) / len(group))
    return [
        {
            **row,
            "flops": row["tokens_per_step"] / row["tokens_per_second"] * row[FLOP_RATE.key],
            "over": mean / row[FLOP_RATE.key] - 1,
        }
        for row in group
    ]


MEASURES = (FLOP_RATE.key, "tokens_per_second", "step_seconds")
SHOWN = (
    MODEL,
    Column(key="parameters", header="parameters"),
    Column(key="tokens_per_step", header="tokens a step"),
    Column(key="flops", header="model FLOPs a step", unit="TFLOP", si="FLOP", scale=TERA, digits=3),
    Column(
        key="step_seconds", header="step, median", unit="ms", si="s", scale=MILLI, interval="step_seconds_half_width"
    ),
    FLOP_RATE,
    Column(key="over", header="over proportional", unit="%", si="fraction", scale=PERCENT, digits=3),
    RUNS, MARK,
)  # fmt: skip


def table(records: Sequence[Record]) -> Table:
    """Tabulate step time and rate of one rank by model size, next to proportional time."""
    title = f"Cost of a step by model size{about(records)}"
    rows = pd.DataFrame([row for group in sizes(frame(records)) for row in group])
    if rows.empty:
        return Table("cost_scaling", title, (), rows)
    rows["line"] = [f"{tokens:,} tokens a step" for tokens in rows["tokens_per_step"]]
    rows["at"], rows["published_rate"] = [size_name(round(count)) for count in rows["parameters"]], math.nan
    notes = (
        "Model FLOPs: palm_12, 6 N + 12 L h s a token, where N counts what a token is multiplied by: 12 L h^2 and the "
        "output head. Over proportional: step time over c times these, less 1; c is the geometric mean over the sizes.",
    )
    return measured("cost_scaling", title, SHOWN, rows, notes)


def is_linear(rows: Sequence[Row]) -> Evidence | None:
    """Judge whether time is proportional to FLOPs within LINEAR, from LEAST parameters on, where sizes span enough."""
    judged = []
    for group in sizes(pd.DataFrame(list(rows))):
        meant = [row for row in group if row["parameters"] >= LEAST and not row["oversubscribed"]]
        if len(meant) > 2 and meant[-1]["parameters"] >= SPAN * meant[0]["parameters"]:
            judged.append(_beside_proportional(meant))
    if not judged:
        return None
    worst = max((row for group in judged for row in group), key=lambda row: abs(row["over"]))
    numbers = "; ".join(
        f"{size_name(round(group[0]['parameters']))} to {size_name(round(group[-1]['parameters']))}: time grows as "
        f"FLOPs^{slope(group):.3f}"
        for group in judged
    )
    furthest = f"furthest {worst['over']:+.1%} ({size_name(round(worst['parameters']))})"
    return Evidence(abs(worst["over"]) <= LINEAR, f"{numbers}; {furthest}")


def slope(group: Sequence[dict[Any, Any]]) -> float:
    """Return the slope of log time over log FLOPs, by least squares."""
    x, y = ([math.log(row[name]) for row in group] for name in ("flops", "step_seconds"))
    x_mean, y_mean = math.fsum(x) / len(x), math.fsum(y) / len(y)
    products = math.fsum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True))
    return products / math.fsum((a - x_mean) ** 2 for a in x)


def turns_add_nothing(rows: Sequence[Row]) -> Evidence | None:
    """Judge whether ranks that share cores have in total no higher rate than ranks with a core each."""
    found = pd.DataFrame(list(rows))
    if not found.empty:
        found = pd.DataFrame(found[(found["status"] == "ok") & (found["dp"] == found["ranks"])]).drop_duplicates("id")
    if found.empty:
        return None
    groups: dict[tuple[Any, ...], list[dict[Any, Any]]] = {}
    for row in combine(found, ("point", "source", "device_name"), MEASURES):
        at = row["model"], row["global_batch"] / row["ranks"], row["device_name"], row["engine"]
        groups.setdefault(at, []).append(row)
    gains = []
    for group in groups.values():
        own = max((row["tokens_per_second"] for row in group if not row["oversubscribed"]), default=math.nan)
        gains += [(row["tokens_per_second"] / own, row["ranks"]) for row in group if row["oversubscribed"]]
    gains = [(gain, ranks) for gain, ranks in gains if not math.isnan(gain)]
    numbers = ", ".join(f"{gain:.2f} times ({ranks} ranks)" for gain, ranks in gains)
    return Evidence(max(gains)[0] <= NO_FASTER, f"{numbers} the best rate of a core each") if gains else None


CPU = Recipe(steps=9, global_batch=2, microbatch=2, lr=1e-4, warmup_steps=2)
GPU = Recipe(steps=15, global_batch=32, microbatch=4, lr=1.5e-4, warmup_steps=2)
SMALL = [
    named("gpt-8m"), named("gpt-25m"),
    *(
        ModelConfig(num_layers=layers, hidden_size=hidden, num_heads=hidden // 64, seq_len=256)
        for layers, hidden in ((12, 768), (16, 1024), (20, 1280))
    ),
]  # fmt: skip
"""Models of `impl.model.sizes`, then on to 85M, 200M and 400M with as many hidden units a head."""
PAPER = [replace(named(f"gpt-{size}"), dropout=0.0) for size in ("355m", "1.2b", "2.5b", "4.2b")]

EXPERIMENT = Experiment(
    source="our own; Kaplan et al. 2020 (2001.08361), section 2.1, take a step's cost as 6 N a token",
    expectation="proportional within 15%; with more ranks than cores, no more tokens a second",
    claims=(
        claimed(
            text="from 8M parameters to 20 times as many or more, time is proportional to model FLOPs within 15%",
            check=is_linear,
        ),
        claimed(text="ranks that share cores are no faster together, but for 5%", check=turns_add_nothing),
    ),
    table=table,
    cost={"smoke": "1 min, 2 CPU cores", "small": "8 min, 2 CPU cores", "paper": "30 min, 8 GPUs with 141 GB"},
    deviations="At `small` in fp32, whose products take most of a step, and with 512 tokens a step: 400M parameters "
    "take a core seconds for each. Vocabularies are those of bytes, so that N is what the layers have.",
    found="Measured on one core in fp32, from 7.6M to 394M parameters: step time grows as FLOPs to the power of 0.950 "
    "and is within 13.7% of proportional. The smallest model is furthest off: it reaches 0.115 TFLOP/s of model FLOPs "
    "where the largest reaches 0.141. Four ranks that share two cores train 0.97 times as many tokens a second as two, "
    "eight ranks 0.91 times.",
    runs={
        "smoke": [
            *one_rank([replace(named(f"gpt-{size}"), seq_len=256) for size in ("0.5m", "2m", "8m")], CPU, 1),
            *in_ranks((1, 2, 4), replace(named("gpt-0.5m"), seq_len=256), replace(CPU, global_batch=4), 1),
        ],
        "small": [*one_rank(SMALL, CPU, 2), *in_ranks((1, 2, 4, 8), named("gpt-8m"), replace(CPU, global_batch=4), 2)],
        "paper": [
            *one_rank(PAPER, GPU, 3, "bf16"),
            *in_ranks((2, 4, 8), PAPER[1], GPU, 3, "bf16"),
        ],
    },
)
