"""Weak and strong scaling: groups of comparable points, relative to the point with the fewest ranks."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import pandas as pd

from harness.records.labels import SHAPE, fields, labels
from harness.records.measures import DEGREES, combine
from harness.records.printable import several
from harness.records.record import float_or_nan
from harness.records.statistics import Estimate
from harness.records.store import SIMULATED
from impl.grouping import by_key
from impl.run import Run

Kind = Literal["weak", "strong"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Row = Mapping[Any, Any]

RATES = ("tokens_per_second", "tokens_per_second_per_device")
WAYS = {
    "tp": ("sequence_parallel", "overlap_input_grad_reduce"),
    "pp": ("schedule", "chunks", "scatter_gather"),
    "cp": ("cp_attention",),
}
"""Fields of the plan without effect at degree 1 of tensor, pipeline or context parallelism."""
PLAN_DEGREES = tuple(f"plan.{degree}" for degree in DEGREES)
VARIED = (*PLAN_DEGREES, *(f"plan.{name}" for name in itertools.chain(*WAYS.values())))
"""Fields in which points of one strong-scaling group may differ."""
LEAST_TIMED_STEPS = 3
"""Least timed steps of a rate for scaling; shorter runs measure memory only."""


def scaling_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Return points of timed runs in groups that differ in their parallel degrees, fewest ranks first.

    Strong scaling groups have a constant global batch and any mix of degrees; weak ones a constant global batch per
    data-parallel rank and the other degrees equal. A point may be in one of each. Speed-up is the ratio of tokens/s,
    efficiency that of tokens/s per device; both are NaN if the row or its baseline is oversubscribed. `curve` names the
    line of a row in a figure: rows of a line scale the same degree in the same way.
    """
    if not rows.empty:
        rows = pd.DataFrame(rows[(rows["timed_steps"] >= LEAST_TIMED_STEPS) | (rows["source"] == SIMULATED)])
    if rows.empty:
        return rows
    points = combine(rows, ("point", "source", "device_name"), RATES)
    out: list[dict[str, Any]] = []
    for kind in KINDS:
        where = [(_group(row["point"], kind), row["source"], str(row["device_name"])) for row in points]
        groups = by_key(zip(where, points, strict=True))  # pandas takes a hundred times as long to group a few rows
        for group in groups.values():
            if len({row["ranks"] for row in group}) > 1:
                ordered = sorted(group, key=lambda row: (row["ranks"], row["tp"], row["pp"]))
                out += _against_fewest(kind, ordered)
    scaled = pd.DataFrame(out)
    if out:
        shown = (*shown_elsewhere(scaled), "train.global_batch")
        scaled["varies"] = labels(list(scaled["point"]), shown)
        scaled["curve"] = _curves(scaled)
    return scaled


def shown_elsewhere(rows: pd.DataFrame) -> tuple[str, ...]:
    """Return the fields that tables have columns for: the model, and `dp` if all ranks are data-parallel."""
    return (*SHAPE, *(("plan.dp",) if all(rows["ranks"] == rows["dp"]) else ()))


def ratio(row: Row, baseline: Row, measure: str) -> Estimate:
    """Return a measure over the baseline's; NaN if one is oversubscribed, exactly 1 for the baseline itself."""
    if row["oversubscribed"] or baseline["oversubscribed"]:
        return Estimate(math.nan, None, row["n"])
    if row is baseline:
        return Estimate(1.0, None, row["n"])
    return _estimate(row, measure) / _estimate(baseline, measure)


def _group(point: Run, kind: Kind) -> tuple[Any, ...]:
    """Return the values that the points of one group have in common."""
    common = dict(fields(point))
    if kind == "weak":
        common["train.global_batch"] /= common.pop("plan.dp")
    else:
        for name in VARIED:
            del common[name]
    return tuple(common.values())


def _against_fewest(kind: Kind, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    pairs = [(row, _baseline(row, rows)) for row in rows]
    used = [id(baseline) for row, baseline in pairs if baseline is not row]
    return [_compared(kind, row, baseline) for row, baseline in pairs if baseline is not row or id(row) in used]


def _baseline(row: Row, rows: Sequence[Row]) -> Row:
    """Return the row with the fewest ranks whose options of WAYS are equal, or without effect at degree 1."""

    def differs(other: Row, degree: str) -> bool:
        return any(other[name] != row[name] for name in WAYS[degree])

    return min(
        (other for other in rows if not any(other[degree] > 1 and differs(other, degree) for degree in WAYS)),
        key=lambda other: (other["ranks"], other["tp"], other["pp"], any(differs(other, degree) for degree in WAYS)),
    )


def _compared(kind: Kind, row: Row, baseline: Row) -> dict[str, Any]:
    compared = dict(row) | {
        "kind": kind,
        "baseline": "baseline" if row is baseline else several(baseline["ranks"], "rank"),
        "baseline_point": baseline["point"],
    }
    for name, rate in zip(("speedup", "efficiency"), RATES, strict=True):
        estimate = ratio(row, baseline, rate)
        compared |= {name: estimate.mean, f"{name}_half_width": float_or_nan(estimate.half_width)}
    return compared


def _curves(scaled: pd.DataFrame) -> list[str]:
    """Return for each row the name of its line in a figure; empty for a baseline, which is part of all its lines."""
    shown = {"weak": ("plan.dp",), "strong": PLAN_DEGREES}
    names: list[str] = []
    rows = scaled.to_dict("records")
    at = {(row["kind"], row["point"]): row for row in rows}
    for kind, growing in shown.items():
        of_kind = [row for row in rows if row["kind"] == kind]
        keys = [row["point"] for row in of_kind if row["baseline"] != "baseline"]
        ways = dict(zip(keys, labels(keys, (*SHAPE, "train.global_batch", *growing)), strict=True))
        for row in of_kind:
            if row["point"] in ways:
                grows = _grows(row, at[kind, row["baseline_point"]]) if kind == "strong" else ""
                names.append(f"{grows} {ways[row['point']]}".strip())
            else:
                names.append("")
    return names


def _grows(row: Row, baseline: Row) -> str:
    """Return the first degree that a row raises over its baseline, and the values of others that differ too."""
    first, *others = [degree for degree in DEGREES if row[degree] != baseline[degree]] or DEGREES[:1]
    return f"{first} with {' '.join(f'{degree}={row[degree]}' for degree in others)}" if others else first


def _estimate(row: Row, measure: str) -> Estimate:
    half_width = row[f"{measure}_half_width"]
    return Estimate(row[measure], None if math.isnan(half_width) else half_width, row["n"])
