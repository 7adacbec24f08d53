"""Weight gradients that are put off: what zero-bubble schedules fill their bubbles with."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

WeightGradient = Callable[[], Tensor]


class Deferred:
    """The weight gradients that linear layers owe, in the order of the backward pass.

    Source: Zero Bubble Pipeline Parallelism, Qi et al. 2023 (2401.10241), section 2.
    """

    def __init__(self) -> None:
        self.is_collecting = False
        self._owed: list[tuple[Tensor, WeightGradient]] = []

    @contextmanager
    def collecting(self) -> Iterator[list[tuple[Tensor, WeightGradient]]]:
        """A backward pass inside computes no layer's weight gradient; the list says what it owes, weight by weight."""
        self.is_collecting, self._owed = True, []
        try:
            yield self._owed
        finally:
            self.is_collecting, self._owed = False, []  # what is owed belongs to the list's reader alone

    def owe(self, weight: Tensor, gradient: WeightGradient) -> None:
        self._owed.append((weight, torch.no_grad()(gradient)))
