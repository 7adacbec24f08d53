"""State of the jobs of attempts, and how they are ended: processes of this machine and Slurm jobs alike."""

import contextlib
import functools
import signal
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import psutil

from harness.rank import slurm_queue
from harness.rank.job import ELSEWHERE, Job, JobState, job_of, stop
from harness.rank.slurm_queue import forget as forget

POLL_SECONDS = 0.25
ASK_AGAIN_SECONDS = 2.0
CANCEL_SECONDS = 10.0
"""Longest wait for cancelled jobs to end."""


def states(attempts: Sequence[Path]) -> dict[Path, JobState]:
    """Return the state of each attempt's job, without attempts that have none.

    However many there are, Slurm is asked once, and its accounting once for those that have left the queue.
    """
    found = _jobs(attempts)
    slurm = slurm_queue.states(sorted({job.job for job in found.values() if job.on == "slurm"}))
    commands = functools.cache(_commands)  # listed once, if at all
    return {a: slurm[job.job] if job.on == "slurm" else _local(a, job, commands) for a, job in found.items()}


def gpus_in_use(folder: Path) -> list[str]:
    """Return the GPUs used by live local jobs of the attempts in a folder, each as often as it is used."""
    found = {path: job for path, job in _jobs(folder.iterdir()).items() if job.gpus}
    return [gpu for path, state in states([*found]).items() if state.name == "running" for gpu in found[path].gpus]


def cancel(attempts: Sequence[Path]) -> None:
    """End the jobs of these attempts, and wait until they are gone, a few seconds at most."""
    for attempt in attempts:
        stop(attempt)
    jobs = _jobs(attempts)
    numbers = [job.job for job in jobs.values() if job.on == "slurm"]
    slurm_queue.cancel(numbers)
    for attempt, job in jobs.items():
        if job.on == "local" and job.host == socket.gethostname() and (launcher := _launcher(attempt.resolve(), job)):
            with contextlib.suppress(psutil.Error):
                launcher.send_signal(signal.SIGINT)
    end, pause = time.monotonic() + CANCEL_SECONDS, ASK_AGAIN_SECONDS if numbers else POLL_SECONDS
    while time.monotonic() < end and any(s.name in ("pending", "running") for s in states([*jobs]).values()):
        time.sleep(pause)


def _jobs(attempts: Iterable[Path]) -> dict[Path, Job]:
    return {attempt: job for attempt in attempts if (job := job_of(attempt)) is not None}


def _local(attempt: Path, job: Job, commands: Callable[[], list[list[str]]]) -> JobState:
    """Return the state of a process of this machine, and of ranks that run on without it."""
    folder = attempt.resolve()
    if _launcher(folder, job) is not None or any(_works_on(words, folder) for words in commands()):
        return JobState("running")  # under whatever name this machine has by now
    return JobState("ended") if job.host == socket.gethostname() else ELSEWHERE


def _launcher(attempt: Path, job: Job) -> psutil.Process | None:
    """Return the process that started the ranks, recognised by its arguments, as its number may be another's by now."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(int(job.job))
        if process.status() == psutil.STATUS_ZOMBIE:
            process.wait(timeout=0)  # no other code reads its exit status
        elif _works_on(process.cmdline(), attempt):
            return process
    return None


def _commands() -> list[list[str]]:
    """Return the arguments of all processes of this machine."""
    return [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]


def _works_on(words: list[str], attempt: Path) -> bool:
    """Return True if arguments are those of a Python module on an attempt's folder, not of an editor or `tail`."""
    return "-m" in words and any(word == str(attempt) or word.startswith(f"{attempt}/") for word in words)
