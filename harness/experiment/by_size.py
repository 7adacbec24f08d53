"""Comparison of models of growing size, each with a layout of its own, with the smallest of them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from harness.analysis.columns import RANKS
from harness.analysis.points import Point
from harness.analysis.render import Column
from harness.experiment.claims import Evidence
from harness.experiment.comparison import Comparison, flop_rate
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

    def rises_with_size(self, records: Sequence[Record]) -> Evidence | None:
        """Check that the larger half of the models is faster per device; one model alone makes no half."""
        found = self.by_size(records)
        half = len(found) // 2
        if half < 2:
            return None
        rates = [one.mean(flop_rate) for one in found]
        gain = math.fsum(rates[-half:]) / math.fsum(rates[:half])
        return Evidence(gain > 1, f"{gain:.2f} times as fast in the larger half; {found[0].model} to {found[-1].model}")

    def largest_is_faster(self, records: Sequence[Record]) -> Evidence | None:
        """Check that the largest model is faster per device than the smallest."""
        if not (found := self.by_size(records)):
            return None
        ratio = found[-1].relative.mean
        return Evidence(ratio > 1, f"{ratio:.2f} ({found[-1].model} over {found[0].model})")

    def falls_with_size(self, records: Sequence[Record]) -> Evidence | None:
        """Check that each larger model is slower per device."""
        found = self.by_size(records)
        holds = all(b.relative.mean < a.relative.mean for a, b in pairwise(found))
        numbers = ", ".join(f"{one.relative.mean:.0%} ({one.model})" for one in found)
        return Evidence(holds, numbers) if found else None
