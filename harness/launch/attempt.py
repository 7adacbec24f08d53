"""Points of a sweep on their way to a record, and the orders of their attempts."""

import os
import re
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from harness.experiment.experiment import Point
from harness.launch.claim_lock import Claim
from harness.launch.decide import AttemptState, Facts, is_same_code
from harness.launch.follow import Follower
from harness.launch.options import Options
from harness.launch.preflight import Datasets, summary, why_invalid
from harness.rank.collect import base_record
from harness.rank.job import JobState
from harness.rank.orders import TrainingOrders
from harness.rank.supervisor import START_SECONDS
from harness.records.environment import CODE
from harness.records.record import Record
from harness.records.store import FINISHED, Document, Store
from impl.run import Run, to_dict

RUN_ID = re.compile(r"[0-9a-f]{12}")
CHECKPOINT = re.compile(r"step-\d{8,}")
"""Name of a finished checkpoint's folder, as in impl.checkpoint, whose import needs PyTorch."""


class Jobs(Protocol):
    """Access to the jobs of attempts."""

    def states(self, attempts: Sequence[Path]) -> dict[Path, JobState]: ...
    def cancel(self, attempts: Sequence[Path]) -> None: ...
    def forget(self, attempt: Path) -> None: ...


@dataclass(eq=False)
class Entry:
    """Point of a sweep on its way to a record."""

    point: Point
    before: str | None = None
    """Attempt of the record that existed when the sweep first looked, once it `is_known`."""
    is_known: bool = False
    claim: Claim | None = None
    attempt: Path | None = None
    """Attempt that is live, or being started."""
    is_local: bool = False
    follower: Follower | None = None
    starts: int = 0
    tries: list[dict[str, Any]] = field(default_factory=list)
    """Outcomes of attempts before the next one, in this command."""
    is_watched: bool = False
    """True if it was seen to run during this command."""
    keeps_checkpoints: bool = False

    @property
    def id(self) -> str:
        """Id of the run."""
        return self.point.id


def facts_of(
    entry: Entry, record: Record | None, attempt: AttemptState | None, environment: Mapping[str, Any]
) -> Facts:
    """Return the facts about a point from its record and attempts; `environment` has the code that would run now."""
    if record is None:
        return Facts(attempt=attempt, starts=entry.starts)
    return Facts(
        status=record.status,
        cause=record.cause,
        tries=len(record.tries),
        is_fresh=record.attempt != entry.before,
        is_same_code=is_same_code(record, environment),
        attempt=attempt,
        starts=entry.starts,
    )


def refused_record(entry: Entry, store: Store, reason: str, environment: Document) -> Document:
    """Return the record of a point that cannot run here."""
    outcome = {"status": "invalid", "reason": reason, "cause": "", "environment": environment}
    return base_record(entry.id, store.experiment, store.tier, to_dict(entry.point.run)) | outcome


def orders(
    entry: Entry, store: Store, datasets: Datasets, options: Options, environment: dict[str, Any]
) -> TrainingOrders:
    """Return the orders of the next attempt at a point; `environment` is this host's in its record."""
    run, cluster, saving = entry.point.run, options.site.cluster, options.saving
    data = datasets.open(run.data.dataset)
    return TrainingOrders(
        id=entry.id,
        experiment=store.experiment,
        tier=store.tier,
        config=to_dict(run),
        ranks=run.plan.world_size,
        on=options.site.on,
        device=options.site.device,
        data=data.path.resolve(),
        data_summary=summary(data, run.data.dataset),
        environment=environment,
        code=CODE,
        folder=Path.cwd(),
        submitted=time.time(),
        time_limit_seconds=options.time_limit_seconds,
        hang_seconds=options.hang_seconds,
        collective_timeout_seconds=options.collective_timeout_seconds or 2 * max(options.hang_seconds, START_SECONDS),
        profile=options.profile,
        checkpoint_every=saving.checkpoint_every,
        checkpoints=store.checkpoints(entry.id),
        keep_checkpoints=saving.keep_checkpoints,
        start=None if run.start is None else start_folder(run.start, store),
        # ranks of this machine end with the harness that reads what they write, and with its claim
        driver_pid=os.getpid() if options.is_local else None,
        claim=entry.claim.folder if options.is_local and entry.claim else None,
        token=secrets.token_hex(16),
        interface=cluster.interface,
        container=tuple(cluster.container),
        signal_seconds=cluster.signal_seconds,
        tries=entry.tries,
    )


def start_folder(start: str, store: Store) -> Path:
    """Return the folder of checkpoints that a run starts from, given by its path or by another run's id."""
    return store.checkpoints(start) if RUN_ID.fullmatch(start) else Path(start).resolve()


def why_refused(
    run: Run, store: Store, datasets: Datasets, options: Options, *, ends_to_come: Collection[str] = ()
) -> str | None:
    """Return why a run cannot be carried out with these options, in one line; None if it can.

    Args:
        ends_to_come: ids of runs that it may start from though they have not ended yet.
    """
    reason = options.saving.why_invalid(run) or why_invalid(run, datasets, options.site)
    return reason or (None if run.start in ends_to_come else why_no_start(run, store))


def why_no_start(run: Run, store: Store) -> str | None:
    """Return why a run has no checkpoint to start from, in one line; None if it has one, or needs none."""
    folder = start_folder(run.start or "", store)
    if run.start is None:
        return None
    if any(CHECKPOINT.fullmatch(path.name) for path in folder.glob("step-*")):
        return None if RUN_ID.fullmatch(run.start) else _why_damaged(run.start, folder)
    if not RUN_ID.fullmatch(run.start):
        return f"start {run.start}: no checkpoint in {folder}"
    head = store.head(run.start)
    if head is None or head.status not in FINISHED:
        state = "has not ended" if head is None else f"ended as {head.status}"
        return f"start {run.start}: that run {state}; when it has come to its end, the same command goes on here"
    return f"start {run.start}: the checkpoint of that run is gone; without its record, `run` trains it again"


def _why_damaged(start: str, folder: Path) -> str | None:
    """Return why no checkpoint in a folder can be used, in one line; None if one can, as far as its metadata shows."""
    from impl.checkpoint import latest  # only a run that starts from a folder pays for PyTorch's import

    saved, damaged = latest(folder)
    return None if saved else f"start {start}: {'; '.join(damaged)}"


def first_to_start(ready: Sequence[Entry], coming: Sequence[Entry]) -> Entry | None:
    """Return the first entry that does not start from the end of a run that is still to come."""

    def waits(start: str | None) -> bool:
        return start is not None and any(start == entry.id for entry in coming)

    return next((entry for entry in ready if not waits(entry.point.run.start)), None)


def shape(point: Point) -> tuple[int, int]:
    """Return the ranks of a point and the threads of each; points that agree in both can be one array of jobs."""
    return point.run.plan.world_size, point.run.threads
