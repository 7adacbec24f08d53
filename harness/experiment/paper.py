"""What experiments compare with a paper: its points next to ours, its models by their notes, tables of both."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from harness.analysis.points import Measure, Point
from harness.analysis.render import Column
from harness.analysis.tables import MakesTable
from harness.analysis.tabulate import printed_value, tabulate
from harness.records.measures import about
from harness.records.record import Record
from impl.run import Run

NOTED = {
    "num_layers": r"(\d+) layers", "hidden_size": r"hidden size (\d+)", "num_heads": r"(\d+) heads",
    "seq_len": r"sequence (\d+)", "microbatch": r"microbatch (\d+)",
}  # fmt: skip
"""Numbers in the notes of published rows, by the field that they are for."""


def noted(note: str) -> dict[str, Any]:
    """Return the fields of a model that a note names, as `48 layers, hidden size 1600, 16 heads`."""
    found = {name: re.search(pattern, note) for name, pattern in NOTED.items()}
    return {name: int(match.group(1)) for name, match in found.items() if match}


def with_printed(found: Iterable[Point], paper: Mapping[Run, Point]) -> list[Point]:
    """Return the points with the numbers that a paper prints for their runs."""
    return [replace(one, printed=paper[one.run].printed) if one.run in paper else one for one in found]


def against_in_print(one: Point, baseline: Point, measure: Measure, key: str) -> Point:
    """Return a point relative to a baseline, and as its printed `relative` that of the numbers printed for both."""
    of = printed_value(key)
    return replace(one.against(baseline, measure), printed={"relative": of(one) / of(baseline)})


def and_absent(found: Sequence[Point], paper: Mapping[Run, Point]) -> list[Point]:
    """Return the points, then those of a paper that were not run."""
    there = {one.run for one in found}
    return [*found, *(one for run, one in paper.items() if run not in there)]


def table_of(
    name: str,
    title: str,
    columns: Sequence[Column],
    found: Callable[[Sequence[Record]], Iterable[Point]],
    notes: Sequence[str] = (),
    **more: Any,
) -> MakesTable:
    """Return a function that tabulates what `found` returns for records; experiment and tier are added to the title.

    `more` are further arguments of `tabulate`.
    """
    return lambda records: tabulate(name, f"{title}{about(records)}", columns, found(records), notes, **more)
