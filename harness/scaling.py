"""Weak and strong scaling: which points belong together, and how they stand to the one with the fewest ranks."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from harness.measures import SHAPE, Record, combine, labels, point
from harness.statistics import Estimate

RATES = ("tokens_per_second", "tokens_per_second_per_device")
SHOWN_ELSEWHERE = (*SHAPE, "plan.dp", "train.global_batch")


def scaling_rows(rows: pd.DataFrame, records: Sequence[Record]) -> pd.DataFrame:
    """Points of timed runs in groups that differ in the data-parallel degree only, the one with the fewest ranks first.

    Weak scaling groups have a constant global batch per data-parallel rank, strong ones a constant global batch; a
    point may stand in one of each. Speed-up is the ratio of tokens/s, efficiency that of tokens/s per device; neither
    is given where the row or its baseline is oversubscribed.
    """
    if rows.empty:
        return rows
    points = combine(rows, ("point", "source", "device_name"), RATES)
    configs = {point(record["config"]): record["config"] for record in records}
    out: list[dict[str, Any]] = []
    for kind in ("weak", "strong"):
        keys = [_group(configs[key], kind) for key in points["point"]]
        where = [points["source"], points["device_name"]]
        for _, group in points.groupby([pd.Series(keys, index=points.index), *where], sort=False, dropna=False):
            if len(set(group["ranks"])) > 1:
                out += _against_fewest(kind, group.sort_values("ranks", kind="stable").to_dict("records"))
    scaled = pd.DataFrame(out)
    if out:
        scaled["varies"] = labels(list(scaled["point"]), records, SHOWN_ELSEWHERE)
    return scaled


def _group(config: Any, kind: str) -> str:
    """What the points of one scaling curve have in common."""
    common = copy.deepcopy(dict(config))
    dp = common["plan"].pop("dp", 1)
    if kind == "weak":
        common["train"]["global_batch"] /= dp
    return point(common)


def _against_fewest(kind: str, rows: list[dict[Any, Any]]) -> list[dict[str, Any]]:
    baseline = rows[0]
    name = "1 rank" if baseline["ranks"] == 1 else f"{baseline['ranks']} ranks"
    out = []
    for row in rows:
        compared = dict(row) | {"kind": kind, "baseline": "baseline" if row is baseline else name}
        for ratio, rate in zip(("speedup", "efficiency"), RATES, strict=True):
            mean, half_width = 1.0, math.nan
            if row["oversubscribed"] or baseline["oversubscribed"]:
                mean = math.nan
            elif row is not baseline:
                quotient = _estimate(row, rate) / _estimate(baseline, rate)
                mean, half_width = quotient.mean, math.nan if quotient.half_width is None else quotient.half_width
            compared |= {ratio: mean, f"{ratio}_half_width": half_width}
        out.append(compared)
    return out


def _estimate(row: dict[Any, Any], measure: str) -> Estimate:
    half_width = row[f"{measure}_half_width"]
    return Estimate(row[measure], None if math.isnan(half_width) else half_width, row["n"])
