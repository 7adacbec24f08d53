"""What do more GPUs, products in 8 bits, compiled layers and interleaved pipelines do to the rate of Llama 3.1?

TorchTitan trains Llama 3.1 on H100s with PyTorch's own parallelism. 8B, its parameters sharded over all GPUs, keeps 97%
of its rate per GPU from 8 GPUs to 128, is 16% faster with compiled layers, and 28% more with their products in 8 bits
(tables 1 and 3). 405B on 512 GPUs is 28% faster when its pipelines' ranks own two stages instead of one (table 5).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.ptdp2021 import SELENE, timed
from harness.experiment.contests import PRECISION, plan_in_words
from harness.experiment.kit import (
    DEVICE_RATE, MARK, MICROBATCHES, MODEL, POINTS, PRINTED_DEVICE_RATE, RANKS, RUNS, UNTESTED, Check, Claim,
    Experiment, ModelConfig, Plan, Point, Precision, Printed, Record, Run, Tolerance, against_in_print, apart_from,
    as_expected, cost, each, measured_only, named, of_run, per_device, points, printed_value, published, relative,
    repeated, table_of, with_printed,
)  # fmt: skip
from impl.grouping import by_key

SAME = Tolerance(0.03, "three times the spread of the three published shares", "2026-11-25")
WHOLE = 2**34
"""Bytes of a bucket in which all of a layer is gathered and reduced at once, as FSDP does."""
KINDS: dict[str, tuple[Precision, bool, int]] = {
    "token_rate": ("bf16", False, 1), "token_rate_compiled": ("bf16", True, 1),
    "token_rate_compiled_float8": ("fp8", True, 1), "token_rate_one_f_one_b": ("fp8", True, 1),
    "token_rate_interleaved": ("fp8", True, 2),
}  # fmt: skip
"""Precision, compilation and chunks of each published quantity."""


def on_h100s(row: Printed) -> Run:
    """Return the run of a published row; in a pipeline a batch has a microbatch for every stage, TorchTitan's default.

    There TorchTitan keeps parameters gathered after the forward pass (its parallelize_llama.py at 004b314), and torch's
    pipelining reduces gradients once a step: ZeRO's stage 1 here.
    """
    precision, is_compiled, chunks = KINDS[row["quantity"]]
    dp, tp, pp, batch = (int(row[name]) for name in ("dp", "tp", "pp", "global_batch"))
    plan = Plan(
        dp=dp, tp=tp, pp=pp, chunks=chunks, zero_stage=3 if pp == 1 else 1, sequence_parallel=tp > 1,
        schedule="interleaved" if chunks > 1 else "one_f_one_b", recompute="full" if pp > 1 else "selective",
        bucket_bytes=WHOLE,
    )  # fmt: skip
    recipe = replace(SELENE, global_batch=batch, microbatch=batch // (dp * pp * chunks))
    return Run(
        model=named(row["model"]), plan=plan, train=recipe, evaluation=UNTESTED, precision=precision,
        compile=is_compiled,
    )  # fmt: skip


PAPER = {
    run: Point(run, model=row["model"], printed={"published_rate": row["value"]})
    for row in published("torchtitan2024").to_dict("records")
    if row["quantity"] in KINDS
    for run in [on_h100s(row)]
}


@dataclass(frozen=True)
class Change:
    """Points that differ from a baseline in one respect."""

    fields: tuple[str, ...]
    """Fields of a run that differ, by dotted name."""
    degree: Callable[[Run], Any]
    """Function that returns what grows with the change, as the GPUs; the baseline has the least of it."""

    def over_baseline(self, records: Sequence[Record]) -> list[Point]:
        """Return the changed points, relative to their baseline, published numbers too."""
        found = with_printed(points(records, per_device), PAPER)
        alike = by_key(((apart_from(one.run, *self.fields), one.device), one) for one in found)
        pairs = [(one, min(group, key=lambda p: self.degree(p.run))) for group in alike.values() for one in group]
        changed = [(one, base) for one, base in pairs if self.degree(one.run) != self.degree(base.run)]
        return [against_in_print(*both, per_device, "published_rate") for both in changed]


GPUS = Change(("plan.dp", "train.global_batch"), lambda run: run.plan.dp)
EIGHT_BITS = Change(("precision",), lambda run: run.precision == "fp8")
COMPILED = Change(("compile",), lambda run: run.compile)
STAGES = Change(("plan.chunks", "plan.schedule", "train.microbatch"), lambda run: run.plan.chunks)


def faster(change: Change) -> Check:
    """Return a check that every changed point is faster than its baseline."""
    found = lambda records: [(one.relative - 1,) for one in change.over_baseline(records)]
    return each(found, lambda by: by, "pairs", "{:+.1%}")


def near(change: Change, within: Tolerance) -> Check:
    """Return a check of the published ratios."""
    return as_expected(change.over_baseline, relative, printed_value("relative"), within, "pairs", are_shares=True)


def all_points(records: Sequence[Record]) -> list[Point]:
    """Return all timed points, by model, plan and precision."""
    found = with_printed(points(records, per_device), PAPER)
    return sorted(found, key=lambda one: (one.parameters, one.run.plan.pp, one.run.plan.dp, one.run.compile))


SHOWN = (
    MODEL, RANKS, of_run("plan", "plan", plan_in_words, text=True), MICROBATCHES, PRECISION,
    of_run("compile", "compiled", lambda run: run.compile, text=True),
    of_run("engine", "engine", lambda run: run.engine, text=True),
    DEVICE_RATE, PRINTED_DEVICE_RATE, RUNS, MARK,
)  # fmt: skip


def on_cpus(model: ModelConfig, repeats: int) -> list[Run]:
    """Return small runs on up to two ranks: sharded, in pipelines, and compiled, by ours and by PyTorch's engine."""
    sharded = [timed(model, Plan(dp=dp, zero_stage=3), 8 * dp, 4) for dp in (1, 2)]
    plans = Plan(pp=2), Plan(pp=2, schedule="interleaved", chunks=2)
    pipelines = [timed(model, plan, 8, 4 // plan.chunks) for plan in plans]
    alone = [replace(timed(model, Plan(), 8, 4), compile=compiled) for compiled in (False, True)]
    peers = [replace(run, engine="torch") for run in (*sharded, *alone)]
    return repeated([*sharded, *pipelines, *alone, *peers], repeats)


EXPERIMENT = Experiment(
    source="TorchTitan 2024, tables 1, 3 and 5",
    expectation="97% of the rate per GPU from 8 to 128; 16% by compiling, 28% by 8 bits, 28% by interleaving",
    claims=(
        Claim(
            "sharded over 128 GPUs 8B keeps the published share of its rate per GPU over 8, within 3 points",
            "tables 1 and 3", near(GPUS, SAME), "97.3, 97.7 and 98.2%", kind="quantitative", about="network",
            tolerance=SAME,
        ),
        Claim(
            "products in 8 bits are faster", "tables 1 and 3", faster(EIGHT_BITS), "+28% and +29%", kind="direction",
            about="computing",
        ),
        Claim(
            "8 bits gain as much as published, within 5 points", "tables 1 and 3", near(EIGHT_BITS, POINTS),
            kind="quantitative", about="computing", tolerance=POINTS,
        ),
        Claim(
            "compiled layers are faster", "tables 1 and 3", measured_only(faster(COMPILED)), "+16%", kind="direction",
        ),
        Claim(
            "pipelines of ranks with two stages each are faster than with one", "table 5", faster(STAGES), "+28%",
            kind="direction", about="bubble",
        ),
        Claim(
            "405B gains by two stages as much as published, within 5 points", "table 5", near(STAGES, POINTS),
            kind="quantitative", about="bubble", tolerance=POINTS,
        ),
    ),
    table=table_of("llama", "Llama 3.1 on PyTorch's parallelism", SHOWN, all_points),
    cost=cost("9 min", "60 min, 512 GPUs with 96 GB", smoke="2 min"),
    deviations="The paper's H100s have slower memory (HBM2e) and 500 W, which no prediction knows, so only ratios are "
    "judged. How many microbatches 405B has is not printed: as many as stages, so that two stages a rank have twice as "
    "many, half as large. It is simulated as ZeRO-1, since its pipelines keep parameters gathered; as ZeRO-3 two "
    "stages a rank are predicted slower. Simulated steps know no compilation and no asynchronous tensor parallelism, "
    "which the paper's 405B has; `selective` recomputes attention, the paper's selects operators. Steps in 8 bits are "
    "simulated only: `run` calls these points invalid. At `smoke` and `small` Llamas of a few layers on one and two "
    "ranks, by our engine and PyTorch's (FSDP2).",
    runs={
        "smoke": on_cpus(replace(named("llama-0.5m"), num_layers=4), 1), "small": on_cpus(named("llama-2m"), 8),
        "paper": list(PAPER),
    },
)  # fmt: skip
