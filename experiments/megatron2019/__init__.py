"""What the experiments of Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053) share: its models and small ones."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from harness.experiment.kit import (
    EFFICIENCY, PUBLISHED, Column, EvaluationConfig, Measure, ModelConfig, Plan, Point, Precision, Recipe, Record,
    Run, Tier, named, points, published, relative_to,
)  # fmt: skip

MODELS: dict[Tier, dict[int, ModelConfig]] = {
    "smoke": {
        tp: ModelConfig(num_layers=2, hidden_size=h, num_heads=h // 32, dropout=0.1) for tp, h in ((1, 128), (2, 192))
    },
    "small": {
        tp: ModelConfig(num_layers=4, hidden_size=h, num_heads=h // 64, seq_len=256, dropout=0.1)
        for tp, h in ((1, 256), (2, 384))
    },
    "paper": {1: named("gpt-1.2b"), 2: named("gpt-2.5b"), 4: named("gpt-4.2b"), 8: named("gpt-8b")},
}
"""The model of each tensor-parallel degree: about as many parameters on a rank as the first has."""
CPU = Recipe(steps=16, global_batch=8, microbatch=8, warmup_steps=2)
V100S = Recipe(steps=20, global_batch=8, microbatch=8, lr=1.5e-4, warmup_steps=2)
"""Batch of a data-parallel rank, in one microbatch; layers are recomputed (section 5.1)."""
GROWS, GROWS_WITH_DATA, CONSTANT = "model", "model and data", "ranks only"
"""What grows along a curve."""
SENT = Column(
    key="tp_bytes_sent", header="sent per step", unit="MiB", si="B", scale=2**20, digits=3,
    of=lambda one: one.mean(lambda record: record.tp_bytes_sent) if one.run.plan.tp > 1 else None,
)  # fmt: skip
SENT_NOTE = "Sent: bytes that a rank sends to those it shares layers with in one step, were every collective a ring."
IN_PRINT = replace(PUBLISHED, of=lambda one: one.printed.get("published"))
SHARE = replace(EFFICIENCY, of=lambda one: one.relative)
SHARE_OF_RANKS = replace(EFFICIENCY, of=lambda one: one.relative.scaled(1 / one.run.plan.tp))
SPEEDUP = Column(key="speedup", header="speed-up", si="ratio", digits=3, of=lambda one: one.relative)
PRINTED_SPEEDUP = replace(
    SPEEDUP, key="published_speedup", header="speed-up, published", of=lambda one: printed_speedup(one)
)
WIDTH = 0.64
"""Standard deviation of initial weights times the root of the hidden size: BERT-large's, 0.02 at 1024."""


def on_v100s(model: ModelConfig, tp: int, dp: int = 1) -> Run:
    """Return a run of table 1's recipe: batches of 8 a data-parallel rank, fp16, every layer recomputed.

    Gradients are of 16 bits, as all of mixed precision's were in 2019; buckets of 128 MiB are assumed.
    """
    plan = Plan(tp=tp, dp=dp, recompute="full", bucket_bytes=2**27)
    return replace(speed(model, plan, V100S, "fp16"), fp32_gradients=False)


def speed(model: ModelConfig, plan: Plan, recipe: Recipe, precision: Precision = "fp32") -> Run:
    """Return a run for speed only; `recipe.global_batch` is the batch of one data-parallel rank."""
    recipe = replace(recipe, global_batch=recipe.global_batch * plan.dp)
    return Run(model=model, plan=plan, train=recipe, evaluation=EvaluationConfig(sequences=None), precision=precision)


def repeated(runs: Sequence[Run], repeats: int) -> list[Run]:
    """Return the runs several times, in turn."""
    return [replace(run, repeat=repeat) for repeat in range(repeats) for run in runs]


def scaled(layers: int, hidden: int, **fields: Any) -> ModelConfig:
    """Return a small model whose initial weights act as a large one's.

    With a deviation of 0.02 its blocks would add next to nothing to the input that post-layernorm scales up to 1.
    """
    shape: dict[str, Any] = {"num_layers": layers, "hidden_size": hidden, "num_heads": max(1, hidden // 32)}
    shape |= {"seq_len": 128, "init_std": round(WIDTH / math.sqrt(hidden), 4)}
    return ModelConfig(**shape | fields)


@functools.cache
def published_efficiency(grows: str, tp: int, dp: int) -> float:
    """Return the efficiency of figure 5, or table 8's speed-up over the GPUs; NaN for degrees that are in neither."""
    if grows == CONSTANT:
        rows = published("megatron2019", "strong_scaling_speedup").to_dict("records")
        found = [row["value"] / row["gpus"] for row in rows if (row["tp"], row["dp"]) == (tp, dp)]
    else:
        rows = published("megatron2019", "weak_scaling_efficiency").to_dict("records")
        where = "figure 5", tp, dp
        found = [row["value"] / 100 for row in rows if (row["where"], row["tp"], row["dp"]) == where]
    return found[0] if found else math.nan


def efficiencies(
    records: Sequence[Record], measure: Measure, is_first: Callable[[Point], bool], printed: Callable[[Point], float]
) -> list[Point]:
    """Return timed points relative to the first model on one rank, with the published efficiency of each.

    Args:
        records: measured or simulated records.
        measure: rate that is compared.
        is_first: function that returns True for the baseline.
        printed: function that returns what the paper prints for a point; NaN: nothing.
    """
    return [
        replace(one, printed={"published": printed(one)})
        for one in relative_to(points(records, measure), is_first, measure)
    ]


def printed_speedup(one: Point) -> float:
    """Return the published speed-up over one rank of a model that does not grow."""
    return one.printed["published"] * one.run.plan.tp


def known(found: Sequence[Point]) -> list[Point]:
    """Return the points whose efficiency is known."""
    return [one for one in found if not math.isnan(one.relative.mean)]
