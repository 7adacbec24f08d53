"""Records as a frame: one row per run with its configuration and measures, all in SI units."""

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

import pandas as pd

from harness.records.frames import none_if_missing, once_for_all, rows_of
from harness.records.labels import SHAPE, labels_by, varying
from harness.records.parts import CATEGORIES, others_share
from harness.records.record import CONVENTION, STATES, Record, float_or_nan
from harness.records.statistics import UNKNOWN, estimate
from harness.records.steps import Step, Steps
from impl.errors import InputError
from impl.grouping import by_key
from impl.model.norm_placement import PLACEMENTS
from impl.run import Run

DEGREES = ("dp", "tp", "pp", "cp")
IN_THE_PLAN = (
    "dp", "tp", "sequence_parallel", "overlap_input_grad_reduce", "pp", "schedule", "chunks", "scatter_gather",
    "recompute", "zero_stage", "cp", "cp_attention",
)  # fmt: skip
"""Fields of the plan that rows have columns for."""
OF_A_RECORD = (
    "id", "experiment", "tier", "source", "status", "reason", "point", "parameters", "tokens_per_second",
    "tokens_per_second_per_device", "step_seconds", "skipped_steps", "peak_memory_bytes", "split_state_bytes",
    "whole_state_bytes", "model_activation_bytes", "layer_activation_bytes", "tp_calls", "tp_bytes_sent",
    "dp_bytes_sent", "pp_sends", "pp_bytes_sent", "bubble", "predicted_bubble", "pipeline_seconds",
    "predicted_pipeline_seconds", "microbatches_in_flight", "in_flight_bytes", "training_seconds", "alone_seconds",
    "losses",
)  # fmt: skip
"""Columns that are properties of a record."""
MEMORY = {"memory": ("total",), **{name: (name,) for name in CATEGORIES}, "states": STATES}
"""Categories of memory, by the beginning of their columns."""


def about(records: Sequence[Record]) -> str:
    """Return experiment and tier for a title, as `: quickstart, smoke tier`, and the engine if it is not ours.

    Raises:
        InputError: the records are of several tiers.
    """
    tiers = sorted({record.tier for record in records})
    if len(tiers) > 1:  # their sizes and budgets differ, so that their numbers are not comparable
        raise InputError(f"records of the tiers {', '.join(tiers)} cannot share a table; choose one with --tier")
    names = ", ".join(dict.fromkeys(record.experiment for record in records))
    engines = {record.run.engine for record in records}
    engine = f", {engines.pop()} engine" if len(engines) == 1 and engines != {"native"} else ""
    return f": {names}, {tiers[0]} tier{engine}" if records else ""


def model_names(records: Sequence[Record]) -> dict[tuple[Any, ...], str]:
    """Return the names of the model shapes, as `GPT 0.5M`, with layers, hidden size and heads where counts coincide."""
    counts: dict[tuple[Any, ...], set[int]] = {}
    kinds: dict[tuple[Any, ...], str] = {}
    for record in records:
        counts.setdefault(shape(record.run), set()).update(filter(None, [record.resolved.parameters]))
        model = record.run.model
        is_llama = (model.mlp, model.positions) == ("swiglu", "rotary")
        kinds[shape(record.run)] = "Llama" if is_llama else model.family.upper()
    names = {s: f"{kinds[s]} {size_name(min(n))}" if n else "" for s, n in counts.items()}
    given = list(names.values())
    shapes = {s: f"{kinds[s]} L{s[1]} h{s[2]} a{s[3]}" for s in names}
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
def frame(records: Sequence[Record]) -> pd.DataFrame:
    """Return one row per run of any status, by model size and then by the varying fields; NaN where not measured.

    Times per step and memory are the largest over the ranks.
    """
    names, differing = model_names(records), varying(record.run for record in records)
    labelled = [name for name in differing if name not in SHAPE]
    called = devices(records)
    ordered = in_order(records, differing)
    rows = []
    for record, label in zip(ordered, labels_by([record.run for record in ordered], labelled), strict=True):
        run = record.run
        rows.append(
            {name: getattr(record, name) for name in OF_A_RECORD}
            | {"diverged": record.has_diverged, "seed": run.seed, "repeat": run.repeat}
            | {"model": names[shape(run)], "varies": label}
            | {"family": run.model.family, "layers": run.model.num_layers, "norm_placement": run.model.norm_placement}
            | {"heads": run.model.num_heads, "lr": run.train.lr, "vocab_size": record.resolved.vocab_size}
            | {"engine": run.engine, "ranks": run.plan.world_size, "threads": run.threads}
            | {name: getattr(run.plan, name) for name in IN_THE_PLAN}
            | {"global_batch": run.train.global_batch, "tokens_per_step": run.tokens_per_step}
            | {"microbatch": run.train.microbatch, "microbatches": run.microbatches}
            | _where(record)
            | ({"device_name": called[record.environment.system]} if record.is_simulated else {})
            | _rates(record)
            | _memory(record)
        )
    return pd.DataFrame(rows)


def in_order(records: Sequence[Record], differing: Sequence[str] | None = None) -> list[Record]:
    """Return the records by family and size, then by the varying fields, norm placements in order of their registry."""
    differing = varying(record.run for record in records) if differing is None else differing
    sizes: dict[tuple[Any, ...], int] = {}
    for record in records:
        if count := record.resolved.parameters:
            sizes[shape(record.run)] = min(count, sizes.get(shape(record.run), count))
    names = [name for name in differing if name not in SHAPE]
    placements, values = list(PLACEMENTS), list(map(attrgetter, names))

    def rank(value: Any) -> tuple[Any, ...]:
        if value in placements:
            return (0, placements.index(value), "")
        return (1, value, "") if isinstance(value, (int, float)) else (2, 0, str(value))

    def key(record: Record) -> tuple[Any, ...]:
        own = shape(record.run)
        unsized = (math.prod(n if isinstance(n, int) else 1 for n in own), *own) if own not in sizes else ()
        order = tuple(rank(of(record.run)) for of in values)
        return (own[0], sizes.get(own, math.inf), unsized, order, record.run.seed, record.run.repeat)

    return sorted(records, key=key)


def _where(record: Record) -> dict[str, Any]:
    names = ("device", "device_name", "backend", "cores", "system")
    marks: dict[str, Any] = {"oversubscribed": record.is_oversubscribed, "disturbed": record.is_disturbed}
    marks["others_share"] = others_share([rank.host for rank in record.ranks])
    return {name: getattr(record.environment, name) for name in names} | marks


def _rates(record: Record) -> dict[str, Any]:
    """Return the quartiles of a step, and the measures of FLOPs."""
    q1, _, q3 = record.step_quartiles
    return {
        "timed_steps": len(record.timed_seconds),
        "step_seconds_q1": q1,
        "step_seconds_q3": q3,
        "flop_convention": CONVENTION,
        **{name: getattr(record, name) for name in ("flop_rate", "mfu", "hardware_flop_rate", "hfu")},
        "gemm_share": record.flop_rate / record.gemm_rate,
    }


def _memory(record: Record) -> dict[str, Any]:
    kinds = [rank.memory_kind for rank in record.ranks if rank.peak_memory_bytes]
    sizes = {f"{name}_bytes": record.bytes_of(*parts) for name, parts in MEMORY.items()}
    predicted = {f"predicted_{name}_bytes": record.predicted_bytes_of(*parts) for name, parts in MEMORY.items()}
    return {"memory_kind": kinds[0] if kinds else None, **sizes, **predicted}


def combine(rows: pd.DataFrame, by: Sequence[str], measures: Sequence[str]) -> list[dict[str, Any]]:
    """Return one row per group: its first row, with mean and 95% half-width of each measure over its runs.

    Groups keep the order of their first rows; a missing value in `by` is a value of its own. `n` counts the runs that
    have the first measure.
    """
    if rows.empty:
        return []
    found = {name: none_if_missing(pd.Series(rows[name])) for name in {*by, *measures}}
    keys = zip(*(found[name] for name in by), strict=True)
    groups = by_key((key, at) for at, key in enumerate(keys))  # pandas takes a hundred times as long for a few rows
    combined = rows_of(rows.iloc[[group[0] for group in groups.values()]])
    for row, group in zip(combined, groups.values(), strict=True):
        known = {name: [value for at in group if (value := found[name][at]) is not None] for name in measures}
        row["n"] = len(known[measures[0]])
        for name, values in known.items():
            mean = estimate(values) if values else UNKNOWN
            row |= {name: mean.mean, f"{name}_half_width": float_or_nan(mean.half_width)}
    return combined


def _apart(record: Record) -> Record:
    """Return a copy of a record that has computed nothing yet."""
    other = copy.copy(record)
    for name in [name for name in other.__dict__ if isinstance(getattr(Record, name, None), cached_property)]:
        del other.__dict__[name]
    return other


def without_losses(record: Record) -> Record:
    """Return a record without losses and evaluations."""
    other, nothing = _apart(record), {"loss": None, "grad_norm": None}
    other.steps = Steps([dataclasses.replace(step, **nothing) for step in record.steps])
    other.evaluations = []
    return other


def with_seconds(record: Record, seconds: float, bubble: float | None = None) -> Record:
    """Return a simulated record whose step takes other seconds, as in a null model or at an interval's end."""
    other = _apart(record)
    other.steps = Steps([Step(seconds=[seconds])])
    if bubble is not None:
        other.prediction = dataclasses.replace(record.prediction, bubble=bubble)
    return other


def devices(records: Sequence[Record]) -> dict[str | None, str]:
    """Return the device names of simulated records, by system.

    Stacks on the same hardware share its name, to be compared like runs on it, unless a point was simulated for
    several.
    """
    own = {r.environment.system: r.environment.device_name for r in records if r.is_simulated}
    return {system: f"{device if is_one_each(records) else system}, simulated" for system, device in own.items()}


def is_one_each(records: Sequence[Record]) -> bool:
    """Return True if no run was simulated for several systems."""
    ids = [record.id for record in records if record.is_simulated]
    return len(set(ids)) == len(ids)
