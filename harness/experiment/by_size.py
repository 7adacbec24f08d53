"""Comparison of models of growing size, each with a layout of its own, with the smallest of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.analysis.columns import RANKS
from harness.analysis.points import Point
from harness.analysis.render import Column
from harness.experiment.checks import falls_along
from harness.experiment.claims import Evidence, tally
from harness.experiment.comparison import Comparison
from harness.records.record import Record


@dataclass(frozen=True, kw_only=True)
class BySize(Comparison):
    """Models of a figure or table, one layout each: all are one line, relative to the smallest model."""

    baseline: Callable[[Point], Any] | None = lambda point: point.run.plan.world_size
    relative_to: str = "the smallest model"
    group: tuple[Column, ...] = ()
    line: tuple[Column, ...] = ()
    at: tuple[Column, ...] = (RANKS,)

    def by_size(self, records: Sequence[Record]) -> list[Point]:
        """Return the points whose relative speed is known, by number of parameters; none if all have the same."""
        found = sorted(self.known(records), key=lambda one: one.parameters)
        return found if found and found[0].parameters < found[-1].parameters else []

    def largest_is_faster(self, records: Sequence[Record]) -> Evidence | None:
        """Check that the largest model is faster per device than the smallest."""
        if not (found := self.by_size(records)):
            return None
        ratio = found[-1].over(found[0], self.measure)
        return tally([ratio - 1], "", f"{ratio:.2f} ({found[-1].model} over {found[0].model})")

    def falls_with_size(self, records: Sequence[Record]) -> Evidence | None:
        """Check that each larger model is slower per device."""
        found = self.by_size(records)
        numbers = ", ".join(f"{one.relative:.0%} ({one.model})" for one in found)
        return falls_along([found], self.measure, "steps in size", numbers)
