"""What became of a try at a run, decided from facts: how ranks ended, what they wrote, what the scheduler says."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from signal import Signals
from typing import Any, Literal, NamedTuple, get_args

Cause = Literal[
    "",
    "error",
    "oom",
    "killed",
    "vanished",
    "node_failure",
    "preempted",
    "time_limit",
    "hang",
    "cancelled",
    "launch",
    "disk",
]
"""Why a run ended: "" by itself; error: a rank raised; killed: by a signal that nobody here sent; vanished: without a
word of a rank, or of what watched it; launch: its ranks never met; disk: what was to be written could not be."""

RETRIED: frozenset[Cause] = frozenset({"killed", "vanished", "node_failure", "preempted", "launch"})
"""The machines' faults, which another try may not meet: the harness tries again by itself."""
AGAIN = RETRIED | frozenset[Cause]({"hang", "cancelled", "time_limit", "disk"})
"""What the next run of the same sweep does again; the rest would end in the same way."""

STATUSES = {"": "ok", "oom": "oom", "time_limit": "timeout", "hang": "timeout"}

OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|cannot allocate memory|not enough memory", re.I)
DISK = re.compile(
    r"no space left on device|disk quota exceeded|read-only file system|stale file handle|input/output error"
    r"|permission denied|PytorchStreamWriter failed",
    re.I,
)
WAITED_TOO_LONG = re.compile(
    r"timed out (waiting|connecting)|before timing out|wait timeout after|timeout waiting for|connect timeout"
    r"|watchdog caught collective",
    re.I,
)
"""What gloo, NCCL and the ranks' store say when a collective's time is over."""
CONSEQUENCE = re.compile(
    r"closed by peer|reset by peer|broken pipe|remote process exited|network error|connection (refused|was closed)"
    r"|failed to recv|socket (timeout|closed)|communicator was aborted|unhandled system error|connectFullMesh failed",
    re.I,
)
"""What a rank says whose neighbour is gone."""
KILLED_FOR_MEMORY = re.compile(r"exceeded (job |step )?memory limit|oom[-_ ]?kill|out[-_ ]of[-_ ]memory", re.I)
"""What Slurm writes into a job's log, whatever state it then gives the job."""

CRASHES = {Signals.SIGSEGV, Signals.SIGABRT, Signals.SIGBUS, Signals.SIGFPE, Signals.SIGILL, Signals.SIGTRAP}
"""Signals that a program brings upon itself."""

SCHEDULER: dict[str, tuple[Cause, str]] = {
    "PREEMPTED": ("preempted", "preempted by another job"),
    "REVOKED": ("preempted", "taken from the queue"),
    "TIMEOUT": ("time_limit", "the job's time limit was reached"),
    "DEADLINE": ("time_limit", "the job's deadline was reached"),
    "NODE_FAIL": ("node_failure", "a node failed"),
    "BOOT_FAIL": ("node_failure", "a node did not start"),
    "LAUNCH_FAILED": ("launch", "the job could not be started"),
    "RECONFIG_FAIL": ("launch", "the job could not be started"),
    "OUT_OF_MEMORY": ("oom", "killed for the memory that it took"),
    "CANCELLED": ("cancelled", "cancelled"),
}
"""States of jobs that Slurm or a person has ended."""


def status_of(cause: Cause) -> str:
    """A record's status."""
    return STATUSES.get(cause, "failed")


def cause_of(error: str) -> Cause:
    """Why a rank raised, from the name and the text of its exception."""
    if OUT_OF_MEMORY.search(error) or error.startswith(("MemoryError", "OutOfMemoryError")):
        return "oom"
    if DISK.search(error):
        return "disk"
    return "hang" if WAITED_TOO_LONG.search(error) else "error"


def of_exit(rank: int, code: int, log: Sequence[str], *, has_begun: bool, memory_kills: int = 0) -> tuple[Cause, str]:
    """Why a rank is gone that said nothing itself, and that in words.

    Args:
        code: what its process left, minus a signal's number.
        log: the end of what it wrote.
        has_begun: it ran any line of ours.
        memory_kills: how many processes the system has killed meanwhile for the memory that they took.
    """
    if code >= 0:
        return ("error" if has_begun else "launch"), f"rank {rank} exited with status {code}"
    name = Signals(-code).name if -code in set(Signals) else f"signal {-code}"
    killed = f"rank {rank} was killed by {name}"
    if -code == Signals.SIGKILL and memory_kills:
        return "oom", f"{killed}: out of memory"
    if -code not in CRASHES:
        return "killed", killed
    watchdog = next((line for line in log if WAITED_TOO_LONG.search(line)), None)  # how NCCL ends a rank
    return ("hang", f"{killed}: {watchdog.strip()}") if watchdog else ("error", killed)


@dataclass(frozen=True)
class Failure:
    """What a rank, or what watches it, wrote down about its end."""

    rank: int
    cause: Cause
    reason: str
    time: float
    log: tuple[str, ...] = ()
    restart: int = 0
    """How often the job had been started before."""

    @classmethod
    def read(cls, found: Any) -> "Failure | None":
        """One as a file holds it; None: it holds none. Older ones have a status only."""
        if not isinstance(found, dict) or not isinstance(reason := found.get("reason"), str):
            return None
        rank, time, log, restart = (found.get(name) for name in ("rank", "time", "log", "restart"))
        if not isinstance(rank, int) or not isinstance(time, int | float):
            return None
        older: dict[str, Cause] = {"oom": "oom", "timeout": "time_limit"}
        otherwise: Cause = "killed" if "was killed by" in reason else "error"
        known: dict[str, Cause] = {cause: cause for cause in get_args(Cause)[1:]}
        cause = known.get(str(found.get("cause"))) or older.get(str(found.get("status"))) or otherwise
        lines = tuple(map(str, log)) if isinstance(log, list) else ()
        return cls(rank, cause, reason, time, lines, restart if isinstance(restart, int) else 0)

    @property
    def is_consequence(self) -> bool:
        """Whether it says no more than that another rank was gone."""
        return self.cause == "error" and bool(CONSEQUENCE.search(self.reason))


def first_failure(failures: Collection[Failure]) -> Failure | None:
    """The failure that caused the others: a rank that was killed, else the earliest.

    A rank that dies breaks its neighbours' collectives, and a neighbour may write that down first; hosts' clocks
    differ, too. So what follows from another's end goes last.
    """

    def order(failure: Failure) -> tuple[int, float]:
        is_victim = failure.cause in ("killed", "oom") and "was killed by" in failure.reason
        return (0 if is_victim else 2 if failure.is_consequence else 1), failure.time

    return min(failures, key=order, default=None)


@dataclass(frozen=True)
class Facts:
    """All that is known about a try that has ended, of its last start."""

    ranks: int
    results: Mapping[int, tuple[str, str | None]]
    """Status and reason that a rank ended with by itself."""
    failures: Collection[Failure] = ()
    stopped: Collection[int] = ()
    """Ranks that were ended in good order, since another had failed or nobody wanted them any more."""
    has_begun: bool = True
    """Whether any rank left a sign of life."""
    scheduler: str = ""
    """State of the job in Slurm's words."""
    said: Sequence[str] = field(default=())
    """Slurm's last lines in the job's log."""
    is_cancelled: bool = False
    """It was to be stopped."""


class Outcome(NamedTuple):
    """What a record says about the end of a run."""

    status: str
    reason: str | None
    cause: Cause
    failure: Failure | None = None
    """Whose log tells about it."""


def decide(facts: Facts) -> Outcome:
    """What became of a try.

    A rank's own word counts first, unless it tells only that somebody else ended it; then the scheduler's; then what
    is missing.
    """
    first = first_failure(facts.failures)
    missing = [rank for rank in range(facts.ranks) if rank not in facts.results]
    if first is None and not missing:
        status, reason = facts.results[0]
        return Outcome(status, reason, "" if status in ("ok", "nan") else "error")
    speaks = first is not None and first.cause != "killed" and not first.is_consequence
    if first is not None and speaks:
        return Outcome(status_of(first.cause), first.reason, first.cause, first)
    if (outside := _by_scheduler(facts)) is not None:
        return outside
    if facts.is_cancelled:
        return Outcome("failed", "cancelled", "cancelled")
    silent = [rank for rank in missing if rank not in facts.stopped and all(rank != f.rank for f in facts.failures)]
    if first is not None and not (first.is_consequence and silent):
        return Outcome(status_of(first.cause), first.reason, first.cause, first)
    if not facts.has_begun:
        said = f": {facts.said[-1]}" if facts.said else ""
        return Outcome("failed", f"no rank was started{said}", "launch")
    if silent:
        why = "vanished without an exit status: it, or what watched it, was killed"
        return Outcome("failed", f"rank {silent[0]} {why}", "vanished")
    return Outcome("failed", "its ranks were stopped: who had started them was gone", "vanished")


def _by_scheduler(facts: Facts) -> Outcome | None:
    """How Slurm has ended it; None: it has not."""
    word = (facts.scheduler.split() or [""])[0].rstrip("+")
    if word in SCHEDULER:
        cause, reason = SCHEDULER[word]
        return Outcome(status_of(cause), f"{reason} ({facts.scheduler})", cause)
    line = next((line for line in facts.said if KILLED_FOR_MEMORY.search(line)), None)
    return None if line is None else Outcome("oom", f"killed for the memory that it took: {line}", "oom")
