"""Calibration: fit the few constants of a software stack to measured steps, and estimate the error of predictions."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from harness.predict.simulation import as_simulated, predicted_seconds
from impl.cost.flops import hardware_flops
from impl.errors import InputError
from impl.run import Run
from impl.simulator.constants import Constant
from impl.simulator.residuals import IGNORED, NOISE, Residuals, place
from impl.simulator.system import Calibration, System

ROW_SD = 0.02
"""Standard deviation of log measured over predicted seconds that weighs rows against priors.

Runs of PTD-P differ by as much on another cluster of the same GPUs.
"""
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
NORMAL = 1.645
"""Standard deviations on each side that hold INSIDE of a normal distribution."""
UNCALIBRATED = 0.15
"""Standard deviation of log seconds from priors alone."""
OTHER_STACK = 0.10
"""Standard deviation added for other software: PTD-P's constants miss Korthikanti et al. 2022 by 10 to 14 %."""
PRIORS = "is not calibrated: its constants are priors"
"""End of the doubt about a system without a calibration."""
EXTRAPOLATES = "extrapolates:"
"""Start of a doubt about extrapolation; the name of the size or feature follows, then its value."""
BASELINE = {
    **{"precision": "fp32", "recompute": "none", "sequence_parallel": "false", "tp_over_nodes": "false"},
    **{"zero_stage": "0", "schedule": "one_f_one_b", "partition_activations": "false"},
    **{"offload_activations": "false", "offload_optimizer": "false"},
}
"""Features of a run that a calibration may cover, each with its value where it has no effect.

An example is ZeRO's stage without data parallelism.
"""
OCTAVE = 0.05
"""Standard deviation added for every doubling beyond the fitted sizes."""


class Measured(NamedTuple):
    """A run and the seconds of its step."""

    name: str
    run: Run
    vocab_size: int
    seconds: float


class _Off(NamedTuple):
    """Log measured over predicted seconds of rows that were not fitted, and their expected standard deviations."""

    logs: np.ndarray
    sd: np.ndarray


def fit(
    rows: Sequence[Measured],
    system: System,
    *,
    held_out: Sequence[Measured] = (),
    row_sd: float = ROW_SD,
    with_surface: bool = True,
    calculon_mape: float | None = None,
    progress: Callable[[int], object] = lambda _: None,
) -> System:
    """Return the system with the constants that fit these rows best: least squares of log seconds, log-normal priors.

    A constant is free if its prior has a deviation. From SURFACE_ROWS rows on, residuals are kept as a surface.

    Args:
        held_out: rows for the kept errors; without any, each row is left out in turn, predictions taken as linear.
        row_sd: standard deviation of log measured over predicted seconds that weighs rows against priors.
        with_surface: keep residuals as a surface; for rows that differ in their sizes.
        calculon_mape: mean error in percent of the public tool, on the rows of the kept errors.
        progress: called with the number of predictions of all rows so far.

    Raises:
        InputError: no row is given.
    """
    from scipy.optimize import least_squares

    if not rows:
        raise InputError("calibration: no row to fit; valid: rows with split calibrate and iteration_time_s")
    space = _Space(dataclasses.replace(system, calibration=None), len(rows))
    measured, tried = np.log([row.seconds for row in rows]), 0

    def left_over(steps: np.ndarray) -> np.ndarray:
        nonlocal tried
        progress(tried := tried + 1)
        return measured - np.log(seconds_of(rows, space.at(steps)))

    def cost(steps: np.ndarray) -> np.ndarray:
        return np.concatenate([left_over(steps) / row_sd, steps])

    found, options = space.start, {"diff_step": 1e-3, "ftol": 3e-3, "xtol": 3e-3, "max_nfev": 10}
    with_surface = with_surface and len(rows) >= SURFACE_ROWS
    if len(found):
        found = least_squares(cost, found, loss="soft_l1", f_scale=ROBUST, **options).x
    if with_surface and len(found):
        # residuals that neighbours share belong to the surface, not to the constants
        whiten = np.linalg.inv(np.linalg.cholesky(_surface(rows, left_over(found)).covariance))
        found = least_squares(lambda steps: np.append(whiten @ left_over(steps), steps), found, **options).x
    logs = left_over(found)
    slopes = _slopes(left_over, found, logs)
    surface = _surface(rows, logs) if with_surface else None
    fitted = space.at(found)
    if held_out:
        there = fitted.with_calibration(_calibration(system, rows, surface))
        off = np.log([row.seconds for row in held_out]) - np.log(seconds_of(held_out, there))
        expected = np.array([surface.log_sd(row.run) if surface else row_sd for row in held_out])
        judged = _Off(off, expected)
    else:
        judged = _left_out(logs - slopes @ found if len(found) else logs, slopes, surface, row_sd)
    calibration = _calibration(system, rows, surface, held_out, judged, calculon_mape)
    return fitted.with_calibration(calibration)


def linear(rows: Sequence[Measured], system: System) -> tuple[np.ndarray, np.ndarray]:
    """Return log measured over predicted seconds with the priors, and slopes by the constants' standard deviations.

    Shapes: [rows], [rows, free constants].
    """
    space, measured = (
        _Space(dataclasses.replace(system, calibration=None), len(rows)),
        np.log([r.seconds for r in rows]),
    )
    left_over = lambda steps: measured - np.log(seconds_of(rows, space.at(steps)))
    logs = left_over(space.start)
    return logs, _slopes(left_over, space.start, logs)


def seconds_of(rows: Sequence[Measured], system: System) -> np.ndarray:
    """Return predicted seconds of every row."""
    return np.array([predicted_seconds(row.run, row.vocab_size, system) for row in rows])


def constant_mfu(fitted: Sequence[Measured], asked: Sequence[Measured]) -> np.ndarray:
    """Return seconds at the geometric mean utilization of the fitted rows: the baseline of every model of time."""
    rate = np.mean([np.log(_flops(row) / row.seconds) for row in fitted])
    return np.array([_flops(row) for row in asked]) / np.exp(rate)


def percent_off(predicted: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Return errors in percent of the measured seconds."""
    return 100 * (predicted / measured - 1)


def interval(system: System, run: Run, seconds: float, stack: str | None = None) -> tuple[float, float, list[str]]:
    """Return seconds between which nine tenths of such steps should be, and what makes that doubtful.

    From residuals of rows that were not fitted; wider for other software, and beyond the sizes that were fitted on. How
    far off a feature is that no fitted row had is not known: it is a doubt, and leaves the interval as it is.

    Args:
        stack: software that will run; None: the system's.
    """
    known, doubts, extra = system.calibration, list[str](), 0.0
    if known is None:
        doubts.append(f"system {system.name} {PRIORS}")
    if stack is not None and stack != system.stack:
        doubts.append(f"constants are those of {system.stack}, not of {stack}")
        extra += OTHER_STACK**2
    ranges = known.ranges if known is not None else {}
    for name, size in sizes(run).items():
        least, most = ranges.get(name, (size, size))
        octaves = max(0.0, math.log2(least / size), math.log2(size / most))
        extra += (OCTAVE * octaves) ** 2
        if octaves >= 1:
            doubts.append(f"{EXTRAPOLATES} {name} {size:g}, calibrated on {least:g} to {most:g}")
    for name, value in features(run, system).items():
        seen = known.features.get(name, [value]) if known is not None else [value]
        if value not in seen:
            doubts.append(f"{EXTRAPOLATES} {name} {value}, calibrated on {' and '.join(seen)}")
    low, high = _bounds(system, run)
    below, above = (math.hypot(side, NORMAL * math.sqrt(extra)) for side in (low, high))
    return seconds * math.exp(-below), seconds * math.exp(above), doubts


def is_beyond(doubt: str) -> bool:
    """Return True if a doubt is about sizes or features, or a whole system, without a calibration."""
    return doubt.startswith(EXTRAPOLATES) or doubt.endswith(PRIORS)


def sizes(run: Run) -> dict[str, float]:
    """Return the sizes of a run that a calibration has ranges of."""
    model, plan = run.model, run.plan
    of_model = {"hidden_size": model.hidden_size, "layers": model.num_layers}
    tokens = {"tokens": run.train.microbatch * model.seq_len}
    return {"gpus": plan.world_size, **of_model, **tokens, "tp": plan.tp, "pp": plan.pp, "dp": plan.dp}


def features(run: Run, system: System) -> dict[str, str]:
    """Return the run's features that have an effect, as the system's software carries them out.

    fp16 and bf16 are one precision: they are predicted to take the same time.
    """
    run = as_simulated(run, system).run
    plan = run.plan
    found = {name: str(getattr(plan, name)).lower() for name in BASELINE if hasattr(plan, name)}
    found |= {
        "precision": "16-bit" if run.precision in ("fp16", "bf16") else run.precision,
        "tp_over_nodes": str(plan.tp > system.node.size.value).lower(),
    }
    without_effect = {
        **dict.fromkeys(("sequence_parallel", "tp_over_nodes", "partition_activations"), plan.tp == 1),
        **{"zero_stage": plan.dp == 1, "schedule": plan.pp == 1},
    }
    return {name: value for name, value in found.items() if not without_effect.get(name)}


def reach(rows: Sequence[Measured], system: System) -> dict[str, Any]:
    """Return what rows cover, as a calibration keeps it: ranges of their sizes, and values of their features."""
    every = [sizes(row.run) for row in rows]
    own = [BASELINE | features(row.run, system) for row in rows]
    return {
        "ranges": {name: (min(one[name] for one in every), max(one[name] for one in every)) for name in every[0]},
        "features": {name: sorted({one[name] for one in own}) for name in BASELINE},
    }


class _Space:
    """Search space of a fit: deviations of the free constants from their priors, in standard deviations."""

    def __init__(self, system: System, rows: int) -> None:
        constants = {name: one for name, one in system.all_constants.items() if one.log_sd > 0}
        self.system, self.source = system, f"fitted on {rows} rows"
        self.free = {name: (prior, one.log_sd) for name, one in constants.items() if (prior := one.prior or one.value)}

    @property
    def start(self) -> np.ndarray:
        return np.zeros(len(self.free))

    def at(self, steps: np.ndarray) -> System:
        moved = {
            name: Constant(prior * math.exp(step * sd), sd, self.source, prior)
            for (name, (prior, sd)), step in zip(self.free.items(), steps, strict=True)
        }
        return dataclasses.replace(self.system, constants=self.system.constants | moved)


def _slopes(left_over: Callable[[np.ndarray], np.ndarray], at: np.ndarray, there: np.ndarray) -> np.ndarray:
    return np.stack([(left_over(at + 0.05 * one) - there) / 0.05 for one in np.eye(len(at))] or [0 * there], axis=1)


def _surface(rows: Sequence[Measured], logs: np.ndarray) -> Residuals:
    """Return the residuals as a surface, scaled by their middle half."""
    sd = float(np.clip(np.median(abs(logs)) / 0.6745, LEAST_SD, MOST_SD))
    return Residuals.of(sd, [place(row.run) for row in rows], logs.tolist())


def _left_out(logs: np.ndarray, slopes: np.ndarray, surface: Residuals | None, row_sd: float) -> _Off:
    """Return the error of each row predicted from the others: constants and surface are one normal distribution.

    Args:
        logs: log measured over predicted seconds with the constants' priors.
        slopes: slopes of these logs by constant.
    """
    noise = np.full(len(logs), row_sd) if surface is None else np.array(surface.noises)
    own = np.diag(noise**2) if surface is None else surface.covariance
    inverse = np.linalg.inv(slopes @ slopes.T + own)
    variance = 1 / np.diag(inverse)
    usual = row_sd if surface is None else NOISE * surface.sd
    return _Off(inverse @ logs * variance, np.sqrt(variance - np.where(noise >= IGNORED, noise**2 - usual**2, 0)))


def _calibration(
    system: System,
    rows: Sequence[Measured],
    surface: Residuals | None,
    held_out: Sequence[Measured] = (),
    off: _Off | None = None,
    calculon_mape: float | None = None,
) -> Calibration:
    judged: dict[str, Any] = {"mape": 0.0, "worst": 0.0}
    if off is not None:
        percent = abs(100 * np.expm1(-off.logs))
        base = percent_off(_baseline(rows, held_out), np.array([row.seconds for row in held_out or rows]))
        judged = {"mape": percent.mean(), "worst": percent.max(), "constant_mfu_mape": abs(base).mean()}
        wide = _reach(off.logs)
        judged["interval"] = (math.exp(-wide), math.exp(wide))
        if surface is not None:
            surface = dataclasses.replace(surface, width=_reach(off.logs / off.sd))
    return Calibration(
        stack=system.stack,
        rows=[row.name for row in rows],
        held_out=[row.name for row in held_out],
        calculon_mape=calculon_mape,
        residuals=surface,
        **reach(rows, system),
        **judged,
    )


def _baseline(rows: Sequence[Measured], held_out: Sequence[Measured]) -> np.ndarray:
    """Return seconds at constant utilization, of held-out rows, or of each row from the others."""
    if held_out or len(rows) == 1:
        return constant_mfu(rows, held_out or rows)
    return np.concatenate([constant_mfu([*rows[:i], *rows[i + 1 :]], [row]) for i, row in enumerate(rows)])


def _reach(off: np.ndarray) -> float:
    """Return the half-width of an interval around 0 that holds nine tenths.

    Of many rows with CONFIDENCE; of few Student's, with a deviation of at least ROW_SD: few rows may agree by chance.
    """
    from scipy.stats import binom, t

    if len(off) < SURFACE_ROWS:
        return float(t.ppf((1 + INSIDE) / 2, len(off)) * max(ROW_SD, np.sqrt(np.mean(off**2))))
    return float(np.sort(abs(off))[min(int(binom.ppf(CONFIDENCE, len(off), INSIDE)), len(off) - 1)])


def _bounds(system: System, run: Run) -> tuple[float, float]:
    """Return the logarithms of the bounds over predicted seconds."""
    known = system.calibration
    if known is not None and known.residuals is not None:
        wide = known.residuals.width * known.residuals.log_sd(run)
        return -wide, wide
    if known is not None and known.interval is not None:
        return math.log(known.interval[0]), math.log(known.interval[1])
    return -NORMAL * UNCALIBRATED, NORMAL * UNCALIBRATED


def _flops(row: Measured) -> float:
    """Return FLOPs of one device, with recomputation."""
    run = row.run
    total = hardware_flops("ptdp", run.model, run.train.global_batch, row.vocab_size, recompute=run.plan.recompute)
    return total / run.plan.world_size
