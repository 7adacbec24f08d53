"""Weight gradients that layers add up themselves, at once or later; autograd would make a tensor of each first."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

Owed = list[Callable[[], None]]
"""What is left to do, in the order of the backward pass."""


class Sums(Protocol):
    """Sums of gradients over microbatches."""

    def add_product(self, parameter: Any, a: Tensor, b: Tensor) -> None:
        """Add a^T b."""

    def add_rows(self, parameter: Any, rows: Tensor, gradient: Tensor) -> None:
        """Add gradient[i] to row rows[i]."""


class WeightGradients:
    """Receiver of the gradients of layers' weights, which are added to `sums`.

    A product is added as it is computed (Megatron-LM's gradient accumulation fusion), or put off, which is what
    zero-bubble schedules fill their bubbles with (Qi et al. 2023, 2401.10241, section 2).
    """

    sums: Sums
    """Sums that gradients are added to; set once the model exists."""

    def __init__(self) -> None:
        self.owed: Owed | None = None
        """Deferred computations; None: nothing is deferred."""

    @contextmanager
    def collecting(self) -> Iterator[Owed]:
        """Collect layers' weight gradients of a backward pass inside as deferred computations in a list."""
        self.owed = found = []
        try:
            yield found
        finally:
            self.owed = None
