"""Parameters that data-parallel ranks divide among them, gathered from their owners before they are used."""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from impl.collectives import all_gather_into_start
from impl.zero.buckets import Bucket

Run = Callable[[Any], Tensor]


class Parameters:
    """Gathering of weights for the blocks that need them.

    Stages 1 and 2 gather all of them once a step, after the owners' update, while the next forward pass goes on. Stage
    3 gathers those of a block just before its forward and its backward pass, begins with the next block's, and frees
    them afterwards; those of neighbours of one name once for all of them.

    Communication (P: bytes of the weights): P in a step at stages 1 and 2, 2 P in a microbatch at stage 3, without what
    only the look-up of tokens and positions needs, which is not gathered again.

    Source: ZeRO (1910.02054), section 5.3.

    Args:
        of: the buckets that hold a block's parameters, by the block's name.
        overlap: gather ahead.
    """

    def __init__(self, of: Mapping[str, Sequence[Bucket]], *, overlap: bool) -> None:
        self.of, self.overlap = of, overlap
        self._users = dict.fromkeys(chain(*of.values()), 0)

    def publish(self, bucket: Bucket) -> None:
        """Begin to gather a bucket's weights after its owners' update, at stages 1 and 2."""
        if bucket.stage in (1, 2):
            bucket.gathering = all_gather_into_start(bucket.weights, bucket.own_weights, bucket.reduction.group)
            if not self.overlap:
                self.settle(bucket)

    def run(self, blocks: Sequence[tuple[str, Run]], x: Tensor | None) -> Tensor:
        """Run one block after another, each with its parameters; x is the first one's input, if it takes any."""
        before: Sequence[Bucket] = ()
        units = [(name, [run for _, run in some]) for name, some in groupby(blocks, itemgetter(0))]
        for i, (name, runs) in enumerate(units):
            block = lambda x, runs=runs: reduce(lambda x, run: run(x), runs, x)
            here, ahead = self.of[name], self.of[units[i + 1][0]] if i + 1 < len(units) else ()
            if x is None:  # looks rows up: the backward pass needs no parameters for that
                self.acquire(here, ahead)
                x = block(x)
                self.release(here)
            else:
                x = _Enter.apply(x, self, here, ahead)
                x = _Leave.apply(block(x), self, here, before)
                before = here
        assert isinstance(x, Tensor)
        return x

    def acquire(self, buckets: Sequence[Bucket], ahead: Sequence[Bucket] = ()) -> None:
        """Await the buckets' weights; begin to gather those that are needed next."""
        for bucket in buckets:
            self._gather(bucket)
        for bucket in buckets:
            self.settle(bucket)
            self._users[bucket] += 1
        for bucket in ahead if self.overlap else ():
            self._gather(bucket)

    def release(self, buckets: Sequence[Bucket]) -> None:
        """Free the buckets' weights where nothing else is using them."""
        for bucket in buckets:
            self._users[bucket] -= 1
            if bucket.stage == 3 and not self._users[bucket]:
                bucket.weights.untyped_storage().resize_(0)

    def settle(self, bucket: Bucket) -> None:
        """Await weights that are on their way, if any are."""
        if bucket.gathering is not None:
            bucket.gathering.wait()
            bucket.gathering = None

    def _gather(self, bucket: Bucket) -> None:
        if bucket.stage == 3 and not self._users[bucket] and bucket.gathering is None:
            bucket.weights.untyped_storage().resize_(bucket.weights.numel() * bucket.weights.itemsize)
            own = bucket.weights[bucket.own].copy_(bucket.own_weights)
            bucket.gathering = all_gather_into_start(bucket.weights, own, bucket.reduction.group)


class _Enter(torch.autograd.Function):
    """Into a block: its parameters are gathered, and freed behind its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameters: Parameters, here: Sequence[Bucket], ahead: Sequence[Bucket]) -> Tensor:
        ctx.parameters, ctx.here = parameters, here
        parameters.acquire(here, ahead)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.parameters.release(ctx.here)
        return grads[0], None, None, None


class _Leave(torch.autograd.Function):
    """Out of a block: its parameters are freed, and gathered again for its backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, parameters: Parameters, here: Sequence[Bucket], before: Sequence[Bucket]
    ) -> Tensor:
        ctx.parameters, ctx.here, ctx.before = parameters, here, before
        parameters.release(here)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.parameters.acquire(ctx.here, ctx.before)
        return grads[0], None, None, None
