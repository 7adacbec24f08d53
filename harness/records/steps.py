"""The optimizer steps of a record, kept as columns."""

import math
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, pairwise
from typing import Annotated, Any, overload

import numpy as np
from pydantic import Field, GetCoreSchemaHandler
from pydantic.dataclasses import dataclass
from pydantic_core import CoreSchema, core_schema

from harness.records.parts import READ, Count, Finite, Positive


@dataclass(config=READ, slots=True, frozen=True)
class Step:
    """One optimizer step."""

    step: Count = 0
    loss: Finite | None = None
    """Training loss; None if it is not finite, or if nothing was trained."""
    grad_norm: Finite | None = None
    lr: Finite | None = None
    seconds: Annotated[list[Positive], Field(min_length=1)] | None = None
    """Seconds of every rank."""
    skipped: bool = False
    """True if fp16 gradients overflowed, so that only the loss scale was changed."""


class Steps(Sequence[Step]):
    """Steps as columns of numbers, which need a fifth of the memory of an object for each."""

    def __init__(self, steps: Iterable[Step] = ()) -> None:
        every = list(steps)
        column = lambda name: array("d", [math.nan if (x := getattr(step, name)) is None else x for step in every])
        self.losses, self._norms, self._rates = map(column, ("loss", "grad_norm", "lr"))
        self._numbers, self._skipped = array("q", [step.step for step in every]), bytes(step.skipped for step in every)
        self.skipped = sum(self._skipped)
        seconds = [step.seconds or () for step in every]
        self._ends = array("Q", accumulate(map(len, seconds), initial=0))
        self._seconds = array("d", chain.from_iterable(seconds))

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        read = core_schema.no_info_after_validator_function(cls, handler(list[Step]))
        return core_schema.json_or_python_schema(
            read, core_schema.union_schema([core_schema.is_instance_schema(cls), read])
        )

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, i: int) -> Step: ...
    @overload
    def __getitem__(self, i: slice) -> "Steps": ...
    def __getitem__(self, i: int | slice) -> "Step | Steps":
        if isinstance(i, slice):
            return Steps(self[k] for k in range(*i.indices(len(self))))
        k = range(len(self))[i]
        loss, norm, rate = (None if math.isnan(x[k]) else x[k] for x in (self.losses, self._norms, self._rates))
        return Step(self._numbers[k], loss, norm, rate, self.seconds(k).tolist() or None, bool(self._skipped[k]))

    def seconds(self, i: int) -> "array[float]":
        """Return the seconds of every rank that measured a step."""
        return self._seconds[self._ends[i] : self._ends[i + 1]]

    def slowest(self) -> list[float]:
        """Return the slowest rank's seconds of every step that was measured."""
        starts = [a for a, b in pairwise(self._ends) if a < b]
        return np.maximum.reduceat(self._seconds, starts).tolist() if starts else []

    def timed_ranks(self) -> list[int]:
        """Return how many ranks measured each step."""
        return [b - a for a, b in pairwise(self._ends)]
