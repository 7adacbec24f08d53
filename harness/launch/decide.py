"""What a point of a sweep needs next, decided from what lies on the disk and what the scheduler says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harness.launch.flags import Retry
from harness.rank.collect import UnreadableError, document_of, has_results
from harness.rank.failure import AGAIN, RETRIED
from harness.rank.heartbeat import has_told
from harness.rank.jobs import ABSENT, JOB, LIFE_SECONDS, STOP, JobState, is_unreadable, job_of
from harness.records.record import Head, Record
from harness.records.store import FINISHED, Document

Todo = Literal["leave", "wait", "harvest", "tidy", "start"]
"""Nothing; wait for its job; write the record of a job that has ended; remove what a finished run left; run it."""
AttemptState = Literal["live", "ended"]


@dataclass(frozen=True)
class Facts:
    """What is known of a point."""

    status: str | None = None
    """Of its record; None: it has none."""
    cause: str | None = None
    """None: a record older than causes."""
    tries: int = 0
    """That went before the record's, in one command."""
    is_fresh: bool = False
    """The record is of this command, not of an earlier one."""
    is_same_code: bool = False
    """The record was made by the very code that would run now."""
    attempt: AttemptState | None = None
    """Of a try that was submitted and has no record yet."""
    starts: int = 0
    """In this command, by this harness."""


def decide(facts: Facts, retries: int = 0, retry: Retry = "again") -> Todo:
    """What the point needs next.

    Infrastructure that failed is tried again at once, `retries` times in one command; what a person or a limit ended,
    by the next command; what the code itself did (an error, too little memory), once the code has changed.
    """
    if facts.status in FINISHED:
        return "tidy" if facts.attempt == "ended" else "leave"
    if facts.attempt is not None:
        return "wait" if facts.attempt == "live" else "harvest"
    if facts.status is None:
        return "start" if facts.starts <= retries else "leave"
    if facts.is_fresh:
        return "start" if facts.cause in RETRIED and max(facts.tries, facts.starts - 1) < retries else "leave"
    is_open = facts.status == "invalid" or facts.cause is None or facts.cause in AGAIN
    return "start" if is_open or retry == "all" or not facts.is_same_code else "leave"


def is_same_code(record: Record, environment: Mapping[str, Any]) -> bool:
    """Whether a record was made by the code of this environment; False where it is not known."""
    here, git = _commit(environment), record.environment.git
    return here is not None and git is not None and (git.commit, git.diff_sha256) == here


def _commit(environment: Any) -> tuple[str, str | None] | None:
    git = environment.get("git") if isinstance(environment, Mapping) else None
    if not isinstance(git, Mapping) or not isinstance(git.get("commit"), str):
        return None
    return git["commit"], git.get("diff_sha256")


def attempt_state(attempt: Path, states: Mapping[Path, JobState]) -> AttemptState:
    """Whether somebody works on an attempt, as far as is known: a scheduler that says nothing has not ended it, but
    results of all its ranks have.

    One that ranks of another machine work on is over as soon as nobody claims the point. One that no scheduler speaks
    for, since it has none here, its job cannot be read, or it was to be stopped, is over without a sign of life.
    """
    state = states.get(attempt)
    if state is None:  # submitted since the scheduler was asked, or its job cannot be read
        return "ended" if is_unreadable(attempt) and not has_told(attempt, LIFE_SECONDS) else "live"
    if state.name != "unknown":
        return "ended" if state.name == "ended" else "live"
    if is_local(attempt) or has_results(attempt):
        return "ended"
    is_given_up = state == ABSENT or (attempt / STOP).exists()  # ranks that start later find that file
    return "ended" if is_given_up and not has_told(attempt, LIFE_SECONDS) else "live"


def document_of_try(attempt: Path, state: JobState | None, run_id: str, *, is_mine: bool) -> Document | None:
    """The record of a try that has ended; None: its harness was killed, and its ranks ended with it.

    Args:
        is_mine: this harness has started its ranks.

    Raises:
        UnreadableError: what is there makes no record, or leaves open what became of it.
    """
    document = document_of(attempt, state, run_id)
    if document["cause"] in ("vanished", "launch"):
        if is_local(attempt):
            return document if is_mine else None
        if state in (None, ABSENT):
            raise UnreadableError(waits_for([attempt], {attempt: state} if state else {}))
    return document


def waits_for(attempts: Sequence[Path], states: Mapping[Path, JobState]) -> str:
    """Which jobs that do not run are waited for and why, in one line, those with the same reason together."""
    reasons: dict[str, list[str]] = {}
    for attempt in attempts:
        state, job = states.get(attempt), job_of(attempt)
        if state is None or job is None:
            reasons.setdefault(f"{JOB} says of no job", []).append(str(attempt))
        elif state.name in ("pending", "unknown"):
            reasons.setdefault(state.reason or state.name, []).append(f"job {job.job} in {attempt}")
    named = (f"{why}: {which[0]}" + f" and {len(which) - 1} more" * (len(which) > 1) for why, which in reasons.items())
    return "; ".join(named)


def attempts_state(attempts: Sequence[Path], states: Mapping[Path, JobState]) -> AttemptState | None:
    """Of all tries at a point: one that lives is enough."""
    found = {attempt_state(attempt, states) for attempt in attempts}
    return "live" if "live" in found else "ended" if found else None


def is_local(attempt: Path) -> bool:
    job = job_of(attempt)
    return job is not None and job.on == "local"


def shown(head: Head | None, attempts: Sequence[Path], states: Mapping[Path, JobState]) -> str:
    """The state of a point in a word: of its record, or of its job, which goes before what came of an earlier one."""
    if head is not None and (head.status in FINISHED or not attempts):
        return head.status
    names = {states[attempt].name if attempt in states else "unknown" for attempt in attempts}
    return next((name for name in ("running", "pending", "unknown", "ended") if name in names), "missing")
