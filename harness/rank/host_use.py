"""Processor time on the cores of a rank while it trains: its own, of all programs, and what other machines took."""

import os
import re
import time
from pathlib import Path
from typing import Any

import psutil

from harness.records.store import Document


class HostUse:
    """Clock of processor time that starts when it is made."""

    def __init__(self, local_rank: int) -> None:
        self.local_rank = local_rank
        self.cores = sorted(os.sched_getaffinity(0))
        self.begun = self._now()

    def so_far(self) -> Document:
        """Return `harness.records.parts.HostUse` since the start, as a JSON object."""
        now = self._now()
        spent = {name: now[name] - self.begun[name] for name in now}
        return {"local_rank": self.local_rank, "core": self.cores[0], "cores": len(self.cores), **spent}

    def _now(self) -> dict[str, float]:
        every = zip(_numbers(), psutil.cpu_times(percpu=True), strict=False)
        times = [one for core, one in every if core in set(self.cores)]
        stolen = sum(getattr(one, "steal", 0.0) for one in times)
        busy = sum(map(_busy, times))
        return {"seconds": time.perf_counter(), "own": time.process_time(), "busy": busy, "stolen": stolen}


def _numbers() -> list[int]:
    """Return the numbers of the processors, in psutil's order; where one is switched off they have gaps."""
    lines = Path(psutil.PROCFS_PATH, "stat").read_text().splitlines()
    return [int(number[1]) for line in lines if (number := re.match(r"cpu(\d+) ", line))]


def _busy(times: Any) -> float:
    """Return the seconds in which a core was not idle; those of virtual machines on it are among the user's."""
    idle = ("idle", "iowait", "steal", "guest", "guest_nice")
    return sum(seconds for name, seconds in times._asdict().items() if name not in idle)
