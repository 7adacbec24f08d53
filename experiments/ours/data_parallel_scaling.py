"""How much of every added device does data parallelism turn into speed?

Weak scaling keeps the sequences per rank, strong scaling the global batch (as in Megatron-LM 2019, section 5.1, and
ZeRO, figure 3). Gradients are all-reduced in buckets while the backward pass runs; each point is also measured with the
reduction after it, so that the difference is what overlap buys.
"""

from collections.abc import Sequence
from dataclasses import replace

from harness.experiment.kit import (
    Claim, Evidence, Experiment, ModelConfig, Plan, Precision, Recipe, Record, Run, Tolerance, cost, measured_only,
    named, repeated, untested, within_points,
)  # fmt: skip
from harness.experiment.rates import SLOWER, choices, overlap_is_no_slower, scaled, weak_keeps_more

LOST = Tolerance(0.02, "half of the published loss: a network that takes no time must not pass", "2026-11-23")
"""Largest distance of an efficiency from the published one."""
PUBLISHED = 0.96
"""Figure 5's efficiency of 1.2B on 64 GPUs."""


def sweep(
    size: ModelConfig, degrees: tuple[int, ...], recipe: Recipe, precision: Precision = "fp32", *, overlap: bool = True
) -> list[Run]:
    """Return weak and strong scaling over the degrees, for speed only; `recipe.global_batch` is one rank's batch."""
    sizes = sorted({(dp, recipe.global_batch * times) for dp in degrees for times in (1, dp)})
    plan = Plan(overlap_grad_reduce=overlap)
    return [untested(size, replace(plan, dp=dp), replace(recipe, global_batch=n), precision) for dp, n in sizes]


def with_and_without_overlap(
    size: ModelConfig, degrees: tuple[int, ...], recipe: Recipe, repeats: int, precision: Precision = "fp32"
) -> list[Run]:
    """Return the sweep, reduced during and after the backward pass, measured `repeats` times in turn."""
    both = [run for overlap in (True, False) for run in sweep(size, degrees, recipe, precision, overlap=overlap)]
    return repeated(both, repeats)


def as_published(records: Sequence[Record]) -> Evidence | None:
    """Judge whether 1.2B on 64 GPUs has the efficiency of figure 5 of Megatron-LM (2019)."""
    is_of_paper = lambda one: one.parameters > 1e9 and one.run.plan.world_size == 64 and all(choices(one).values())
    found = [one.relative for one in scaled(records) if is_of_paper(one)]
    return within_points([(one, PUBLISHED) for one in found], LOST, "", ", ".join(f"{one:.1%}" for one in found))


EXPERIMENT = Experiment(
    source="Megatron-LM 2019, section 5.1, figure 5; ZeRO 2019, figure 3; data parallelism alone",
    expectation="weak scaling stays near 100% while gradients are small against compute; strong scaling falls behind",
    claims=(
        Claim(
            "a rank keeps more of its rate in weak scaling than in strong", "our own", weak_keeps_more,
            published="96% weak (1.2B on 64 GPUs, Megatron-LM 2019, figure 5)", about="network",
        ),
        Claim(
            "gradients that are reduced during the backward pass make no step over 2% slower", "our own",
            measured_only(overlap_is_no_slower), tolerance=SLOWER,
        ),
        Claim(
            "1.2B on 64 GPUs with as many sequences each loses the published 4% of its rate, within 2 points",
            "Megatron-LM 2019, figure 5, model and data parallel", as_published, kind="quantitative", about="network",
            tolerance=LOST,
        ),
    ),
    cost=cost("13 min", "20 min, 64 GPUs"),
    runs={
        "smoke": with_and_without_overlap(
            named("gpt-0.5m"), (1, 2), Recipe(steps=15, global_batch=8, microbatch=4, warmup_steps=2), 1,
        ),
        "small": with_and_without_overlap(
            named("gpt-8m"), (1, 2), Recipe(steps=16, global_batch=8, microbatch=4, warmup_steps=2), 8,
        ),
        "paper": with_and_without_overlap(
            named("gpt-1.2b"), (1, 2, 4, 8, 16, 32, 64),
            Recipe(steps=100, global_batch=64, microbatch=1, lr=1.5e-4, warmup_steps=10), 3, "bf16",
        ),
    },
)  # fmt: skip
