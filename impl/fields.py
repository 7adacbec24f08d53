"""Checks of configuration fields: one strictness for all, and the ranges that more than one of them needs."""

import math
from typing import Annotated

from pydantic import ConfigDict, Field

CHECKED = ConfigDict(extra="forbid", allow_inf_nan=False)

MOST = 10**9
"""Largest value of any count in a run: far beyond every machine and model, and still cheap to compute with."""
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
PositiveFraction = Annotated[float, Field(gt=0.0, le=1.0)]
Count = Annotated[int, Field(ge=0, le=MOST)]
Positive = Annotated[int, Field(gt=0, le=MOST)]
AtLeastTwo = Annotated[int, Field(ge=2, le=MOST)]
Depth = Annotated[int, Field(gt=0, le=4096)]
"""Count of layers, or of the stages that they are divided into, each of which is visited."""
Threads = Annotated[int, Field(gt=0, le=4096)]
Bytes = Annotated[int, Field(gt=0, le=2**50)]


def divisors(n: int) -> list[int]:
    """Return all divisors of a positive number, the smallest first."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d < n]
