"""Memory that a collective or transfer holds until it is awaited, and the operations that use it before."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from impl.ghost.events import Begin

_ATEN = torch.ops.aten
UNREAD = {_ATEN.empty_like, _ATEN.new_empty, _ATEN.zeros_like, _ATEN.new_zeros, _ATEN._unsafe_view}
"""Operations that take a tensor's shape but no value of it; views do so, too."""


class _Span(NamedTuple):
    storage: weakref.ref[torch.UntypedStorage]
    start: int
    stop: int
    is_result: bool
    """True if the transfer writes to it, so that it must not even be read."""
    event: Begin


class UnderWay:
    """Transfers that have begun and were not waited for yet, by storage and place in the log."""

    def __init__(self) -> None:
        self.early: list[str] = []
        """Uses before the wait, one line for each that began."""
        self._spans: dict[int, dict[int, _Span]] = {}
        self._storages: dict[int, set[int]] = {}

    def begin(self, place: int, event: Begin, tensors: Sequence[Tensor]) -> None:
        """Note a transfer that begins, and uses of tensors under way in other groups: one group's are in order.

        The first of the tensors is its result, but of a send.
        """
        for i, tensor in enumerate(tensors):
            is_result = i == 0 and event.kind != "send"
            self._meet(event.kind, tensor, is_written=is_result, of=event.group)
            name, start, stop = _extent(tensor)
            span = _Span(weakref.ref(tensor.untyped_storage()), start, stop, is_result, event)
            self._spans.setdefault(name, {})[place if i == 0 else ~place] = span
            self._storages.setdefault(place, set()).add(name)

    def end(self, place: int) -> None:
        """Note that the transfer from this place of the log was waited for, or was used too early already."""
        for name in self._storages.pop(place, ()):
            self._spans[name].pop(place, None)
            self._spans[name].pop(~place, None)

    def look(self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Check whether an operation reads or writes a tensor under way."""
        if not self._storages or operation.is_view or operation.overloadpacket in UNREAD:
            return
        for tensor, is_written in _operands(operation, args, kwargs):
            self._meet(operation.overloadpacket.__name__, tensor, is_written=is_written)

    def _meet(self, name: str, tensor: Tensor, *, is_written: bool, of: str | None = None) -> None:
        storage, start, stop = _extent(tensor)
        for place, span in list(self._spans.get(storage, {}).items()):
            overlaps = start < span.stop and span.start < stop and span.storage() is not None
            if overlaps and (is_written or span.is_result) and span.event.group != of:
                self.early.append(f"{name} {'writes to' if is_written else 'reads'} {span.event} before it is awaited")
                self.end(place if place >= 0 else ~place)


def _operands(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Tensor, bool]]:
    """Yield the tensors that an operation takes, and whether it writes to them."""
    arguments = operation._schema.arguments
    named = ((argument, kwargs[argument.name]) for argument in arguments[len(args) :] if argument.name in kwargs)
    for argument, value in chain(zip(arguments, args, strict=False), named):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        yield from ((leaf, is_written) for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.numel())


def _extent(tensor: Tensor) -> tuple[int, int, int]:
    """Return a tensor's storage, and its first and last byte there."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start, stop = (int(at) * tensor.itemsize for at in (tensor.storage_offset(), tensor.storage_offset() + last + 1))
    return tensor.untyped_storage()._cdata, start, stop
