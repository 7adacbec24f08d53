"""Ranks that share the experts of every layer, and the way of rows to them and back; for runs with `plan.ep`."""

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from impl.collectives import exchange


@dataclass
class ExpertParallel:
    """Ranks that share the experts of every layer, each with all weights of some."""

    group: dist.ProcessGroup | None = None
    """Ranks that divide the experts; None: this rank has all experts."""
    owners: dist.ProcessGroup | None = None
    """Ranks with the same experts, divided as by ZeRO, whose gradients are summed over these ranks first."""
    replicas: dist.ProcessGroup | None = None
    """Ranks that own the same part of them, over which it is summed once a step."""
    loss_share: float = 0.0
    """Factor of a microbatch's loss where its backward pass begins, and so of its balance loss."""


class Way(NamedTuple):
    """Exchange of rows, from their tokens' ranks, sorted by expert, to experts' ranks, where they are sorted again."""

    group: dist.ProcessGroup
    sent: list[int]
    """Number of rows sent to each rank."""
    received: list[int]
    """Number of rows received from each rank."""
    counts: list[int]
    """Number of rows of each of this rank's experts."""
    order: Tensor | None
    """Index among received rows of each row in the order of experts; None: they are in this order."""

    @staticmethod
    def to_experts(counts: Tensor, total: int, group: dist.ProcessGroup) -> "Way":
        """Return the exchange of this rank's rows, whose counts the ranks exchange first. Shapes: [E]."""
        ranks, each = group.size(), len(counts) // group.size()
        arriving = exchange(counts, [each] * ranks, [each] * ranks, group, is_return=False)
        sent, received = (numbers(of.view(ranks, -1).sum(1), total) for of in (counts, arriving))
        order = None
        if each > 1:
            experts = torch.arange(each, device=counts.device).repeat(ranks)
            order = experts.repeat_interleave(arriving, output_size=sum(received)).argsort(stable=True)
        return Way(group, sent, received, numbers(arriving.view(ranks, -1).sum(0), total), order)

    def there(self, rows: Tensor, *, is_return: bool) -> Tensor:
        """Send rows to their experts. Shapes: [sent, h] -> [received, h]."""
        rows = exchange(rows, self.sent, self.received, self.group, is_return=is_return)
        return rows if self.order is None else rows.index_select(0, self.order)

    def back(self, rows: Tensor, *, is_return: bool) -> Tensor:
        """Send rows to where they came from. Shapes: [received, h] -> [sent, h]."""
        if self.order is not None:
            rows = torch.empty_like(rows).index_copy_(0, self.order, rows)
        return exchange(rows.contiguous(), self.received, self.sent, self.group, is_return=is_return)


def go(rows: Tensor, way: Way, *, is_return: bool) -> Tensor:
    """Return rows where their experts are, or those that come back; their gradients go the other way.

    Communication: an all-to-all forward and one backward.
    """
    return cast(Tensor, _Go.apply(rows, way, is_return))


class _Go(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: Way, is_return: bool) -> Tensor:
        ctx.way, ctx.is_return = way, is_return
        return way.back(rows, is_return=True) if is_return else way.there(rows, is_return=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        way, grad = ctx.way, grads[0].contiguous()
        return way.there(grad, is_return=False) if ctx.is_return else way.back(grad, is_return=True), None, None


def numbers(counts: Tensor, total: int) -> list[int]:
    """Return counts of rows on the host; `total` is their sum, for a replacement where tensors have no values."""
    del total
    return cast(list[int], counts.tolist())
