"""Goodput: the share of time that trains, between failures, checkpoints and restarts."""

import math
from dataclasses import asdict, dataclass
from typing import NamedTuple

from impl.errors import InputError

HOUR = 3600.0
LEAST, MOST = 1e-15, 1e15
"""Bounds of hours and seconds: the arithmetic holds between them."""
NEAR = 1e-4
"""Value of `root` below which a series gives the best interval: so near its branch point Lambert's W loses digits."""


@dataclass(frozen=True)
class Failures:
    """Failures of a run's devices, each of which ends the run, and what they and checkpoints cost."""

    mtbf: float | None = None
    """Mean hours between failures of one device: also predict the share of time that trains."""
    checkpoint_seconds: float = 60.0
    """Seconds in which a checkpoint stops training."""
    restart_seconds: float = 300.0
    """Seconds from a failure until training goes on."""

    def check(self) -> None:
        """Refuse what is no time.

        Raises:
            InputError: a number is not between LEAST, of the last one 0, and MOST.
        """
        for name, value in asdict(self).items():
            least = 0.0 if name == "restart_seconds" else LEAST
            if not least <= value <= MOST:
                raise InputError(f"--{name.replace('_', '-')} {value}; valid: {least:g} to {MOST:g}")


class Goodput(NamedTuple):
    """The best interval between checkpoints, and the share of time that trains then."""

    mean_seconds: float
    """Mean seconds between failures of the whole run."""
    interval: float
    """Seconds of training between two checkpoints."""
    share: float


def goodput(devices: int, failures: Failures) -> Goodput:
    """Return the goodput of a run whose failures have a constant rate, restarts and checkpoints included.

    With M seconds between failures on average, d for a checkpoint and R for a restart, it takes
    M exp(R / M) (exp((t + d) / M) - 1) seconds on average to train for t seconds and save; the best t solves
    exp((t + d) / M) (1 - t / M) = 1. Work after the last checkpoint is lost.

    Source: Daly 2006 (doi 10.1016/j.future.2004.11.016), whose optimal intervals this gives.
    """
    from scipy.special import lambertw

    failures.check()
    assert failures.mtbf is not None
    between = failures.mtbf * HOUR / devices
    saving = failures.checkpoint_seconds / between
    root = math.sqrt(-2 * math.expm1(-saving))  # below, shares of the time between failures
    trained = root - root**2 / 3 if root < NEAR else 1 + float(lambertw(-math.exp(-1 - saving)).real)
    exponents = failures.restart_seconds / between, trained + saving
    share = trained * math.exp(-exponents[0]) / math.expm1(exponents[1]) if max(exponents) < 700 else 0.0
    return Goodput(between, trained * between, share)
