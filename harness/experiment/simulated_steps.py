"""Steps that were both trained and simulated: how far the simulated ones are off, and whether in the same order."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from harness.analysis.points import Point, points
from harness.experiment.claims import Evidence, Tolerance, tally
from harness.experiment.contests import plan_name
from harness.experiment.pairs import step_seconds, with_interval
from harness.records.record import Record
from harness.records.statistics import Estimate, estimate, t_quantile
from impl.run import Run

OFF = Tolerance(0.1, "a goal", "2026-11-21")
"""Largest mean of the errors' sizes."""
SAME_ORDER = Tolerance(0.85, "a goal", "2026-11-21")
"""Least Kendall's tau."""


def compared(records: Sequence[Record]) -> list[Point]:
    """Return every point both trained and simulated, as measured; relative is the simulated step over the measured."""
    found = points(records, step_seconds)
    ran = {one.run: one for one in found if not one.is_simulated}
    pairs = [(ran[one.run], one) for one in found if one.is_simulated and one.run in ran]
    return [replace(one, relative=other.estimate(step_seconds) / one.estimate(step_seconds)) for one, other in pairs]


def systems(records: Sequence[Record]) -> str:
    """Return the names of the systems that runs were simulated for."""
    return ", ".join(dict.fromkeys(str(one.environment.system) for one in records if one.is_simulated))


def off(one: Point) -> float:
    """Return the relative error of the simulated step."""
    return one.relative.mean - 1


def predicted(one: Point) -> float:
    """Return the simulated seconds of a step."""
    return one.relative.mean * one.mean(step_seconds)


def name(run: Run) -> str:
    again = "" if run.plan.recompute == "none" else f", {run.plan.recompute} recomputation"
    return plan_name(run.plan) + (", zero-bubble" if run.plan.schedule == "zb_h1" else "") + again


def close(records: Sequence[Record]) -> Evidence | None:
    """Judge whether predictions are off by OFF on average, or less."""
    if not (found := compared(records)):
        return None
    mean, worst = estimate([abs(off(one)) for one in found]), max(found, key=lambda one: abs(off(one)))
    on_average = f"{with_interval(mean, '.1%', '.1%')} off on average"
    at_most = f"{off(worst):+.1%} at most ({worst.model}, {name(worst.run)})"
    return tally([mean.scaled(-1) - -OFF], "", f"{on_average}, {at_most}")


def in_order(records: Sequence[Record]) -> Evidence | None:
    """Judge whether predicted and measured steps are in the same order, but for a few pairs."""
    if len(found := compared(records)) < 2:
        return None
    both = [(predicted(one), one.mean(step_seconds)) for one in found]
    kendall = lambda pairs: float(pd.DataFrame(pairs).corr(method="kendall").iloc[0, 1])
    tau = kendall(both)
    left_out = [kendall([*both[:i], *both[i + 1 :]]) for i in range(len(both))]
    jackknife = math.sqrt((len(both) - 1) / len(both) * sum((one - tau) ** 2 for one in left_out))
    margin = Estimate(tau - SAME_ORDER, t_quantile(len(both) - 1) * jackknife, len(both))
    return tally([margin], "", f"Kendall's tau {tau:.2f} ± {margin.half_width:.2f}")
