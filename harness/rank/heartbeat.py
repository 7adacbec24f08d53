"""Place of a rank: in memory shared with its supervisor, and in a file for all other processes.

Noting a place costs the rank a microsecond: no file, no system call, no lock. The memory is the rank's standard input,
so it needs no name, reaches into a container, and is freed with both processes.
"""

import ctypes
import json
import mmap
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal

from harness.rank.json_files import read_as
from harness.records.store import write_atomically
from impl.grouping import by_key

if TYPE_CHECKING:
    import torch.distributed as dist

Phase = Literal["", "start-up", "training", "evaluation", "checkpoint", "profiling"]
Ended = Literal["", "finished", "failed", "stopped", "saved"]
"""How a rank ended; saved: it wrote a checkpoint and ended, since its job was about to end."""
EXIT_SAVED = 75
"""Exit status of a rank that saved a checkpoint and ended on request (sysexits.h: try again)."""

SIZE = 4096
WIDTH = 48
"""Bytes of a collective's or action's name."""
WORDS = {
    "": "not yet started",
    "start-up": "starting up",
    "training": "in step {}",
    "evaluation": "evaluating after {} steps",
    "checkpoint": "saving after {} steps",
    "profiling": "profiling",
}
MOST_PLACES = 8
CLOCK_SECONDS = 600.0
"""Time for which the difference of a file system's clock to this machine's counts as known."""


class Shared(ctypes.Structure):
    """Layout of the memory."""

    _fields_ = (
        ("notes", ctypes.c_uint64),
        ("is_end_requested", ctypes.c_bool),  # written by the supervisor: the rank has to save a checkpoint and end
        ("step", ctypes.c_int64),
        ("phase", ctypes.c_char * 16),
        ("collective", ctypes.c_char * WIDTH),
        ("action", ctypes.c_char * WIDTH),
    )


@dataclass(frozen=True)
class Pulse:
    """Place of a rank according to its process; a GPU may be behind it."""

    progress: int = 0
    """Number of notes so far; it stands still while the rank does."""
    phase: str = ""
    step: int = 0
    action: str = ""
    """Last collective that began, and the current or last action of the pipeline."""
    is_stopped: bool = False
    """True if a signal such as SIGSTOP keeps the process from running."""

    def __str__(self) -> str:
        place = WORDS.get(self.phase, self.phase).format(self.step)
        at = f"{place} {self.action if self.action.startswith('after') else f'at {self.action}'}".removesuffix(" at ")
        return f"{at}, stopped by a signal" if self.is_stopped else at


class Heartbeat:
    """Rank's side of the shared memory: notes the rank's place, and reads the request to end."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.shared = Shared.from_buffer(memory)
        self._axes: Mapping[str, str | None] = {}

    @classmethod
    def of_this_rank(cls) -> "Heartbeat":
        """Return the heartbeat shared with a supervisor; a private one if there is no supervisor."""
        with suppress(OSError, ValueError):
            if os.fstat(0).st_size == SIZE:
                return cls(mmap.mmap(0, SIZE))
        return cls(mmap.mmap(-1, SIZE))

    def name_groups(self, axes: Mapping[str, str | None]) -> None:
        """Set the names of groups' axes; None for groups whose collectives only count as progress."""
        self._axes = axes

    def enter(self, phase: Phase, step: int = 0, action: str = "") -> None:
        """Note that a part of the run begins."""
        self.shared.step, self.shared.phase = step, phase.encode()
        self.begin(action)

    def begin(self, action: object) -> None:
        """Note that an action of the pipeline begins."""
        self.shared.collective, self.shared.action = b"", str(action).encode()[:WIDTH]
        self.shared.notes += 1

    def end(self, action: object) -> None:
        """Note that an action of the pipeline is over."""
        self.begin(f"after {action}")

    def began(self, op: str, group: "dist.ProcessGroup") -> None:
        """Note that a collective begins; `impl.collectives` calls it."""
        if axis := self._axes.get(str(group.group_name), "joint"):
            self.shared.collective = f"{op}({axis})".encode()[:WIDTH]
        self.shared.notes += 1

    def is_end_requested(self) -> bool:
        """Return True if the rank has to save a checkpoint and end."""
        return self.shared.is_end_requested


class SharedMemory:
    """Supervisor's side of the shared memory; its open `file` becomes the rank's standard input."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self.file: IO[bytes] = os.fdopen(os.memfd_create("heartbeat"), "w+b")
        else:  # Python built for glibc before 2.27, as conda's is
            self.file = tempfile.TemporaryFile()  # noqa: SIM115
        self.file.truncate(SIZE)
        self.shared = Shared.from_buffer(mmap.mmap(self.file.fileno(), SIZE))

    def pulse(self) -> Pulse:
        """Return the rank's place."""
        shared = self.shared
        phase, collective, action = (
            text.decode(errors="replace") for text in (shared.phase, shared.collective, shared.action)
        )
        both = f"{collective} ({action})" if collective and action else collective or action
        return Pulse(shared.notes, phase, shared.step, both)

    def request_end(self) -> None:
        """Ask the rank to save a checkpoint and end."""
        self.shared.is_end_requested = True


# The file -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alive:
    """State of a rank, written by its supervisor every few seconds."""

    time: float = 0.0
    """Time by the supervisor's clock, which differs from other hosts'."""
    host: str = ""
    restart: int = 0
    """Number of earlier starts of the job."""
    ran: float = 0.0
    """Total duration of all starts so far."""
    ended: str = ""
    pulse: Pulse = field(default_factory=Pulse)


def write_alive(attempt: Path, rank: int, found: Alive) -> None:
    """Write a rank's state atomically; a full disk is ignored."""
    path, text = attempt / f"rank-{rank}.alive.json", json.dumps(asdict(found))
    with suppress(OSError):  # not synced: after a crash of the machine it is worth nothing
        write_atomically(path, text, by_way_of=attempt, is_lasting=False)


def read_alive(attempt: Path, rank: int) -> Alive | None:
    """Return the last written state of a rank; None if there is none that can be read."""
    return read_as(Alive, attempt / f"rank-{rank}.alive.json")


@lru_cache(maxsize=64)
def _ahead(folder: Path, _period: int, _set: float) -> float:
    """Return by how many seconds the clock of a folder's file system is ahead of this machine's; 0 if it is unknown."""
    with suppress(OSError), tempfile.NamedTemporaryFile(prefix=".clock-", dir=folder) as stamp:
        os.utime(stamp.fileno())
        return os.fstat(stamp.fileno()).st_mtime - time.time()
    return 0.0


def age(path: Path) -> float:
    """Return the seconds since a file of an attempt was written, by the clock of its file system, a server's perhaps.

    Raises:
        OSError: there is no such file.
    """
    # a clock that is set, as by NTP, is compared again
    period, offset = int(time.monotonic() // CLOCK_SECONDS), round(time.time() - time.monotonic(), -1)
    return time.time() + _ahead(path.parent.parent, period, offset) - path.stat().st_mtime


def is_alive(attempt: Path, seconds: float) -> bool:
    """Return True if the state of a rank that has not ended was written within this time."""
    for path in attempt.glob("rank-*.alive.json"):
        with suppress(OSError):
            found = read_as(Alive, path)
            if found is not None and not found.ended and age(path) < seconds:
                return True
    return False


def has_news(attempt: Path, seconds: float) -> bool:
    """Return True if the state or the result of any rank, also of one that has ended, was written within this time."""
    for path in attempt.glob("rank-*.json"):
        with suppress(OSError):
            if age(path) < seconds:
                return True
    return False


def last_start(attempt: Path) -> int | None:
    """Return the number of the last start of the attempt's job of which a rank has left its state; None without any."""
    found = (read_as(Alive, path) for path in attempt.glob("rank-*.alive.json"))
    return max((one.restart for one in found if one is not None), default=None)


def places(attempt: Path, ranks: int) -> str:
    """Return the last places of all ranks in one line: `rank 0 in step 12 at all_reduce(dp), rank 1 in step 11`."""
    lives = [read_alive(attempt, rank) for rank in range(ranks)]
    ranks_at = by_key(("not heard of" if life is None else str(life.pulse), rank) for rank, life in enumerate(lives))
    parts = [f"{_numbers(those)} {place}" for place, those in ranks_at.items()]
    more = len(parts) - MOST_PLACES
    return ", ".join(parts[:MOST_PLACES] + [f"{more} more places"] * (more > 0))


def _numbers(ranks: list[int]) -> str:
    spans = [[rank for _, rank in span] for _, span in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    texts = [str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"
