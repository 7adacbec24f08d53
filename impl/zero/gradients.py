"""Gradients of data-parallel ranks: accumulated in flat buckets, summed over the ranks while the backward pass runs."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.collectives import Pending, all_reduce_start, all_reduce_sum


class Reduced(NamedTuple):
    """Parameters whose gradients are summed over the same ranks."""

    parameters: Sequence[nn.Parameter]
    group: dist.ProcessGroup
    is_split: bool
    """Each tensor-parallel rank has another part of these parameters; else all have the same."""


@dataclass
class Bucket:
    """Gradients that are reduced by one collective; `flat` holds them all, each parameter's is a view of it."""

    flat: Tensor
    parameters: list[nn.Parameter]
    group: dist.ProcessGroup
    is_split: bool
    missing: int = 0
    pending: list[Pending] = field(default_factory=list)


class Gradients:
    """The sum over microbatches and ranks of every parameter's gradient.

    Gradients accumulate in `dtype`. Parameters are laid out from the last to the first, in the order in which the
    backward pass finishes them, so that a bucket's reduction overlaps the rest of it.

    Communication: one all-reduce of each bucket per step, the parameter count times the size of `dtype` in all.
    """

    def __init__(
        self,
        kinds: Iterable[Reduced],
        tp_group: dist.ProcessGroup,
        *,
        dtype: torch.dtype,
        bucket_bytes: int,
        overlap: bool,
    ) -> None:
        self.tp_group, self.overlap = tp_group, overlap
        self.of: dict[nn.Parameter, Tensor] = {}
        self.buckets = [
            Bucket(self._lay_out(part, dtype), part, kind.group, kind.is_split)
            for kind in kinds
            for part in _split(list(kind.parameters)[::-1], bucket_bytes // dtype.itemsize)
        ]
        self._last = False
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, bucket))

    def _lay_out(self, parameters: list[nn.Parameter], dtype: torch.dtype) -> Tensor:
        flat = torch.zeros(sum(p.numel() for p in parameters), dtype=dtype, device=parameters[0].device)
        start = 0
        for p in parameters:
            self.of[p] = flat[start : start + p.numel()].view_as(p)
            if p.dtype == dtype:
                p.grad = self.of[p]  # autograd then adds in place
            start += p.numel()
        return flat

    def _arrived(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        if parameter.dtype != bucket.flat.dtype:
            assert parameter.grad is not None
            self.of[parameter].add_(parameter.grad)
            parameter.grad = None
        if self._last:
            bucket.missing -= 1
            if bucket.missing == 0 and self.overlap:
                self._reduce(bucket)

    def _reduce(self, bucket: Bucket) -> None:
        bucket.pending.append(all_reduce_start(bucket.flat, bucket.group))

    def zero(self) -> None:
        """Forget the last step's gradients."""
        for bucket in self.buckets:
            bucket.flat.zero_()

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Around the step's last backward pass: buckets are reduced as they fill, and all are complete at the end.

        Raises:
            RuntimeError: a parameter got no gradient, so that its bucket was never reduced.
        """
        self._last = True
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)
        yield
        self._last = False
        if any(bucket.missing for bucket in self.buckets):
            raise RuntimeError("a parameter took no part in the backward pass")
        for bucket in self.buckets:
            if not self.overlap:
                self._reduce(bucket)
        for bucket in self.buckets:
            while bucket.pending:
                bucket.pending.pop().wait()

    def clip(self, limit: float) -> Tensor:
        """The global L2 norm of the gradients, which are scaled down to `limit` if it is larger; 0: never scaled.

        Communication: one all-reduce of a scalar over the tensor-parallel ranks.
        """
        flats = [bucket.flat for bucket in self.buckets]
        split, whole = flats[0].new_zeros(()), flats[0].new_zeros(())
        for bucket, norm in zip(self.buckets, torch._foreach_norm(flats), strict=True):
            (split if bucket.is_split else whole).add_(norm.square())
        norm = (all_reduce_sum(split, self.tp_group) + whole).sqrt()
        if limit:
            torch._foreach_mul_(flats, torch.clamp(limit / (norm + 1e-6), max=1.0))
        return norm


def _split(parameters: list[nn.Parameter], elements: int) -> list[list[nn.Parameter]]:
    """Neighbours together, each part closed by the parameter that makes it reach `elements`."""
    parts: list[list[nn.Parameter]] = [[]] if parameters else []
    for p in parameters:
        if parts[-1] and sum(q.numel() for q in parts[-1]) >= elements:
            parts.append([])
        parts[-1].append(p)
    return parts
