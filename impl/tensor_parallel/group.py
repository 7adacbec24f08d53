"""The tensor-parallel group, and what its ranks have whole and in parts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from impl.tensor_parallel.conjugates import F_SEQUENCE, GATHER, NOTHING, F, Pair
from impl.tensor_parallel.weight_gradients import WeightGradients

if TYPE_CHECKING:
    from impl.context_parallel import ContextParallel, Rows
    from impl.expert_parallel import ExpertParallel


class Part(NamedTuple):
    """The `index`-th of `of` equal parts."""

    index: int
    of: int

    def rows(self, own: int) -> list[range]:
        """Return the ranges, in the whole, of the rows of a part that has `own` rows."""
        return [range(self.index * own, (self.index + 1) * own)]


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
    """Whether input gradients are reduced while weight gradients are computed."""
    weight_gradients: WeightGradients | None = None
    """Object that adds the weight gradients of layers' matrices to their sums; None: autograd does."""
    neighbours: dist.ProcessGroup | None = None
    """Ranks that share a head of keys and values; None: each has heads of its own."""
    features: dist.ProcessGroup | None = None
    """Ranks that divide the hidden features between split blocks (`impl.grid`); None: each has all of them."""
    context: "ContextParallel | None" = None
    """Ranks that share every sequence, and what attention needs of them; None: this one has whole sequences."""
    experts: "ExpertParallel | None" = None
    """Ranks that share the experts of every layer; None: there are no experts, or this rank has all."""

    @property
    def degree(self) -> int:
        return self.group.size()

    @property
    def is_plain(self) -> bool:
        """True if a product needs no collective, and autograd adds its gradient."""
        return self.degree == 1 and self.weight_gradients is None

    @property
    def part(self) -> Part:
        """Part of this rank in everything that is split over the group."""
        return Part(self.group.rank(), self.group.size())

    @property
    def tokens(self) -> Part:
        """Part of this rank in the tokens between split blocks."""
        return self.part if self.sequence_parallel else WHOLE

    @property
    def rows(self) -> "Part | Rows":
        """Part of this rank in the tokens of whole sequences, between split blocks."""
        return self.tokens if self.context is None else self.context.rows(self.tokens)

    @property
    def heads(self) -> Part:
        """Part of this rank in the heads of attention's core."""
        return self.part if self.context is None else self.context.heads(self.part)

    @property
    def places(self) -> Callable[..., Tensor]:
        """Function from the tokens that this rank has of a sequence, by number, to their places in it."""
        return torch.arange if self.context is None else self.context.places

    @property
    def f(self) -> Pair:
        """Pair of collectives on the input of a split block."""
        return F_SEQUENCE if self.sequence_parallel else F

    @property
    def g(self) -> Pair:
        """Pair of collectives on the output of a split block."""
        return self.f.conjugate

    @property
    def gather(self) -> Pair:
        """Pair of collectives on the input of work that every rank does in full on all tokens."""
        return GATHER if self.sequence_parallel else NOTHING
