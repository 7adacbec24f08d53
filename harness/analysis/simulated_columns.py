"""Measured and simulated numbers of a point in one row of a table."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from harness.analysis.render import Column
from harness.records.frames import rows_of
from harness.records.store import SIMULATED
from impl.grouping import by_key

TWINS = frozenset({
    "tokens_per_second", "tokens_per_second_per_device", "step_seconds", "flop_rate", "mfu",
    "hfu", "peak_memory_bytes", "bubble", "speedup", "efficiency", "relative", "scaling", "speed", "gain", "rate",
    "counted_rate",
})  # fmt: skip
"""Columns in which a run and its simulation have different numbers; the others hold for both."""
SYSTEM = Column(key="simulated_on", header="simulated on", text=True)


def twin(key: str) -> str:
    """Return the key of the column with the simulated number."""
    return f"simulated_{key}"


def beside(columns: Sequence[Column], rows: pd.DataFrame) -> tuple[list[Column], pd.DataFrame]:
    """Return columns and rows with each simulated point in the row of the measured one, or in one of its own.

    A simulated number has a column of its own, left of the measured one.
    """
    twins = [column for column in columns if column.key in TWINS and column.key in rows]
    found = rows_of(rows)
    ran = [row for row in found if isinstance(row["source"], str) and row["source"] != SIMULATED]  # not in print alone
    measured = by_key((_point(row), row) for row in ran)
    out = []
    for row in found:
        if row["source"] != SIMULATED:
            out.append(row)
            continue
        own = {twin(column.key): row[column.key] for column in twins} | {SYSTEM.key: row.get("system")}
        free = [other for other in measured.get(_point(row), []) if SYSTEM.key not in other]
        for other in free:
            other |= own
        if not free:
            gone = {name: math.nan for column in twins for name in (column.key, f"{column.key}_half_width")}
            out.append(row | gone | own | {"n": math.nan})
    shown: list[Column] = [] if twins else [Column(key="source", header="source", text=True)]
    for column in columns:
        if column in twins:
            shown.append(replace(column, key=twin(column.key), header=f"{column.header}, simulated", interval=None))
        shown.append(column)
    return [*shown, SYSTEM], pd.DataFrame(out)


def _point(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a row has in common with that of its simulation: the point, and the kind of scaling if it has one."""
    return row["point"], row.get("kind")
