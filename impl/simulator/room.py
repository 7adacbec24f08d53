"""Whether tensors fit a device: besides them its memory holds what is known between bounds only."""

from typing import Literal

from pydantic import NonNegativeFloat, model_validator
from pydantic.dataclasses import dataclass

from impl.fields import CHECKED

Fit = Literal["fits", "may fit", "does not fit"]


@dataclass(config=CHECKED | {"frozen": True})
class Taken:
    """Bytes of a device that no predicted tensor has: of the framework, its libraries and collectives, and of gaps."""

    least: NonNegativeFloat
    value: NonNegativeFloat
    """Bytes that are most likely taken."""
    most: NonNegativeFloat
    source: str

    def doubt(self, verdict: Fit | None) -> str:
        """Return why tensors only may fit, as the end of a sentence; empty with another verdict."""
        least, most = (size / 2**30 for size in (self.least, self.most))
        return f"; runs had {least:.3g} to {most:.3g} GiB besides their tensors" * (verdict == "may fit")

    @model_validator(mode="after")
    def _in_order(self) -> "Taken":
        if not self.least <= self.value <= self.most:
            raise ValueError(f"least {self.least:g}, value {self.value:g}, most {self.most:g} must not fall")
        return self


NOTHING = Taken(0.0, 0.0, 0.0, "memory of a host: what other processes have is not known")
OF_GPUS = Taken(0.0, 8.7e9, 17.0e9, "11 trials of BLOOM; 10 runs of torchtitan (2410.06511) over its engine's")
"""Bytes, least, median and most, that published runs had in memory beyond those predicted for their tensors."""


def taken_of(kind: str) -> Taken:
    """Return the bytes taken on a kind of device, `cuda` or `cpu`, whose software is not known."""
    return OF_GPUS if kind == "cuda" else NOTHING


def fit(size: float, memory: float, taken: Taken) -> Fit:
    """Return whether tensors fit a device's memory, with the most and the least bytes that are taken besides them.

    Args:
        size: bytes of the tensors at the moment when they are most.
    """
    left = memory - size
    return "does not fit" if left < taken.least else "fits" if left >= taken.most else "may fit"
