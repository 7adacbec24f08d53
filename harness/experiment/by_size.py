"""Models of growing size: compared with the smallest, each with a layout of its own, and whether a loss falls."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from harness.analysis.columns import MODEL
from harness.analysis.points import Point
from harness.analysis.render import Column, number
from harness.experiment.checks import falls_along
from harness.experiment.claims import Check, Evidence, less, means, tally
from harness.experiment.comparison import Comparison, flop_rate
from harness.experiment.pairs import with_interval
from harness.records.measures import size_name
from harness.records.parts import Evaluation
from harness.records.record import Record
from harness.records.statistics import slope


@dataclass(frozen=True, kw_only=True)
class BySize(Comparison):
    """Models of a figure or table, one layout each: all are one line, relative to the smallest model."""

    baseline: Callable[[Point], Any] | None = lambda point: point.run.plan.world_size
    relative_to: str = "the smallest model"
    group: tuple[Column, ...] = ()
    line: tuple[Column, ...] = ()
    at: tuple[Column, ...] = (MODEL,)

    def by_size(self, records: Sequence[Record]) -> list[Point]:
        """Return the points whose relative speed is known, by number of parameters; none if all have the same."""
        found = sorted(self.known(records), key=lambda one: one.parameters)
        return found if found and found[0].parameters < found[-1].parameters else []

    def largest_is_faster(self, records: Sequence[Record]) -> Evidence | None:
        """Check that the largest model is faster per device than the smallest."""
        if not (found := self.by_size(records)):
            return None
        ratio = found[-1].over(found[0], flop_rate)
        return tally([ratio - 1], "", f"{ratio:.2f} ({found[-1].model} over {found[0].model})")

    def falls_with_size(self, records: Sequence[Record]) -> Evidence | None:
        """Check that each larger model is slower per device."""
        found = self.by_size(records)
        numbers = ", ".join(f"{one.relative:.0%} ({one.model})" for one in found)
        return falls_along([found], flop_rate, "steps in size", numbers)


def with_size(measure: Callable[[Evaluation], float], name: str, unit: str) -> Check:
    """Return a check that a loss falls with the number of parameters. A run that diverged refutes the claim.

    Where each size has several seeds every step in size is compared. Else the slope of both logarithms, through the
    sizes' means, has to be below 0.

    Args:
        measure: function of an evaluation, as `lambda evaluation: evaluation.per("tokens")`.
        name: name of the evaluated text.
        unit: unit of the measure, for the numbers.
    """

    def check(records: Sequence[Record]) -> Evidence | None:
        every = ((record.parameters, last) for record in records for last in record.last_evaluations)
        known = [(size, value) for size, last in every if last.name == name and (value := measure(last)) > 0]
        found = slope([(math.log(size), math.log(value)) for size, value in known])
        if math.isnan(found.mean):
            return None
        by_size = sorted(means(known).items())
        losses = [loss for _, loss in by_size]
        numbers = ", ".join(f"{number(value.mean)} ({size_name(round(size))})" for size, value in by_size)
        text = f"exponent {with_interval(found, '.3f')}; {unit}: {numbers}"
        if any(record.has_diverged for record in records):
            return tally([False], "", f"{text}; a run diverged")
        if all(loss.n > 1 for loss in losses):
            return tally([less(b, a) for a, b in pairwise(losses)], "steps in size", text)
        return tally([found.scaled(-1)], "", text)

    return check
