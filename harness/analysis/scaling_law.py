"""Loss by model size and data: a law fitted to trained models, how certain it is, and what it says of larger ones.

L(N, D) = E + A / N^alpha + B / D^beta, of N parameters trained on D tokens; the letters are those of the source.
Source: Hoffmann et al. 2022 (2203.15556), section 3.3 (approach 3); it is their Huber loss of logarithms.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np

DELTAS = (1e-1, 1e-2, 1e-3)
"""Where the Huber loss turns linear; the last is the source's, the others lead up to it."""
STEPS = 40
"""Of the solver, at each of DELTAS."""
POWERS, SHARE = (0.1, 0.3, 0.7, 1.5), 0.5
"""Starts: exponents, and E's share of the mean loss. The solver may end elsewhere from each; the best counts."""
POSSIBLE = (0.01, 5.0)
"""Exponents."""
RESAMPLES = 100
INSIDE = 0.95
LEAST_POINTS = 6
"""The law has five constants."""
FLOPS = 6
"""Of training, a parameter and token."""


class Point(NamedTuple):
    """What a run's validation said at some time of its training."""

    parameters: float
    tokens: float
    """Trained on until then."""
    loss: float
    """Nats per token."""
    run: str
    """Which one: points of a run are drawn together, as they are not independent."""


class Law(NamedTuple):
    """The five constants, each a number, or an array over resamples."""

    E: Any
    A: Any
    B: Any
    alpha: Any
    beta: Any

    def loss(self, parameters: Any, tokens: Any) -> Any:
        """L(N, D) in nats per token."""
        return self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta

    def optimum(self, flops: float) -> tuple[Any, Any]:
        """Parameters and tokens of the least loss for so many FLOPs of training, 6 N D.

        Source: Hoffmann et al. 2022, equation 4.
        """
        ratio = (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))
        parameters = ratio * (flops / FLOPS) ** (self.beta / (self.alpha + self.beta))
        return parameters, flops / FLOPS / parameters


@dataclass(frozen=True, eq=False)
class Fitted:
    """A law, and those of resampled runs, which say how certain it is."""

    law: Law
    resampled: Law
    """Arrays, a number for each resample; NaN where no size has a second run."""
    points: tuple[Point, ...]
    off: float
    """Root mean square of log loss over the law's."""

    def interval(self, of: Callable[[Law], Any]) -> tuple[float, float]:
        """Between which INSIDE of the resamples have what is asked of a law; NaN: nothing is known."""
        return between(of(self.resampled))


def between(values: Any) -> tuple[float, float]:
    """Percentiles with INSIDE of the values between them."""
    low, high = np.quantile(np.asarray(values, float), [(1 - INSIDE) / 2, (1 + INSIDE) / 2])
    return float(low), float(high)


def can_fit(points: Sequence[Point]) -> bool:
    """Whether there are points, sizes and amounts of data enough for five constants."""
    sizes, amounts = {point.parameters for point in points}, {point.tokens for point in points}
    return len(points) >= LEAST_POINTS and len(sizes) > 2 and len(amounts) > 2


def fitted(points: Sequence[Point], resamples: int = RESAMPLES, seed: int = 0) -> Fitted:
    """The law that these points follow best, and its bootstrap: of every model size, runs drawn with replacement.

    Args:
        points: `can_fit` is true of them.
        seed: of the draws; equal seeds draw alike, so that laws of as many runs each can be compared draw by draw.
    """
    data = np.array([point[:3] for point in points], float)
    places, logs = np.log(data[:, :2]), np.log(data[:, 2])
    centre = places.mean(axis=0)  # of it all constants are told nearly independently
    n, d = (places - centre).T
    once = np.ones((1, len(points)))
    found, costs = _solved(n, d, logs, once, _starts(logs))
    best, _ = _solved(n, d, logs, once, found[[np.argmin(costs)]])
    again = np.full((resamples, 5), math.nan)
    if len({point.run for point in points}) > len({point.parameters for point in points}):
        drawn = _drawn(points, resamples, np.random.default_rng(seed))
        again, _ = _solved(n, d, logs, drawn, np.repeat(best, resamples, axis=0))
    off = _residuals(best, n, d, logs)[0]
    law = Law(*(float(one[0]) for one in _law(best, centre)))
    return Fitted(law, _law(again, centre), tuple(points), math.sqrt(float(np.mean(off**2))))


def _starts(logs: np.ndarray) -> np.ndarray:
    """Logarithms of A, B and E with sizes and data around 1, and of alpha and beta. Shapes: [starts, 5]."""
    mean = float(np.exp(logs).mean())
    part, floor = math.log(mean * (1 - SHARE) / 2), math.log(mean * SHARE)
    return np.array([(part, part, floor, math.log(a), math.log(b)) for a, b in product(POWERS, POWERS)])


def _drawn(points: Sequence[Point], resamples: int, generator: np.random.Generator) -> np.ndarray:
    """How often each point counts in each resample. Shapes: [resamples, points]."""
    counts = np.zeros((resamples, len(points)))
    for size in sorted({point.parameters for point in points}):
        runs = sorted({point.run for point in points if point.parameters == size})
        draws = generator.integers(len(runs), size=(resamples, len(runs)))
        for i, run in enumerate(runs):
            of_run = [j for j, point in enumerate(points) if (point.parameters, point.run) == (size, run)]
            counts[:, of_run] = (draws == i).sum(axis=1, keepdims=True)
    return counts


def _terms(at: np.ndarray, n: np.ndarray, d: np.ndarray) -> np.ndarray:
    """Logarithms of the law's three terms. Shapes: [r, 5], [points] -> [r, points, 3]."""
    a, b, e, alpha, beta = at[:, :, None].swapaxes(0, 1)
    return np.stack([a - np.exp(alpha) * n, b - np.exp(beta) * d, e + 0 * n], axis=-1)


def _residuals(at: np.ndarray, n: np.ndarray, d: np.ndarray, logs: np.ndarray) -> np.ndarray:
    """Logarithm of the law's loss over the measured one. Shapes: [r, points]."""
    return np.logaddexp.reduce(_terms(at, n, d), axis=-1) - logs


def _solved(
    n: np.ndarray, d: np.ndarray, logs: np.ndarray, counts: np.ndarray, at: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Where the Huber loss of the residuals is least, and that loss: Levenberg's steps, all starts at once.

    Args:
        counts: how often each point counts. Shapes: [1 or r, points].
        at: where to begin. Shapes: [r, 5].
    """
    cost = np.zeros(len(at))
    for delta in DELTAS:
        damping, cost = np.full(len(at), 1e-2), _cost(at, n, d, logs, counts, delta)
        for _ in range(STEPS):
            other = at - _step(at, n, d, logs, counts, delta, damping)
            other[:, 3:] = np.clip(other[:, 3:], *np.log(POSSIBLE))
            tried = _cost(other, n, d, logs, counts, delta)
            better = tried < cost
            at, cost = np.where(better[:, None], other, at), np.where(better, tried, cost)
            damping = np.clip(np.where(better, damping / 4, damping * 4), 1e-9, 1e9)
    return at, cost


def _cost(
    at: np.ndarray, n: np.ndarray, d: np.ndarray, logs: np.ndarray, counts: np.ndarray, delta: float
) -> np.ndarray:
    size = abs(_residuals(at, n, d, logs))
    return (counts * np.where(size <= delta, size**2 / 2, delta * (size - delta / 2))).sum(axis=1)


def _step(
    at: np.ndarray,
    n: np.ndarray,
    d: np.ndarray,
    logs: np.ndarray,
    counts: np.ndarray,
    delta: float,
    damping: np.ndarray,
) -> np.ndarray:
    """Of Gauss and Newton, with weights under which squares have the Huber loss's gradient. Shapes: [r, 5]."""
    terms = _terms(at, n, d)
    log_loss = np.logaddexp.reduce(terms, axis=-1)
    shares = np.exp(terms - log_loss[..., None])
    powers = -shares[..., :2] * np.exp(at[:, None, 3:]) * np.stack([n, d], axis=-1)
    slopes = np.concatenate([shares, powers], axis=-1)
    residuals = log_loss - logs
    weights = counts * np.minimum(1, delta / np.maximum(abs(residuals), 1e-300))
    left = (slopes * weights[..., None]).swapaxes(1, 2)
    curvature, gradient = left @ slopes, (left @ residuals[..., None])[..., 0]
    scale = np.einsum("rii->ri", curvature) + 1e-9
    damped = curvature + damping[:, None, None] * scale[:, :, None] * np.eye(5)
    return np.clip(np.linalg.solve(damped, gradient[..., None])[..., 0], -1, 1)


def _law(at: np.ndarray, centre: np.ndarray) -> Law:
    """The constants, of sizes and data as they are."""
    a, b, e, alpha, beta = at.T
    alpha, beta = np.exp(alpha), np.exp(beta)
    return Law(np.exp(e), np.exp(a + alpha * centre[0]), np.exp(b + beta * centre[1]), alpha, beta)
