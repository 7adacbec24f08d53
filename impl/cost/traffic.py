"""What ranks send each other in one training step, by formula: calls and bytes of every kind of collective."""

from dataclasses import dataclass
from typing import Literal

Op = Literal["all_reduce", "all_gather", "reduce_scatter"]


@dataclass(frozen=True)
class Count:
    """Collectives of one kind; bytes are those of the whole tensor: what is summed, or what all parts make together."""

    calls: int = 0
    bytes: int = 0

    def __add__(self, other: "Count") -> "Count":
        return Count(self.calls + other.calls, self.bytes + other.bytes)
