"""Collectives over a group that is passed in; over one rank they return at once.

Their traffic can be counted, and their start observed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from impl.cost.traffic import Count, Op


class Pending(NamedTuple):
    """Collective that is under way; its tensors must not be touched before `wait` returns its result."""

    tensor: Tensor
    work: dist.Work | None
    finish: Callable[[], object] | None = None
    """Work left to do after the transfer is complete."""

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        if self.finish is not None:
            self.finish()
        return self.tensor

    def is_done(self) -> bool:
        return self.work is None or self.work.is_completed()


Start = Callable[[Tensor, dist.ProcessGroup], Pending]
Observer = Callable[[str, dist.ProcessGroup], None]
"""Callback with the kind and the group of a collective, called as it begins; has to be quick."""

_counting: list[dict[tuple[str, Op], Count]] = []
_observers: list[Observer] = []


@contextmanager
def counted() -> Iterator[dict[tuple[str, Op], Count]]:
    """Count what this rank's collectives move inside, by group name and kind; `impl.cost.traffic` predicts it."""
    counts: dict[tuple[str, Op], Count] = {}
    _counting.append(counts)
    try:
        yield counts
    finally:
        _counting.remove(counts)


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Call the observer at every collective that this rank begins inside; a broadcast counts over one rank, too.

    Compiled code does not call it: every call would cause a recompilation.
    """
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def _tell(op: str, group: dist.ProcessGroup) -> None:
    if _observers and not torch.compiler.is_compiling():
        for observer in _observers:
            observer(op, group)


def count(op: Op, whole: Tensor, group: dist.ProcessGroup) -> None:
    """Count a collective that this rank begins; `whole` as in `impl.cost.traffic.Count`."""
    _tell(op, group)
    for counts in _counting:
        key = group.group_name, op
        counts[key] = counts.get(key, Count()) + Count(1, whole.numel() * whole.element_size())


def identity_start(tensor: Tensor, group: dist.ProcessGroup) -> Pending:
    """Return the tensor itself. Communication: none."""
    return Pending(tensor, None)


def all_reduce_start(tensor: Tensor, group: dist.ProcessGroup) -> Pending:
    """Begin the sum over the group's ranks, in place."""
    if group.size() == 1:
        return Pending(tensor, None)
    count("all_reduce", tensor, group)
    return Pending(tensor, dist.all_reduce(tensor, group=group, async_op=True))


def all_gather_start(tensor: Tensor, group: dist.ProcessGroup) -> Pending:
    """Begin to concatenate the ranks' tensors. Shapes: [n, ...] -> [t n, ...]."""
    if group.size() == 1:
        return Pending(tensor, None)
    whole = tensor.new_empty(group.size() * tensor.shape[0], *tensor.shape[1:])
    return all_gather_into_start(whole, tensor.contiguous(), group)


def all_gather_into_start(whole: Tensor, own: Tensor, group: dist.ProcessGroup) -> Pending:
    """Begin to concatenate the ranks' tensors into `whole`, of which `own` may be a view."""
    count("all_gather", whole, group)
    return Pending(whole, dist.all_gather_single(whole, own, group=group, async_op=True))


def reduce_scatter_start(tensor: Tensor, group: dist.ProcessGroup) -> Pending:
    """Begin the sum over the group's ranks, of which each keeps its part. Shapes: [t n, ...] -> [n, ...]."""
    if group.size() == 1:
        return Pending(tensor, None)
    own = tensor.new_empty(tensor.shape[0] // group.size(), *tensor.shape[1:])
    return reduce_scatter_into_start(own, tensor.contiguous(), group)


def reduce_scatter_into_start(own: Tensor, whole: Tensor, group: dist.ProcessGroup) -> Pending:
    """Begin the sum over the group's ranks into `own`, the part that a rank keeps, which may be a view of `whole`."""
    count("reduce_scatter", whole, group)
    if dist.get_backend(group) != "gloo":
        return Pending(own, dist.reduce_scatter_single(own, whole, group=group, async_op=True))
    # gloo's own takes more than twice as long as an all-to-all followed by a local sum
    parts = whole.new_empty(group.size(), *own.shape)
    work = dist.all_to_all_single(parts.flatten(0, 1), whole, group=group, async_op=True)
    return Pending(own, work, lambda: torch.sum(parts, 0, out=own))


def exchange(
    x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup, *, is_return: bool
) -> Tensor:
    """Send each rank its rows, and return those that arrive, in the order of the ranks that sent them.

    Shapes: [sum of sent, ...] -> [sum of received, ...].
    Communication: an all-to-all with uneven parts. Counted are the bytes at the ranks that rows come from at first: of
    x, or on their return of the result.

    Args:
        sent: number of rows for each rank.
        received: number of rows from each rank.
    """
    out = x.new_empty(sum(received), *x.shape[1:])
    count("all_to_all", out if is_return else x, group)
    dist.all_to_all_single(out, x, list(received), list(sent), group=group)
    return out


def own_start(tensor: Tensor, group: dist.ProcessGroup) -> Pending:
    """Return this rank's part of a tensor that all ranks have. Communication: none. Shapes: [t n, ...] -> [n, ...]."""
    return Pending(tensor.tensor_split(group.size())[group.rank()], None)


def all_reduce_sum(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over the group's ranks, in place. Communication: one all-reduce of the tensor's bytes."""
    return all_reduce_start(tensor, group).wait()


def all_gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the ranks' tensors concatenated. Communication: one all-gather. Shapes: [n, ...] -> [t n, ...]."""
    return all_gather_start(tensor, group).wait()


def send_start(tensor: Tensor, peer: int, group: dist.ProcessGroup, over: dist.ProcessGroup | None = None) -> Pending:
    """Begin to send to another rank of the group; the tensor must not be written to before it is done.

    Args:
        over: group of these two ranks only, which carries it instead, in its own order.
    """
    count("send", tensor, group)
    work = dist.isend(tensor, **_end(group, over, "group_dst", peer))
    assert work is not None
    return Pending(tensor, work)


def receive_start(
    buffer: Tensor, peer: int, group: dist.ProcessGroup, over: dist.ProcessGroup | None = None
) -> Pending:
    """Begin to receive from another rank of the group, in the order in which it sends; `over` as in `send_start`."""
    _tell("receive", group)
    work = dist.irecv(buffer, **_end(group, over, "group_src", peer))
    assert work is not None
    return Pending(buffer, work)


def _end(group: dist.ProcessGroup, over: dist.ProcessGroup | None, name: str, peer: int) -> dict[str, Any]:
    return {"group": group, name: peer} if over is None else {"group": over, name: 1 - over.rank()}


def broadcast(tensor: Tensor, source: int, group: dist.ProcessGroup) -> Tensor:
    """Copy the source rank's tensor to all ranks of the group, in place."""
    if group.size() > 1:
        count("broadcast", tensor, group)
        dist.broadcast(tensor, group=group, group_src=source)
    else:
        _tell("broadcast", group)
    return tensor
