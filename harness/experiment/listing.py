"""Points that have a measure, in a table and a figure beside what a formula gives, and checks on that measure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from harness.analysis.columns import value, values
from harness.analysis.points import Measure, Point, points
from harness.analysis.render import Column, Table, shown
from harness.analysis.tables import PERCENT
from harness.analysis.tabulate import tabulate
from harness.experiment.checks import falls_along, grouped, within_points
from harness.experiment.claims import Check, Evidence
from harness.figures.style import figure_of
from harness.records.measures import about
from harness.records.record import Record
from impl.run import Run


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Points that have a measure, a share of something: their table, their figure and checks."""

    name: str
    """Name of the table."""
    title: str
    measure: Measure
    formula: Column
    """Column with what a formula gives for the measure."""
    columns: tuple[Column, ...]
    order: Callable[[Run], Any]
    """Function of a run that returns its place among the others."""
    keep: Callable[[Run], bool] = lambda _: True
    """Function that returns True for the runs that are listed."""
    notes: tuple[str, ...] = ()

    def points(self, records: Sequence[Record]) -> list[Point]:
        """Return the points that have the measure, in order."""
        found = (one for one in points(records, self.measure) if self.keep(one.run))
        return sorted(found, key=lambda one: self.order(one.run))

    def fair(self, records: Sequence[Record]) -> list[Point]:
        """Return the points whose ranks share no cores, in order."""
        return [one for one in self.points(records) if not one.is_oversubscribed]

    def mean(self, point: Point) -> float:
        """Return the measure of a point."""
        return point.mean(self.measure)

    def table(self, records: Sequence[Record]) -> Table:
        """Return the table with a row for every point that has the measure."""
        return tabulate(self.name, f"{self.title}{about(records)}", self.columns, self.points(records), self.notes)

    def figure(self, x: Column, line: Callable[[Run], str], labels: tuple[str, str]) -> Callable[..., Any]:
        """Return a function that draws the measure in percent, and a formula dashed, against a field.

        Args:
            x: field of the horizontal axis.
            line: function of a run that returns the name of its line.
            labels: names of both axes.
        """
        return figure_of(
            self.title,
            *labels,
            self.fair,
            name=lambda one: line(one.run),
            at=lambda one: value(one, x),
            ours=lambda one: self.mean(one) / PERCENT,
            published=lambda one: value(one, self.formula) / PERCENT,
        )

    def near(self, within: float, what: str) -> Check:
        """Return a check that the measure is what a formula gives, within a difference; `what` names the points."""
        return lambda records: within_points(
            ((one.estimate(self.measure), value(one, self.formula)) for one in self.fair(records)), within, what
        )

    def falls(self, what: str, alike: Sequence[Column], quoted: Callable[[Run], bool] = lambda _: False) -> Check:
        """Return a check that the measure falls from point to point where these fields are alike.

        Args:
            what: plural name of the steps.
            alike: fields that the points of a line have in common.
            quoted: function that returns True for a run whose line's ends are quoted.
        """

        def check(records: Sequence[Record]) -> Evidence | None:
            lines = [line for line in grouped(self.fair(records), *alike) if len(line) > 1]
            ends = (
                f"{self.mean(line[0]):.0%} to {self.mean(line[-1]):.0%} "
                f"({', '.join(f'{name.key} {at}' for name, at in zip(alike, values(line[0], alike), strict=True))})"
                for line in lines
                if quoted(line[0].run)
            )
            return falls_along(lines, self.measure, what, ", ".join(ends))

        return check


def listed(name: str, title: str, columns: Sequence[Column], items: Iterable[Any], notes: Sequence[str] = ()) -> Table:
    """Return a table with one row per item of any kind, whose values are the columns' functions `of` of the item."""
    rows = pd.DataFrame([{column.key: column.of(item) for column in columns if column.of} for item in items])
    return Table(name, title, shown(columns, rows), rows, tuple(notes) if len(rows) else ())
