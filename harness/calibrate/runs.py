"""Runs that a calibration trains for a few steps, to measure the software's costs beyond single operations."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from harness.rank.orders import Orders
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Precision, Run

MODELS = {
    "cpu": (
        ModelConfig(num_layers=2, hidden_size=256, seq_len=128, vocab_size=2048),
        ModelConfig(num_layers=4, hidden_size=128, seq_len=256, vocab_size=512),
    ),
    "cuda": (
        ModelConfig(num_layers=4, hidden_size=2048, seq_len=1024, vocab_size=32768),
        ModelConfig(num_layers=8, hidden_size=1024, seq_len=2048, vocab_size=32768),
    ),
}
"""A wide model and a long one; their heads follow from the ranks that share them."""
HEAD_SIZE = {"cpu": 64, "cuda": 128}
MEASURED = "measured.json"
"""File in the folder of an attempt with the measurements of its ranks."""


@dataclass(frozen=True, kw_only=True)
class CalibrationOrders(Orders):
    """Orders of a calibration's ranks, in addition to a run's."""

    precisions: tuple[Precision, ...]
    """Precisions of the runs to be predicted."""


def runs_to_train(ranks: int, device: str, precisions: Sequence[Precision], threads: int) -> dict[str, Run]:
    """Return runs by label: every axis alone over all ranks, with options that change work or traffic, by precision."""
    found: dict[str, Run] = {}
    for precision in precisions:
        for run, label in _runs(ranks, device):
            run = replace(run, precision=precision, threads=threads)
            if not run.problems():
                found[f"{label}, {precision}"] = run
    return found


def _runs(ranks: int, device: str) -> Iterator[tuple[Run, str]]:
    wide, long = (_with_heads(model, ranks, HEAD_SIZE[device]) for model in MODELS[device])
    yield _run(wide, Plan(dp=ranks), 4, 2), "wide"
    yield _run(long, Plan(dp=ranks, recompute="full"), 2, 1), "long, recomputed"
    if ranks == 1:  # what each microbatch and each step cost, by their numbers
        yield _run(long, Plan(), 2, 4), "long"
        yield _run(wide, Plan(), 1, 1), "wide, one small microbatch"
        yield _run(wide, Plan(recompute="selective"), 2, 4), "wide, partly recomputed"
        return
    yield _run(wide, Plan(dp=ranks, zero_stage=1), 2, 1), "wide, stage 1"
    yield _run(long, Plan(dp=ranks, zero_stage=2), 2, 2), "long, stage 2"
    yield _run(long, Plan(dp=ranks, zero_stage=3), 2, 2), "long, stage 3"
    yield _run(wide, Plan(dp=ranks, zero_stage=3), 4, 1), "wide, stage 3"
    yield _run(wide, Plan(tp=ranks), 4, 2), "wide, tensor-parallel"
    yield _run(long, Plan(tp=ranks, recompute="full"), 2, 2), "long, tensor-parallel, recomputed"
    yield _run(long, Plan(tp=ranks, sequence_parallel=True), 2, 2), "long, sequence-parallel"
    deep = {model: replace(model, num_layers=max(model.num_layers, ranks)) for model in (wide, long)}
    yield _run(deep[wide], Plan(pp=ranks), 2, 2 * ranks), "wide, pipeline"
    yield _run(deep[long], Plan(pp=ranks, schedule="gpipe"), 1, 4 * ranks), "long, GPipe"
    yield _run(deep[wide], Plan(pp=ranks, schedule="zb_h1"), 2, 3 * ranks), "wide, zero-bubble"


def _with_heads(model: ModelConfig, ranks: int, size: int) -> ModelConfig:
    """Return a model with heads of this size, or smaller ones if more ranks share them; unchanged if they cannot."""
    hidden = model.hidden_size
    heads = next((n for n in range(hidden // size, hidden + 1) if n % ranks == 0 and hidden % n == 0), hidden // size)
    return replace(model, num_heads=heads)


def _run(model: ModelConfig, plan: Plan, microbatch: int, microbatches: int) -> Run:
    recipe = Recipe(global_batch=plan.dp * microbatch * microbatches, microbatch=microbatch)
    return Run(model=model, plan=plan, train=recipe)
