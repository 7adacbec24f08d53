"""Space of plans that was run whole: exact importance of each knob, and how much of the space a search needs.

A table and a figure show both.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from harness.analysis.columns import share
from harness.analysis.points import Point, points
from harness.analysis.render import Column, Table
from harness.analysis.tables import TERA
from harness.analysis.tabulate import listed
from harness.figures.style import COLOURS, panels, to_draw
from harness.records.measures import about
from harness.records.record import Record
from harness.tune.search import shapley, study_of

KNOBS = ("tp", "pp", "microbatch", "microbatches", "zero_stage")
LEAST = 6
"""Fewest plans that count as a space."""
TRIED = 1 / 3
"""Share of the space that the sampler may attempt; assumed."""
SEEDS = 20
"""Searches, each with a seed of the sampler: one search finds the best plan, or misses it, by luck."""
PROPOSALS = 2
"""Proposals for every plan of the space, most of which are repeats once the sampler has settled."""
Values = tuple[int, ...]
"""Value of each knob."""


@dataclass(frozen=True)
class Space:
    """The rates of a model on a device, by the knobs' values; failed plans have none."""

    model: str
    device: str
    ranks: int
    rates: Mapping[Values, float]
    runs: Mapping[Values, Point]
    """Plans that were run, including failed ones."""

    @cached_property
    def axes(self) -> list[list[int]]:
        """Values of each knob."""
        return [sorted(set(axis)) for axis in zip(*self.rates, strict=True)]

    @cached_property
    def grid(self) -> np.ndarray:
        """Rates with an axis for each knob, 0 where a plan is impossible or failed."""
        every = [self.rates.get(values, 0.0) for values in itertools.product(*self.axes)]
        return np.array(every).reshape([len(axis) for axis in self.axes])

    @property
    def is_whole(self) -> bool:
        """True if every combination that divides the ranks was run."""
        every = [values for values in itertools.product(*self.axes) if self.ranks % (values[0] * values[1]) == 0]
        return len(every) >= LEAST and all(values in self.rates for values in every)

    @property
    def best(self) -> Values:
        """Values of the fastest plan."""
        return max(self.rates, key=lambda values: self.rates[values])

    @cached_property
    def importance(self) -> dict[str, float]:
        """Mean size of each varying knob's effect on the rate (Shapley value), largest first."""
        moved = zip(KNOBS, shapley(self.grid).tolist(), self.axes, strict=True)
        known = {knob: one for knob, one, axis in moved if len(axis) > 1}
        return dict(sorted(known.items(), key=lambda item: -item[1]))

    def steps(self, knob: str) -> list[tuple[Point, Point]]:
        """Return plans and those with the next larger value of a knob, all else equal and neither failed."""
        i = KNOBS.index(knob)
        larger = dict(pairwise(self.axes[i]))
        pairs = [(at, (*at[:i], larger[at[i]], *at[i + 1 :])) for at in self.rates if at[i] in larger]
        return [(self.runs[a], self.runs[b]) for a, b in pairs if self.rates[a] and self.rates.get(b)]

    @cached_property
    def searches(self) -> list[Values]:
        """The fastest plan that the sampler finds with each of its seeds; the slowest of all where it finds none."""
        return [self._searched(seed) for seed in range(SEEDS)]

    @property
    def tried(self) -> int:
        """Number of plans that a search attempts: a third of the space."""
        return math.ceil(TRIED * len(self.rates))

    def _searched(self, seed: int) -> Values:
        study, tried = study_of("space", seed=seed), dict[Values, float]()
        for _ in range(PROPOSALS * len(self.rates)):
            if len(tried) >= self.tried:
                break
            trial = study.ask()
            proposed = (trial.suggest_categorical(knob, axis) for knob, axis in zip(KNOBS, self.axes, strict=True))
            values: Values = tuple(proposed)
            tried[values] = self.rates.get(values, 0.0)  # a repeated proposal costs nothing
            study.tell(trial, -tried[values])
        plans = [values for values in tried if values in self.rates]  # others do not divide the ranks
        return max(plans or [min(self.rates, key=self.rates.__getitem__)], key=self.rates.__getitem__)


def spaces(records: Sequence[Record]) -> list[Space]:
    """Return the spaces in which every combination was run, each of one model on one device."""
    found: dict[tuple[str, str, int], dict[Values, Point]] = {}
    for one in points(records, lambda _: 0.0, failed=True):
        run, plan = one.run, one.run.plan
        values = (plan.tp, plan.pp, run.train.microbatch, run.microbatches, plan.zero_stage)
        found.setdefault((one.model, one.device, plan.world_size), {})[values] = one
    made = [Space(*at, {values: rate(one) for values, one in runs.items()}, runs) for at, runs in found.items()]
    return [space for space in made if space.is_whole and max(space.rates.values()) > 0]


def rate(one: Point) -> float:
    """Return the rate of a plan; 0 if it failed."""
    found = one.mean(lambda record: record.flop_rate if record.status == "ok" else math.nan)
    return 0.0 if math.isnan(found) else found


def rate_text(rate: float) -> str:
    return f"{rate / TERA:.3g}" if rate else "fails"


def summary(space: Space) -> str:
    best = ", ".join(f"{knob} {value}" for knob, value in zip(KNOBS, space.best, strict=True))
    highest = space.rates[space.best]
    shares = sorted(space.rates[at] / highest for at in space.searches)
    failures = sum(rate == 0 for rate in space.rates.values())
    return (
        f"{space.model} on {space.device}: {len(space.rates)} plans, {failures} fail; fastest: {best}, "
        f"{rate_text(highest)} TFLOP/s; the best of {space.tried} that Optuna's sampler tries reaches "
        f"{shares[0]:.1%} to {shares[-1]:.1%} of that, by its seed ({len(shares)}; median {median(shares):.1%})."
    )


def best_rates(space: Space, knob: str) -> str:
    """Return the highest rate with each value of a knob, as text."""
    i = KNOBS.index(knob)
    highest = {value: max(rate for at, rate in space.rates.items() if at[i] == value) for value in space.axes[i]}
    return ", ".join(f"{value}: {rate_text(rate)}" for value, rate in highest.items())


SHOWN = (
    Column(key="model", header="model", text=True, of=lambda at: at[0].model),
    Column(key="device_name", header="device", text=True, of=lambda at: at[0].device),
    Column(key="knob", header="knob", text=True, of=lambda at: at[1]),
    Column(
        key="moved", header="moves the rate by", unit="TFLOP/s", si="FLOP/s", scale=TERA, digits=3,
        of=lambda at: at[0].importance[at[1]],
    ),
    share("share", "share", lambda at: at[0].importance[at[1]] / sum(at[0].importance.values()), digits=2),
    Column(key="by_value", header="best rate with each value (TFLOP/s)", text=True, of=lambda at: best_rates(*at)),
)  # fmt: skip
"""Columns of a space and one of its knobs."""


def table(records: Sequence[Record]) -> Table:
    """Tabulate the importance of each knob, and the best rate with each of its values."""
    found = spaces(records)
    notes = [
        "Moves the rate: the mean size of the knob's Shapley value over all plans, of the rate of model FLOPs per "
        "device; a plan that fails, or that the ranks cannot be divided into, has a rate of 0.",
        *map(summary, found),
    ]
    every = [(space, knob) for space in found for knob in space.importance]
    return listed("search", f"Searching the plans{about(records)}", SHOWN, every, notes)


def figure(records: Sequence[Record]) -> Any:
    """Draw the importance of each knob for the rate: a panel for each model and device."""
    records, simulated = to_draw(records)
    if not (found := spaces(records)):
        return None
    drawn, axes = panels(len(found))
    for ax, space in zip(axes, found, strict=True):
        knobs = list(reversed(space.importance.items()))
        ax.barh([knob for knob, _ in knobs], [moved / TERA for _, moved in knobs], color=COLOURS[0])
        ax.set(title=f"{space.model}, {space.device}", xlabel="mean size of the Shapley value (TFLOP/s per device)")
    drawn.suptitle(f"What moves the rate{about(records)}{simulated}")
    return drawn
