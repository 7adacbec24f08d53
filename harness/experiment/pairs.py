"""Comparison of runs that differ in one choice only, measured in turn, by pairs of repeats."""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.records.labels import apart_from
from harness.records.statistics import Estimate, estimate
from impl.run import Run

Row = Mapping[Any, Any]
"""Row of `measures.frame`."""


@dataclass
class Cell:
    """Runs on one device that differ only in a choice, seed and repeat."""

    run: Run
    """Common part of the runs: the fields that may differ, seed and repeat are at their defaults."""
    runs: dict[Any, dict[tuple[int, int], Row]] = field(default_factory=dict)
    """Rows of successful runs, by choice, then by seed and repeat."""
    why_not: dict[Any, str] = field(default_factory=dict)
    """Status of the other runs, by choice: invalid, oom, failed."""

    @property
    def first(self) -> Row:
        """Row that has the values common to all runs."""
        return next(iter(next(iter(self.runs.values())).values()))

    @property
    def is_crowded(self) -> bool:
        """True if ranks of some run shared cores, which makes its times useless."""
        return any(row["oversubscribed"] for runs in self.runs.values() for row in runs.values())

    def mean(self, choice: Hashable, measure: str) -> Estimate:
        """Return the estimate of a measure over the repeats; NaN if it was not measured."""
        values = [row[measure] for row in self.runs.get(choice, {}).values() if not math.isnan(row[measure])]
        return estimate(values) if values else Estimate(math.nan, None, 0)

    def ratio(self, ours: Hashable, theirs: Hashable, measure: str = "step_seconds") -> Estimate:
        """Return the mean ratio of a measure, ours over theirs, over pairs of equal seed and repeat.

        It has a 95% t-interval. A temporary slowdown of the machine affects both runs of a pair. NaN if there are no
        pairs, or ranks shared cores.
        """
        a, b = self.runs.get(ours, {}), self.runs.get(theirs, {})
        ratios = [a[key][measure] / b[key][measure] for key in a if key in b]
        ratios = [one for one in ratios if not math.isnan(one)]
        return estimate(ratios) if ratios and not self.is_crowded else Estimate(math.nan, None, 0)


def cells(rows: Iterable[Row], *fields: str, choice: Callable[[Run], Hashable]) -> list[Cell]:
    """Return the runs in cells, in the order of their first rows.

    Args:
        fields: dotted names of the fields in which the runs of a cell may differ.
        choice: function that returns a run's choice in these fields.
    """
    found: dict[tuple[Run, str | None], Cell] = {}
    why_not: dict[Run, dict[Any, str]] = {}
    for row in rows:
        run, chosen = apart_from(row["point"], *fields), choice(row["point"])
        others = why_not.setdefault(run, {})
        if row["status"] == "ok":
            cell = found.setdefault((run, row["device_name"]), Cell(run, why_not=others))
            cell.runs.setdefault(chosen, {})[row["seed"], row["repeat"]] = row
        else:
            others[chosen] = row["status"]
    return list(found.values())


def reaches_below(ratio: Estimate, limit: float = 1.0) -> bool:
    """Return True if a ratio, or the lower end of its 95% interval, is at most the limit."""
    return ratio.mean - (ratio.half_width or 0.0) <= limit


def in_words(ratio: Estimate) -> str:
    """Return the ratio as text, `0.87 ± 0.02`; a single pair has no interval."""
    return f"{ratio.mean:.3g}" if ratio.half_width is None else f"{ratio.mean:.3g} ± {ratio.half_width:.2g}"
