"""Where a rank is: in memory shared with its supervisor, and in a file for all other processes.

Noting a place costs the rank a microsecond: no file, no system call, no lock. The memory is the rank's standard input,
so it needs no name, reaches into a container, and is freed with both processes.
"""

import json
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal

from harness.rank.json_files import read_as
from impl.files import rename

if TYPE_CHECKING:
    import torch.distributed as dist

Phase = Literal["", "start-up", "training", "evaluation", "checkpoint", "profiling"]
Ended = Literal["", "finished", "failed", "stopped", "saved"]
"""How a rank ended; saved: it wrote a checkpoint and ended, since its job was about to end."""
EXIT_SAVED = 75
"""Exit status of a rank that saved a checkpoint and ended on request (sysexits.h: try again)."""

SIZE = 4096
PROGRESS, PLACE, COLLECTIVE = struct.Struct("=Q"), struct.Struct("=q16s"), struct.Struct("=48s")
ACTION = struct.Struct("=48s48s")
END_REQUESTED_AT, PLACE_AT, COLLECTIVE_AT = 8, 16, 64
END = COLLECTIVE_AT + ACTION.size
"""Layout of the memory: the number of notes, the request to save and end (written by the supervisor), the place."""
WORDS = {
    "": "not yet started",
    "start-up": "starting up",
    "training": "in step {}",
    "evaluation": "evaluating after {} steps",
    "checkpoint": "saving after {} steps",
    "profiling": "profiling",
}
MOST_PLACES = 8


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
        self._memory, self._notes = memory, memoryview(memory).cast("Q")  # their count is its first number
        self._axes: Mapping[str, str | None] = {}
        self._collectives: dict[tuple[str, int], bytes] = {}
        self._actions: dict[tuple[Hashable, bool], bytes] = {}

    @classmethod
    def of_this_rank(cls) -> "Heartbeat":
        """Return the heartbeat shared with a supervisor; a private one if there is no supervisor."""
        with suppress(OSError, ValueError):
            if os.fstat(0).st_size == SIZE:
                return cls(mmap.mmap(0, SIZE))
        return cls(mmap.mmap(-1, SIZE))

    def name_groups(self, axes: Mapping[str, str | None]) -> None:
        """Set the names of groups' axes; None for groups whose collectives only count as progress."""
        self._axes, self._collectives = axes, {}

    def enter(self, phase: Phase, step: int = 0, action: str = "") -> None:
        """Note that a part of the run begins."""
        PLACE.pack_into(self._memory, PLACE_AT, step, phase.encode())
        self.begin(action)

    def begin(self, action: Hashable) -> None:
        """Note that an action of the pipeline begins."""
        self._note_action(action, False)

    def end(self, action: Hashable) -> None:
        """Note that an action of the pipeline is over."""
        self._note_action(action, True)

    def _note_action(self, action: Hashable, is_over: bool) -> None:
        text = self._actions.get((action, is_over))
        if text is None:
            words = f"after {action}" if is_over else str(action)
            text = self._actions[action, is_over] = ACTION.pack(b"", words.encode())
        self._memory[COLLECTIVE_AT:END] = text
        self._notes[0] += 1

    def began(self, op: str, group: "dist.ProcessGroup") -> None:
        """Note that a collective begins; `impl.collectives` calls it."""
        text = self._collectives.get((op, id(group)))  # groups live as long as the rank
        if text is None:
            axis = self._axes.get(str(group.group_name), "joint")
            text = self._collectives[op, id(group)] = COLLECTIVE.pack(f"{op}({axis})".encode()) if axis else b""
        if text:
            self._memory[COLLECTIVE_AT : COLLECTIVE_AT + COLLECTIVE.size] = text
        self._notes[0] += 1

    def is_end_requested(self) -> bool:
        """Return True if the rank has to save a checkpoint and end."""
        return self._memory[END_REQUESTED_AT] != 0


class SharedMemory:
    """Supervisor's side of the shared memory, a context; `file` becomes the rank's standard input."""

    def __init__(self) -> None:
        self.file = _unnamed_file()
        self.file.truncate(SIZE)
        self._memory = mmap.mmap(self.file.fileno(), SIZE)

    def __enter__(self) -> "SharedMemory":
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.close()
        self.file.close()

    def pulse(self) -> Pulse:
        """Return the rank's place."""
        (progress,) = PROGRESS.unpack_from(self._memory, 0)
        step, phase = PLACE.unpack_from(self._memory, PLACE_AT)
        collective, action = map(_text, ACTION.unpack_from(self._memory, COLLECTIVE_AT))
        both = f"{collective} ({action})" if collective and action else collective or action
        return Pulse(progress, _text(phase), step, both)

    def request_end(self) -> None:
        """Ask the rank to save a checkpoint and end."""
        self._memory[END_REQUESTED_AT] = 1


def _unnamed_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):  # in memory, where the system has that
        return os.fdopen(os.memfd_create("heartbeat"), "w+b")
    return tempfile.TemporaryFile()


def _text(packed: bytes) -> str:
    return packed.rstrip(b"\0").decode(errors="replace")


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
    path = attempt / f"rank-{rank}.alive.json"
    with suppress(OSError):
        new = path.with_suffix(".new")
        new.write_text(json.dumps(asdict(found)))  # not synced: after a crash of the machine it is worth nothing
        rename(new, path)


def read_alive(attempt: Path, rank: int) -> Alive | None:
    """Return the last written state of a rank; None if there is none that can be read."""
    return read_as(Alive, attempt / f"rank-{rank}.alive.json")


def is_alive(attempt: Path, seconds: float) -> bool:
    """Return True if the state of a rank that has not ended was written within this time."""
    for path in attempt.glob("rank-*.alive.json"):
        with suppress(OSError):
            found, age = read_as(Alive, path), time.time() - path.stat().st_mtime
            if found is not None and not found.ended and age < seconds:
                return True
    return False


def places(attempt: Path, ranks: int, own: tuple[int, Pulse] | None = None) -> str:
    """Return the last places of all ranks in one line: `rank 0 in step 12 at all_reduce(dp), rank 1 in step 11`.

    Args:
        own: a rank whose place is known better than from its file.
    """
    known = {rank: found.pulse for rank in range(ranks) if (found := read_alive(attempt, rank)) is not None}
    known |= {own[0]: own[1]} if own else {}
    named = {rank: str(known[rank]) if rank in known else "not heard of" for rank in range(ranks)}
    found = [(text, [rank for rank in named if named[rank] == text]) for text in dict.fromkeys(named.values())]
    parts = [f"{_numbers(those)} {text}" for text, those in found]
    return ", ".join(parts[:MOST_PLACES] + [f"{len(parts) - MOST_PLACES} more places"] * (len(parts) > MOST_PLACES))


def _numbers(ranks: list[int]) -> str:
    spans = [[rank for _, rank in span] for _, span in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    texts = [str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"


@contextmanager
def entered(heart: Heartbeat, phase: Phase, step: int, back: Phase = "training") -> Iterator[None]:
    """Note a part of the run, and the return to another one at its end."""
    heart.enter(phase, step)
    yield
    heart.enter(back, step)
