"""Parameters in flat buckets, divided over the ranks that sum their gradients."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.collectives import Pending
from impl.zero.partition import BucketLayout, Piece, lay_out

Initial = Callable[[str, int, int], Iterable[Tensor]]
"""Elements of a parameter, by name, start and stop in it flattened, in consecutive slices."""


class ReductionGroup(NamedTuple):
    """Parameters by name whose gradients are summed over the same ranks, which divide them among themselves."""

    named: Mapping[str, nn.Parameter]
    group: dist.ProcessGroup
    copies: Sequence[dist.ProcessGroup] = ()
    """Groups whose ranks have the same parameters and gradients without being in `group`."""
    replicas: dist.ProcessGroup | None = None
    """Ranks of other groups that own the same part, over which it is summed once a step."""
    ends: dist.ProcessGroup | None = None
    """Ranks at both ends of the pipeline, over which the owned part of tied weights is summed last."""


class Bucket:
    """Some parameters of a reduction group in one flat tensor, of which this rank owns a slice.

    From ZeRO's stage 1 on the rank updates its slice only, from 2 on it keeps the gradient of no more, from 3 on it
    keeps the weights of no more (`weights` then has memory only while they are gathered). At stage 0, and where no
    other rank shares them, the rank owns all.

    Memory: while it is made, no more on the device than what is kept, whose initial weights come slice by slice.
    """

    def __init__(
        self,
        layout: BucketLayout,
        reduction: ReductionGroup,
        dtype: torch.dtype,
        kept: torch.dtype,
        device: torch.device,
        initial: Initial,
    ) -> None:
        self.layout, self.reduction = layout, reduction
        self.stage = layout.zero_stage
        self.rank = reduction.group.rank() if self.stage else 0
        self.own = layout.own(self.rank)
        self.parameters = [reduction.named[slot.name] for slot in layout.slots]
        self.dtype, self.device = dtype, device
        self.weights_dtype = self.parameters[0].dtype
        element = torch.empty(1, dtype=self.weights_dtype, device=device)
        for parameter in self.parameters:  # it stays the same object, and gets its memory from `weights`
            torch.utils.swap_tensors(parameter, nn.Parameter(element.expand(parameter.shape)))
        if self.stage == 3:
            self.own_weights = torch.zeros(layout.slice_size, dtype=kept, device=device)
        else:
            self.own_weights = self.weights[self.own]
        self._fill(initial)
        self.gradient_kept = torch.zeros(layout.gradients, dtype=dtype, device=self.device)
        self.gradient = self.gradient_kept if self.stage >= 2 else self.gradient_kept[self.own]
        """Gradient of what the rank owns."""
        self.flat = None if self.stage >= 2 else self.gradient_kept
        """Gradient of the whole bucket; at stages 2 and 3 it exists only while it is computed and reduced."""
        self.gathering: Pending | None = None
        """Weights on their way from their owners."""

    def _fill(self, initial: Initial) -> None:
        """Give the weights that are kept their initial values, rounded to the model's type."""
        layout, rank = (self.layout, self.rank) if self.stage == 3 else (replace(self.layout, ranks=1), 0)
        for piece in layout.pieces(rank):
            at = piece.at - layout.own(rank).start
            for values in initial(piece.name, piece.start, piece.stop):
                self.weights_kept[at : at + len(values)].copy_(values.to(self.weights_dtype))
                at += len(values)

    @cached_property
    def weights(self) -> Tensor:
        """The weights of the whole bucket, of which the parameters are views.

        Made when it is first used, which at stage 3 is when it is gathered; there it has no memory between uses.
        """
        flat = torch.zeros(self.layout.size, dtype=self.weights_dtype, device=self.device)
        for parameter, view in zip(self.parameters, self.views(flat), strict=True):
            parameter.data = view  # a version of its own: gathering is no change that autograd has to know of
        if self.stage == 3:
            flat.untyped_storage().resize_(0)
        return flat

    @property
    def weights_kept(self) -> Tensor:
        """Weights that have memory between steps."""
        return self.own_weights if self.stage == 3 else self.weights

    @property
    def is_first_copy(self) -> bool:
        """True if this rank is the first of those that own the same slice of the same parameters."""
        _, group, copies, *others = self.reduction
        owners = [*copies, *others, None if self.stage else group]
        return all(each is None or each.rank() == 0 for each in owners)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return each parameter's part of a flat tensor that is as long as the bucket."""
        slots = self.layout.slots
        return [flat[slot.start : slot.stop].view_as(p) for slot, p in zip(slots, self.parameters, strict=True)]

    def places(self) -> dict[Piece, slice]:
        """Return the place of each piece of a parameter in the owned slice."""
        first = self.own.start
        return {
            piece: slice(piece.at - first, piece.at - first + piece.stop - piece.start)
            for piece in self.layout.pieces(self.rank)
        }


def divide(
    groups: Iterable[ReductionGroup],
    *,
    stage: int,
    dtype: torch.dtype,
    bucket_bytes: int,
    kept: torch.dtype,
    device: torch.device,
    initial: Initial,
) -> list[Bucket]:
    """Return buckets of every group's parameters, in order; the parameters become views of them.

    Args:
        stage: ZeRO's.
        dtype: of accumulated gradients, of which `bucket_bytes` make up a bucket.
        kept: of the weights that stage 3 keeps; larger than the model's they are master weights, rounded when gathered.
        device: of the buckets; the parameters may be on the meta device.
        initial: values of the weights.
    """
    return [
        Bucket(layout, reduction, dtype, kept, device, initial)
        for reduction in groups
        for layout in lay_out(
            [(name, p.numel()) for name, p in reduction.named.items()],
            reduction.group.size(),
            bucket_bytes // dtype.itemsize,
            stage,
        )
    ]
