"""Whether what watches over the other ranks of this machine is alive.

submitit's process that starts the ranks here waits for all of them, so the end of a supervisor that is killed would be
noticed by nothing: its rank dies with it, and the others wait for that one, before they are connected without an error.
On Slurm srun ends the job's other tasks.
"""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from harness.rank.collect import result_of
from harness.rank.heartbeat import alive

RANK = "SUBMITIT_LOCAL_GLOBALID"
"""Variable in the environment of each supervisor."""
LOOK_SECONDS = 1.0
MISSING_SECONDS = 5.0
"""All supervisors are started within this time."""


class Siblings:
    """The supervisors of all ranks of an attempt, this one among them."""

    def __init__(self, attempt: Path, rank: int, ranks: int) -> None:
        self.attempt, self.rank, self.ranks = attempt, rank, ranks
        self.found: dict[int, psutil.Process] = {}
        self.begun = time.monotonic()
        self.looked = -LOOK_SECONDS

    def vanished(self, now: float) -> int | None:
        """Return a rank whose supervisor is gone without a word of its end; None: none, as far as can be known."""
        if os.environ.get(RANK) != str(self.rank) or now - self.looked < LOOK_SECONDS:
            return None
        self.looked = now
        if len(self.found) < self.ranks:
            self.found |= dict(_children(os.getppid()))
        if self.rank not in self.found:
            return None  # the environments of processes cannot be read here
        return next((rank for rank in range(self.ranks) if self._is_gone(rank, now) and not self._has_told(rank)), None)

    def _is_gone(self, rank: int, now: float) -> bool:
        process = self.found.get(rank)
        if process is None:
            return now - self.begun > MISSING_SECONDS
        with suppress(psutil.NoSuchProcess):
            return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        return True

    def _has_told(self, rank: int) -> bool:
        """Whether the end of a rank is written down."""
        told, failure = alive(self.attempt, rank), self.attempt / f"rank-{rank}.failure.json"
        return bool(told and told.ended) or failure.exists() or result_of(self.attempt, rank) is not None


def _children(parent: int) -> Iterator[tuple[int, psutil.Process]]:
    """The supervisors that a process has started, with their ranks."""
    with suppress(psutil.Error):
        for process in psutil.Process(parent).children():
            with suppress(psutil.Error):
                if (rank := process.environ().get(RANK, "")).isdecimal():
                    yield int(rank), process
