"""IsoFLOP profiles: loss by model size at equal training FLOPs, and how the best size grows with the FLOPs.

Source: Hoffmann et al. 2022 (2203.15556), section 3.2 (approach 2): a parabola of loss over log N for each budget.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from harness.analysis.scaling_law import FLOPS
from harness.records.record import Record
from harness.records.statistics import Estimate, slope


class Profile(NamedTuple):
    """Models of one seed that were trained for equally many FLOPs, by size."""

    flops: float
    seed: int
    sizes: tuple[float, ...]
    """Weights of the layers' matrices, N."""
    losses: tuple[float, ...]

    @property
    def parabola(self) -> np.ndarray:
        """Coefficients of loss over log N, the highest power first. Shapes: [3]."""
        return np.polyfit(np.log(self.sizes), self.losses, 2)

    @property
    def best(self) -> float:
        """N of the parabola's lowest point; NaN if it has none among the sizes."""
        if len(self.sizes) < 3:
            return math.nan
        curvature, tilt, _ = self.parabola
        found = math.exp(-tilt / (2 * curvature)) if curvature > 0 and abs(tilt) < 100 * curvature else math.nan
        return found if min(self.sizes) <= found <= max(self.sizes) else math.nan


def budget(record: Record) -> float:
    """Return the FLOPs of a run's training, 6 N D, to two digits: whole steps miss a budget by less."""
    run = record.run
    return float(f"{FLOPS * run.model.active_weights * run.train.steps * run.tokens_per_step:.1e}")


def profiles(records: Iterable[Record], loss: Callable[[Record], float]) -> list[Profile]:
    """Return the profiles of the runs whose loss is known, by FLOPs and seed."""
    found: dict[tuple[float, int], dict[float, float]] = {}
    for record in records:
        if math.isfinite(value := loss(record)):
            found.setdefault((budget(record), record.run.seed), {})[record.run.model.active_weights] = value
    by_size = ((place, sorted(of.items())) for place, of in sorted(found.items()))
    return [Profile(*place, *zip(*of, strict=True)) for place, of in by_size]


def exponent(found: Iterable[Profile]) -> Estimate:
    """Return a of N_best ~ FLOPs^a, fitted to each budget's mean logarithm of the best sizes of its seeds."""
    return slope([(math.log(one.flops), math.log(one.best)) for one in found if not math.isnan(one.best)])
