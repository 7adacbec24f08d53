"""What a fit leaves over, as a surface over runs' sizes: it corrects near what was measured and fades away from it."""

from functools import cached_property

import numpy as np
from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass

from impl.fields import CHECKED
from impl.run import Run

OCTAVES = {"hidden_size": 0.5, "tp": 1.0, "microbatch": 1.0}
"""Doublings of a size over which a correction falls to 1/e: what the kernels of a layer depend on."""
NOISE = 0.3
"""What repeating a run changes, in standard deviations of the surface."""
OUTLIER = 3.0
"""Standard deviations from its neighbours beyond which a row is not learned from."""
IGNORED = 10.0
"""Standard deviation of the noise of such a row."""
Coordinates = list[PositiveFloat]
"""A run's sizes, in the order of OCTAVES."""


def place(run: Run) -> Coordinates:
    return [run.model.hidden_size, run.plan.tp, run.train.microbatch]


@dataclass(config=CHECKED | {"frozen": True})
class Residuals:
    """Kriging of log measured over predicted seconds, with an exponential covariance: continuous in every size."""

    sd: PositiveFloat
    """Standard deviation of the surface, before anything is measured."""
    places: list[Coordinates]
    logs: list[float]
    noises: list[PositiveFloat]
    """Standard deviation of the noise of each measurement."""
    width: PositiveFloat = 1.645
    """Half of an interval that holds nine tenths of such rows, in standard deviations."""

    @classmethod
    def of(cls, sd: float, places: list[Coordinates], logs: list[float]) -> "Residuals":
        """Return the surface through measured rows but those, worst first, that their neighbours contradict."""
        noises = [NOISE * sd] * len(logs)
        while True:
            found = cls(sd, places, logs, noises)
            off, deviation = found.left_out()
            worst = int(np.argmax(abs(off) / deviation))
            if abs(off[worst]) <= OUTLIER * deviation[worst]:
                return found
            noises = [*noises[:worst], IGNORED, *noises[worst + 1 :]]

    def factor(self, run: Run) -> float:
        """Return the expected ratio of measured to predicted seconds; 1 far from all rows."""
        return float(np.exp(self.near(np.array(place(run))) @ self._weights))

    def log_sd(self, run: Run) -> float:
        """Return the standard deviation of a measurement's logarithm about `factor`: grows away from the rows."""
        near = self.near(np.array(place(run)))
        return float(np.sqrt(max(0.0, self.sd**2 - near @ self._inverse @ near) + (NOISE * self.sd) ** 2))

    def left_out(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the logarithm of each row over its prediction from the other rows, and its standard deviation."""
        variance = 1 / np.diag(self._inverse)
        return self._weights * variance, np.sqrt(variance)

    def near(self, places: np.ndarray) -> np.ndarray:
        """Return the covariance of the surface at some places with that at the rows."""
        lengths = np.array(list(OCTAVES.values()))
        offsets = (np.log2(places)[..., None, :] - np.log2(np.array(self.places))) / lengths
        return self.sd**2 * np.exp(-np.sqrt((offsets**2).sum(-1)))

    @cached_property
    def covariance(self) -> np.ndarray:
        """Return the covariance of the rows' measurements."""
        return self.near(np.array(self.places)) + np.diag(np.square(self.noises))

    @cached_property
    def _inverse(self) -> np.ndarray:
        return np.linalg.inv(self.covariance)

    @cached_property
    def _weights(self) -> np.ndarray:
        return self._inverse @ np.array(self.logs)
