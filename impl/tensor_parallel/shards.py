"""Part of a parameter on a rank: slices of the whole parameter that serial training has under the same name."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from impl.tensor_parallel.group import Part


@dataclass(frozen=True)
class Shard:
    """Split of a parameter over tensor-parallel ranks along one dim, each block in equal parts.

    Shapes: whole [..., size, ...], on a rank [..., padded / t, ...].
    """

    dim: int
    size: int
    """Size of the whole parameter along the dim."""
    blocks: tuple[int, ...] = ()
    """Sizes of blocks that are split one by one, as queries, keys and values of all heads; empty: one block."""
    padding: int = 0
    """Zeros after the whole parameter that make it divisible."""
    over_heads: ClassVar[bool] = True
    """Whether ranks of other heads have other parts; in a grid, ranks of other features may instead."""

    def take(self, whole: Tensor, part: Part) -> Tensor:
        """Return a rank's part of the whole parameter."""
        if self.padding:
            zeros = whole.new_zeros(*whole.shape[: self.dim], self.padding, *whole.shape[self.dim + 1 :])
            whole = torch.cat([whole, zeros], self.dim)
        blocks = whole.split(self._sizes, self.dim)
        return torch.cat([block.chunk(part.of, self.dim)[part.index] for block in blocks], self.dim)

    def take_rows(self, rows: Tensor, first: int, part: Part) -> Tensor:
        """Return a rank's part of consecutive rows of a whole matrix, without padding rows.

        Args:
            first: index of the first of the rows in the matrix.
        """
        if self.dim == 1:
            return self.take(rows, part)
        runs = self.runs(0, (self.size + self.padding) // part.of, part)
        within = [(max(there - first, 0), max(there + count - first, 0)) for _, there, count in runs]
        return torch.cat([rows[:0], *(rows[start:stop] for start, stop in within)])

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole parameter from all ranks' parts, in order: the inverse of `take`."""
        widths = [size // len(parts) for size in self._sizes]
        blocks = zip(*(part.split(widths, self.dim) for part in parts), strict=True)
        return torch.cat([own for block in blocks for own in block], self.dim).narrow(self.dim, 0, self.size)

    def runs(self, start: int, stop: int, part: Part) -> Iterator[tuple[int, int, int]]:
        """Yield the contiguous runs of indices `start` to `stop` of a rank's part along the dim, without padding.

        A run is (first in the part, first in the whole, count).
        """
        behind = before = 0
        for size in self._sizes:
            width = size // part.of
            own, end = max(start, behind), min(stop, behind + width)
            first = before + part.index * width + own - behind
            if (real := min(end - own, self.size - first)) > 0:
                yield own, first, real
            behind, before = behind + width, before + size

    @property
    def _sizes(self) -> tuple[int, ...]:
        return self.blocks or (self.size + self.padding,)

    def whole_shape(self, shape: Sequence[int]) -> list[int]:
        """Return the shape of the whole parameter, from that of a rank's part."""
        return [*shape[: self.dim], self.size, *shape[self.dim + 1 :]]


def shards_of(model: nn.Module) -> dict[str, Shard]:
    """Return the shards of split parameters by name; the other parameters are whole on every rank."""
    return {
        f"{prefix}.{name}".removeprefix("."): shard
        for prefix, module in model.named_modules()
        for name, shard in getattr(module, "shards", {}).items()
    }
