"""Memory that a forward pass keeps for its backward pass: counted, not estimated."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class SavedBytes:
    """Storages that autograd holds on to, each counted once, whatever views of it are kept."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        parameters = list(parameters)
        self.device = parameters[0].device
        self._seen = {_storage(p) for p in parameters}
        self.bytes = 0
        """Bytes on the device of the parameters."""
        self.host_bytes = 0
        """Bytes of activations in host memory, for a model on another device."""
        self.by_name = Counter[str]()
        """Bytes of both kinds, by the name passed to `counting`."""

    def pack(self, tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        if storage not in self._seen:
            self._seen.add(storage)
            if tensor.device == self.device:
                self.bytes += tensor.untyped_storage().nbytes()
            else:
                self.host_bytes += tensor.untyped_storage().nbytes()
        return tensor

    def counting(self, name: str, function: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        """Return the function wrapped so that its bytes are counted under a name."""

        def counted(x: Any) -> Tensor:
            before = self.bytes + self.host_bytes
            out = function(x)
            self.by_name[name] += self.bytes + self.host_bytes - before
            return out

        return counted


def _storage(tensor: Tensor) -> int:
    """Names a storage also while its memory is given back: a parameter's that is gathered and freed stays the same."""
    return tensor.untyped_storage()._cdata


@contextmanager
def kept_for_backward(parameters: Iterable[Tensor]) -> Iterator[SavedBytes]:
    """Count what operations inside save for the backward pass, the parameters left out.

    The graph must stay alive inside, or a freed storage's name may be taken for one that was counted.
    """
    kept = SavedBytes(parameters)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
        yield kept
