"""Goodput: the share of time that trains, between failures, checkpoints and restarts."""

import math
from typing import NamedTuple

from impl.errors import InputError

HOUR = 3600.0


class Failures(NamedTuple):
    """Failures of a run's devices, each of which ends the run, and what they and checkpoints cost."""

    mtbf_hours: float
    """Mean hours between failures of one device."""
    checkpoint_seconds: float
    """Seconds in which a checkpoint stops training."""
    restart_seconds: float
    """Seconds from a failure until training goes on."""

    def check(self) -> None:
        """Refuse what is no time.

        Raises:
            InputError: a number is negative, infinite or not one, or the first two are 0.
        """
        for name, value in self._asdict().items():
            least = value >= 0 if name == "restart_seconds" else value > 0
            if not (least and math.isfinite(value)):
                option = "--mtbf" if name == "mtbf_hours" else f"--{name.replace('_', '-')}"
                raise InputError(f"{option} {value}; valid: a positive number{' or 0' * (name == 'restart_seconds')}")


class Goodput(NamedTuple):
    """The best interval between checkpoints, and the share of time that trains then."""

    mean_seconds: float
    """Mean seconds between failures of the whole run."""
    interval: float
    """Seconds of training between two checkpoints."""
    share: float


def goodput(devices: int, failures: Failures) -> Goodput:
    """Return the goodput of a run whose failures come at any time alike, restarts and checkpoints included.

    To train for t seconds and save takes M exp(R / M) (exp((t + d) / M) - 1) seconds on average, with M between
    failures, d for a checkpoint and R for a restart; most is trained where exp((t + d) / M) (1 - t / M) = 1. Work after
    the last checkpoint is lost.

    Source: Daly 2006 (doi 10.1016/j.future.2004.11.016), whose optimal intervals this gives.
    """
    from scipy.special import lambertw

    failures.check()
    between = failures.mtbf_hours * HOUR / devices
    saving = failures.checkpoint_seconds / between
    trained = 1 + float(lambertw(-math.exp(-1 - saving)).real)  # of the time between failures
    exponents = failures.restart_seconds / between, trained + saving
    share = trained * math.exp(-exponents[0]) / math.expm1(exponents[1]) if max(exponents) < 700 else 0.0
    return Goodput(between, trained * between, share)
