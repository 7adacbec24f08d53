"""Records what a rank asks of its process groups; on a ghost, whose groups have no other ranks, nothing is sent."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

import impl.collectives
import impl.context_parallel
from impl.ghost.events import Begin, Kind, Wait
from impl.ghost.uses import UnderWay
from impl.precision import name_of

WHOLE: dict[str, tuple[Kind, int]] = {
    "all_reduce": ("all_reduce", 0),
    "all_gather_single": ("all_gather", 0),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "all_to_all_single": ("all_to_all", 0),
}
"""Functions of torch.distributed, with what each is called here and which argument is the whole tensor."""


class _Work:
    """Handle of a transfer that began; the first wait for it is recorded."""

    def __init__(self, log: list[Begin | Wait], place: int, work: Any, under_way: UnderWay) -> None:
        self.log, self.place, self.work, self.is_awaited = log, place, work, False
        self.under_way = under_way

    def wait(self) -> None:
        if not self.is_awaited:
            self.log.append(Wait(self.place))
            self.under_way.end(self.place)
            self.is_awaited = True
        if self.work is not None:
            self.work.wait()

    def is_completed(self) -> bool:
        return self.is_awaited or (self.work is not None and self.work.is_completed())


class _Transfer(NamedTuple):
    """Part of a batch."""

    begin: Callable[..., _Work]
    tensor: Tensor
    group: dist.ProcessGroup
    group_peer: int


class Recorder:
    """Replacement of torch.distributed in `impl.collectives` and `impl.context_parallel`.

    Args:
        backend: of the groups, as the modules are to see it: gloo has no reduce-scatter of its own there.
        is_real: also begin on the real groups what is recorded.
    """

    P2POp = _Transfer

    def __init__(self, backend: str, *, is_real: bool) -> None:
        self.log: list[Begin | Wait] = []
        self.under_way = UnderWay()
        self.backend, self.is_real = backend, is_real
        self._members: dict[str, tuple[int, ...]] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in WHOLE:
            raise AttributeError(f"torch.distributed.{name} is not recorded; recorded: {', '.join(WHOLE)}")
        return partial(self._collective, name)

    def get_backend(self, _: dist.ProcessGroup) -> str:
        return self.backend

    def _collective(
        self, name: str, *args: Tensor | list[int], group: dist.ProcessGroup, async_op: bool = False
    ) -> _Work | None:
        kind, whole = WHOLE[name]
        begin = partial(getattr(dist, name), *args, group=group, async_op=True)
        tensors = [one for one in args if isinstance(one, Tensor)]
        work = self._begin(kind, tensors[whole], group, begin, tensors=tensors)
        return work if async_op else work.wait()

    def broadcast(self, tensor: Tensor, group: dist.ProcessGroup, group_src: int) -> None:
        begin = partial(dist.broadcast, tensor, group=group, group_src=group_src, async_op=True)
        self._begin("broadcast", tensor, group, begin).wait()

    def isend(self, tensor: Tensor, *, group: dist.ProcessGroup, group_dst: int, batch: int | None = None) -> _Work:
        begin = partial(dist.isend, tensor, group=group, group_dst=group_dst)
        return self._begin("send", tensor, group, begin, group_dst, batch)

    def irecv(self, tensor: Tensor, *, group: dist.ProcessGroup, group_src: int, batch: int | None = None) -> _Work:
        begin = partial(dist.irecv, tensor, group=group, group_src=group_src)
        return self._begin("receive", tensor, group, begin, group_src, batch)

    def batch_isend_irecv(self, transfers: Sequence[_Transfer]) -> list[_Work]:
        """Begin them as one; gloo does so one after another."""
        batch, works = len(self.log), []
        for begin, tensor, group, peer in transfers:
            end = {"group_dst" if begin == self.isend else "group_src": peer}
            works.append(begin(tensor, group=group, batch=batch, **end))
        return works

    def _begin(
        self,
        kind: Kind,
        whole: Tensor,
        group: dist.ProcessGroup,
        begin: Callable[[], Any],
        peer: int | None = None,
        batch: int | None = None,
        tensors: Sequence[Tensor] = (),
    ) -> _Work:
        name = str(group.group_name)
        if name not in self._members:
            self._members[name] = tuple(dist.get_process_group_ranks(group))
        members = self._members[name]
        other = None if peer is None else members[peer]
        event = Begin(kind, name, members, whole.numel(), name_of(whole.dtype), other, batch)
        self.under_way.begin(len(self.log), event, tensors or [whole])
        self.log.append(event)
        return _Work(self.log, len(self.log) - 1, begin() if self.is_real else None, self.under_way)


@contextmanager
def recorded(backend: str, *, is_real: bool) -> Iterator[Recorder]:
    """Record all collectives and transfers that this rank begins inside, and its waits for them."""
    recorder = Recorder(backend, is_real=is_real)
    with ExitStack() as stack:
        for module in (impl.collectives, impl.context_parallel):
            stack.enter_context(instead(module, dist=recorder))
        yield recorder


@contextmanager
def instead(where: Any, **others: Any) -> Iterator[None]:
    """Replace some attributes by other values inside."""
    usual = {name: getattr(where, name) for name in others}
    for name, other in others.items():
        setattr(where, name, other)
    try:
        yield
    finally:
        for name, value in usual.items():
            setattr(where, name, value)
