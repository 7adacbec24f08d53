"""The parallel plan: how one training step is spread over ranks."""

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from impl.fields import CHECKED


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class Plan:
    """Parallel degrees and what is needed to carry them out."""

    dp: PositiveInt = 1
    """Data-parallel degree."""
    bucket_bytes: PositiveInt = 4 * 2**20
    """Gradients are all-reduced in buckets of about this size."""
    overlap_grad_reduce: bool = True
    """Reduce a bucket while the backward pass goes on; False waits for its end (to measure what overlap buys)."""

    @property
    def world_size(self) -> int:
        return self.dp
