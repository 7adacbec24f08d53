"""The job of each try at a run, kept on disk, so that whoever comes back finds out what became of it.

A job is what `Site.submit` started: a process that starts the ranks on this machine, or a Slurm job.
"""

import contextlib
import functools
import json
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil

from harness.records.store import read_json, write_atomically

Where = Literal["local", "slurm"]
STOP = "stop"
"""A file of this name in an attempt's folder ends its ranks: a signal may be ignored where the sweep was started."""
JOB = "job.json"
ASK_SECONDS = 30.0
"""How long a scheduler may take to answer; what it has not said by then is unknown."""
BEHIND_SECONDS = 600.0
"""How long a scheduler's accounts may be behind its queue; it takes seconds."""
SUBMIT_SECONDS = 60.0
"""An attempt that is younger may still be on its way to a job."""
LIFE_SECONDS = 60.0
"""Ranks that told something within this time are alive; they do so every few seconds."""
POLL_SECONDS = 0.25
ASK_AGAIN_SECONDS = 2.0
NUMBERS: dict[Where, str] = {"local": r"[1-9]\d{0,9}", "slurm": r"[1-9]\d*(_\d+)?"}
"""They become arguments of scancel: nothing but a number may get there."""
SAID_LINES = 20
SAYS = re.compile(r"(slurmstepd|slurmd|srun)[\w.-]*: ", re.ASCII)
"""How a line of Slurm's begins; some add the node's name."""

WAITING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT")
AT_WORK = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
OVER = (
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "DEADLINE", "PREEMPTED"),
    *("NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL"),
)
"""Slurm's words for what is over; one that nobody here has heard of is not taken for the end."""

QUEUE_FIELDS = "JobArrayID:64,State:32,RestartCnt:16,Reason:64"
MOST_TASKS = 4_000_000
"""No array of Slurm has more."""
NO_SUCH_JOB = "Invalid job id specified"
NO_ACCOUNTING = "accounting storage is disabled"
NO_CLUSTER = "Could not establish a configuration source"
"""What Slurm's commands say on a machine that belongs to no cluster."""


@dataclass(frozen=True)
class JobState:
    """How a job is doing; `unknown` where nobody who knows has answered, which says nothing about the job."""

    name: Literal["pending", "running", "ended", "unknown"]
    scheduler: str | None = None
    """The scheduler's own word: COMPLETED, TIMEOUT, PREEMPTED, CANCELLED by 0, ..."""
    restarts: int | None = None
    reason: str = ""
    """Why a job is pending, in the scheduler's word, or why its state is unknown."""


SILENT = JobState("unknown", reason="Slurm does not answer")
ABSENT = JobState("unknown", reason="this machine has no Slurm")
BEHIND = JobState("unknown", reason="it has left Slurm's queue, and its accounts do not say how it ended")
ELSEWHERE = JobState("unknown", reason="its processes are another machine's")


@dataclass(frozen=True)
class Job:
    """The job of an attempt, as its folder keeps it."""

    on: Where
    job: str
    """Number of the process, or of the Slurm job: 123, or 123_4 in an array."""
    host: str
    submitted: float
    seconds: float = 0.0
    """How long the scheduler lets it run."""
    log: str = ""
    """Path, up to the task's number, of what the launcher and the scheduler wrote about it; "": nobody keeps that."""
    gpus: tuple[str, ...] = ()
    """Names of the GPUs that the ranks of a local job use."""


def keep(attempt: Path, on: Where, job: str, seconds: float = 0.0, log: str = "", *, gpus: Sequence[str] = ()) -> None:
    """Write down the job of an attempt."""
    found = Job(on, job, socket.gethostname(), time.time(), seconds, log, tuple(gpus))
    write_atomically(attempt / JOB, json.dumps(asdict(found)))


def job_of(attempt: Path) -> Job | None:
    """The job of an attempt; None: it has none, or what is there describes none."""
    found = read_json(attempt / JOB)
    if not isinstance(found, dict):
        return None
    told, job, host = found.get("on"), found.get("job"), found.get("host")
    on: Where | None = "local" if told == "local" else "slurm" if told == "slurm" else None
    if on is None or not isinstance(job, str) or not re.fullmatch(NUMBERS[on], job, re.ASCII):
        return None
    submitted, seconds, log = found.get("submitted"), found.get("seconds", 0.0), found.get("log", "")
    if not isinstance(host, str) or not isinstance(submitted, int | float) or not isinstance(seconds, int | float):
        return None
    log = log if isinstance(log, str) and log.isprintable() else ""
    gpus = tuple(map(str, found["gpus"])) if isinstance(found.get("gpus"), list) else ()
    return Job(on, job, host, submitted, seconds, log, gpus)


def is_unreadable(attempt: Path) -> bool:
    """Whether a file says which job an attempt has, and has not been readable for longer than a submission takes."""
    try:
        age = time.time() - (attempt / JOB).stat().st_mtime
    except OSError:
        return False
    return age > SUBMIT_SECONDS and job_of(attempt) is None


def adopt(attempt: Path, on: Where, job: str, gpus: Sequence[str] = ()) -> bool:
    """Called in a job: whether the attempt is this job's. Where its driver died before it wrote that down, it is."""
    found = job_of(attempt)
    if found is None:
        keep(attempt, on, job, gpus=gpus)
        return True
    return (found.on, found.job) == (on, job)


def gpus_in_use(folder: Path) -> list[str]:
    """GPUs of this machine that live local jobs of the attempts in a folder use, once for each job."""
    found = {path: job for path in folder.iterdir() if (job := job_of(path)) is not None and job.gpus}
    live = {path for path, state in states(list(found)).items() if state.name == "running"}
    return [gpu for path in live for gpu in found[path].gpus]


# What became of them ------------------------------------------------------------------------------------------------


def states(attempts: Sequence[Path]) -> dict[Path, JobState]:
    """How the job of each attempt is doing; attempts that have none are left out.

    However many there are, the scheduler is asked once, and its accounting once for those it has forgotten.
    """
    found = {attempt: job for attempt in attempts if (job := job_of(attempt)) is not None}
    slurm = slurm_states(sorted({job.job for job in found.values() if job.on == "slurm"}))
    commands = functools.cache(_commands)  # looked at once, if at all
    return {a: slurm[job.job] if job.on == "slurm" else _local(a, job, commands) for a, job in found.items()}


def _local(attempt: Path, job: Job, commands: Callable[[], list[list[str]]]) -> JobState:
    """Of processes on this machine; those of another are unknown."""
    if job.host != socket.gethostname():
        return ELSEWHERE
    return JobState("running" if _runs(attempt.resolve(), int(job.job), commands) else "ended")


def _runs(attempt: Path, number: int, commands: Callable[[], list[list[str]]]) -> bool:
    """Whether the process, or a rank that has outlived it, works on this attempt.

    By what it was told, not by its number alone, which another process has after a while.
    """
    try:
        process = psutil.Process(number)
        if process.status() == psutil.STATUS_ZOMBIE:
            process.wait(timeout=0)  # its end is read by nobody else
        elif _works_on(process.cmdline(), attempt):
            return True
    except psutil.Error:
        pass
    return any(_works_on(words, attempt) for words in commands())


def _commands() -> list[list[str]]:
    """What the processes of this machine were told that run a Python module."""
    found = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
    return [words for words in found if "-m" in words]


def _works_on(words: list[str], attempt: Path) -> bool:
    """Whether a command line runs a Python module on a folder of the attempt: neither an editor nor `tail` does."""
    return "-m" in words and any(word == str(attempt) or word.startswith(f"{attempt}/") for word in words)


def slurm_states(numbers: Sequence[str]) -> dict[str, JobState]:
    """How these Slurm jobs are doing; the queue's word goes before the accounting's, which is behind."""
    if not numbers:
        return {}
    arrays = ",".join(sorted({number.partition("_")[0] for number in numbers}))
    # of one job alone that it has forgotten, squeue makes an error; of one among several, nothing
    asked = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={arrays}", f"--Format={QUEUE_FIELDS}"]
    queue = _ask(asked, no_answer=(NO_SUCH_JOB, NO_CLUSTER))
    if queue in (None, NO_CLUSTER):
        return dict.fromkeys(numbers, SILENT if queue is None and shutil.which("squeue") else ABSENT)
    found = in_queue(queue)
    gone = [number for number in numbers if number not in found]
    if gone:
        fields = ["--noheader", "--parsable2", "--allocations", "--format=JobID,State"]
        accounts = _ask(["sacct", *fields, f"--jobs={arrays}"], no_answer=(NO_ACCOUNTING,))
        found |= dict.fromkeys(gone, SILENT) if accounts is None else _overtaken(in_accounts(accounts, gone))
    return {number: found[number] for number in numbers}


def _overtaken(found: dict[str, JobState]) -> dict[str, JobState]:
    """Accounts that stay behind the queue have missed the job's end, and never learn of it."""
    now = time.monotonic()
    for number, state in found.items():
        if state.name == "unknown" and now - _behind.setdefault(number, now) >= BEHIND_SECONDS:
            found[number] = JobState("ended")
    return found


_behind: dict[str, float] = {}
"""Jobs that had left the queue while the accounts did not know it, and since when."""


def in_queue(text: str) -> dict[str, JobState]:
    """What squeue says, a line of QUEUE_FIELDS a job."""
    found = {}
    for words in map(str.split, text.splitlines()):
        if len(words) >= 3:
            restarts = int(words[2]) if words[2].isdecimal() else None
            found[words[0]] = _state(words[1], restarts, " ".join(words[3:]))
    return found


def in_accounts(text: str, gone: Sequence[str]) -> dict[str, JobState]:
    """What sacct says, `123_4|CANCELLED by 0` a job, of jobs that are not in the queue.

    They are over, whether the accounts know how or not, but where those say otherwise they are behind the queue:
    unknown. A task that is cancelled before it starts is in no list, unless as one of `123_[4-6,8%2]`.
    """
    rows: dict[str, str] = {}
    for number, word in (line.split("|")[:2] for line in text.splitlines() if "|" in line):
        array, _, tasks = number.partition("_[")
        for task in _tasks(tasks.partition("]")[0]):
            rows.setdefault(f"{array}_{task}", word)
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
    """The numbers in a list of tasks, such as 0-3,5%2."""
    for part in text.partition("%")[0].split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            yield from range(int(first), min(int(last or first), MOST_TASKS) + 1)


def _state(word: str, restarts: int | None = None, reason: str = "") -> JobState:
    kind = (word.split() or [""])[0].rstrip("+").upper()  # "CANCELLED by 0", or cut off: "CANCELLED+"
    if kind in OVER:
        return JobState("ended", word, restarts)
    if kind in WAITING:
        return JobState("pending", word, restarts, "" if reason in ("None", "N/A") else reason)
    return JobState("running" if kind in AT_WORK else "unknown", word, restarts)


def _ask(command: list[str], no_answer: Sequence[str] = ()) -> str | None:
    """What a scheduler's command answers; one of `no_answer` where it says that; None: it fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=ASK_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return None
    said = next((text for text in no_answer if text in done.stdout + done.stderr), None)
    return said if said is not None else None if done.returncode else done.stdout


# Ending and forgetting them -----------------------------------------------------------------------------------------


def cancel(attempts: Sequence[Path], wait_seconds: float = 10.0) -> None:
    """End the jobs of these attempts, and wait until they are gone, a few seconds at most."""
    for attempt in attempts:
        stop(attempt)
    jobs = {attempt: job for attempt in attempts if (job := job_of(attempt)) is not None}
    numbers = [job.job for job in jobs.values() if job.on == "slurm"]
    if numbers:
        _ask(["scancel", *numbers])  # should it not answer: ranks that start find the file
    for attempt, job in jobs.items():
        if job.on == "local" and job.host == socket.gethostname():
            _interrupt(attempt.resolve(), int(job.job))
    _wait(lambda: _still(states(list(jobs)).values()), wait_seconds, ASK_AGAIN_SECONDS if numbers else POLL_SECONDS)


def stop(attempt: Path) -> None:
    """Have the ranks of an attempt end, also those that start later; another user's go on."""
    with contextlib.suppress(OSError):
        (attempt / STOP).touch()


def _interrupt(attempt: Path, number: int) -> None:
    try:
        process = psutil.Process(number)
        if _works_on(process.cmdline(), attempt):
            process.send_signal(signal.SIGINT)
    except psutil.Error:
        pass


def _still(found: Iterable[JobState]) -> bool:
    return any(state.name in ("pending", "running") for state in found)


def _wait(condition: Callable[[], bool], seconds: float, pause: float) -> None:
    """Wait as long as the condition holds, and no longer than this."""
    end = time.monotonic() + seconds
    while condition() and time.monotonic() < end:
        time.sleep(pause)


def said(attempt: Path) -> list[str]:
    """The last lines that Slurm wrote into the logs of the attempt's job: of memory, limits, nodes that failed."""
    lines = [
        line.strip()
        for log in _logs(attempt)
        if log.name.endswith("log.err")
        for line in log.read_text(errors="replace").splitlines()
        if SAYS.match(line)
    ]
    return list(dict.fromkeys(lines))[-SAID_LINES:]


def forget(attempt: Path) -> None:
    """Remove what the launcher keeps of the attempt's job outside of the attempt."""
    for path in _logs(attempt):
        path.unlink(missing_ok=True)
        if not any(path.parent.glob("*_submitted.pkl")):  # the last one of an array
            shutil.rmtree(path.parent, ignore_errors=True)


def _logs(attempt: Path) -> list[Path]:
    """The launcher's files of the attempt's job, below the folder of attempts and nowhere else."""
    job = job_of(attempt)
    if job is None or not job.log:
        return []
    start = Path(job.log)
    if start.name != job.job or start.resolve().parent.parent != submissions(attempt).resolve():
        return []
    return sorted(start.parent.glob(f"{start.name}_*"))


def submissions(attempt: Path) -> Path:
    """Where what is submitted together with an attempt lies, beside the attempts: a folder for each submission."""
    return attempt.parent / ".submit"
