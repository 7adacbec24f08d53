"""Times of a rank's actions in a step, by the device's own clock, on one scale for all ranks."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from impl.pipeline.schedule import Action


class Stopwatch:
    """Start and end of every action of the latest step, in seconds.

    On a GPU they are CUDA events, so nothing waits for the device. All ranks have to construct theirs together. Ranks
    of one machine share its clock; other machines' clocks are set by a barrier, to within the barrier's own time.

    Args:
        begun, ended: functions called with every action, for reports of the rank's place.
    """

    def __init__(
        self,
        device: torch.device,
        begun: Callable[[Action], None] | None = None,
        ended: Callable[[Action], None] | None = None,
    ) -> None:
        self._begun, self._ended = begun, ended
        self._is_cuda = device.type == "cuda"
        dist.barrier()
        if self._is_cuda:
            self._first = self._event()
            torch.cuda.synchronize(device)
        clocks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(clocks, (socket.gethostname(), time.perf_counter()))
        mine = clocks[dist.get_rank()]
        same_host = next(clock for clock in clocks if clock[0] == mine[0])
        self._zero = same_host[1]
        self._started = mine[1]
        self._marks: list[tuple[Action, Any, Any]] = []

    def reset(self) -> None:
        """Forget the previous step."""
        self._marks = []

    @contextmanager
    def __call__(self, action: Action) -> Iterator[None]:
        if self._begun is not None:
            self._begun(action)
        start = self._event() if self._is_cuda else time.perf_counter()
        yield
        self._marks.append((action, start, self._event() if self._is_cuda else time.perf_counter()))
        if self._ended is not None:
            self._ended(action)

    def row(self) -> list[list[Any]]:
        """Return [action, start, end] of the latest step, as `impl.pipeline.simulate.Timeline` reads them."""
        return [[str(action), self._seconds(start), self._seconds(end)] for action, start, end in self._marks]

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, mark: Any) -> float:
        if self._is_cuda:
            mark.synchronize()
            return self._started - self._zero + self._first.elapsed_time(mark) / 1e3
        return mark - self._zero
