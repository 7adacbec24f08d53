"""How unlike the steps of one run are: as logs say, and as devices of unlike speed or uneven experts make them."""

from dataclasses import replace
from itertools import pairwise
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from harness.predict.simulation import Done, predicted
from harness.terminal import shown_progress
from impl.errors import InputError
from impl.simulator.system import System

SHARES = (0.1, 0.5, 0.9)
DRAWS = 64
"""Sets of devices whose step is simulated."""


class Quantiles(NamedTuple):
    """Seconds that a tenth, half and nine tenths of steps do not exceed."""

    p10: float
    p50: float
    p90: float


def as_logged(system: System, devices: int, seconds: float) -> Quantiles | None:
    """Return quantiles of a run's steps about their predicted median, as in the system's logs; None: it has none.

    Between logged numbers of devices, shares are interpolated over their logarithm; beyond them they are kept.
    """
    logs = sorted(system.step_logs, key=lambda log: log.gpus)
    if not logs:
        return None
    of_logs = np.array([[log.p10, log.p50, log.p90] for log in logs]) / np.array([[log.p50] for log in logs])
    places = np.log([log.gpus for log in logs])
    return Quantiles(*(seconds * float(np.interp(np.log(devices), places, of)) for of in of_logs.T))


def with_unlike_devices(run: Done, system: System, spread: float) -> Quantiles:
    """Return quantiles of a step over sets of devices that compute at unlike speeds: all wait for the slowest.

    A pipeline rank is as slow as the slowest of its devices, of all replicas together.

    Args:
        spread: standard deviation of the logarithm of devices' computing seconds, normal about the system's.

    Raises:
        InputError: `spread` is no number between 0 and 1.
    """
    from scipy.stats import qmc

    if not 0 < spread < 1:
        raise InputError(f"--spread {spread}; valid: a number above 0 and below 1, as 0.01 for devices 1% apart")
    pp, devices = run.plan.pp, run.plan.world_size // run.plan.pp
    shares = qmc.LatinHypercube(pp, rng=0).random(DRAWS) ** (1 / devices)  # of the slowest of so many
    factors = np.exp(spread * np.vectorize(NormalDist().inv_cdf)(shares))
    steps = [
        predicted(run, system, dict(enumerate(of.tolist()))).seconds
        for of in shown_progress(factors, "sets of devices")
    ]
    return Quantiles(*np.quantile(steps, SHARES).tolist())


def with_imbalance(run: Done, system: System, measured: tuple[float, ...]) -> System:
    """Return the system with the fullest of the ranks that share experts as full as measured; without it as it is.

    Args:
        measured: rows of that rank over the mean of all: one number, or a tenth, half and nine tenths of them.

    Raises:
        InputError: these are not such numbers, or no ranks share experts.
    """
    if not measured:
        return system
    ep, ends = run.plan.ep, (1.0, *measured, float(run.plan.ep))
    if ep == 1:
        raise InputError("--imbalance is about ranks that share experts; valid with plan.ep above 1")
    if len(measured) not in (1, len(SHARES)) or not all(one <= other for one, other in pairwise(ends)):
        shown = " ".join(f"{one:g}" for one in measured)
        valid = f"one number, or p10, p50 and p90 that do not fall, of 1 to plan.ep {ep}"
        raise InputError(f"--imbalance {shown}; valid: {valid}")
    return replace(system, habits=replace(system.habits, imbalance=measured[len(measured) // 2]))


def with_uneven_experts(run: Done, system: System, measured: tuple[float, ...]) -> Quantiles:
    """Return quantiles of a step whose ranks wait for the fullest of those that share a layer's experts.

    A step takes the longer the fuller that rank is, so that its quantiles are the steps at the imbalance's.

    Args:
        measured: tenth, half and nine tenths of a run's imbalances; empty: those of a router with even choices.
    """
    from impl.simulator.routing import imbalance_of_step  # for few runs

    at = measured or tuple(imbalance_of_step(run, share) for share in SHARES)
    return Quantiles(*(predicted(run, with_imbalance(run, system, (factor,))).seconds for factor in at))
