"""Agreement of all ranks on the step after which they save and end, when their job is about to end."""

from collections.abc import Callable

import torch.distributed as dist

LOOK_SECONDS = 1.0
"""Approximate time between two looks for a request to end."""
AGREE_AFTER = 2
"""Steps of an attempt after which its ranks know how long one takes, as the first may compile."""
MOST_STEPS = 1000
"""Largest number of steps between two looks."""


class AgreedEnd:
    """Step after which all ranks end, chosen by rank 0, whose supervisor receives the scheduler's signal.

    On a request rank 0 chooses a later step at which all ranks look, and writes it into the run's store before it goes
    on; since every step ends with a sum over all ranks, no rank can have passed that step by then. Between two looks
    about a second passes, however short a step is, so that the other ranks rarely query the host of rank 0.

    Args:
        is_requested: returns True if this rank is to end; called on rank 0 only.
    """

    def __init__(self, store: dist.Store, rank: int, is_requested: Callable[[], bool]) -> None:
        self.store, self.rank, self.is_requested = store, rank, is_requested
        self._calls, self._every = 0, 1
        self._end: int | None = None

    def ends(self, steps: int, seconds: float) -> bool:
        """Return True if training ends after this many steps; every rank has to call this after each step.

        Args:
            seconds: duration of the last step.
        """
        self._calls += 1
        if self._calls == AGREE_AFTER:
            self._every = self._steps_between_looks(seconds)
        if self._end is None:
            if self.rank == 0:
                if self.is_requested():
                    self._end = steps + self._every - steps % self._every
                    self.store.set("end", str(self._end))
            elif (self._calls <= AGREE_AFTER or steps % self._every == 0) and self.store.check(["end"]):
                self._end = int(self.store.get("end"))
        return self._end is not None and steps >= self._end

    def _steps_between_looks(self, seconds: float) -> int:
        """Return the number of steps between two looks, the same on all ranks."""
        if self.rank == 0:
            self.store.set("look", str(min(MOST_STEPS, max(1, int(LOOK_SECONDS / max(seconds, 1e-6))))))
        return int(self.store.get("look"))
