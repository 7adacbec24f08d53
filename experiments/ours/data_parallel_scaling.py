"""How much of every added device does data parallelism turn into speed?

Weak scaling keeps the sequences per rank, strong scaling the global batch (as in Megatron-LM 2019, section 5.1, and
ZeRO, figure 3). Gradients are all-reduced in buckets while the backward pass runs; each point is also measured with the
reduction after it, so that the difference is what overlap buys.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from harness.analysis.scaling import ratio
from harness.experiment.claims import Claim, Evidence, Row, tally
from harness.experiment.experiment import Experiment
from harness.records.measures import combine
from impl.evaluation_config import EvaluationConfig
from impl.model.config import ModelConfig
from impl.model.sizes import named
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Precision, Run


def sweep(
    size: ModelConfig, degrees: tuple[int, ...], recipe: Recipe, precision: Precision = "fp32", *, overlap: bool = True
) -> list[Run]:
    """Return weak and strong scaling over the degrees, for speed only; `recipe.global_batch` is one rank's batch."""
    strong = {(dp, recipe.global_batch) for dp in degrees}
    weak = {(dp, recipe.global_batch * dp) for dp in degrees}
    return [
        Run(
            model=size,
            plan=Plan(dp=dp, overlap_grad_reduce=overlap),
            train=replace(recipe, global_batch=batch),
            evaluation=EvaluationConfig(sequences=None),
            precision=precision,
        )
        for dp, batch in sorted(strong | weak)
    ]


def with_and_without_overlap(
    size: ModelConfig, degrees: tuple[int, ...], recipe: Recipe, repeats: int, precision: Precision = "fp32"
) -> list[Run]:
    """Return the sweep, reduced during and after the backward pass, measured `repeats` times in turn."""
    during = sweep(size, degrees, recipe, precision)
    after = sweep(size, degrees, recipe, precision, overlap=False)
    return [replace(run, repeat=repeat) for repeat in range(repeats) for run in (*during, *after)]


RATE = "tokens_per_second_per_device"
SLOWER, POINTS, PUBLISHED = 0.98, 0.02, 0.96
"""Ratio of rates that still counts as no slower; how near an efficiency is to count as the published one, which a
network that takes no time must not be; figure 5's of 1.2B on 64 GPUs."""


def compared(rows: Sequence[Row]) -> list[dict[Any, Any]]:
    """Return points of timed runs on more than one rank, with `kind` of scaling and `efficiency`.

    Efficiency is the rate of a rank over that of one alone, with the same model, device and overlap; NaN where ranks
    are oversubscribed.
    """
    found = pd.DataFrame(list(rows))
    if not found.empty:
        found = pd.DataFrame(found[(found["status"] == "ok") & found[RATE].notna()]).drop_duplicates("id")
    if found.empty:
        return []
    points = combine(found, ("point", "source", "device_name"), (RATE,))
    for row in points:
        row["overlap"] = row["point"].plan.overlap_grad_reduce
    of = lambda row: (row["model"], row["device_name"], row["engine"], row["overlap"])
    alone = {of(row): row for row in points if row["ranks"] == 1}
    out = []
    for row in points:
        first = alone.get(of(row))
        if first is not None and row is not first:
            kinds = {row["ranks"] * first["global_batch"]: "weak", first["global_batch"]: "strong"}
            if row["global_batch"] in kinds:
                efficiency = ratio(row, first, RATE).mean
                out.append({**row, "kind": kinds[row["global_batch"]], "efficiency": efficiency})
    return out


def pairs(rows: Sequence[Row], name: str, one: Any, other: Any) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    """Return pairs of points that differ in one choice only and whose efficiency is known."""
    rest = {"kind", "overlap"} - {name}
    by_rest: dict[tuple[Any, ...], dict[Any, dict[Any, Any]]] = {}
    for row in compared(rows):
        if not math.isnan(row["efficiency"]):
            at = tuple(row[of] for of in ("model", "device_name", "engine", "ranks", *sorted(rest)))
            by_rest.setdefault(at, {})[row[name]] = row
    return [(ways[one], ways[other]) for ways in by_rest.values() if {one, other} <= set(ways)]


def weak_keeps_more(rows: Sequence[Row]) -> Evidence | None:
    found = [(a, b) for a, b in pairs(rows, "kind", "weak", "strong") if a["overlap"]]
    numbers = (f"{a['efficiency']:.0%} and {b['efficiency']:.0%} ({a['ranks']} ranks)" for a, b in found)
    return tally([a["efficiency"] > b["efficiency"] for a, b in found], "degrees", ", ".join(numbers))


def overlap_is_no_slower(rows: Sequence[Row]) -> Evidence | None:
    found = [(on, on[RATE] / off[RATE]) for on, off in pairs(rows, "overlap", True, False)]
    numbers = (f"{gain:.3f} times as fast ({row['ranks']} ranks, {row['kind']})" for row, gain in found)
    return tally([gain >= SLOWER for _, gain in found], "points", ", ".join(numbers))


def as_published(rows: Sequence[Row]) -> Evidence | None:
    """Judge whether 1.2B on 64 GPUs has the efficiency of figure 5."""
    is_of_paper: Callable[[dict[Any, Any]], bool] = lambda row: (
        row["parameters"] > 1e9 and (row["ranks"], row["kind"], row["overlap"]) == (64, "weak", True)
    )
    found = [row["efficiency"] for row in compared(rows) if is_of_paper(row) and not math.isnan(row["efficiency"])]
    numbers = ", ".join(f"{one:.1%}" for one in found)
    return Evidence(all(abs(one - PUBLISHED) <= POINTS for one in found), numbers) if found else None


EXPERIMENT = Experiment(
    source="Megatron-LM 2019, section 5.1, figure 5; ZeRO 2019, figure 3; data parallelism alone",
    expectation="weak scaling stays near 100% while gradients are small against compute; strong scaling falls behind",
    claims=(
        Claim(
            text="a rank keeps more of its rate in weak scaling than in strong",
            source="our own",
            check=weak_keeps_more,
            published="96% weak (1.2B on 64 GPUs, Megatron-LM 2019, figure 5)",
        ),
        Claim(
            text="gradients that are reduced during the backward pass make no step over 2% slower",
            source="our own",
            check=overlap_is_no_slower,
        ),
        Claim(
            text="1.2B on 64 GPUs with as many sequences each loses the published 4% of its rate, within 2 points",
            source="Megatron-LM 2019, figure 5, model and data parallel",
            check=as_published,
        ),
    ),
    cost={
        "smoke": "1 min, 2 CPU cores",
        "small": "8 min, 2 CPU cores",
        "paper": "20 min, 64 GPUs",
    },
    found="Measured with 7.6M parameters on two cores: two ranks keep 93 ± 13% of one's rate in weak and 87.9 ± 7.0% "
    "in strong scaling. Reducing the gradients during the backward pass or after it makes no difference that can be "
    "told (0.996 and 1.005 times as fast), presumably as gloo reduces on the core that the backward pass runs on. "
    "Simulated with 1.2B on 64 V100s, a rank keeps 99% in weak scaling: it loses 1%, where the paper lost 4%. In "
    "strong scaling it keeps 41%, and there the reduction during the backward pass makes a step 1.24 times as fast.",
    runs={
        "smoke": with_and_without_overlap(
            named("gpt-0.5m"), (1, 2), Recipe(steps=15, global_batch=8, microbatch=4, warmup_steps=2), 1
        ),
        "small": with_and_without_overlap(
            named("gpt-8m"), (1, 2), Recipe(steps=16, global_batch=8, microbatch=4, warmup_steps=2), 3
        ),
        "paper": with_and_without_overlap(
            named("gpt-1.2b"),
            (1, 2, 4, 8, 16, 32, 64),
            Recipe(steps=100, global_batch=64, microbatch=1, lr=1.5e-4, warmup_steps=10),
            3,
            "bf16",
        ),
    },
)
