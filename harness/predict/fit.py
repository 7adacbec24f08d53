"""Calibration: fit the few constants of a software stack to measured steps, and estimate the error of predictions."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from harness.predict.interval import reach
from harness.predict.simulation import Done, predicted_seconds, vocabulary_of
from impl.cost.flops import hardware_flops
from impl.errors import InputError
from impl.simulator.constants import Constant
from impl.simulator.residuals import IGNORED, NOISE, Residuals, place
from impl.simulator.system import Calibration, System

ROBUST = 1.5
"""Residual, in standard deviations, beyond which a row pulls with a constant force."""
SURFACE_ROWS = 16
"""Least rows for which residuals are kept as a surface: fewer do not determine its shape."""
LEAST_SD, MOST_SD = 0.03, 0.20
"""Limits of the surface's standard deviation."""
INSIDE = 0.90
"""Share of rows that an interval holds."""
CONFIDENCE = 0.8
"""Confidence that an interval holds INSIDE of the rows, which are a sample."""


class Measured(NamedTuple):
    """A run and the seconds of its step."""

    name: str
    run: Done
    seconds: float
    file: str = ""
    """Published table that has it."""


def fit(rows: Sequence[Measured], system: System, *, with_surface: bool = True) -> System:
    """Return the system with the constants that fit these rows best: least squares of log seconds, log-normal priors.

    A constant is free if its prior has a deviation. From SURFACE_ROWS rows on, residuals are kept as a surface. The
    calibration's errors are those of each row predicted from the others, predictions taken as linear.

    Args:
        with_surface: keep residuals as a surface; for rows that differ in their sizes.

    Raises:
        InputError: no row is given.
    """
    from scipy.optimize import least_squares

    if not rows:
        raise InputError("calibration: no row to fit; valid: rows with split calibrate and iteration_time_s")
    space, row_sd = _Space(rows, system), system.row_sd
    with_surface = with_surface and len(rows) >= SURFACE_ROWS
    found, options = np.zeros(len(space.free)), {"diff_step": 1e-3, "ftol": 3e-3, "xtol": 3e-3, "max_nfev": 10}
    if len(found):
        cost = lambda steps: np.concatenate([space.logs(steps) / row_sd, steps])
        found = least_squares(cost, found, loss="soft_l1", f_scale=ROBUST, **options).x
        if with_surface:  # residuals that neighbours share belong to the surface, not to the constants
            whiten = np.linalg.inv(np.linalg.cholesky(_surface(rows, space.logs(found)).covariance))
            found = least_squares(lambda steps: np.append(whiten @ space.logs(steps), steps), found, **options).x
    logs = space.logs(found)
    slopes = space.slopes(found, logs)
    surface = _surface(rows, logs) if with_surface else None
    off, sd = _left_out(logs - slopes @ found, slopes, surface, row_sd)
    percent = abs(100 * np.expm1(-off))
    baseline = [constant_mfu([*rows[:i], *rows[i + 1 :]] or rows, [row])[0] for i, row in enumerate(rows)]
    ranges, features = reach([row.run for row in rows], system)
    known = Calibration(
        stack=system.stack,
        rows=[row.name for row in rows],
        held_out=[],
        mape=percent.mean(),
        worst=percent.max(),
        constant_mfu_mape=abs(percent_off(np.array(baseline), np.array([row.seconds for row in rows]))).mean(),
        interval=interval_of(off, row_sd),
        spread=dict(zip(space.free, _factor(slopes, row_sd), strict=True)),
        ranges=ranges,
        features=features,
        residuals=surface and dataclasses.replace(surface, width=_reach(off / sd, row_sd)),
    )
    return dataclasses.replace(space.at(found), calibration=known)


def _factor(slopes: np.ndarray, row_sd: float) -> list[list[float]]:
    """Return the lower-triangular factor of the constants' covariance after fitting, in units of their priors'."""
    precision = np.eye(slopes.shape[1]) + slopes.T @ slopes / row_sd**2
    return np.linalg.cholesky(np.linalg.inv(precision)).round(5).tolist()


def linear(rows: Sequence[Measured], system: System) -> tuple[np.ndarray, np.ndarray]:
    """Return log measured over predicted seconds with the priors, and slopes by the constants' standard deviations.

    Shapes: [rows], [rows, free constants].
    """
    space = _Space(rows, system)
    start = np.zeros(len(space.free))
    logs = space.logs(start)
    return logs, space.slopes(start, logs)


def seconds_of(rows: Sequence[Measured], system: System) -> np.ndarray:
    """Return predicted seconds of every row."""
    return np.array([predicted_seconds(row.run, system) for row in rows])


def constant_mfu(fitted: Sequence[Measured], asked: Sequence[Measured]) -> np.ndarray:
    """Return seconds at the geometric mean rate of the fitted rows: the baseline of every model of time."""
    return scaled(flops, fitted, asked)


def scaled(seconds: Callable[[Measured], float], fitted: Sequence[Measured], asked: Sequence[Measured]) -> np.ndarray:
    """Return a predictor's seconds for the asked rows, times a factor fitted to the fitted rows, if there are any.

    Args:
        seconds: function of a row; NaN: the predictor cannot say.
    """
    logs = [math.log(row.seconds / seconds(row)) for row in fitted]
    known = [log for log in logs if math.isfinite(log)] or [0.0]
    factor = math.exp(sum(known) / len(known))
    return np.array([factor * seconds(row) for row in asked])


def percent_off(predicted: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Return errors in percent of the measured seconds."""
    return 100 * (predicted / measured - 1)


def error_sizes(off: np.ndarray) -> tuple[float, float, float]:
    """Return the mean, median and largest size of errors."""
    return float(abs(off).mean()), float(np.median(abs(off))), float(abs(off).max())


class _Space:
    """Search space of a fit: deviations of the free constants from their priors, in standard deviations."""

    def __init__(self, rows: Sequence[Measured], system: System) -> None:
        self.rows, self.system = rows, dataclasses.replace(system, calibration=None)
        self.measured = np.log([row.seconds for row in rows])
        self.free = {
            name: (prior, one.log_sd)
            for name, one in system.all_constants.items()
            if one.log_sd > 0 and (prior := one.prior or one.value)
        }

    def at(self, steps: np.ndarray) -> System:
        moved = {
            name: Constant(prior * math.exp(step * sd), sd, f"fitted on {len(self.rows)} rows", prior)
            for (name, (prior, sd)), step in zip(self.free.items(), steps, strict=True)
        }
        return dataclasses.replace(self.system, constants=self.system.constants | moved)

    def logs(self, steps: np.ndarray) -> np.ndarray:
        """Return log measured over predicted seconds of every row."""
        return self.measured - np.log(seconds_of(self.rows, self.at(steps)))

    def slopes(self, steps: np.ndarray, logs: np.ndarray) -> np.ndarray:
        """Return how `logs`, those at `steps`, change with each constant: [rows, constants]."""
        columns = [(self.logs(steps + 0.05 * one) - logs) / 0.05 for one in np.eye(len(steps))]
        return np.column_stack([np.empty((len(logs), 0)), *columns])


def _surface(rows: Sequence[Measured], logs: np.ndarray) -> Residuals:
    """Return the residuals as a surface, scaled by their middle half."""
    sd = float(np.clip(np.median(abs(logs)) / 0.6745, LEAST_SD, MOST_SD))
    return Residuals.of(sd, [place(row.run) for row in rows], logs.tolist())


def _left_out(
    logs: np.ndarray, slopes: np.ndarray, surface: Residuals | None, row_sd: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return log measured over predicted seconds of each row predicted from the others, and its standard deviation.

    Constants and surface are one normal distribution.

    Args:
        logs: log measured over predicted seconds with the constants' priors.
        slopes: slopes of these logs by constant.
    """
    noise = np.full(len(logs), row_sd) if surface is None else np.array(surface.noises)
    own = np.diag(noise**2) if surface is None else surface.covariance
    inverse = np.linalg.inv(slopes @ slopes.T + own)
    variance = 1 / np.diag(inverse)
    usual = row_sd if surface is None else NOISE * surface.sd
    return inverse @ logs * variance, np.sqrt(variance - np.where(noise >= IGNORED, noise**2 - usual**2, 0))


def interval_of(logs: np.ndarray, row_sd: float) -> tuple[float, float]:
    """Return bounds of measured over predicted seconds for nine tenths of rows like these, from their logarithms."""
    wide = _reach(logs, row_sd)
    return math.exp(-wide), math.exp(wide)


def _reach(off: np.ndarray, row_sd: float) -> float:
    """Return the half-width of an interval around 0 that holds nine tenths.

    Of many rows with CONFIDENCE; of few Student's, with a deviation of at least row_sd: few rows may agree by chance.
    """
    from scipy.stats import binom, t

    if len(off) < SURFACE_ROWS:
        return float(t.ppf((1 + INSIDE) / 2, len(off)) * max(row_sd, np.sqrt(np.mean(off**2))))
    return float(np.sort(abs(off))[min(int(binom.ppf(CONFIDENCE, len(off), INSIDE)), len(off) - 1)])


def flops(row: Measured) -> float:
    """Return FLOPs of one device, with recomputation."""
    run = row.run
    total = hardware_flops("ptdp", run.model, run.train.global_batch, vocabulary_of(run), recompute=run.plan.recompute)
    return total / run.plan.world_size
