"""How unevenly a balanced router loads the ranks that share a layer's experts: the fullest one's rows over the mean."""

from functools import lru_cache
from math import sqrt

import numpy as np

REACH, POINTS = 9.0, 4001
"""Standard deviations on either side that the largest of normal numbers is integrated over, and at how many points."""


def fullest_share(tokens: int, choices: int, experts: int, ranks: int) -> tuple[float, float]:
    """Return mean and standard deviation of the rows of the fullest of the ranks, over the mean of all ranks.

    Every token meets `choices` different experts, each set of as many equally likely and whatever others meet, and each
    rank has as many experts. A rank's rows then have the mean m = n k / r and, as tokens draw without replacement, the
    variance v = m (1 - 1/r) (E - k) / (E - 1); as all rows are n k, ranks have the correlation -1 / (r - 1). In the
    normal limit they are m + s (Z - mean of all Z) with Z standard normal and s^2 = v r / (r - 1), so that the largest
    has the mean m + s e and the variance s^2 (w - 1/r), of e and w the largest Z's mean and variance.

    Source: a multinomial's normal limit; the mean of Z is independent of each Z less that mean. From two rows a rank on
    the mean is within 5% of that of all choices counted out, and the nearer the more rows there are.
    """
    mean = tokens * choices / ranks
    if ranks == 1 or choices == experts:
        return 1.0, 0.0
    s = sqrt(mean * (experts - choices) / (experts - 1))
    largest, variance = _largest_normal(ranks)
    return 1 + s * largest / mean, s * sqrt(variance - 1 / ranks) / mean


@lru_cache(maxsize=256)
def _largest_normal(count: int) -> tuple[float, float]:
    """Return mean and variance of the largest of n independent standard normal numbers."""
    from scipy.special import ndtr

    at = np.linspace(-REACH, REACH, POINTS)
    not_below = 1 - ndtr(at) ** count
    step = at[1] - at[0]
    mean = -REACH + float(np.trapezoid(not_below, dx=step))
    square = REACH**2 + float(np.trapezoid(2 * at * not_below, dx=step))
    return mean, square - mean**2
