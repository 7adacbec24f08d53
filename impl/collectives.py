"""Collectives over a group that is passed in; over one rank they return at once."""

import torch
import torch.distributed as dist
from torch import Tensor


def all_reduce_sum(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the group's ranks, in place.

    Communication: one all-reduce of the tensor's bytes; none over one rank.
    """
    if group.size() > 1:
        dist.all_reduce(tensor, group=group)
    return tensor


def all_reduce_start(tensor: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Begin the sum over the group's ranks, in place; wait on the result before reading the tensor."""
    if group.size() > 1:
        return dist.all_reduce(tensor, group=group, async_op=True)
    return None


def total(values: list[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Float64 sums over the group's ranks of a few host numbers."""
    return all_reduce_sum(torch.tensor(values, dtype=torch.float64, device=device), group).tolist()
