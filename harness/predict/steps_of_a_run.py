"""How unlike the steps of one run are: as a system's logs say, and as devices of unlike speed make them."""

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
