"""Gradients of data-parallel ranks: accumulated in flat buckets, summed over the ranks while the backward pass runs."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
    is_counted: bool = True
    """Whether this pipeline rank counts them in the gradient norm; False: another one does, which has them too."""
    is_late: bool = False
    """Reduced after the last backward pass: their other ranks are elsewhere in the schedule."""


@dataclass
class Bucket:
    """Gradients that are reduced by one collective; `flat` holds them all, each parameter's is a view of it."""

    flat: Tensor
    parameters: list[nn.Parameter]
    kind: Reduced
    missing: int = 0
    pending: list[Pending] = field(default_factory=list)


class Gradients:
    """The sum over microbatches and ranks of every parameter's gradient.

    Gradients accumulate in `dtype`. Parameters are laid out from the last to the first, in the order in which the
    backward pass finishes them, so that a bucket's reduction overlaps the rest of it.

    Communication: one all-reduce of each bucket per step, the parameter count times the size of `dtype` in all.

    Args:
        arrivals: how often a parameter gets a gradient in one microbatch, where it is not once.
        put_off: parameters that get theirs by `add`, not by autograd.
    """

    def __init__(
        self,
        kinds: Iterable[Reduced],
        tp_group: dist.ProcessGroup,
        pp_group: dist.ProcessGroup,
        *,
        dtype: torch.dtype,
        bucket_bytes: int,
        overlap: bool,
        arrivals: Mapping[nn.Parameter, int] | None = None,
        put_off: Collection[nn.Parameter] = (),
    ) -> None:
        self.tp_group, self.pp_group, self.overlap = tp_group, pp_group, overlap
        self.arrivals = arrivals or {}
        self.of: dict[nn.Parameter, Tensor] = {}
        self.buckets = [
            Bucket(self._lay_out(part, dtype), part, kind)
            for kind in kinds
            for part in _split(list(kind.parameters)[::-1], bucket_bytes // dtype.itemsize)
        ]
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self._fresh: set[nn.Parameter] = set()
        for parameter in self._bucket_of.keys() - set(put_off):  # autograd's hook comes without a gradient too
            parameter.register_post_accumulate_grad_hook(self._arrived)

    def _lay_out(self, parameters: list[nn.Parameter], dtype: torch.dtype) -> Tensor:
        flat = torch.zeros(sum(p.numel() for p in parameters), dtype=dtype, device=parameters[0].device)
        start = 0
        for p in parameters:
            self.of[p] = flat[start : start + p.numel()].view_as(p)
            if p.dtype == dtype:
                p.grad = self.of[p]  # autograd then adds in place
            start += p.numel()
        return flat

    def _arrived(self, parameter: Tensor) -> None:
        """Autograd has accumulated a gradient."""
        assert isinstance(parameter, nn.Parameter)
        if parameter.dtype == self.of[parameter].dtype:
            self._count(parameter)
        else:
            assert parameter.grad is not None
            self.add(parameter, parameter.grad)
            parameter.grad = None

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Accumulate a gradient that autograd does not."""
        if parameter in self._fresh:
            self.of[parameter].copy_(gradient)
            self._fresh.remove(parameter)
        else:
            self.of[parameter].add_(gradient)
        self._count(parameter)

    def _count(self, parameter: nn.Parameter) -> None:
        bucket = self._bucket_of[parameter]
        bucket.missing -= 1
        if bucket.missing == 0 and self.overlap and not bucket.kind.is_late:
            self._reduce(bucket)

    def _reduce(self, bucket: Bucket) -> None:
        bucket.pending.append(all_reduce_start(bucket.flat, bucket.kind.group))

    @contextmanager
    def accumulated(self, microbatches: int) -> Iterator[None]:
        """Around a step's backward passes: old gradients are forgotten, buckets are reduced as they fill, and all are
        complete at the end.

        Raises:
            RuntimeError: a parameter got too few gradients, or too many, so that its bucket was not reduced rightly.
        """
        for bucket in self.buckets:
            bucket.missing = microbatches * sum(self.arrivals.get(p, 1) for p in bucket.parameters)
            if bucket.parameters[0].dtype == bucket.flat.dtype:
                bucket.flat.zero_()
            else:
                self._fresh.update(bucket.parameters)
        yield
        if any(bucket.missing for bucket in self.buckets):
            raise RuntimeError("a parameter took no part in a backward pass")
        for bucket in self.buckets:
            if not self.overlap or bucket.kind.is_late:
                self._reduce(bucket)
        for bucket in self.buckets:
            while bucket.pending:
                bucket.pending.pop().wait()

    def clip(self, limit: float) -> Tensor:
        """The global L2 norm of the gradients, which are scaled down to `limit` if it is larger; 0: never scaled.

        Communication: an all-reduce of a scalar over the tensor-parallel ranks, and one over the pipeline's.
        """
        flats = [bucket.flat for bucket in self.buckets]
        split, whole = flats[0].new_zeros(()), flats[0].new_zeros(())
        for bucket, norm in zip(self.buckets, torch._foreach_norm(flats), strict=True):
            if bucket.kind.is_counted:
                (split if bucket.kind.is_split else whole).add_(norm.square())
        norm = all_reduce_sum(all_reduce_sum(split, self.tp_group) + whole, self.pp_group).sqrt()
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
