"""Gradients of data-parallel ranks: accumulated in flat buckets, summed over the ranks while the backward pass runs."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.collectives import all_reduce_start


@dataclass
class Bucket:
    """Gradients that are reduced by one collective; `flat` holds them all, each parameter's is a view of it."""

    flat: Tensor
    parameters: list[nn.Parameter]
    missing: int = 0
    work: list[dist.Work] = field(default_factory=list)


class Gradients:
    """The sum over microbatches and data-parallel ranks of every parameter's gradient.

    Gradients accumulate in `dtype`. Parameters are laid out from the last to the first, in the order in which the
    backward pass finishes them, so that a bucket's reduction overlaps the rest of it.

    Communication: one all-reduce of each bucket per step, the parameter count times the size of `dtype` in all.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: dist.ProcessGroup,
        *,
        dtype: torch.dtype,
        bucket_bytes: int,
        overlap: bool,
    ) -> None:
        self.group, self.overlap = group, overlap
        self.of: dict[nn.Parameter, Tensor] = {}
        self.buckets = [self._lay_out(b, dtype) for b in _split(list(parameters)[::-1], bucket_bytes // dtype.itemsize)]
        self._last = False
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, bucket))

    def _lay_out(self, parameters: list[nn.Parameter], dtype: torch.dtype) -> Bucket:
        flat = torch.zeros(sum(p.numel() for p in parameters), dtype=dtype, device=parameters[0].device)
        start = 0
        for p in parameters:
            self.of[p] = flat[start : start + p.numel()].view_as(p)
            if p.dtype == dtype:
                p.grad = self.of[p]  # autograd then adds in place
            start += p.numel()
        return Bucket(flat, parameters)

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
        if work := all_reduce_start(bucket.flat, self.group):
            bucket.work.append(work)

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
            while bucket.work:
                bucket.work.pop().wait()

    def clip(self, limit: float) -> Tensor:
        """The global L2 norm of the gradients, which are scaled down to `limit` if it is larger; 0: never scaled."""
        flats = [bucket.flat for bucket in self.buckets]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(flats)))
        if limit:
            torch._foreach_mul_(flats, torch.clamp(limit / (norm + 1e-6), max=1.0))
        return norm


def _split(parameters: list[nn.Parameter], elements: int) -> list[list[nn.Parameter]]:
    """Neighbours together, each part closed by the parameter that makes it reach `elements`."""
    parts: list[list[nn.Parameter]] = [[]]
    for p in parameters:
        if parts[-1] and sum(q.numel() for q in parts[-1]) >= elements:
            parts.append([])
        parts[-1].append(p)
    return parts
