"""What our own experiments share: models, timed runs in turn, and plans over one axis with their names."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from harness.experiment.kit import Check, Claim, ModelConfig, Plan, Recipe, Run, Tolerance, repeated, untested

MODEL_23M = ModelConfig(num_layers=6, hidden_size=512, num_heads=8, seq_len=256, vocab_size=8192)
MODEL_7M = replace(MODEL_23M, hidden_size=256, num_heads=4)
SLOWER = Tolerance(1.02, "repeats of one point differ by as much", "2026-11-21")
"""Ratio of step times that still counts as no slower."""
NO_SLOWER = Tolerance(0.02, "repeats of one point differ by as much", "2026-11-25")
"""Share of a step's time that still counts as no slower."""
SMALL = Tolerance(
    0.01, "the median half-width of the best losses of ours/stability_map, three seeds each, is 0.8%", "2026-11-25"
)
"""Share of a loss that counts as none."""


def claim(text: str, check: Check, **more: Any) -> Claim:
    """Return a claim of our own."""
    return Claim(text, "our own", check, **more)


def within(text: str, limit: Tolerance, check_of: Callable[..., Check], *about: Any) -> Claim:
    """Return a claim of our own whose check is made by a function of the limit."""
    return claim(text, check_of(limit, *about), tolerance=limit)


def in_turn(variants: Callable[[Run], Sequence[Run]], runs: Iterable[Run], repeats: int) -> list[Run]:
    """Return the variants of each run, repeated in turn: A B C A B C."""
    return [one for run in runs for one in repeated(variants(run), repeats)]


def in_both(model: ModelConfig, plans: Sequence[Plan], recipe: Recipe) -> list[Run]:
    """Return each plan in fp32 and in bf16."""
    return [run for plan in plans for run in (untested(model, plan, recipe), untested(model, plan, recipe, "bf16"))]


def shared_by(plan: Plan) -> list[str]:
    """Return in words what ranks share a layer: its matrices, the tokens between them, or sequences."""
    parts = [f"tp {plan.tp}"] * (plan.tp > 1) + ["sp"] * plan.sequence_parallel
    return parts + [f"{'ring' if plan.is_ring else 'Ulysses'} {plan.cp}"] * (plan.cp > 1)


def data_parallel(n: int, **fields: Any) -> list[Plan]:
    """Return ZeRO's stages over n ranks; stage 0 divides nothing."""
    return [Plan(dp=n, zero_stage=stage, **fields) for stage in (0, 1, 2, 3)]


def layers_shared(n: int) -> list[Plan]:
    """Return tensor parallelism over n ranks, without and with sequence parallelism."""
    return [Plan(tp=n), Plan(tp=n, sequence_parallel=True)]


def pipelines(n: int, chunks: int) -> list[Plan]:
    """Return a pipeline of n ranks by each schedule; the interleaved one has several chunks a rank."""
    plain = [Plan(pp=n, schedule="gpipe"), Plan(pp=n, schedule="one_f_one_b")]
    return [*plain, Plan(pp=n, schedule="interleaved", chunks=chunks)]
