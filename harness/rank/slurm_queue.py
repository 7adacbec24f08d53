"""Slurm jobs: their state by squeue and sacct, their logs, and their end by scancel."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.rank.failure import SCHEDULER
from harness.rank.job import ABSENT, BEHIND, SILENT, JobState, job_of

ASK_SECONDS = 30.0
"""Longest wait for an answer of Slurm."""
NOT_THERE, NO_ANSWER = 127, "no answer"
"""Exit status of `ask` without the command; how its text begins where there is no answer in time."""
BEHIND_SECONDS = 600.0
"""Longest delay of Slurm's accounting behind its queue; seconds are usual."""
DEFAULTS = re.compile("(SQUEUE|SACCT|SINFO|SCANCEL)_")
"""Variables with a user's options for Slurm's commands, such as SQUEUE_PARTITION, which hides jobs elsewhere."""
LOG_LINES = 20
LOG_LINE = re.compile(r"(slurmstepd|slurmd|srun)[\w.-]*: ", re.ASCII)
"""Beginning of a line by Slurm; some add the node's name."""

PENDING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT")
RUNNING = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
ENDED = ("COMPLETED", "FAILED", *SCHEDULER)
"""Slurm's states of jobs that are over; a state in none of the three lists is unknown, not an end."""

QUEUE_FIELDS = "JobArrayID:64,State:32,RestartCnt:16,Reason:64"
MOST_TASKS = 4_000_000
"""Largest array that Slurm supports."""
NO_SUCH_JOB = "Invalid job id specified"
NO_ACCOUNTING = ("accounting storage is disabled", "no sacct on this machine")
NO_CLUSTER = ("Could not establish a configuration source", "no squeue on this machine")
"""Messages of Slurm's commands and of `ask` on a machine that belongs to no cluster."""

_behind: dict[str, float] = {}
"""Times at which jobs were first missing from the queue while the accounting had no end of them."""


def states(numbers: Sequence[str]) -> dict[str, JobState]:
    """Return the states of these jobs; the queue has precedence over the accounting, which lags behind it."""
    if not numbers:
        return {}
    arrays = ",".join(sorted({number.partition("_")[0] for number in numbers}))
    # squeue fails if asked only for a job that it has forgotten, and leaves out such a job among several
    command = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={arrays}", f"--Format={QUEUE_FIELDS}"]
    queue = _ask(command, no_answer=(NO_SUCH_JOB, *NO_CLUSTER))
    if queue is None or queue in NO_CLUSTER:
        return dict.fromkeys(numbers, SILENT if queue is None else ABSENT)
    found = in_queue(queue)
    if gone := [number for number in numbers if number not in found]:
        fields = ["--noheader", "--parsable2", "--allocations", "--format=JobID,State"]
        accounts = _ask(["sacct", *fields, f"--jobs={arrays}"], no_answer=NO_ACCOUNTING)
        found |= dict.fromkeys(gone, SILENT) if accounts is None else _overtaken(in_accounts(accounts, gone))
    return {number: found[number] for number in numbers}


def _overtaken(found: dict[str, JobState]) -> dict[str, JobState]:
    """Replace states by an end if the accounting has been behind the queue for so long that it missed the end."""
    now = time.monotonic()
    for number, state in found.items():
        if state.name == "unknown" and now - _behind.setdefault(number, now) >= BEHIND_SECONDS:
            found[number] = JobState("ended")
    return found


def in_queue(text: str) -> dict[str, JobState]:
    """Return the states of jobs in the output of squeue, a line of QUEUE_FIELDS a job."""
    rows = [words for words in map(str.split, text.splitlines()) if len(words) >= 3]
    restarts = lambda word: int(word) if word.isdecimal() else None
    return {number: _state(word, restarts(count), " ".join(reason)) for number, word, count, *reason in rows}


def in_accounts(text: str, gone: Sequence[str]) -> dict[str, JobState]:
    """Return the states of jobs that have left the queue, from the output of sacct: `123_4|CANCELLED by 0` a job.

    They are over, also without a row; with a row of another state, the accounting lags behind: the state is unknown.
    A task that is cancelled before it starts is listed only as one of `123_[4-6,8%2]`.
    """
    rows: dict[str, str] = {}
    for number, word in (line.split("|")[:2] for line in text.splitlines() if "|" in line):
        array, _, tasks = number.partition("_[")
        rows |= {f"{array}_{task}": rows.get(f"{array}_{task}", word) for task in _tasks(tasks.partition("]")[0])}
        rows[number] = word
    arrays = {number.partition("_")[0] for number in rows}
    found = {}
    for number in gone:
        array, _, task = number.partition("_")
        never_started = "CANCELLED" if task and array in arrays else None
        state = _state(rows[number]) if number in rows else JobState("ended", never_started)
        found[number] = state if state.name == "ended" else BEHIND
    return found


def _tasks(text: str) -> Iterator[int]:
    """Yield the numbers in a list of tasks, such as 0-3,5%2."""
    for part in text.partition("%")[0].split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            yield from range(int(first), min(int(last or first), MOST_TASKS) + 1)


def _state(word: str, restarts: int | None = None, reason: str = "") -> JobState:
    kind = (word.split() or [""])[0].rstrip("+").upper()  # "CANCELLED by 0", or cut off: "CANCELLED+"
    if kind in ENDED:
        return JobState("ended", word, restarts)
    if kind in PENDING:
        return JobState("pending", word, restarts, "" if reason in ("None", "N/A") else reason)
    return JobState("running" if kind in RUNNING else "unknown", word, restarts)


def ask(*command: str) -> tuple[int, str]:
    """Return a command's exit status, and its output or, if it failed, the last line of its errors.

    The status is NOT_THERE where this machine has no such command.
    """
    own = {name: value for name, value in os.environ.items() if not DEFAULTS.match(name)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=ASK_SECONDS, env=own)
    except FileNotFoundError:
        return NOT_THERE, f"no {command[0]} on this machine"
    except (OSError, subprocess.SubprocessError):
        return 1, f"{NO_ANSWER} within {ASK_SECONDS:.0f} s"
    errors = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
    return done.returncode, errors[-1] if done.returncode else done.stdout


def _ask(command: list[str], no_answer: Sequence[str] = ()) -> str | None:
    """Return a command's output; one of `no_answer` if that is its message; None if it fails or takes too long."""
    status, answer = ask(*command)
    return next((text for text in no_answer if text in answer), None if status else answer)


def cancel(numbers: Sequence[str]) -> None:
    """Cancel these jobs; if Slurm does not answer, ranks that start later find the file STOP."""
    if numbers:
        _ask(["scancel", *numbers])


def log_lines(attempt: Path) -> list[str]:
    """Return the last lines that Slurm wrote into the logs of the attempt's job: on memory, limits, failed nodes."""
    logs = [log for log in _logs(attempt) if log.name.endswith("log.err")]
    lines = (line.rstrip() for log in logs for line in log.read_text(errors="replace").splitlines())
    return list(dict.fromkeys(filter(LOG_LINE.match, lines)))[-LOG_LINES:]


def forget(attempt: Path) -> None:
    """Remove the launcher's files of the attempt's job, which lie outside of the attempt's folder.

    Of an attempt whose submission was cut off, the folder goes without which what was submitted cannot start.
    """
    for folder in submissions(attempt).glob(f"{attempt.name}-*"):
        if not any(folder.glob("*_submitted.pkl")):
            shutil.rmtree(folder, ignore_errors=True)
    for path in _logs(attempt):
        path.unlink(missing_ok=True)
        if not any(path.parent.glob("*_submitted.pkl")):  # the last job of an array
            shutil.rmtree(path.parent, ignore_errors=True)


def _logs(attempt: Path) -> list[Path]:
    """Return the launcher's files of the attempt's job, below the folder of attempts only."""
    job = job_of(attempt)
    if job is None or not job.log or not job.log.isprintable():
        return []
    start = Path(job.log)
    if start.name != job.job or start.resolve().parent.parent != submissions(attempt).resolve():
        return []
    return sorted(start.parent.glob(f"{start.name}_*"))


def submissions(attempt: Path) -> Path:
    """Return the folder of Slurm's files for all attempts, with one folder for each submission."""
    return attempt.parent / ".submit"
