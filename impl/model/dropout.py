"""Dropout whose masks are those of serial training, whatever the plan."""

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from impl.model.config import MASK_BLOCKS
from impl.seeding import derive
from impl.tensor_parallel.group import Part
from impl.untraced import untraced

if TYPE_CHECKING:
    from impl.context_parallel import Rows


class DropoutKey(NamedTuple):
    """Names the random numbers of one forward pass: the same key gives the same masks, on any rank and twice."""

    seed: int
    step: int
    microbatch: int
    """Index in the global batch, so that masks do not depend on the data-parallel degree."""


@cache
def _generator(device: torch.device) -> torch.Generator:
    """Return the one generator of a device: to make one for every block takes longer than to seed it."""
    return torch.Generator(device)


class Dropout(nn.Module):
    """Zeroes activations with probability `rate`, as a pure function of a key and the place in the model.

    The first dim may be split over ranks: each draws the blocks of serial training's mask that its rows touch.
    """

    def __init__(self, rate: float, place: str, part: "Part | Rows") -> None:
        super().__init__()
        self.rate, self.place, self.part = rate, place, part

    def forward(self, x: Tensor, key: DropoutKey | None) -> Tensor:
        if self.rate == 0.0 or not self.training:
            return x
        if key is None:
            raise TypeError(f"dropout at {self.place} needs a key while training")
        return (x * self._kept(x, key)).div_(1.0 - self.rate)  # in place: scores are the largest tensor of a layer

    @untraced  # a generator is not traced
    def _kept(self, x: Tensor, key: DropoutKey) -> Tensor:
        size = -(-len(x) * self.part.of // MASK_BLOCKS)
        parts = [self._drawn(rows, size, x, key) for rows in self.part.rows(len(x))]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _drawn(self, rows: range, size: int, x: Tensor, key: DropoutKey) -> Tensor:
        """Return these rows of the mask, drawn in blocks of `size` rows."""
        first, last = rows.start // size, -(-rows.stop // size)
        drawn = torch.empty((last - first) * size, *x.shape[1:], dtype=torch.bool, device=x.device)
        for block, kept in enumerate(drawn.split(size), first):
            seed = derive(key.seed, "dropout", key.step, key.microbatch, self.place, block)
            kept.bernoulli_(1.0 - self.rate, generator=_generator(x.device).manual_seed(seed))
        own = drawn[rows.start - first * size :][: len(rows)]
        return drawn if len(own) == len(drawn) else own.clone()
