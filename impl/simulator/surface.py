"""A positive quantity between the points where it is known."""

from itertools import product
from typing import Any

import numpy as np


class Surface:
    """Points where a positive quantity is known: a grid, or scattered.

    On a grid interpolation is linear in every direction, and constant beyond its borders. Elsewhere it is weighted by
    distance to the power -4. Both are continuous, and exact where the quantity is known.
    """

    def __init__(self, places: np.ndarray) -> None:
        """Store the points. Shapes: [points, dimensions]."""
        self.logs = np.log(places)
        self.axes = [np.unique(column) for column in self.logs.T]
        shape = [len(axis) for axis in self.axes]
        at = [np.searchsorted(axis, column) for axis, column in zip(self.axes, self.logs.T, strict=True)]
        place = np.ravel_multi_index(at, shape)
        is_grid = len(np.unique(place)) == len(places) == np.prod(shape)
        self.order = np.argsort(place).reshape(shape) if is_grid else None
        """Index of the point at each place of the grid."""

    def at(self, logs: np.ndarray, sizes: tuple[Any, ...]) -> Any:
        """Return the quantity at some sizes, numbers or arrays, from its logarithms at the points."""
        where = np.log(np.stack(np.broadcast_arrays(*sizes), axis=-1).astype(float))
        if self.order is not None:
            return np.exp(self._on_grid(logs[self.order], where))
        offsets = where[..., None, :] - self.logs
        weights = 1 / ((offsets**2).sum(-1) + 1e-9) ** 2
        return np.exp((weights * logs).sum(-1) / weights.sum(-1))

    def _on_grid(self, values: np.ndarray, where: np.ndarray) -> Any:
        below, shares = [], []
        for axis, x in zip(self.axes, np.moveaxis(where, -1, 0), strict=True):
            i = np.clip(np.searchsorted(axis, x) - 1, 0, max(len(axis) - 2, 0))
            width = axis[np.minimum(i + 1, len(axis) - 1)] - axis[i]
            below.append(i)
            shares.append(np.clip((x - axis[i]) / np.where(width > 0, width, 1.0), 0.0, 1.0))
        total = 0.0
        for corner in product((0, 1), repeat=len(self.axes)):
            at = tuple(np.minimum(i + up, len(axis) - 1) for i, up, axis in zip(below, corner, self.axes, strict=True))
            weight = 1.0
            for share, up in zip(shares, corner, strict=True):
                weight = weight * (share if up else 1 - share)
            total = total + weight * values[at]
        return total
