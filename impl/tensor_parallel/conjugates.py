"""The collectives around a tensor-parallel block as autograd pairs: each one's backward is its conjugate's forward."""

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from impl.collectives import Start, all_gather_start, all_reduce_start, identity_start, own_start, reduce_scatter_start


@dataclass(frozen=True)
class Pair:
    """Collective on an activation in the forward pass, with the one on its gradient in the backward pass."""

    forward: Start
    backward: Start

    @property
    def conjugate(self) -> "Pair":
        return Pair(self.backward, self.forward)

    def __call__(self, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Apply the operation.

        Communication: one collective in each direction, of the whole activation's bytes; none over one rank.
        """
        return cast(Tensor, _Apply.apply(x, self, group))


F = Pair(identity_start, all_reduce_start)
"""Into a split block from activations that every rank has (Megatron-LM 2019, section 3, f).

Its conjugate is the way out: the ranks' partial sums become activations that every rank has (g).
"""
F_SEQUENCE = Pair(all_gather_start, reduce_scatter_start)
"""Into a split block from activations split over tokens (Korthikanti et al. 2022, section 4.2.2, there g).

Its conjugate is the way out, to activations split over tokens (there g-bar).
"""
GATHER = Pair(all_gather_start, own_start)
"""From activations split over tokens to work that every rank does in full, whose gradient is whole already."""
NOTHING = Pair(identity_start, identity_start)
"""Where activations stay as they are."""


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pair: Pair, group: dist.ProcessGroup) -> Tensor:
        ctx.pair, ctx.group = pair, group
        return pair.forward(_writable(x, pair.forward), group).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        return ctx.pair.backward(_writable(grad, ctx.pair.backward), ctx.group).wait(), None, None


def _writable(x: Tensor, start: Start) -> Tensor:
    """Return a tensor that the collective may overwrite, since autograd may still use its own."""
    return x.clone() if start is all_reduce_start else x
