"""Does everything work here: how fast are one and two ranks, and how near does a small model come to the best possible?

Trains GPTs on a synthetic language whose entropy is known exactly, so every perplexity stands beside the floor that no
model can beat; and the same model on one and two data-parallel ranks, with the global batch constant (strong scaling)
and growing with the ranks (weak scaling).
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from experiments.ours.data_parallel_scaling import sweep
from harness.experiment.kit import (
    Claim, Estimate, EvaluationConfig, Evidence, Experiment, ModelConfig, Plan, Precision, Recipe, Record, Run,
    Tolerance, cost, named, tally,
)  # fmt: skip
from harness.records.evaluations import floor_of

QUALITY = Recipe(steps=320, global_batch=16, microbatch=8, lr=3e-3, warmup_steps=60)
SPEED = Recipe(steps=20, global_batch=8, microbatch=4, warmup_steps=5)

NEAR = Tolerance(0.1, "assumed", "2026-11-20")
"""Share of the perplexity floor that the largest model may be above it."""
TINY = replace(named("gpt-0.5m"), hidden_size=64, num_heads=1)


def perplexity(sizes: list[ModelConfig], recipe: Recipe, precision: Precision = "fp32") -> list[Run]:
    """Return each size with LayerNorm before and after its blocks."""
    return [
        Run(
            model=replace(size, norm_placement=norm), plan=Plan(dp=2), train=recipe, precision=precision,
            evaluation=EvaluationConfig(every=recipe.steps // 4, sequences=512),
        )
        for size in sizes
        for norm in ("pre", "post")
    ]  # fmt: skip


def over_floor(records: Sequence[Record]) -> list[tuple[Record, float, float]]:
    """Return the records evaluated on the synthetic language: how far over its floor, and the floor's standard error.

    Both are relative to the floor; the error is NaN if unknown.
    """
    found = [(record, floor_of(record, one)) for record in records for one in record.last_evaluations]
    known = [(record, one) for record, one in found if not math.isnan(one["floor"])]
    return [(record, one["above_floor"], one["floor_standard_error"] / one["floor"]) for record, one in known]


def near_floor(records: Sequence[Record]) -> Evidence | None:
    """Judge the largest model's best placement, with two standard errors of the validation sample as its interval."""
    found = [(record.parameters, over, error) for record, over, error in over_floor(records)]
    if not found:
        return None
    _, best, error = min(found, key=lambda one: (-one[0], one[1]))
    margin = Estimate(NEAR - best, None if math.isnan(error) else 2 * error, 1, math.inf)
    return tally([margin], "", f"{best:.1%} above the floor")


def none_below_floor(records: Sequence[Record]) -> Evidence | None:
    in_errors = [over / error for _, over, error in over_floor(records) if not math.isnan(over / error)]
    lowest = min(in_errors, default=0.0)
    return tally([one > -2 for one in in_errors], "runs", f"lowest: {lowest:+.1f} standard errors from the floor")


EXPERIMENT = Experiment(
    source="Megatron-LM 2019, figures 5 and 7, table 3, in miniature",
    expectation="perplexity falls with size towards the floor; two ranks are nearly twice as fast as one",
    claims=(
        Claim("the largest model comes within 10% of the perplexity floor", "our own", near_floor, tolerance=NEAR),
        Claim(
            "no perplexity is below the floor by more than two sampling errors", "our own", none_below_floor,
            kind="self-consistency",
        ),
    ),
    cost=cost("3 min", "1 h, 8 GPUs"),
    runs={
        "smoke": [*perplexity([TINY], replace(QUALITY, steps=100)), *sweep(named("gpt-2m"), (1, 2), SPEED)],
        "small": [*perplexity([TINY, named("gpt-0.5m")], QUALITY), *sweep(named("gpt-2m"), (1, 2), SPEED)],
        "paper": [
            *perplexity([named("gpt-8m"), named("gpt-25m")], replace(QUALITY, steps=4000, global_batch=64), "bf16"),
            *sweep(named("gpt-355m"), (1, 2, 4, 8), replace(SPEED, global_batch=32), "bf16"),
        ],
    },
)  # fmt: skip
