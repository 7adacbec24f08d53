"""How all ranks of a run that is told to end do so after the same step."""

from collections.abc import Callable

import torch.distributed as dist

LOOK_SECONDS = 1.0
"""About how often ranks look whether they are to end."""
AGREE_AFTER = 2
"""Steps of a try after which its ranks know how long one takes: the first may compile."""
MOST_STEPS = 1000
"""Between two looks."""


class Notice:
    """Word that all ranks save and end after the same step, given by the one whose supervisor is told first.

    The first rank, when it is told, chooses a later step at which all look, and says it in the run's store before it
    goes on; since every step ends with a sum over all ranks, nobody can have passed that step by then. Between two
    looks about a second passes, however short a step is: the other ranks ask the first one's host no more often.

    Args:
        is_told: whether this rank is to end; asked of the first rank only.
    """

    def __init__(self, store: dist.Store, rank: int, is_told: Callable[[], bool]) -> None:
        self.store, self.rank, self.is_told = store, rank, is_told
        self._asked, self._every = 0, 1
        self._end: int | None = None

    def ends(self, steps: int, seconds: float) -> bool:
        """Whether training ends after this many steps; every rank has to ask after each one.

        Args:
            seconds: that the last step took.
        """
        self._asked += 1
        if self._asked == AGREE_AFTER:
            self._every = self._agree(seconds)
        if self._end is None:
            if self.rank == 0:
                if self.is_told():
                    self._end = steps + self._every - steps % self._every
                    self.store.set("end", str(self._end))
            elif (self._asked <= AGREE_AFTER or steps % self._every == 0) and self.store.check(["end"]):
                self._end = int(self.store.get("end"))
        return self._end is not None and steps >= self._end

    def _agree(self, seconds: float) -> int:
        """Steps between two looks, the same on all ranks."""
        if self.rank == 0:
            self.store.set("look", str(min(MOST_STEPS, max(1, int(LOOK_SECONDS / max(seconds, 1e-6))))))
        return int(self.store.get("look"))
