"""Decision on what a point of a sweep needs next, from the files on disk and the scheduler's answers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from harness.launch.flags import Trying
from harness.rank.collect import document_of
from harness.rank.failure import AGAIN, RETRIED
from harness.rank.heartbeat import has_news, is_alive, last_start
from harness.rank.job import ABSENT, BEHIND, JOB, STOP, JobState, is_unreadable, job_of
from harness.rank.orders import UnreadableError
from harness.rank.results import has_results
from harness.rank.slurm_queue import log_lines
from harness.records.parts import Head
from harness.records.record import Record
from harness.records.store import FINISHED, Document
from impl.own_code import hashes

LIFE_SECONDS = 60.0
"""Longest time without a sign of life from live ranks, which write one every few seconds."""
QUIET_SECONDS = 300.0
"""Time without a sign of life after which ranks are dead though Slurm says they run: a file system returns sooner."""
Todo = Literal["leave", "wait", "harvest", "tidy", "start"]
"""Nothing; wait for its job; write the record of a job that has ended; remove what a finished run left; run it."""
AttemptState = Literal["live", "ended"]


def decide(
    record: Head | None,
    attempt: AttemptState | None,
    trying: Trying,
    *,
    is_fresh: bool = False,
    is_same_code: bool = False,
    starts: int = 0,
) -> Todo:
    """Return what a point needs next.

    After a failure of the infrastructure it is tried again at once, up to the retries of one command; what a person or
    a limit ended is run by the next command; what the code itself caused (an error, too little memory), once the code
    has changed.

    Args:
        record: record of the point.
        attempt: state of its attempts that were submitted and have no record yet.
        is_fresh: True if the record is of this command, not of an earlier one.
        is_same_code: True if the record was made by the very code that would run now.
        starts: number of starts in this command, by this harness.
    """
    if record is not None and record.status in FINISHED:
        return "tidy" if attempt == "ended" else "leave"
    if attempt is not None:
        return "wait" if attempt == "live" else "harvest"
    if record is None:
        return "start" if starts <= trying.retries else "leave"
    if is_fresh:
        return "start" if record.cause in RETRIED and max(len(record.tries), starts - 1) < trying.retries else "leave"
    is_open = record.status == "invalid" or record.cause is None or record.cause in AGAIN
    return "start" if is_open or trying.retry == "all" or not is_same_code else "leave"


def is_same_code(record: Record, environment: Document) -> bool:
    """Return True if a record was made by the code of this environment and the user's own; False if not known."""
    here, made_by = environment.get("git"), record.environment.git
    if not here or made_by is None or (record.environment.own_code or {}) != hashes(record.run):
        return False
    return (made_by.commit, made_by.diff_sha256) == (here["commit"], here.get("diff_sha256"))


def attempt_state(attempt: Path, states: Mapping[Path, JobState]) -> AttemptState:
    """Return whether an attempt goes on, as far as is known; results of all its ranks end it, a silent Slurm does not.

    A job whose end a killed controller of Slurm has forgotten runs or waits in its queue until the job's time is over
    (`is_forgotten`), or is missing there and runs in the accounting: it is over once ranks that have started give no
    sign of life.
    An attempt whose ranks are another machine's processes is over, as it is only looked at under a claim. One without
    a scheduler that answers for it (none here, its job unreadable, or it was to be stopped) is over once it gives no
    sign of life.
    """
    state = states.get(attempt)
    if state is None:  # submitted since the scheduler was asked, or its job cannot be read
        return "ended" if is_unreadable(attempt) and not is_alive(attempt, LIFE_SECONDS) else "live"
    if state.name != "unknown":
        return "ended" if state.name == "ended" or is_forgotten(attempt, state) else "live"
    if is_local(attempt) or has_results(attempt):
        return "ended"
    if state == BEHIND and any(attempt.glob("rank-*.json")) and not has_news(attempt, LIFE_SECONDS):
        return "ended"
    is_given_up = state == ABSENT or (attempt / STOP).exists()  # ranks that start later find that file
    return "ended" if is_given_up and not is_alive(attempt, LIFE_SECONDS) else "live"


def is_forgotten(attempt: Path, state: JobState | None) -> bool:
    """Return True if a job is over that seems to go on: no rank gives a sign of life, and all results are there.

    Without all results one in Slurm's queue is over once the ranks of its last start have been silent for
    QUIET_SECONDS. Of a process of this machine, a signal may have stopped it as its ranks ended.
    """
    if state is None or state.name not in ("pending", "running") or has_news(attempt, LIFE_SECONDS):
        return False
    if has_results(attempt):
        return True
    is_last = state.restarts is not None and state.restarts == last_start(attempt)
    return state.name == "running" and is_last and not has_news(attempt, QUIET_SECONDS)


def document_of_attempt(attempt: Path, state: JobState | None, run_id: str, *, is_mine: bool) -> Document | None:
    """Return the record of an ended attempt; None if another harness (`is_mine`: this one) was killed with its ranks.

    Raises:
        UnreadableError: its files make no record, or leave its outcome open.
    """
    scheduler = (state.scheduler if state is not None else None) or ""
    document = document_of(attempt, run_id, scheduler=scheduler, slurm_log=log_lines(attempt))
    if document["cause"] in ("vanished", "launch"):
        if is_local(attempt):
            return document if is_mine else None
        if state in (None, ABSENT):
            raise UnreadableError(waits_for([attempt], {attempt: state} if state else {}))
    return document


def waits_for(attempts: Sequence[Path], states: Mapping[Path, JobState]) -> str:
    """Return which jobs do not run and why, in one line, those with the same reason together."""
    reasons: dict[str, list[str]] = {}
    for attempt in attempts:
        state, job = states.get(attempt), job_of(attempt)
        if state is None or job is None:
            reasons.setdefault(f"{JOB} describes no job", []).append(str(attempt))
        elif state.name in ("pending", "unknown"):
            reasons.setdefault(state.reason or state.name, []).append(f"job {job.job} in {attempt}")
    named = (f"{why}: {which[0]}" + f" and {len(which) - 1} more" * (len(which) > 1) for why, which in reasons.items())
    return "; ".join(named)


def is_local(attempt: Path) -> bool:
    """Return True if an attempt's ranks are processes of a machine, not of a Slurm job."""
    job = job_of(attempt)
    return job is not None and job.on == "local"


def state_word(head: Head | None, attempts: Sequence[Path], states: Mapping[Path, JobState]) -> str:
    """Return the state of a point in a word: of its record, or of its job, if that is newer."""
    if head is not None and (head.status in FINISHED or not attempts):
        return head.status
    names = {states[attempt].name if attempt in states else "unknown" for attempt in attempts}
    return next((name for name in ("running", "pending", "unknown", "ended") if name in names), "missing")
