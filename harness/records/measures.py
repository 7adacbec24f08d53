"""Measures of records: one row per run with rates, memory, traffic and pipeline bubbles, all in SI units."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import pandas as pd

from harness.records.frames import is_missing, once_for_all, rows_of
from harness.records.labels import SHAPE, fields, label_of, varying
from harness.records.record import Collective, Rank, Record, float_or_nan
from harness.records.source import devices
from harness.records.statistics import estimate, quartiles
from harness.records.timelines import measured, predicted
from impl.cost.flops import hardware_flops, model_flops
from impl.cost.memory import memory
from impl.cost.peaks import peak_flops
from impl.errors import InputError
from impl.model.norm_placement import PLACEMENTS
from impl.run import Run

CONVENTION = "palm_12"
"""Default FLOP convention, that of most published numbers; for GPT and for BERT."""
DEGREES = ("dp", "tp", "pp")
NONE = Collective()
IN_THE_PLAN = (
    "dp", "tp", "sequence_parallel", "overlap_input_grad_reduce", "pp", "schedule", "chunks", "scatter_gather",
    "recompute", "zero_stage",
)  # fmt: skip
"""Fields of the plan that rows have columns for."""


def tokens_per_second(record: Record) -> float:
    """Return the global tokens of the timed steps over their wall time; NaN if no step was timed."""
    seconds = record.step_seconds
    return len(seconds) * record.run.tokens_per_step / math.fsum(seconds) if seconds else math.nan


def flops_per_step(record: Record, convention: str = CONVENTION, *, recomputed: bool = False) -> float:
    """Return the model FLOPs of one optimizer step over all ranks; NaN if the vocabulary size is unknown.

    Args:
        recomputed: return hardware FLOPs instead, including what the run recomputes in the backward pass.
    """
    run, vocab_size = record.run, record.resolved.vocab_size
    if vocab_size is None and run.model.vocab_size is None:
        return math.nan
    # BERT's head sees the masked positions only; the record has their number
    counted = convention, run.model, run.train.global_batch, vocab_size, record.resolved.head_positions
    return hardware_flops(*counted, recompute=run.plan.recompute) if recomputed else model_flops(*counted)


def about(records: Sequence[Record]) -> str:
    """Return experiment and tier for a title, as `: quickstart, smoke tier`, and the engine if it is not ours.

    Raises:
        InputError: the records are of several tiers.
    """
    tier = only_tier(records)
    names = ", ".join(dict.fromkeys(record.experiment for record in records))
    engines = {record.run.engine for record in records}
    engine = f", {engines.pop()} engine" if len(engines) == 1 and engines != {"native"} else ""
    return f": {names}, {tier} tier{engine}" if records else ""


def only_tier(records: Sequence[Record]) -> str:
    """Return the tier that all records share.

    Raises:
        InputError: there are several tiers, whose sizes and budgets differ, so their numbers are not comparable.
    """
    tiers = sorted({record.tier for record in records})
    if len(tiers) > 1:
        raise InputError(f"records of the tiers {', '.join(tiers)} cannot share a table; choose one with --tier")
    return tiers[0] if tiers else ""


def model_names(records: Sequence[Record]) -> dict[tuple[Any, ...], str]:
    """Return the names of the model shapes, as `GPT 0.5M`, with layers, hidden size and heads where counts coincide."""
    counts: dict[tuple[Any, ...], set[int]] = {}
    for record in records:
        counts.setdefault(shape(record.run), set()).update(filter(None, [record.resolved.parameters]))
    names = {s: f"{s[0].upper()} {size_name(min(n))}" if n else "" for s, n in counts.items()}
    given = list(names.values())
    shapes = {s: f"{s[0].upper()} L{s[1]} h{s[2]} a{s[3]}" for s in names}
    for s, name in names.items():
        if not name:
            names[s] = shapes[s]
        elif given.count(name) > 1:
            names[s] = f"{name} ({shapes[s].partition(' ')[2]})"
    return names


shape: Callable[[Run], tuple[Any, ...]] = attrgetter(*SHAPE)
"""Function of a run that returns the fields that a model's name stands for."""


def size_name(parameters: int) -> str:
    """Return a number of parameters as papers name their models: `0.5M`, `25M`, `1.2B`."""
    if parameters < 5e4:
        return f"{parameters / 1e3:.3g}K"
    scale, unit = next((s, u) for s, u in ((1e6, "M"), (1e9, "B"), (1e12, "T")) if parameters < 999.5 * s or u == "T")
    value = parameters / scale
    return (f"{value:.1f}".removesuffix(".0") if value < 9.95 else f"{value:.0f}") + unit


@once_for_all
def frame(records: Sequence[Record], convention: str = CONVENTION) -> pd.DataFrame:
    """Return one row per run of any status, by model size and then by the varying fields; NaN where not measured.

    Times per step and memory are the largest over the ranks.

    Args:
        convention: how FLOPs are counted, a name in `impl.cost.flops.MODEL_FLOPS`.
    """
    names, differing = model_names(records), varying(record.run for record in records)
    labelled = [name for name in differing if name not in SHAPE]
    called = devices(records)
    rows = []
    for record in sorted(records, key=_order(records, differing)):
        run = record.run
        rows.append(
            {name: getattr(record, name) for name in ("id", "experiment", "tier", "source", "status", "reason")}
            | {"diverged": record.has_diverged, "point": record.point, "seed": run.seed, "repeat": run.repeat}
            | {"model": names[shape(run)], "varies": label_of(fields(run), labelled)}
            | {"family": run.model.family, "parameters": record.resolved.parameters or math.nan}
            | {"layers": run.model.num_layers, "norm_placement": run.model.norm_placement}
            | {"heads": run.model.num_heads, "lr": run.train.lr, "vocab_size": record.resolved.vocab_size}
            | {"engine": run.engine, "ranks": run.plan.world_size, "threads": run.threads}
            | {name: getattr(run.plan, name) for name in IN_THE_PLAN}
            | {"global_batch": run.train.global_batch, "tokens_per_step": run.tokens_per_step}
            | {"microbatch": run.train.microbatch, "microbatches": run.microbatches}
            | _where(record)
            | ({"device_name": called[record.environment.system]} if record.is_simulated else {})
            | _speed(record, convention)
            | {**_memory(record), **_traffic(record), **_pipeline(record)}
            | {"training_seconds": float_or_nan(record.times.training_seconds)}
            | {"alone_seconds": _alone_seconds(record), "losses": record.losses}
        )
    return pd.DataFrame(rows)


def _order(records: Sequence[Record], differing: Sequence[str]) -> Callable[[Record], tuple[Any, ...]]:
    """Return the sort key: family, size, then the varying fields, norm placements in the order of their registry."""
    sizes: dict[tuple[Any, ...], int] = {}
    for record in records:
        if count := record.resolved.parameters:
            sizes[shape(record.run)] = min(count, sizes.get(shape(record.run), count))
    placements = list(PLACEMENTS)

    def rank(value: Any) -> tuple[Any, ...]:
        if value in placements:
            return (0, placements.index(value), "")
        number = isinstance(value, (int, float))
        return (1, value, "") if number else (2, 0, str(value))

    def key(record: Record) -> tuple[Any, ...]:
        own, values = shape(record.run), fields(record.run)
        unsized = (math.prod(n if isinstance(n, int) else 1 for n in own), *own) if own not in sizes else ()
        order = [rank(values[name]) for name in differing if name not in SHAPE]
        return (own[0], sizes.get(own, math.inf), unsized, tuple(order), record.run.seed, record.run.repeat)

    return key


def _where(record: Record) -> dict[str, Any]:
    names = ("device", "device_name", "backend", "cores", "system")
    return {name: getattr(record.environment, name) for name in names} | {"oversubscribed": record.is_oversubscribed}


def _speed(record: Record, convention: str) -> dict[str, Any]:
    run, where, ranks = record.run, record.environment, record.run.plan.world_size
    seconds, rate = record.step_seconds, tokens_per_second(record)
    q1, median, q3 = quartiles(seconds) if seconds else (math.nan,) * 3
    steps_of_a_rank = rate / run.tokens_per_step / ranks  # per second
    flops, hardware = (
        flops_per_step(record, convention, recomputed=on) * steps_of_a_rank if seconds else math.nan
        for on in (False, True)
    )
    gemm = [rank.gemm_flops_per_s for rank in record.ranks if rank.gemm_flops_per_s]
    # a CPU's peak depends on its current clock: no MFU
    peak = None if where.device == "cpu" else peak_flops(where.device_name or "", run.precision)
    return {
        "timed_steps": len(seconds),
        "tokens_per_second": rate,
        "tokens_per_second_per_device": rate / ranks,
        "step_seconds": median,
        "step_seconds_q1": q1,
        "step_seconds_q3": q3,
        "flop_convention": convention,
        "model_flops_per_second_per_device": flops,
        "mfu": flops / peak if peak else math.nan,
        "hardware_flops_per_second_per_device": hardware,
        "hfu": hardware / peak if peak else math.nan,
        "skipped_steps": float(sum(step.skipped for step in record.steps))
        if run.precision == "fp16" and record.losses
        else math.nan,
        "gemm_share": flops / (math.fsum(gemm) / len(gemm)) if gemm else math.nan,
    }


def _alone_seconds(record: Record) -> float:
    """Return the seconds of a step's products and attention alone, on the rank with most; NaN if not measured."""
    limits = [rank.limit for rank in record.ranks if rank.limit]
    return max((one.gemm_seconds + one.attention_seconds for one in limits), default=math.nan)


def _memory(record: Record) -> dict[str, Any]:
    kinds = [rank.memory_kind for rank in record.ranks if rank.peak_memory_bytes]

    def largest(of: Callable[[Rank], int | None]) -> float:
        """Return the largest value over the ranks; NaN if no rank has one."""
        values = [value for value in map(of, record.ranks) if value is not None]
        return max(map(float, values), default=math.nan)

    return {
        "peak_memory_bytes": largest(lambda rank: rank.peak_memory_bytes),
        "memory_kind": kinds[0] if kinds else None,
        "split_state_bytes": largest(lambda rank: (rank.state_bytes or {}).get("split")),
        "whole_state_bytes": largest(lambda rank: (rank.state_bytes or {}).get("whole")),
        "model_activation_bytes": largest(lambda rank: (rank.activation_bytes or {}).get("model")),
        "layer_activation_bytes": largest(lambda rank: (rank.activation_bytes or {}).get("layer")),
        **_categories(record),
    }


CATEGORIES = {
    **{name: (name,) for name in ("parameters", "gradients", "optimizer", "activations", "buffers", "rest")},
    "states": ("parameters", "gradients", "optimizer"),
}


@functools.lru_cache(maxsize=1024)
def _predicted(*asked: Any) -> dict[str, int]:
    """Return the memory prediction, cached: many records differ only in fields that it does not depend on."""
    return memory(*asked).as_dict()


def _categories(record: Record) -> dict[str, float]:
    """Return the fullest rank's memory in a step, total and by category, measured and predicted.

    NaN where tensors were not counted; predictions are NaN also where the schedule is not trusted.
    """
    fullest, sizes = max(record.ranks, key=lambda rank: rank.total_bytes, default=None), dict[str, dict[str, int]]()
    if fullest and fullest.memory:
        sizes[""] = fullest.memory | {"total": fullest.total_bytes}
    if fullest and sizes and record.has_trusted_schedule:
        run, resolved = record.point, record.resolved
        alike = replace(run, train=replace(run.train, lr=1.0))  # one prediction for all learning rates
        place = record.ranks.index(fullest) // (run.plan.dp * run.plan.tp)
        asked = resolved.vocab_size, place, resolved.head_positions, record.environment.device
        sizes["predicted_"] = _predicted(alike, *asked)
    wanted = {"memory_bytes": ("total",)} | {f"{name}_bytes": parts for name, parts in CATEGORIES.items()}
    return {
        f"{kind}{column}": float(sum(sizes[kind][part] for part in parts)) if kind in sizes else math.nan
        for kind in ("", "predicted_")
        for column, parts in wanted.items()
    }


def _traffic(record: Record) -> dict[str, Any]:
    """Return the busiest rank's communication in one step: tensor- and data-parallel collectives, pipeline sends.

    In a ring of t ranks each rank sends (t - 1) / t of the tensor in an all-gather or reduce-scatter, and twice that in
    an all-reduce, which is both.
    """
    counted = [rank.traffic for rank in record.ranks if rank.traffic is not None]
    if not counted:
        return dict.fromkeys(("tp_calls", "tp_bytes_sent", "dp_bytes_sent", "pp_sends", "pp_bytes_sent"), math.nan)
    passes = lambda op: 2 if op == "all_reduce" else 1
    within, sent = [axes.get("tp", {}) for axes in counted], [axes.get("pp", {}).get("send", NONE) for axes in counted]

    def in_rings(axis: str) -> float:
        degree = getattr(record.run.plan, axis)
        ops = [axes.get(axis, {}).items() for axes in counted]
        return max(sum(passes(op) * count.bytes for op, count in of_rank) for of_rank in ops) * (degree - 1) / degree

    return {
        "tp_calls": max(sum(count.calls for count in ops.values()) for ops in within),
        "tp_bytes_sent": in_rings("tp"),
        "dp_bytes_sent": in_rings("dp"),
        "pp_sends": max(count.calls for count in sent),
        "pp_bytes_sent": max(count.bytes for count in sent),
    }


def _pipeline(record: Record) -> dict[str, float]:
    """Return the last step's pipeline measures, and those simulated from its own times; NaN without a pipeline.

    `pipeline_seconds` lasts from the first start to the last end, without the optimizer update.
    `microbatches_in_flight` is that of the fullest rank over all its chunks; `in_flight_bytes` multiplies it by the
    bytes that the rank keeps of one microbatch.
    """
    timeline = measured(record)
    if timeline is None:
        names = ("bubble", "predicted_bubble", "pipeline_seconds", "predicted_pipeline_seconds")
        known = {name: float_or_nan(getattr(record.prediction, name)) for name in ("bubble", "microbatches_in_flight")}
        return dict.fromkeys((*names, "microbatches_in_flight", "in_flight_bytes"), math.nan) | known
    simulated = predicted(record, timeline) if record.has_trusted_schedule else None
    held = [rank.activation_bytes or {} for rank in record.ranks if rank.timeline]
    in_flight = [float(timeline.microbatches_in_flight(rank)) for rank in timeline.rows]
    kept = [float_or_nan(of_one.get("model")) for of_one in held]
    return {
        "bubble": float(timeline.bubble),
        "predicted_bubble": float(simulated.bubble) if simulated else math.nan,
        "pipeline_seconds": float(timeline.step_time),
        "predicted_pipeline_seconds": float(simulated.step_time) if simulated else math.nan,
        "microbatches_in_flight": max(in_flight),
        "in_flight_bytes": max(count * size for count, size in zip(in_flight, kept, strict=True)),
    }


def combine(rows: pd.DataFrame, by: Sequence[str], measures: Sequence[str]) -> list[dict[str, Any]]:
    """Return one row per group: its first row, with mean and 95% half-width of each measure over its runs.

    Groups keep the order of their first rows; a missing value in `by` is a value of its own. `n` counts the runs that
    have the first measure.
    """
    if rows.empty:
        return []
    columns = {name: rows[name].to_numpy(dtype=object).tolist() for name in {*by, *measures}}
    found = {name: [None if is_missing(value) else value for value in column] for name, column in columns.items()}
    groups: dict[tuple[Any, ...], list[int]] = {}
    for at, key in enumerate(zip(*(found[name] for name in by), strict=True)):
        groups.setdefault(key, []).append(at)  # pandas takes a hundred times as long to group a few rows
    combined = rows_of(rows.iloc[[group[0] for group in groups.values()]])
    for row, group in zip(combined, groups.values(), strict=True):
        known = {name: [value for at in group if (value := found[name][at]) is not None] for name in measures}
        row["n"] = len(known[measures[0]])
        for name, values in known.items():
            mean = estimate(values) if values else None
            row[name] = mean.mean if mean else math.nan
            row[f"{name}_half_width"] = mean.half_width if mean and mean.half_width is not None else math.nan
    return combined
