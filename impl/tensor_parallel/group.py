"""The tensor-parallel group, and what its ranks have whole and in parts."""

from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist

from impl.tensor_parallel.conjugates import F_SEQUENCE, GATHER, NOTHING, F, Pair
from impl.tensor_parallel.weight_gradients import WeightGradients


class Part(NamedTuple):
    """The `index`-th of `of` equal parts."""

    index: int
    of: int


WHOLE = Part(0, 1)


@dataclass(frozen=True)
class TensorParallel:
    """A group of ranks that share every layer's matrices.

    Between two split blocks every rank has all activations and does the same work on them, or, if `sequence_parallel`,
    each has its part of the tokens.
    """

    group: dist.ProcessGroup
    sequence_parallel: bool
    overlap: bool
    """Reduce input gradients while weight gradients are computed."""
    weight_gradients: WeightGradients | None = None
    """Object that adds the weight gradients of layers' matrices to their sums; None: autograd does."""
    neighbours: dist.ProcessGroup | None = None
    """Ranks that share a head of keys and values; None: each has heads of its own."""

    @property
    def degree(self) -> int:
        return self.group.size()

    @property
    def part(self) -> Part:
        """Part of this rank in everything that is split over the group."""
        return Part(self.group.rank(), self.group.size())

    @property
    def tokens(self) -> Part:
        """Part of this rank in the tokens between split blocks."""
        return self.part if self.sequence_parallel else WHOLE

    @property
    def f(self) -> Pair:
        """Into a split block."""
        return F_SEQUENCE if self.sequence_parallel else F

    @property
    def g(self) -> Pair:
        """Out of a split block."""
        return self.f.conjugate

    @property
    def gather(self) -> Pair:
        """To work that every rank does in full on all tokens."""
        return GATHER if self.sequence_parallel else NOTHING
