"""How much memory a forward pass keeps for its backward pass: counted, not estimated."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Kept:
    """Storages that autograd holds on to, each counted once, whatever views of it are kept."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._seen = {p.untyped_storage().data_ptr() for p in parameters}
        self.bytes = 0
        self.marks: list[int] = []

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return tensor

    def mark(self) -> None:
        """Note how much is kept by now."""
        self.marks.append(self.bytes)


@contextmanager
def kept_for_backward(parameters: Iterable[Tensor]) -> Iterator[Kept]:
    """Count what operations inside save for the backward pass, the parameters left out.

    The graph must stay alive inside, or a freed storage's address may be taken for one that was counted.
    """
    kept = Kept(parameters)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
        yield kept
