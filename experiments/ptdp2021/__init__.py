"""What the experiments of PTD-P (Narayanan et al. 2021, arXiv 2104.04473) share: its runs on Selene, and small ones."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from harness.experiment.kit import BATCH, RANKS, UNTESTED, ModelConfig, Plan, Recipe, Run, Tier, repeated, untested

CPU = Recipe(steps=8, microbatch=2, warmup_steps=2)
SELENE = Recipe(steps=10, microbatch=1, lr=1e-4, min_lr=1e-5, warmup_steps=2)
"""Ten steps, of which seven are timed; learning rates of the paper's run scripts."""
AS_RUN = (
    "bf16, not fp16. What runs has no dropout, and fused attention; simulated steps are as the system's software was, "
    "whose attention writes its scores. "
)
DEVIATIONS = AS_RUN + "Every layer is recomputed at `paper`, as in the paper, and none at `smoke` and `small`. "
"""Deviations that all runs of the paper share."""


def timed(model: ModelConfig, plan: Plan, batch: int, microbatch: int = CPU.microbatch) -> Run:
    """Return a run for speed only, on CPUs."""
    return untested(model, plan, replace(CPU, global_batch=batch, microbatch=microbatch))


def small_model(seq_len: int) -> ModelConfig:
    """Return a model of eight layers that two or four ranks of a CPU can share, in any way."""
    return ModelConfig(num_layers=8, hidden_size=128, num_heads=4, seq_len=seq_len)


def layouts(
    seq_len: int,
    plans: Sequence[Plan],
    batches: Sequence[int],
    repeats: int = 1,
    microbatches: Sequence[int] = (CPU.microbatch,),
) -> list[Run]:
    """Return every plan of the small model at every batch and microbatch."""
    model, every = small_model(seq_len), [(p, b, m) for b in batches for p in plans for m in microbatches]
    return repeated([timed(model, *one) for one in every], repeats)


AT_SAME_RANKS: dict[str, Any] = {
    "relative_to": "the fastest layout of as many ranks at the same batch",
    "group": (RANKS, BATCH),
    "line": (RANKS, BATCH),
}
"""Fields of a comparison of layouts of as many ranks."""


def two_ways(one: str, other: str, batches: Sequence[int]) -> dict[Tier, list[Run]]:
    """Return runs of the small model whose ranks are all in one axis of the plan, or in the other; at `small` on four.

    Four ranks are also two by two, at the smallest batch.
    """
    plan = lambda **degrees: Plan(**degrees)
    two = [plan(**{axis: 2}) for axis in (one, other)]
    four = [plan(**{one: 4}), plan(**{one: 2, other: 2}), plan(**{other: 4})]
    small = layouts(256, two, batches, repeats=3) + layouts(256, four, batches[:1])
    return {"smoke": layouts(128, two, batches), "small": small}


def grown(shapes: Sequence[tuple[int, int, Plan]], seq_len: int, microbatch: int, repeats: int) -> list[Run]:
    """Return runs of models of these numbers of layers and hidden sizes, each with its plan."""
    model = lambda n, size: ModelConfig(num_layers=n, hidden_size=size, num_heads=size // 32, seq_len=seq_len)
    return repeated([timed(model(n, size), plan, 16, microbatch) for n, size, plan in shapes], repeats)


def microbatch_of(printed: Mapping[Any, Any]) -> int:
    """Return the microbatch that ends the quantity of a published row."""
    return int(printed["quantity"].rpartition("_")[2])


def on_selene(
    printed: Mapping[Any, Any], model: ModelConfig, microbatch: int = 1, vocab_size: int = 51200, **plan: Any
) -> Run:
    """Return the run behind a point of a figure; all models have the paper's sequence."""
    degrees = {name: int(printed[name]) for name in ("tp", "pp", "dp")}
    return Run(
        model=replace(model, seq_len=2048, vocab_size=vocab_size),
        plan=Plan(recompute="full", **degrees, **plan),
        train=replace(SELENE, global_batch=int(printed["global_batch"]), microbatch=microbatch),
        evaluation=UNTESTED,
        precision="bf16",
    )


def closed_bubble(run: Run) -> Fraction:
    """Return idle over computing time with even stages and T_F = T_B = T_W.

    Source: PTD-P (2104.04473), section 2.2; zero bubble (2401.10241), table 2, with m less than p as in
    `impl.pipeline.zero_bubble.zb_h1`.
    """
    p, m = run.plan.pp, run.microbatches
    if run.plan.schedule == "zb_h1":
        return Fraction(2 * (p - 1) - (min(p, m) - 1), 3 * m)
    return Fraction(p - 1, m * run.plan.chunks)


def closed_in_flight(run: Run) -> Fraction:
    """Return microbatches that the fullest rank holds; source: as above, and Korthikanti et al. 2022, section 4.2.3."""
    p, m, v = run.plan.pp, run.microbatches, run.plan.chunks
    if run.plan.schedule == "gpipe" or m <= p:
        return Fraction(m)
    return p + Fraction(p - 1, v) if v > 1 else Fraction(p)
