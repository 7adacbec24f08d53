"""An experiment's own table, of its points, or of items of any kind."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import pandas as pd

from harness.analysis.points import Point
from harness.analysis.render import Column, Table, shown
from harness.analysis.tables import measured
from harness.records.statistics import Estimate


def tabulate(
    name: str, title: str, columns: Sequence[Column], points: Iterable[Point], notes: Sequence[str] = (), *,
    apart: bool = False, is_timed: bool = True, **more: Column,
) -> Table:  # fmt: skip
    """Return a table with one row per point: the run ones, and those of a paper beside or below them.

    The value of a column is its function `of` of the point, else the mean of the record's measure of its key. An
    `Estimate` gets a column with its half-width.

    Args:
        apart: give simulated points rows of their own, like the measured ones.
        is_timed: name the device, mark oversubscribed points, and put simulated numbers beside measured ones.
        more: columns of the frame that are not shown.
    """
    rows: list[dict[str, Any]] = []
    intervals: dict[str, str] = {}
    for point in points:
        row = {key: None if not point.records else value for key, value in _place(point).items()}
        for column in (*columns, *more.values()):
            if column.key in row:
                continue
            value = column.of(point) if column.of else point.estimate(attrgetter(column.key))
            if isinstance(value, Estimate):
                half_width = f"{column.key}_half_width"
                row |= {column.key: value.mean, half_width: math.nan if value.half_width is None else value.half_width}
                if column.of:
                    intervals[column.key] = half_width
            else:
                row[column.key] = value
        rows.append(row)
    if not any(row["source"] for row in rows):
        return Table(name, title, (), pd.DataFrame())
    frame = pd.DataFrame(rows)
    frame["device_name"] = frame["device_name"].fillna(frame["device_name"].dropna().iloc[0])
    for mark in ("oversubscribed", "disturbed"):
        frame[mark] = frame[mark].eq(True)
    if apart:
        frame = frame.drop(columns=["source", "system"])
    with_intervals = [c if c.key not in intervals else replace(c, interval=intervals[c.key]) for c in columns]
    if not is_timed:
        return Table(name, title, shown(with_intervals, frame), frame, tuple(notes))
    return measured(name, title, with_intervals, frame, notes)


def _place(point: Point) -> dict[str, Any]:
    """Return the arguments of `measured` that are no columns."""
    where = point.records[0].environment if point.records else None
    return {
        "point": point.run,
        "source": point.records[0].source if point.records else None,
        "device_name": point.device,
        "oversubscribed": point.is_oversubscribed,
        "disturbed": point.is_disturbed,
        "system": where and where.system,
        "device": where and where.device,
        "backend": where and where.backend,
        "n": point.n,
        "mark": "",
    }


def listed(name: str, title: str, columns: Sequence[Column], items: Iterable[Any], notes: Sequence[str] = ()) -> Table:
    """Return a table with one row per item of any kind, whose values are the columns' functions `of` of the item."""
    rows = pd.DataFrame([{column.key: column.of(item) for column in columns if column.of} for item in items])
    return Table(name, title, shown(columns, rows), rows, tuple(notes) if len(rows) else ())


def printed_value(key: str) -> Callable[[Point], float]:
    """Return a function that gives the number which a source prints for a point; NaN if there is none."""
    return lambda point: point.printed.get(key, math.nan)
