"""The job of an attempt, kept in its folder: a process of this machine that starts the ranks, or a Slurm job."""

import contextlib
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.rank.heartbeat import age
from harness.rank.json_files import read_as, write_as
from harness.records.attempts import JOB as JOB

Where = Literal["local", "slurm"]
"""Where ranks run: processes of this machine, or a Slurm job."""
STOP = "stop"
"""Name of a file in an attempt's folder that ends its ranks, also where signals are ignored."""
SUBMIT_SECONDS = 60.0
"""Age of an attempt below which its job may still be on the way."""
NUMBERS: dict[Where, str] = {"local": r"[1-9]\d{0,9}", "slurm": r"[1-9]\d*(_\d+)?"}
"""Patterns of job numbers; they become arguments of scancel."""


@dataclass(frozen=True)
class Job:
    """Job of an attempt."""

    on: Where
    job: str
    """Number of the process, or of the Slurm job: 123, or 123_4 in an array."""
    host: str
    submitted: float
    seconds: float = 0.0
    """Longest duration that the scheduler allows."""
    log: str = ""
    """Path, up to the task's number, of the launcher's and scheduler's logs; "" if there are none."""
    gpus: tuple[str, ...] = ()
    """Names of the GPUs used by the ranks of a local job."""


@dataclass(frozen=True)
class JobState:
    """State of a job; `unknown` if there is no answer, which does not mean that the job has ended."""

    name: Literal["pending", "running", "ended", "unknown"]
    scheduler: str | None = None
    """State in Slurm's words: COMPLETED, TIMEOUT, PREEMPTED, CANCELLED by 0, ..."""
    restarts: int | None = None
    reason: str = ""
    """Why a job is pending, in Slurm's words, or why its state is unknown."""


SILENT = JobState("unknown", reason="Slurm does not answer")
ABSENT = JobState("unknown", reason="this machine has no Slurm")
BEHIND = JobState("unknown", reason="it has left Slurm's queue, and its end is not in the accounting yet")
ELSEWHERE = JobState("unknown", reason="its processes are another machine's")


def keep(attempt: Path, on: Where, job: str, seconds: float = 0.0, log: str = "", *, gpus: Sequence[str] = ()) -> None:
    """Write the job of an attempt into its folder."""
    write_as(attempt / JOB, Job(on, job, socket.gethostname(), time.time(), seconds, log, tuple(gpus)))


def job_of(attempt: Path) -> Job | None:
    """Return the job of an attempt; None if it has none, or its file describes none."""
    job = read_as(Job, attempt / JOB)
    return job if job is not None and re.fullmatch(NUMBERS[job.on], job.job, re.ASCII) else None


def is_unreadable(attempt: Path) -> bool:
    """Return True if an attempt has a file of its job that stays unreadable for longer than a submission takes."""
    with contextlib.suppress(OSError):
        return age(attempt / JOB) > SUBMIT_SECONDS and job_of(attempt) is None
    return False


def adopt(attempt: Path, on: Where, job: str, gpus: Sequence[str] = ()) -> bool:
    """Return True if an attempt is this job's; called in a job, whose submitter may have died before writing it."""
    found = job_of(attempt)
    if found is None:
        keep(attempt, on, job, gpus=gpus)
        return True
    return (found.on, found.job) == (on, job)


def stop(attempt: Path) -> None:
    """Have the ranks of an attempt end, also those that start later; an attempt of another user is left alone."""
    with contextlib.suppress(OSError):
        (attempt / STOP).touch()
