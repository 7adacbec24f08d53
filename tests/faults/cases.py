"""The fault matrix: where, in which phase, which fault, and the cause of the first attempt's failure."""

from collections.abc import Iterator
from dataclasses import dataclass

from harness.launch.slurm import Where

PHASES = ("start-up", "forward", "backward", "optimizer", "checkpoint save", "evaluation", "record write")
CAUSES = {
    "SIGKILL": ("killed",),
    "SIGTERM": ("killed",),
    "SIGSTOP": ("hang",),
    "SIGKILL to supervisor": ("vanished",),
    "disk full": ("disk",),
    "read-only": ("disk",),
    "raises": ("error",),
    "out of memory": ("oom",),
    "scancel": ("cancelled",),
}
"""Causes in the record of the first try; a rank that fails because another one has died must not be its cause."""
DAMAGES = ("missing", "empty", "cut short", "junk", "first byte flipped", "middle overwritten", "one bit flipped")
"""Damages of a record, and of a checkpoint's files."""
OF_ATTEMPT = {
    "job": ("empty", "cut short", "junk"),
    "orders": ("missing", "empty", "cut short", "junk"),
    "result": ("missing", "cut short", "junk"),
    "steps log": ("missing", "cut short", "junk", "middle overwritten", "fields missing"),
}
"""Damages of the files of an attempt that has ended, and whose harness was killed before it wrote the record."""


@dataclass(frozen=True)
class Case:
    """One fault, once."""

    place: str
    phase: str
    fault: str
    layout: str = "dp2"
    on: Where = "local"

    @property
    def name(self) -> str:
        return ", ".join((self.on, self.layout, self.place, self.phase, self.fault))

    @property
    def rank(self) -> int | None:
        return int(self.place.removeprefix("rank ")) if self.place.startswith("rank ") else None

    @property
    def causes(self) -> tuple[str, ...]:
        """Return the causes that the first attempt may have; none if any, or if it leaves no record."""
        return CAUSES.get(self.fault, ()) if self.rank is not None or self.place == "job" else ()


def cases() -> list[Case]:
    """Return all cases, each once."""
    return list(dict.fromkeys((*_of_ranks(), *_of_files(), *_of_harness(), *_on_slurm())))


def _of_ranks() -> Iterator[Case]:
    ranks = ("rank 0", "rank 1")
    yield from (Case(rank, phase, "SIGKILL") for phase in PHASES for rank in ranks)
    yield from (Case(rank, "checkpoint publish", "SIGKILL") for rank in ranks)
    yield from (Case(rank, phase, "SIGTERM") for phase in ("start-up", "backward", "evaluation") for rank in ranks)
    yield from (Case("rank 1", phase, "SIGSTOP") for phase in PHASES)
    yield Case("rank 0", "forward", "SIGSTOP")
    yield from (Case(rank, "forward", "SIGKILL to supervisor") for rank in ranks)
    yield Case("rank 1", "record write", "SIGKILL to supervisor")
    yield from (Case(rank, phase, "SIGKILL to supervisor") for phase in ("rendezvous", "start-up") for rank in ranks)
    for layout in ("zero", "pp2", "tp2"):
        yield from (Case(rank, phase, "SIGKILL", layout) for phase in ("backward", "checkpoint save") for rank in ranks)
    for phase in ("steps log", "checkpoint save", "record write"):
        yield from (Case(rank, phase, "disk full") for rank in ranks)
    yield Case("rank 0", "checkpoint save", "read-only")
    yield from (Case("rank 1", phase, "raises") for phase in ("start-up", "forward", "evaluation"))
    yield Case("rank 0", "backward", "out of memory")


def _of_files() -> Iterator[Case]:
    yield from (Case("record", "finished", damage) for damage in DAMAGES)
    for what in ("metadata", "data", "journal"):
        yield from (Case("checkpoint", what, damage) for damage in DAMAGES)
    yield Case("checkpoint", "all of them", "junk")
    yield from (Case("attempt", file, damage) for file, damages in OF_ATTEMPT.items() for damage in damages)
    yield from (Case("output", "sweep", fault) for fault in ("disk full", "read-only"))


def _of_harness() -> Iterator[Case]:
    phases = ("submission", "start-up", "training", "record write", "clearing up")
    yield from (Case("harness", phase, "SIGKILL") for phase in phases)
    yield from (Case("harness", phase, "SIGTERM") for phase in ("start-up", "training"))
    yield from (Case("harness", "record write", fault) for fault in ("disk full", "read-only"))


def _on_slurm() -> Iterator[Case]:
    for phase in ("start-up", "forward", "checkpoint save", "evaluation", "record write"):
        yield from (Case(rank, phase, "SIGKILL", on="slurm") for rank in ("rank 0", "rank 1"))
    yield Case("rank 1", "forward", "SIGSTOP", on="slurm")
    yield Case("rank 0", "backward", "SIGKILL to supervisor", on="slurm")
    yield Case("rank 1", "rendezvous", "SIGKILL to supervisor", on="slurm")
    yield Case("rank 1", "forward", "raises", on="slurm")
    yield from (Case("harness", phase, "SIGKILL", on="slurm") for phase in ("submission", "training", "record write"))
    yield from (Case("job", "training", fault, on="slurm") for fault in ("scancel", "scontrol requeue"))
