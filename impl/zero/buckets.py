"""Parameters in flat buckets, divided over the ranks that sum their gradients."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.collectives import Pending
from impl.zero import partition
from impl.zero.partition import Piece


class Kind(NamedTuple):
    """Parameters by name whose gradients are summed over the same ranks, which divide them among themselves."""

    named: Mapping[str, nn.Parameter]
    group: dist.ProcessGroup
    copies: Sequence[dist.ProcessGroup] = ()
    """Groups whose ranks have the same parameters, and gradients after all, without being in `group`."""
    ends: dist.ProcessGroup | None = None
    """Ranks at both ends of the pipeline, over which what is owned is summed at last; one of `copies` too."""


class Bucket:
    """Some parameters of a kind in one flat tensor, of which this rank owns a slice.

    From ZeRO's stage 1 on the rank updates its slice only, from 2 on it keeps the gradient of no more, from 3 on it
    keeps the weights of no more (`weights` then has memory only while they are gathered). At stage 0, and where no
    other rank shares them, the rank owns all.
    """

    def __init__(self, layout: partition.Bucket, kind: Kind, stage: int, dtype: torch.dtype, kept: torch.dtype) -> None:
        self.layout, self.kind = layout, kind
        self.stage = stage if layout.ranks > 1 else 0
        self.rank = kind.group.rank() if self.stage else 0
        self.own = layout.own(self.rank)
        self.parameters = [kind.named[slot.name] for slot in layout.slots]
        self.dtype, self.device = dtype, self.parameters[0].device
        self.weights = torch.zeros(layout.size, dtype=self.parameters[0].dtype, device=self.device)
        for parameter, view in zip(self.parameters, self.views(self.weights), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view  # a version of its own: gathering is no change that autograd has to know of
        self.own_weights = self.weights[self.own]
        if self.stage == 3:
            self.own_weights = self.own_weights.to(kept, copy=True)
            self.weights.untyped_storage().resize_(0)
        size = layout.slice_size if self.stage >= 2 else layout.size
        self.gradient_kept = torch.zeros(size, dtype=dtype, device=self.device)
        self.gradient = self.gradient_kept if self.stage >= 2 else self.gradient_kept[self.own]
        """Of what the rank owns."""
        self.flat = None if self.stage >= 2 else self.gradient_kept
        """Of the whole bucket; at stages 2 and 3 there is one only while it is computed and reduced."""
        self.gathering: Pending | None = None
        """Weights on their way from their owners."""

    @property
    def weights_kept(self) -> Tensor:
        """What has memory between steps."""
        return self.own_weights if self.stage == 3 else self.weights

    @property
    def is_added_in_place(self) -> bool:
        """Whether autograd itself adds to the bucket."""
        return self.stage < 2 and self.weights.dtype == self.dtype

    @property
    def is_first_copy(self) -> bool:
        """Whether this rank is the first of those that own the same slice of the same parameters."""
        owners = [*self.kind.copies, *([] if self.stage else [self.kind.group])]
        return all(group.rank() == 0 for group in owners)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's part of a tensor like the bucket."""
        slots = self.layout.slots
        return [flat[slot.start : slot.stop].view_as(p) for slot, p in zip(slots, self.parameters, strict=True)]

    def places(self) -> dict[Piece, slice]:
        """Where each parameter's part is in the owned slice."""
        first = self.own.start
        return {
            piece: slice(piece.at - first, piece.at - first + piece.stop - piece.start)
            for piece in self.layout.pieces(self.rank)
        }


def divide(
    kinds: Iterable[Kind], *, stage: int, dtype: torch.dtype, bucket_bytes: int, kept: torch.dtype
) -> list[Bucket]:
    """Buckets of every kind's parameters, in order.

    Args:
        stage: ZeRO's.
        dtype: of accumulated gradients, of which `bucket_bytes` make up a bucket.
        kept: of the weights that stage 3 keeps; larger than the model's they are master weights, rounded when gathered.
    """
    return [
        Bucket(layout, kind, stage, dtype, kept)
        for kind in kinds
        for layout in partition.lay_out(
            [(name, p.numel()) for name, p in kind.named.items()],
            kind.group.size() if stage else 1,
            bucket_bytes // dtype.itemsize,
        )
    ]
