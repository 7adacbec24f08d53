"""Gradients: accumulated in flat buckets, reduced over the ranks that divide them while the backward pass runs."""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.collectives import Pending, all_reduce_start, all_reduce_sum, reduce_scatter_into_start
from impl.squares import squares
from impl.zero.buckets import Bucket
from impl.zero.partition import REDUCTIONS

PIECE = 2**15
"""Elements of a piece."""


class _Reduction(NamedTuple):
    bucket: Bucket
    pending: Pending
    is_last: bool = True
    """True if no later reduction of the step adds to the bucket."""
    flat: Tensor | None = None
    """Tensor being reduced, where it is released afterwards."""
    buffer: Tensor | None = None
    """Buffer of which `flat` is a part."""


class Gradients:
    """The sum over microbatches and ranks of every parameter's gradient, or of what this rank owns of it.

    Communication (P: bytes of the gradients, of m microbatches): stage 0 all-reduces P in a step, stage 1
    reduce-scatters P, stages 2 and 3 m P: they keep no rank's sum over microbatches. What a rank then owns is
    all-reduced once over its replicas, if any, and a tied embedding's over the pipeline's ends besides.

    Source: ZeRO (1910.02054), sections 5.1, 5.2 and 7; replicas as in FSDP2 with `set_requires_all_reduce`.

    Args:
        overlap: reduce a bucket when it is full; else at the step's end, at stages 2 and 3 without going on meanwhile.
        arrivals: how often a parameter gets a gradient in one microbatch, where it is not once.
        added: parameters that get theirs by `add`, `add_product` or `add_rows`, not by autograd.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        every_rank: dist.ProcessGroup,
        *,
        overlap: bool,
        arrivals: Mapping[nn.Parameter, int] | None = None,
        added: Collection[nn.Parameter] = (),
    ) -> None:
        self.buckets, self.every_rank, self.overlap = buckets, every_rank, overlap
        self.of: dict[nn.Parameter, Tensor] = {}
        """Where a parameter's gradient is accumulated; none where no rank's sum over microbatches is kept."""
        self._bucket_of = {p: bucket for bucket in buckets for p in bucket.parameters}
        self._arrivals = {bucket: sum((arrivals or {}).get(p, 1) for p in bucket.parameters) for bucket in buckets}
        self._missing = dict.fromkeys(buckets, 0)
        self._fresh: set[nn.Parameter] = set()
        """Parameters whose place holds nothing yet."""
        self._untouched: set[Bucket] = set()
        """Buckets whose owned gradient holds nothing of this step yet."""
        self._reducing: deque[_Reduction] = deque()
        self._summing: list[Pending] = []
        """Sums over replicas under way."""
        self._free: list[Tensor] = []
        self._lent: dict[Bucket, Tensor] = {}
        shared = [bucket.layout for bucket in buckets if bucket.stage >= 2 and len(bucket.parameters) > 1]
        self._common = max((layout.size for layout in shared), default=0)
        """Elements of a buffer: a single parameter that is larger gets memory of its own."""
        for bucket in buckets:
            if bucket.flat is not None:
                self._place(bucket, bucket.flat)
        for parameter in self._bucket_of.keys() - set(added):  # autograd's hook comes without a gradient too
            parameter.register_post_accumulate_grad_hook(self._arrived)

    @property
    def buffers(self) -> list[Tensor]:
        """Memory for gradients on their way to their owners."""
        return [*self._free, *self._lent.values()]

    def _place(self, bucket: Bucket, flat: Tensor) -> None:
        for parameter, view in zip(bucket.parameters, bucket.views(flat), strict=True):
            self.of[parameter] = view

    def _arrived(self, parameter: Tensor) -> None:
        """Accumulate the gradient of one microbatch, which autograd has just computed."""
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        self.add(parameter, parameter.grad)
        parameter.grad = None

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Accumulate a gradient that autograd does not; it may become the bucket's memory."""
        bucket = self._bucket_of[parameter]
        is_bucket = gradient.numel() == bucket.layout.size and gradient.dtype == bucket.dtype
        place = self._open(bucket, parameter, gradient.flatten() if is_bucket else None)
        if parameter not in self._fresh:
            _accumulate(place, gradient)
        elif place.data_ptr() != gradient.data_ptr():
            place.copy_(gradient)
        self._close(parameter)

    def add_product(self, parameter: nn.Parameter, a: Tensor, b: Tensor) -> None:
        """Accumulate a^T b, summed where it is kept; of a wider type than theirs only on GPUs of NVIDIA."""
        bucket = self._bucket_of[parameter]
        wide = () if a.dtype == bucket.dtype else (bucket.dtype,)
        if wide and not (a.is_cuda and torch.version.cuda):  # PyTorch's other kernels round as their factors
            self.add(parameter, a.t() @ b)
            return
        place = self._open(bucket, parameter)
        if parameter in self._fresh:
            torch.mm(a.t(), b, *wide, out=place)
        else:
            torch.addmm(place, a.t(), b, *wide, out=place)
        self._close(parameter)

    def add_rows(self, parameter: nn.Parameter, rows: Tensor, gradient: Tensor) -> None:
        """Accumulate gradient[i] in row rows[i]."""
        if gradient.device.type != "cpu":  # where the order of such sums is not the same every time
            self.add(parameter, torch.ops.aten.embedding_dense_backward(gradient, rows, len(parameter), -1, False))
            return
        place = self._open(self._bucket_of[parameter], parameter)
        if parameter in self._fresh:
            place.zero_()
        place.index_add_(0, rows, gradient.to(place.dtype))
        self._close(parameter)

    def _open(self, bucket: Bucket, parameter: nn.Parameter, memory: Tensor | None = None) -> Tensor:
        """Return the tensor that accumulates the parameter's gradient; a new one is in the given memory, if any."""
        if bucket.flat is None:
            self.settle(REDUCTIONS - 1)
            bucket.flat = self._buffer(bucket) if memory is None else memory
            self._place(bucket, bucket.flat)
            self._fresh.update(bucket.parameters)
        return self.of[parameter]

    def _buffer(self, bucket: Bucket) -> Tensor:
        """Memory for a bucket's gradient, used again by one after another (ZeRO's constant-size buffers, C_B)."""
        if bucket.layout.size > self._common:
            flat = torch.empty(bucket.layout.size, dtype=bucket.dtype, device=bucket.device)
        else:
            empty = partial(torch.empty, self._common, dtype=bucket.dtype, device=bucket.device)
            self._lent[bucket] = self._free.pop() if self._free else empty()
            flat = self._lent[bucket][: bucket.layout.size]
        stops = [0, *(slot.stop for slot in bucket.layout.slots)]
        starts = [*(slot.start for slot in bucket.layout.slots), len(flat)]
        for stop, start in zip(stops, starts, strict=True):
            flat[stop:start].zero_()  # padding
        return flat

    def _close(self, parameter: nn.Parameter) -> None:
        """Record that the parameter's gradient has been stored, and reduce its bucket where it is full."""
        self._fresh.discard(parameter)
        bucket = self._bucket_of[parameter]
        self._missing[bucket] -= 1
        missing, arrivals = self._missing[bucket], self._arrivals[bucket]
        if bucket.stage >= 2 and missing % arrivals == 0:
            self._reduce_scatter(bucket)
        elif bucket.stage < 2 and missing == 0 and self.overlap:
            self._reduce(bucket)

    def _reduce(self, bucket: Bucket) -> None:
        """Begin the sum of what all microbatches have added up to."""
        assert bucket.flat is not None
        if bucket.stage:
            self.settle(REDUCTIONS - 1)
            pending = reduce_scatter_into_start(bucket.gradient, bucket.flat, bucket.reduction.group)
        else:
            pending = all_reduce_start(bucket.flat, bucket.reduction.group)
        self._reducing.append(_Reduction(bucket, pending))

    def _reduce_scatter(self, bucket: Bucket) -> None:
        """Begin the sum of what has arrived since the last time, a microbatch's gradients."""
        assert bucket.flat is not None
        for parameter in bucket.parameters:
            if parameter in self._fresh:  # where another parameter's of the next microbatch came first
                self.of[parameter].zero_()
                self._fresh.remove(parameter)
            del self.of[parameter]
        own = bucket.gradient if bucket in self._untouched else torch.empty_like(bucket.gradient)
        self._untouched.discard(bucket)
        pending = reduce_scatter_into_start(own, bucket.flat, bucket.reduction.group)
        is_last = not self._missing[bucket]
        self._reducing.append(_Reduction(bucket, pending, is_last, bucket.flat, self._lent.pop(bucket, None)))
        bucket.flat = None
        if not self.overlap:
            self.settle()

    def settle(self, left: int = 0) -> None:
        """Await the oldest reductions until no more than these are under way; a forward pass needs their memory."""
        while len(self._reducing) > left:
            bucket, pending, is_last, _, buffer = self._reducing.popleft()
            own = pending.wait()
            if bucket.stage >= 2 and own is not bucket.gradient:
                bucket.gradient.add_(own)
            if buffer is not None:
                self._free.append(buffer)
            if is_last and bucket.reduction.replicas is not None:
                self._summing.append(all_reduce_start(bucket.gradient, bucket.reduction.replicas))
        while self._summing and not left:
            self._summing.pop().wait()

    @contextmanager
    def accumulated(self, microbatches: int) -> Iterator[None]:
        """Enclose a step's backward passes: drop old gradients, reduce buckets as they fill, complete all at the end.

        Raises:
            RuntimeError: a parameter got too few gradients, or too many, so that its bucket was not reduced rightly.
        """
        self._untouched.update(self.buckets)
        for bucket in self.buckets:
            self._missing[bucket] = microbatches * self._arrivals[bucket]
            if bucket.stage < 2:
                self._fresh.update(bucket.parameters)
        yield
        if any(self._missing.values()):
            raise RuntimeError("a parameter took no part in a backward pass")
        for bucket in self.buckets:
            if bucket.stage < 2 and not self.overlap:
                self._reduce(bucket)
        self.settle()
        tied = [all_reduce_start(b.gradient, b.reduction.ends) for b in self.buckets if b.reduction.ends is not None]
        for pending in tied:
            pending.wait()

    def norm(self) -> Tensor:
        """Return the global L2 norm of the gradients, each parameter's counted once.

        Communication: an all-reduce of a scalar over all ranks.
        """
        counted = [bucket.gradient for bucket in self.buckets if bucket.is_first_copy]
        dtype, device = self.buckets[0].dtype, self.buckets[0].device
        none = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=device)
        return all_reduce_sum(squares(counted).sum() if counted else none, self.every_rank).sqrt()


def _accumulate(total: Tensor, gradient: Tensor) -> None:
    if total.dtype == gradient.dtype or total.device.type != "cpu":
        total.add_(gradient)
        return
    # a CPU converts all of a smaller type before it adds: in pieces, what it has converted is in its cache still
    for part, of_gradient in zip(total.view(-1).split(PIECE), gradient.reshape(-1).split(PIECE), strict=True):
        part.add_(of_gradient)
