"""Scaling law of loss by model size and data: fitted to trained models, with its uncertainty and predictions.

L(N, D) = E + A / N^alpha + B / D^beta, of N parameters trained on D tokens; the letters are those of the source.
Source: Hoffmann et al. 2022 (2203.15556), section 3.3 (approach 3); it is their Huber loss of logarithms.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from harness.analysis.render import number

DELTAS = (1e-1, 1e-2, 1e-3)
"""Residuals at which the Huber loss of a fit turns linear, one fit after another; Chinchilla's is the last."""
STEPS = 40
"""Steps of the solver at each of DELTAS."""
POWERS, SHARE = (0.1, 0.3, 0.7, 1.5), 0.5
"""Starting exponents, and E's starting share of the mean loss; the best end point over all starts is used."""
POSSIBLE = (0.01, 5.0)
"""Bounds of the exponents."""
RESAMPLES = 100
INSIDE = 0.95
CONSTANTS, LEAST_POINTS = 5, 6
"""Constants of the law, and the least number of points for their fit."""
FLOPS = 6
"""FLOPs of training per parameter and token."""


class Observation(NamedTuple):
    """Validation loss of a run at some time of its training."""

    parameters: float
    tokens: float
    """Tokens that the run had trained on at that time."""
    loss: float
    """Nats per token."""
    run: str
    """Run of the point; points of a run are resampled together, as they are not independent."""


class Law(NamedTuple):
    """Constants of the loss law L(N, D) = E + A / N^alpha + B / D^beta, each a number, or an array over resamples."""

    E: Any
    A: Any
    B: Any
    alpha: Any
    beta: Any

    def loss(self, parameters: Any, tokens: Any) -> Any:
        """Return L(N, D) in nats per token."""
        return self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta

    def optimum(self, flops: float) -> tuple[Any, Any]:
        """Return the parameters and tokens of the least loss for a number of training FLOPs, 6 N D.

        Source: Hoffmann et al. 2022, equation 4.
        """
        ratio = (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))
        parameters = ratio * (flops / FLOPS) ** (self.beta / (self.alpha + self.beta))
        return parameters, flops / FLOPS / parameters


@dataclass(frozen=True, eq=False)
class Fitted:
    """Fitted law, and laws of resampled runs for its uncertainty."""

    law: Law
    resampled: Law
    """Arrays with a number for each resample; NaN if no size has a second run."""
    points: tuple[Observation, ...]
    off: float
    """Root mean square of the logarithm of loss over the law's loss."""

    def interval(self, of: Callable[[Law], Any]) -> tuple[float, float]:
        """Return the interval of a law's value that holds INSIDE of the resamples; NaN if it is unknown."""
        return between(of(self.resampled))


def between(values: Any) -> tuple[float, float]:
    """Return the percentiles with INSIDE of the values between them."""
    low, high = np.quantile(np.asarray(values, float), [(1 - INSIDE) / 2, (1 + INSIDE) / 2])
    return float(low), float(high)


def can_fit(points: Sequence[Observation]) -> bool:
    """Return True if points, sizes and amounts of data are enough for five constants."""
    sizes, amounts = {point.parameters for point in points}, {point.tokens for point in points}
    return len(points) >= LEAST_POINTS and len(sizes) > 2 and len(amounts) > 2


def fitted(points: Sequence[Observation], resamples: int = RESAMPLES, seed: int = 0) -> Fitted:
    """Return the law that fits the points best, and its bootstrap: per model size, runs drawn with replacement.

    Args:
        points: points for which `can_fit` is True.
        seed: seed of the draws; laws with equal seeds and numbers of runs can be compared draw by draw.
    """
    data = np.array([point[:3] for point in points], float)
    places, logs = np.log(data[:, :2]), np.log(data[:, 2])
    centre = places.mean(axis=0)  # around it the constants are nearly independent
    n, d = (places - centre).T
    once = np.ones((1, len(points)))
    found, costs = _solved(n, d, logs, once, _starts(logs))
    best, _ = _solved(n, d, logs, once, found[[np.argmin(costs)]])
    again = np.full((resamples, 5), math.nan)
    if len({point.run for point in points}) > len({point.parameters for point in points}):
        drawn = _drawn(points, resamples, np.random.default_rng(seed))
        again, _ = _solved(n, d, logs, drawn, np.repeat(best, resamples, axis=0))
    off = _residuals(_terms(best, n, d), logs)[0]
    law = Law(*(float(one[0]) for one in _law(best, centre)))
    return Fitted(law, _law(again, centre), tuple(points), math.sqrt(float(np.mean(off**2))))


class Difference(NamedTuple):
    """Loss of one law over another's, with its uncertainty."""

    mean: float
    low: float
    high: float
    above: float
    """Share of the resamples in which it is above 0; NaN if that is unknown."""


def difference(of: Fitted, baseline: Fitted, parameters: float, tokens: float) -> Difference:
    """Return a law's loss over the baseline's, resample by resample: they need independent draws."""
    each = of.resampled.loss(parameters, tokens) - baseline.resampled.loss(parameters, tokens)
    low, high = between(each)
    mean = of.law.loss(parameters, tokens) - baseline.law.loss(parameters, tokens)
    return Difference(mean, low, high, math.nan if math.isnan(low) else float(np.mean(each > 0)))


def in_words(one: Fitted) -> str:
    """Return the constants with their intervals, as `E 1.2 (1.1 to 1.3), ..., 0.5% off`."""
    parts = []
    for name in Law._fields:
        low, high = one.interval(lambda law, name=name: getattr(law, name))
        certain = "" if math.isnan(low) else f" ({number(low, 3)} to {number(high, 3)})"
        parts.append(f"{name} {number(getattr(one.law, name), 3)}{certain}")
    return f"{', '.join(parts)}; {len(one.points)} losses are {one.off:.2%} off"


def _starts(logs: np.ndarray) -> np.ndarray:
    """Return logarithms of A, B and E with sizes and data around 1, and of alpha and beta. Shapes: [starts, 5]."""
    mean = float(np.exp(logs).mean())
    part, floor = math.log(mean * (1 - SHARE) / 2), math.log(mean * SHARE)
    return np.array([(part, part, floor, math.log(a), math.log(b)) for a, b in product(POWERS, POWERS)])


def _drawn(points: Sequence[Observation], resamples: int, generator: np.random.Generator) -> np.ndarray:
    """Return how much each point counts in each resample. Shapes: [resamples, points].

    Source: Rao and Wu 1988: draws of a run less, each with a larger weight; as many draws as runs vary too little.
    """
    counts = np.zeros((resamples, len(points)))
    for size in sorted({point.parameters for point in points}):
        runs = sorted({point.run for point in points if point.parameters == size})
        fewer = max(1, len(runs) - 1)
        draws = generator.integers(len(runs), size=(resamples, fewer))
        for i, run in enumerate(runs):
            of_run = [j for j, point in enumerate(points) if (point.parameters, point.run) == (size, run)]
            counts[:, of_run] = (draws == i).sum(axis=1, keepdims=True) * len(runs) / fewer
    return counts


def _terms(at: np.ndarray, n: np.ndarray, d: np.ndarray) -> np.ndarray:
    """Return the law's three terms, whose sum is the loss. Shapes: [r, 5], [points] -> [3, r, points]."""
    a, b, e, alpha, beta = at.T[:, :, None]
    return np.exp(np.stack([a - np.exp(alpha) * n, b - np.exp(beta) * d, e + 0 * n]))


def _solved(
    n: np.ndarray, d: np.ndarray, logs: np.ndarray, counts: np.ndarray, at: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the constants of least Huber loss, and that loss, by Levenberg's steps from all starts at once.

    Args:
        counts: how much each point counts. Shapes: [1 or r, points].
        at: starts. Shapes: [r, 5].
    """
    terms = _terms(at, n, d)
    cost = np.zeros(len(at))
    for delta in DELTAS:
        damping, cost = np.full(len(at), 1e-2), _cost(terms, logs, counts, delta)
        for _ in range(STEPS):
            off = _residuals(terms, logs)
            weights = counts * np.minimum(1, delta / np.maximum(abs(off), 1e-300))  # squares get Huber's slope
            other = at - _step(at, terms, np.stack([n, d]), off, weights, damping)
            other[:, 3:] = np.clip(other[:, 3:], *np.log(POSSIBLE))
            others = _terms(other, n, d)
            tried = _cost(others, logs, counts, delta)
            better = tried < cost
            at, terms = np.where(better[:, None], other, at), np.where(better[:, None], others, terms)
            cost = np.where(better, tried, cost)
            damping = np.clip(np.where(better, damping / 4, damping * 4), 1e-9, 1e9)
    return at, cost


def _cost(terms: np.ndarray, logs: np.ndarray, counts: np.ndarray, delta: float) -> np.ndarray:
    size = abs(_residuals(terms, logs))
    return (counts * np.where(size <= delta, size**2 / 2, delta * (size - delta / 2))).sum(axis=1)


def _residuals(terms: np.ndarray, logs: np.ndarray) -> np.ndarray:
    """Return the logarithm of the law's loss over the measured one. Shapes: [3, r, points] -> [r, points]."""
    return np.log(terms.sum(axis=0)) - logs


def _step(
    at: np.ndarray, terms: np.ndarray, places: np.ndarray, off: np.ndarray, weights: np.ndarray, damping: np.ndarray
) -> np.ndarray:
    """Return a damped Gauss-Newton step for weighted squares of the residuals `off`. Shapes: [r, 5]."""
    shares = terms / terms.sum(axis=0)
    powers = -shares[:2] * np.exp(at.T[3:, :, None]) * places[:, None]
    slopes = np.concatenate([shares, powers]).swapaxes(0, 1)
    left = slopes * weights[:, None]
    curvature, gradient = left @ slopes.swapaxes(1, 2), (left @ off[..., None])[..., 0]
    scale = np.einsum("rii->ri", curvature) + 1e-9
    damped = curvature + damping[:, None, None] * scale[:, :, None] * np.eye(5)
    return np.clip(np.linalg.solve(damped, gradient[..., None])[..., 0], -1, 1)


def _law(at: np.ndarray, centre: np.ndarray) -> Law:
    """Return the constants of the law for uncentred sizes and data."""
    a, b, e, alpha, beta = at.T
    alpha, beta = np.exp(alpha), np.exp(beta)
    return Law(np.exp(e), np.exp(a + alpha * centre[0]), np.exp(b + beta * centre[1]), alpha, beta)
