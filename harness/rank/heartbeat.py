"""Signs of life: where a rank is, in memory that it shares with what watches it, and in a file for everybody else.

A note costs the rank a microsecond: no file, no system call, no lock. The memory is its standard input, so that it
needs no name, reaches through a container, and is gone when both are.
"""

import json
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple

from harness.records.store import read_json
from impl.files import rename

if TYPE_CHECKING:
    import torch.distributed as dist

Phase = Literal["", "start-up", "training", "evaluation", "checkpoint", "profiling"]
Ended = Literal["", "finished", "failed", "stopped", "told"]
"""How the supervisor of a rank left it; told: it saved a checkpoint and ended, since it was asked to."""

SIZE = 4096
PROGRESS, PLACE, COLLECTIVE = struct.Struct("=Q"), struct.Struct("=q16s"), struct.Struct("=48s")
ACTION = struct.Struct("=48s48s")
TOLD_AT, PLACE_AT, COLLECTIVE_AT = 8, 16, 64
END = COLLECTIVE_AT + ACTION.size
"""Where they lie, behind the count of notes. `told` goes the other way: the rank is to save and end."""
WORDS = {
    "": "not yet started",
    "start-up": "starting up",
    "training": "in step {}",
    "evaluation": "evaluating after {} steps",
    "checkpoint": "saving after {} steps",
    "profiling": "profiling",
}
MOST_PLACES = 8


class Pulse(NamedTuple):
    """Where a rank is, as far as its process knows: a GPU may be behind it."""

    progress: int = 0
    """Notes that it has made: it stands still while this does."""
    phase: str = ""
    step: int = 0
    action: str = ""
    """The last collective that it began, and the action of the pipeline that it is in or was in last."""
    is_stopped: bool = False
    """By a signal, such as SIGSTOP."""

    def __str__(self) -> str:
        place = WORDS.get(self.phase, self.phase).format(self.step)
        at = f"{place} {self.action if self.action.startswith('after') else f'at {self.action}'}".removesuffix(" at ")
        return f"{at}, stopped by a signal" if self.is_stopped else at


class Heartbeat:
    """The rank's side: notes where it is, and sees whether it is told to end."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory, self._notes = memory, memoryview(memory).cast("Q")  # their count is its first number
        self._axes: Mapping[str, str | None] = {}
        self._collectives: dict[tuple[str, int], bytes] = {}
        self._begun: dict[Hashable, bytes] = {}
        self._over: dict[Hashable, bytes] = {}

    @classmethod
    def of_this_rank(cls) -> "Heartbeat":
        """The one that the supervisor reads; one that nobody reads, where there is none."""
        with suppress(OSError, ValueError):
            if os.fstat(0).st_size == SIZE:
                return cls(mmap.mmap(0, SIZE))
        return cls(mmap.mmap(-1, SIZE))

    def name_groups(self, axes: Mapping[str, str | None]) -> None:
        """The names of groups' axes; None: collectives over it are none, and only count as progress."""
        self._axes, self._collectives = axes, {}

    def enter(self, phase: Phase, step: int = 0, action: str = "") -> None:
        """A part of the run begins."""
        PLACE.pack_into(self._memory, PLACE_AT, step, phase.encode())
        self.begin(action)

    def begin(self, action: Hashable) -> None:
        """An action of the pipeline begins."""
        text = self._begun.get(action)
        if text is None:
            text = self._begun[action] = ACTION.pack(b"", str(action).encode())
        self._memory[COLLECTIVE_AT:END] = text
        self._notes[0] += 1

    def end(self, action: Hashable) -> None:
        """An action of the pipeline is over."""
        text = self._over.get(action)
        if text is None:
            text = self._over[action] = ACTION.pack(b"", f"after {action}".encode())
        self._memory[COLLECTIVE_AT:END] = text
        self._notes[0] += 1

    def began(self, op: str, group: "dist.ProcessGroup") -> None:
        """A collective begins; `impl.collectives` calls it."""
        text = self._collectives.get((op, id(group)))  # groups live as long as the rank
        if text is None:
            axis = self._axes.get(str(group.group_name), "joint")
            text = self._collectives[op, id(group)] = COLLECTIVE.pack(f"{op}({axis})".encode()) if axis else b""
        if text:
            self._memory[COLLECTIVE_AT : COLLECTIVE_AT + COLLECTIVE.size] = text
        self._notes[0] += 1

    def is_told(self) -> bool:
        """Whether the rank is to save a checkpoint and to end."""
        return self._memory[TOLD_AT] != 0


class Watched:
    """The supervisor's side. Use as a context; `file` becomes the rank's standard input."""

    def __init__(self) -> None:
        self.file = _memory()
        self.file.truncate(SIZE)
        self._memory = mmap.mmap(self.file.fileno(), SIZE)

    def __enter__(self) -> "Watched":
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.close()
        self.file.close()

    def pulse(self) -> Pulse:
        (progress,) = PROGRESS.unpack_from(self._memory, 0)
        step, phase = PLACE.unpack_from(self._memory, PLACE_AT)
        collective, action = map(_text, ACTION.unpack_from(self._memory, COLLECTIVE_AT))
        both = f"{collective} ({action})" if collective and action else collective or action
        return Pulse(progress, _text(phase), step, both)

    def tell(self) -> None:
        """Ask the rank to save a checkpoint and to end."""
        self._memory[TOLD_AT] = 1


def _memory() -> IO[bytes]:
    """A file without a name, which lies in memory where the system has that."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("heartbeat"), "w+b")
    return tempfile.TemporaryFile()


def _text(packed: bytes) -> str:
    return packed.rstrip(b"\0").decode(errors="replace")


# The file -----------------------------------------------------------------------------------------------------------


class Alive(NamedTuple):
    """What a rank's supervisor tells everybody, every few seconds."""

    time: float = 0.0
    """By its own clock, which is not another host's."""
    host: str = ""
    restart: int = 0
    """How often the job had been started before."""
    ran: float = 0.0
    """Seconds that all its starts have lasted until then."""
    ended: str = ""
    pulse: Pulse = Pulse()


def tell_alive(attempt: Path, rank: int, alive: Alive) -> None:
    """Write it, so that nobody reads a half; a disk that is full ends no rank."""
    document = alive._asdict() | alive.pulse._asdict()
    del document["pulse"]
    path = attempt / f"rank-{rank}.alive.json"
    with suppress(OSError):
        new = path.with_suffix(".new")
        new.write_text(json.dumps(document))  # not synced: after a crash of the machine it tells nothing anyway
        rename(new, path)


def alive(attempt: Path, rank: int) -> Alive | None:
    """What was last told about a rank; None: nothing that can be read."""
    found = read_json(attempt / f"rank-{rank}.alive.json")
    if not isinstance(found, dict):
        return None
    return Alive(**_fields(Alive(), found))._replace(pulse=Pulse(**_fields(Pulse(), found)))


def has_told(attempt: Path, seconds: float) -> bool:
    """Whether anything was told about a rank within this time, and it has not ended since."""
    for path in attempt.glob("rank-*.alive.json"):
        with suppress(OSError):
            found, age = read_json(path), time.time() - path.stat().st_mtime
            if isinstance(found, dict) and not found.get("ended") and age < seconds:
                return True
    return False


def _fields(default: Any, found: dict[str, Any]) -> dict[str, Any]:
    """The fields that are there and of the right type."""
    kinds = {
        name: (int, float) if isinstance(value, float) else type(value) for name, value in default._asdict().items()
    }
    return {name: found[name] for name, kind in kinds.items() if name in found and isinstance(found[name], kind)}


def places(attempt: Path, ranks: int, own: tuple[int, Pulse] | None = None) -> str:
    """Where every rank was last, in one line: `rank 0 in step 12 at all_reduce(dp), rank 1 in step 11 at 1F3`."""
    known = {rank: found.pulse for rank in range(ranks) if (found := alive(attempt, rank)) is not None}
    known |= {own[0]: own[1]} if own else {}
    named = {rank: str(known[rank]) if rank in known else "not heard of" for rank in range(ranks)}
    found = [(text, [rank for rank in named if named[rank] == text]) for text in dict.fromkeys(named.values())]
    parts = [f"{_numbers(those)} {text}" for text, those in found]
    return ", ".join(parts[:MOST_PLACES] + [f"{len(parts) - MOST_PLACES} more places"] * (len(parts) > MOST_PLACES))


def _numbers(ranks: list[int]) -> str:
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"


@contextmanager
def entered(heart: Heartbeat, phase: Phase, step: int, back: Phase = "training") -> Iterator[None]:
    """Around a part of the run, after which another goes on."""
    heart.enter(phase, step)
    yield
    heart.enter(back, step)
