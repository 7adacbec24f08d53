"""Outcome of an attempt, decided from facts: how ranks ended, the failures they wrote, and Slurm's state of the job."""

import os
import re
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Literal, NamedTuple

from harness.rank.heartbeat import read_alive
from harness.rank.json_files import read_as, write_as

Cause = Literal[
    "", "error", "oom", "killed", "vanished", "node_failure", "preempted", "time_limit", "hang", "cancelled", "launch",
    "disk",
]  # fmt: skip
"""Why a run ended; "": by itself; error: a rank raised; killed: by a signal from outside; vanished: a rank or its
supervisor left no exit status; launch: the ranks never found each other; disk: a file could not be written."""
RETRIED: frozenset[Cause] = frozenset({"killed", "vanished", "node_failure", "preempted", "launch"})
"""Faults of machines, which another attempt may not meet: the harness tries again by itself."""
AGAIN = RETRIED | frozenset[Cause]({"hang", "cancelled", "time_limit", "disk"})
"""Causes after which the next command runs the point again; after the others it would end in the same way."""
STATUSES = {"": "ok", "oom": "oom", "time_limit": "timeout", "hang": "timeout"}
"""Statuses of a record by cause; "failed" for all others."""

OUT_OF_MEMORY = re.compile(
    r"out of memory|can('|no)t allocate memory|not enough memory|failed to cuda calloc|STATUS_ALLOC_FAILED", re.I
)
BROKEN = re.compile(r"uncorrectable (ecc|nvlink) error|or a hardware error", re.I)
"""Messages of CUDA and HIP about a GPU that is at fault itself."""
DISK = re.compile(
    r"no space left on device|disk quota exceeded|file too large|read-only file system|stale file handle"
    r"|input/output error|permission denied|PytorchStreamWriter failed",
    re.I,
)
TIMED_OUT = re.compile(
    r"timed out (waiting|connecting)|before timing out|wait timeout after|timeout waiting for|connect timeout"
    r"|watchdog caught collective",
    re.I,
)
"""Messages of gloo, NCCL and the ranks' store about a collective that took too long."""
CONSEQUENCE = re.compile(
    r"closed by peer|reset by peer|broken pipe|remote process exited|network error|connection (refused|was closed)"
    r"|failed to recv|socket (timeout|closed)|communicator was aborted|unhandled system error|connectFullMesh failed",
    re.I,
)
"""Messages of a rank whose neighbour is gone."""
KILLED_FOR_MEMORY = re.compile(r"exceeded (job |step )?memory limit|oom[-_ ]?kill|out[-_ ]of[-_ ]memory", re.I)
"""Messages of Slurm in a job's log, whatever state it then gives the job."""

CRASHES = {Signals.SIGSEGV, Signals.SIGABRT, Signals.SIGBUS, Signals.SIGFPE, Signals.SIGILL, Signals.SIGTRAP}
"""Signals that a program causes by itself."""

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

LOG_LINES, LOG_BYTES = 60, 2**16
"""Length of the end of a rank's log that is kept; NCCL's watchdog writes some 30 lines after the one that says why."""


@dataclass(frozen=True)
class Failure:
    """Failure of a rank, written by the rank or its supervisor."""

    rank: int
    cause: Cause
    reason: str
    time: float
    log: tuple[str, ...] = ()
    restart: int = 0
    """Number of earlier starts of the job."""

    @classmethod
    def of_rank(cls, attempt: Path, rank: int) -> "Failure | None":
        """Return the failure of a rank; None if there is none."""
        return read_as(cls, attempt / f"rank-{rank}.failure.json")

    @property
    def is_consequence(self) -> bool:
        """True if the reason is only that another rank was gone."""
        return self.cause == "error" and bool(CONSEQUENCE.search(self.reason))


def fail(attempt: Path, rank: int, cause: Cause, reason: str) -> None:
    """Write the failure of a rank with the end of its log; on a full disk it may be lost."""
    before = read_alive(attempt, rank)
    restart = before.restart if before is not None else 0
    try:
        failure = Failure(rank, cause, reason, time.time(), tuple(last_lines(attempt, rank)), restart)
        write_as(attempt / f"rank-{rank}.failure.json", failure)
    except OSError as error:
        print(f"rank {rank}: {reason}; this could not be written down: {error}", file=sys.stderr)


def last_lines(attempt: Path, rank: int) -> list[str]:
    """Return the end of a rank's log."""
    return end_of(attempt / f"rank-{rank}.log", LOG_BYTES).splitlines()[-LOG_LINES:]


def end_of(path: Path, most: int) -> str:
    """Return at most this many bytes at the end of a file as text; "" if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - most))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def one_line(error: BaseException) -> str:
    """Return an exception's type and first line, with NCCL's own reason, which is further below."""
    parts = str(error).strip().split("\nLast error:\n", 1)
    return ": ".join([type(error).__name__, *(part.partition("\n")[0] for part in parts)])


def cause_of(error: str) -> Cause:
    """Return why a rank raised, from the name and the text of its exception."""
    if BROKEN.search(error):
        return "node_failure"
    if OUT_OF_MEMORY.search(error) or error.startswith(("MemoryError", "OutOfMemoryError")):
        return "oom"
    if DISK.search(error):
        return "disk"
    return "hang" if TIMED_OUT.search(error) else "error"


def of_exit(rank: int, code: int, log: Sequence[str], *, has_begun: bool, memory_kills: int = 0) -> tuple[Cause, str]:
    """Return why a rank ended that wrote no failure: the cause, and the reason in words.

    Args:
        code: exit status, or minus the number of a signal.
        log: end of the rank's log.
        has_begun: True if the rank executed any of the project's code.
        memory_kills: number of processes that the system has killed meanwhile for the memory that they took.
    """
    if code >= 0 and (line := next(filter(DISK.search, reversed(log)), None)) is not None:
        return "disk", f"rank {rank} exited with status {code}: {line.strip()}"
    if code >= 0:
        return ("error" if has_begun else "launch"), f"rank {rank} exited with status {code}"
    killed = f"rank {rank} was killed by {signal_name(-code)}"
    if -code == Signals.SIGKILL and memory_kills:
        return "oom", f"{killed}: out of memory"
    if -code not in CRASHES:
        return "killed", killed
    # NCCL's watchdog says why it ends a rank
    line = next((line for line in log if cause_of(line) != "error"), "")
    return cause_of(line), f"{killed}: {line.strip()}" if line else killed


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL."""
    return Signals(number).name if number in set(Signals) else f"signal {number}"


def first_failure(failures: Collection[Failure]) -> Failure | None:
    """Return the failure that caused the others: a rank that was killed, else the earliest.

    A rank that dies breaks its neighbours' collectives, and a neighbour may write its failure first; hosts' clocks
    differ, too. So a failure that follows from another rank's end comes last.
    """

    def order(failure: Failure) -> tuple[int, float]:
        is_victim = failure.cause in ("killed", "oom") and "was killed by" in failure.reason
        return (0 if is_victim else 2 if failure.is_consequence else 1), failure.time

    return min(failures, key=order, default=None)


class Outcome(NamedTuple):
    """Outcome of a run for its record."""

    status: str
    reason: str | None
    cause: Cause
    failure: Failure | None = None
    """Failure whose log is kept in the record."""


def decide(
    *,
    ranks: int,
    results: Mapping[int, tuple[str, str | None]],
    failures: Collection[Failure] = (),
    stopped: Collection[int] = (),
    has_begun: bool = True,
    scheduler: str = "",
    slurm_log: Sequence[str] = (),
    is_cancelled: bool = False,
) -> Outcome:
    """Return the outcome of an attempt from facts about its last start.

    A rank's own failure counts first, unless it only shows that the rank was ended from outside; then Slurm's state of
    the job; then what is missing.

    Args:
        results: status and reason of each rank that came to its end.
        stopped: ranks that were stopped in good order, as another had failed or their result was not needed any more.
        has_begun: True if any rank has left a file.
        scheduler: state of the job in Slurm's words.
        slurm_log: Slurm's last lines in the job's log.
    """
    first = first_failure(failures)
    missing = [rank for rank in range(ranks) if rank not in results]
    if first is None and not missing:
        status, reason = results[0]
        return Outcome(status, reason, "" if status in ("ok", "nan") else "error")
    if first is not None and first.cause != "killed" and not first.is_consequence:
        return _failed(first.cause, first.reason, first)
    word = (scheduler.split() or [""])[0].rstrip("+")
    if word in SCHEDULER:
        cause, reason = SCHEDULER[word]
        return _failed(cause, f"{reason} ({scheduler})")
    if (line := next(filter(KILLED_FOR_MEMORY.search, slurm_log), None)) is not None:
        return _failed("oom", f"killed for the memory that it took: {line}")
    if is_cancelled:
        return _failed("cancelled", "cancelled")
    silent = [rank for rank in missing if rank not in stopped and all(rank != f.rank for f in failures)]
    if first is not None and not (first.is_consequence and silent):
        return _failed(first.cause, first.reason, first)
    if not has_begun:
        return _failed("launch", "no rank was started" + (f": {slurm_log[-1]}" if slurm_log else ""))
    if silent:
        return _failed("vanished", f"rank {silent[0]} vanished without an exit status: it or its supervisor was killed")
    return _failed("vanished", "its ranks were stopped, since the process that started them was gone")


def _failed(cause: Cause, reason: str, failure: Failure | None = None) -> Outcome:
    return Outcome(STATUSES.get(cause, "failed"), reason, cause, failure)
