"""Scores of forecasts that were written into records before the runs began."""

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from harness.analysis.columns import share
from harness.analysis.render import Column, Table
from harness.analysis.tabulate import listed
from harness.records.parts import HELD_OUT
from harness.records.record import Record

TAILS = (0.05, 0.95)
"""Quantiles at which the ends of a forecast's interval lie."""
STEP, LOSS = "seconds of a step", "nats a token at the end"
"""What is forecast."""


class Outcome(NamedTuple):
    """Forecast of one run, between the ends of its interval, and what was measured."""

    low: float
    middle: float
    high: float
    measured: float


class Scored(NamedTuple):
    """Forecasts of one quantity of an experiment's runs, with what was measured."""

    experiment: str
    quantity: str
    runs: Sequence[Outcome]

    @property
    def coverage(self) -> float:
        """Share of runs inside their interval; nine tenths are expected."""
        return sum(one.low <= one.measured <= one.high for one in self.runs) / len(self.runs)

    @property
    def pinball(self) -> float:
        """Mean pinball loss of the logarithms of both ends: 0 for ends that every run lies on."""
        losses = (
            _pinball(math.log(one.measured / end), tail)
            for one in self.runs
            for tail, end in zip(TAILS, (one.low, one.high), strict=True)
        )
        return math.fsum(losses) / (2 * len(self.runs))

    @property
    def ratio(self) -> float:
        """Median ratio of what was measured to its forecast."""
        return median(one.measured / one.middle for one in self.runs)


def _pinball(off: float, quantile: float) -> float:
    return quantile * off if off > 0 else (quantile - 1) * off


def scored(experiment: str, records: Iterable[Record]) -> list[Scored]:
    """Return the scores of an experiment's forecasts, of steps and of losses, as far as measured runs have them."""
    found: dict[str, list[Outcome]] = {STEP: [], LOSS: []}
    for one in records:
        step, loss = one.forecast, one.loss_forecast
        if one.status != "ok":
            continue
        if step and not math.isnan(one.step_seconds) and not one.is_oversubscribed:
            found[STEP].append(Outcome(step.low, step.seconds, step.high, one.step_seconds))
        ends = [last.per("tokens") for last in one.last_evaluations if last.name == HELD_OUT]
        if loss and ends and ends[0] > 0:
            found[LOSS].append(Outcome(loss.low, loss.nats, loss.high, ends[0]))
    return [Scored(experiment, quantity, runs) for quantity, runs in found.items() if runs]


def forecasts_table(found: Sequence[Scored]) -> Table:
    """Return the scores by quantity and experiment, and of all experiments together."""
    rows: list[Scored] = []
    for quantity in (STEP, LOSS):
        own = [one for one in found if one.quantity == quantity]
        rows += own
        rows += [Scored("all", quantity, [run for one in own for run in one.runs])] if len(own) > 1 else []
    columns = (
        Column(key="experiment", header="experiment", text=True, of=lambda one: one.experiment),
        Column(key="quantity", header="forecast", text=True, of=lambda one: one.quantity),
        Column(key="runs", header="runs", of=lambda one: len(one.runs)),
        share("coverage", "inside the 90% interval", lambda one: one.coverage),
        Column(key="pinball", header="pinball loss", digits=3, of=lambda one: one.pinball),
        Column(key="ratio", header="measured / forecast, median", digits=3, of=lambda one: one.ratio),
    )
    note = (
        "Forecasts that `run --forecast SYSTEM` wrote before the run began: seconds of a step by the simulator, nats a "
        "token of held-out text after the last step by the scaling law of the finished runs. Pinball loss: mean over "
        "both ends of the interval, of the logarithm of measured over forecast; smaller is better."
    )
    return listed("forecasts", "Forecasts and what was measured", columns, rows, [note])
