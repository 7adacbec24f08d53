"""Time that a GPU is busy with a matrix product: its processors take tiles of the result in waves."""

from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (128, 64, 0.75), (64, 128, 0.75), (64, 64, 0.6))
"""Rows and columns of a tile, and the share of the rate of the largest that its size allows: operands read again."""
SPLITS = (1, 2, 4)
"""Parts of the depth that processors may take apart from each other."""
RISE = 0.2
"""Share of a tile, or of a wave, in which a further one comes to cost all of its time: no size makes a step."""
_ROWS, _COLUMNS, _RATES, _SPLITS = np.array([(*tile, split) for tile, split in product(TILES, SPLITS)]).T


def busy(m: Any, n: Any, k: Any, fill: float, processors: int) -> Any:
    """Operations that all processors could do while they do [m, k] times [k, n], with the best tiles for it.

    Args:
        fill: depth that takes as long as the filling and the writing of a tile.
    """
    if all(isinstance(size, int) for size in (m, n, k)):
        return _of_one(m, n, k, fill, processors)
    return _of_many(m, n, k, fill, processors)


@lru_cache(maxsize=2**16)
def _of_one(m: int, n: int, k: int, fill: float, processors: int) -> float:
    return float(_of_many(m, n, k, fill, processors))


def _of_many(m: Any, n: Any, k: Any, fill: float, processors: int) -> Any:
    rows, columns, depth = (np.asarray(size, dtype=float)[..., None] for size in (m, n, k))
    tiles = _up(rows / _ROWS) * _up(columns / _COLUMNS) * _SPLITS
    waves = _up(tiles / processors)
    return (2 * waves * processors * _ROWS * _COLUMNS * (depth / _SPLITS + fill) / _RATES).min(-1)


def _up(count: Any) -> Any:
    """Return the count rounded up, at least 1, with a steep continuous rise in place of each step."""
    whole = np.floor(count)
    return np.maximum(whole + np.minimum((count - whole) / RISE, 1.0), 1.0)
