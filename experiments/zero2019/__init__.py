"""What the experiments of ZeRO (Rajbhandari et al. 2019, arXiv 1910.02054) share: its runs on V100s, and small ones."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from harness.experiment.kit import (
    GB, GIB, TERA, UNTESTED, ModelConfig, Plan, Point, Printed, Recipe, Run, Tolerance, ZeroStage, as_predicted,
    gigabytes, known, noted, of_run, published, repeated, untested,
)  # fmt: skip
from harness.experiment.kit import printed as in_print
from impl.cost.memory import memory_of_ranks

V100 = 32 * GIB
"""Bytes of a device."""
PRINTED_V100 = 32e9
"""Bytes that the paper's formulas have for it: its GB are 1e9."""
STAGES: tuple[ZeroStage, ...] = (0, 1, 2, 3)
OF_ZERO_100B: ZeroStage = 2
"""Stage that divides gradients and optimizer states."""
CPU = Recipe(steps=8, warmup_steps=2)
V100S = Recipe(steps=10, lr=1.5e-4, min_lr=1e-5, warmup_steps=2)
"""Ten steps, of which seven are timed."""
UNITS = {"TFLOP/s per GPU": ("published_rate", TERA), "GB per device": ("cached", GB)}
"""Column and SI value of the units in which bars of the figures are printed."""
T = of_run("tp", "t", lambda run: run.plan.tp)
N = of_run("dp", "N", lambda run: run.plan.dp)
COUNTED = gigabytes("memory_bytes", "all, counted")
CLOSE = Tolerance(0.05, "what formulas leave out of a step's working memory", "2026-11-21")
"""Relative distance of a step's counted memory from the predicted."""
ALL_AS_PREDICTED = as_predicted(lambda one: one.memory_bytes, lambda one: one.predicted_memory_bytes, CLOSE)
PRINTED_RATE = in_print("published_rate", "published rate", "TFLOP/s", TERA, "FLOP/s")


def predicted_bytes(one: Point) -> float:
    """Return the predicted bytes of the fullest rank, which are the peak of simulated runs."""
    return one.mean(lambda record: record.peak_memory_bytes if one.is_simulated else record.predicted_memory_bytes)


PREDICTED = gigabytes("predicted_memory_bytes", "all, predicted", predicted_bytes)


def for_memory(model: ModelConfig, plan: Plan, batch: int, microbatch: int = 1) -> Run:
    """Return a run of two steps, for the memory only, in the paper's precisions; the batch is of each replica."""
    recipe = Recipe(steps=2, global_batch=batch * plan.dp, microbatch=microbatch, warmup_steps=0)
    return replace(untested(model, plan, recipe, "fp16"), fp32_gradients=False)


def timed(model: ModelConfig, plan: Plan, batch: int) -> Run:
    """Return a run for speed only, on CPUs; the batch is of each replica, in one microbatch."""
    return untested(model, plan, replace(CPU, global_batch=batch * plan.dp, microbatch=batch))


def on_v100s(printed: Printed, **plan: Any) -> Run:
    """Return the run behind a point of a figure: one microbatch a step, all layers recomputed; GPT-2's model else."""
    tp, dp, batch = (int(printed[name]) for name in ("tp", "dp", "global_batch"))
    return Run(
        model=ModelConfig(seq_len=1024, vocab_size=51200, **noted(printed["note"])),
        plan=Plan(tp=tp, dp=dp, recompute="full", bucket_bytes=2**28, **plan),
        train=replace(V100S, global_batch=batch, microbatch=batch // dp),
        evaluation=UNTESTED,
        precision="fp16",
        fp32_gradients=False,
    )


@cache
def needed(run: Run) -> int:
    """Return the predicted bytes of a GPU, of the pipeline's first rank."""
    return memory_of_ranks(run, run.model.vocab_size or 0, run.model.seq_len)[0].total


@cache
def deepest(run: Run) -> ModelConfig:
    """Return the model with as many layers, one to a thousand, as are predicted to fit a V100.

    Bytes rise with every layer, nearly by as much: from what is known a line proposes the next number to try.
    """
    of = lambda layers: needed(replace(run, model=replace(run.model, num_layers=layers)))
    fits, too_many, a_layer = 1, 1001, of(2) - of(1)
    while too_many - fits > 1:
        proposed = fits + int((PRINTED_V100 - of(fits)) / a_layer)
        tried = min(max(proposed, fits + 1), too_many - 1)
        fits, too_many = (tried, too_many) if of(tried) <= PRINTED_V100 else (fits, tried)
    return replace(run.model, num_layers=fits)


def bars(run_of: Callable[[Printed], Run], *figures: str) -> dict[Run, Point]:
    """Return the points of figures by their runs, with the printed rate of a device or its cached memory."""
    rows = published("zero2019").query("where in @figures and unit in @UNITS").to_dict("records")
    found: dict[Run, Point] = {}
    for row in rows:
        key, scale = UNITS[row["unit"]]
        run, model = run_of(row), f"GPT {row['note'].partition(':')[0]}"
        found[run] = Point(run, model=model, printed={key: row["value"] * scale})
    return found


def compared(found: Sequence[Point]) -> list[Point]:
    """Return the points whose relative rate is known, without the baselines."""
    return [one for one in known(found) if not one.is_baseline]


OPTIONS = ("zero_stage", "partition_activations", "offload_activations")
P_A: dict[str, Any] = {"partition_activations": True}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "C1": {"zero_stage": 1}, "C2": {"zero_stage": 1, **P_A}, "C3": {"zero_stage": 2}, "C4": {"zero_stage": 2, **P_A},
    "C5": {"zero_stage": 2, **P_A, "offload_activations": True},
}  # fmt: skip
"""Configurations of table 3; constant-size buffers and one-time allocation (C_B, M_D) are in all of them."""


def configuration(run: Run) -> str:
    """Return a run's configuration in table 3; empty for others."""
    own = {name: value for name in OPTIONS if (value := getattr(run.plan, name))}
    alike = (name for name, fields in CONFIGURATIONS.items() if fields == own and run.plan.recompute == "full")
    return next(alike, "")


def of_bar(bar: Printed) -> str:
    return bar["quantity"].rpartition("_")[2].upper()


def five_ways(model: ModelConfig, tp: int, dp: int, batch: int, bucket_bytes: int = 2**18) -> list[Run]:
    """Return all configurations on CPUs, for the memory."""
    plan = Plan(tp=tp, dp=dp, recompute="full", bucket_bytes=bucket_bytes)
    return [for_memory(model, replace(plan, **fields), batch, batch) for fields in CONFIGURATIONS.values()]


def for_speed(found: Sequence[Run], repeats: int) -> list[Run]:
    """Return the runs with more steps and in fp32."""
    longer = [replace(one, train=replace(one.train, steps=8), precision="fp32", fp32_gradients=True) for one in found]
    return repeated(longer, repeats)
