"""Scores of forecasts that were written into records before the runs began."""

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from harness.analysis.columns import share
from harness.analysis.render import Column, Table
from harness.experiment.listing import listed
from harness.records.record import Record

TAILS = (0.05, 0.95)
"""Quantiles that the ends of a forecast's interval stand for."""


class Scored(NamedTuple):
    """Forecasts of an experiment's runs, with the median seconds of their steps."""

    experiment: str
    pairs: Sequence[tuple[Record, float]]
    """Records with a forecast, and the measured seconds."""

    @property
    def coverage(self) -> float:
        """Share of runs inside their interval; nine tenths are expected."""
        inside = (one.forecast.low <= seconds <= one.forecast.high for one, seconds in self.pairs if one.forecast)
        return sum(inside) / len(self.pairs)

    @property
    def pinball(self) -> float:
        """Mean pinball loss of the logarithms of both ends: 0 for ends that every run lies on."""
        losses = (
            _pinball(math.log(seconds / end), tail)
            for one, seconds in self.pairs
            if one.forecast
            for tail, end in zip(TAILS, (one.forecast.low, one.forecast.high), strict=True)
        )
        return math.fsum(losses) / (2 * len(self.pairs))

    @property
    def ratio(self) -> float:
        """Median ratio of measured to forecast seconds."""
        return median(seconds / one.forecast.seconds for one, seconds in self.pairs if one.forecast)


def _pinball(off: float, quantile: float) -> float:
    return quantile * off if off > 0 else (quantile - 1) * off


def scored(experiment: str, records: Iterable[Record]) -> Scored | None:
    """Return the scores of an experiment's forecasts; None if no measured run has one."""
    known = [(one, one.step_seconds) for one in records if one.forecast and one.status == "ok"]
    timed = [(one, seconds) for one, seconds in known if not math.isnan(seconds) and not one.is_oversubscribed]
    return Scored(experiment, timed) if timed else None


def forecasts_table(found: Sequence[Scored]) -> Table:
    """Return the scores by experiment, and of all together."""
    everything = [Scored("all", [pair for one in found for pair in one.pairs])] if len(found) > 1 else []
    columns = (
        Column(key="experiment", header="experiment", text=True, of=lambda one: one.experiment),
        Column(key="runs", header="runs", of=lambda one: len(one.pairs)),
        share("coverage", "inside the 90% interval", lambda one: one.coverage),
        Column(key="pinball", header="pinball loss", digits=3, of=lambda one: one.pinball),
        Column(key="ratio", header="measured / forecast, median", digits=3, of=lambda one: one.ratio),
    )
    note = (
        "Forecasts: seconds of a step that `run --forecast SYSTEM` wrote before the run began. Pinball loss: mean over "
        "both ends of the interval, of the logarithm of measured over forecast seconds; smaller is better."
    )
    return listed("forecasts", "Forecasts and what was measured", columns, [*found, *everything], [note])
