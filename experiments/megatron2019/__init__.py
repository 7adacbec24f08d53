"""What the experiments of Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053) share: models, curves and checks."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import attrgetter
from typing import Any

from harness.experiment.kit import (
    EFFICIENCY, PUBLISHED, Column, Evidence, Measure, ModelConfig, Plan, Point, Precision, Recipe, Record, Run, Tier,
    all_hold, flop_rate, known, named, points, published, relative_to, sent, tally, untested,
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
BERT = Recipe(steps=2_000_000, global_batch=1024, microbatch=8, lr=1e-4, warmup_steps=10_000, decay="linear")
"""Pretraining of BERT (section 5.4)."""
GROWS, GROWS_WITH_DATA, CONSTANT = "model", "model and data", "ranks only"
"""What grows along a curve."""
SENT = sent("tp", "sent per step")
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
    return untested(model, plan, recipe, precision)


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
    """Return timed points relative to the one that `is_first`, each with what the paper prints; NaN: nothing."""
    return [
        replace(one, printed={"published": printed(one)})
        for one in relative_to(points(records, measure), is_first, measure)
    ]


def printed_speedup(one: Point) -> float:
    """Return the published speed-up over one rank of a model that does not grow."""
    return one.printed["published"] * one.run.plan.tp


tokens_per_second = attrgetter("tokens_per_second")


def sped_up(records: Sequence[Record]) -> list[Point]:
    """Return points relative to one rank, by tensor-parallel degree."""
    is_first = lambda one: one.run.plan.world_size == 1
    in_table_8 = lambda one: published_efficiency(CONSTANT, one.run.plan.tp, 1)
    found = efficiencies(records, tokens_per_second, is_first, in_table_8)
    return sorted(found, key=lambda one: one.run.plan.tp)


def times_as_fast(found: Sequence[Point]) -> str:
    return ", ".join(f"{one.relative.mean:.2f} times on {one.run.plan.world_size}" for one in found)


def faster_but_less_so(records: Sequence[Record]) -> Evidence | None:
    """Judge whether every doubling of the ranks is faster, and less than twice as fast."""
    found = known(sped_up(records))
    ratios = [b.over(a, tokens_per_second) for a, b in pairwise(found)]
    margins = [all_hold([ratio - 1, ratio.scaled(-1) - -2]) for ratio in ratios]
    return tally(margins, "doublings", times_as_fast(found[1:]))


LINES = {GROWS: "model grows", GROWS_WITH_DATA: "model and data grow", CONSTANT: "only ranks grow"}
"""Names of the curves in the figure."""


def what_grows(run: Run) -> str:
    """Return what grows along the curve of a point; all curves begin at the first model on one rank."""
    tp, dp = run.plan.tp, run.plan.dp
    for models in MODELS.values():
        if models.get(tp) == run.model:
            return GROWS if dp == 1 else GROWS_WITH_DATA
        if models[1] == run.model and dp == 1:
            return CONSTANT
    return "other"


def begins(run: Run) -> bool:
    """Return True for the first model on one rank, where all curves begin."""
    return what_grows(run) == GROWS and run.plan.world_size == 1


def is_plain(run: Run) -> bool:
    """Return True if layers work as in the paper, and gradients are reduced as they come."""
    return not run.plan.sequence_parallel and run.plan.overlap_input_grad_reduce


def printed_on_curve(one: Point) -> float:
    """Return what the paper prints for a point's degrees and curve, whatever the size of the model here."""
    plan = one.run.plan
    return published_efficiency(what_grows(one.run), plan.tp, plan.dp) if is_plain(one.run) else math.nan


def on_all_curves(records: Sequence[Record]) -> list[Point]:
    """Return timed points, each with its rate of model FLOPs per device over that of the first model on one rank."""
    return efficiencies(records, flop_rate, lambda one: begins(one.run), printed_on_curve)


def line_of(run: Run) -> str:
    """Return the name of a point's line in the figure; empty where all begin."""
    if begins(run):
        return ""
    way = "" if is_plain(run) else ", sequence parallel" if run.plan.sequence_parallel else ", no input overlap"
    return LINES.get(what_grows(run), what_grows(run)) + way


def on_curve(records: Sequence[Record], grows: str) -> list[Point]:
    """Return a curve's plain points whose efficiency is known, by degree."""
    is_on = lambda run: what_grows(run) == grows or (grows == CONSTANT and begins(run))
    found = [one for one in known(on_all_curves(records)) if is_plain(one.run) and is_on(one.run)]
    return sorted(found, key=lambda one: one.run.plan.tp)
