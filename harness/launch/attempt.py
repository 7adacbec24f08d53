"""A point on its way to a record, and what its ranks are told to do."""

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
from harness.rank.jobs import JobState
from harness.rank.orders import TrainingOrders
from harness.rank.supervisor import START_SECONDS
from harness.records.environment import CODE
from harness.records.record import Record
from harness.records.store import FINISHED, Document, Store
from impl.run import Run, to_dict

RUN_ID = re.compile(r"[0-9a-f]{12}")
CHECKPOINT = re.compile(r"step-\d{8,}")
"""The folder of one that was written to its end, as impl.checkpoint names it, which needs PyTorch to be imported."""


class Jobs(Protocol):
    """Knows what became of what was submitted: harness.rank.jobs."""

    def states(self, attempts: Sequence[Path]) -> dict[Path, JobState]: ...
    def cancel(self, attempts: Sequence[Path]) -> None: ...
    def forget(self, attempt: Path) -> None: ...


@dataclass(eq=False)
class Case:
    """A point on its way to a record, as one sweep sees it."""

    point: Point
    before: str | None = None
    """The attempt of the record that was there at first, once it `is_known`."""
    is_known: bool = False
    claim: Claim | None = None
    attempt: Path | None = None
    """A try that lives, or is being started."""
    is_local: bool = False
    follower: Follower | None = None
    starts: int = 0
    tries: list[dict[str, Any]] = field(default_factory=list)
    """What came of those before the next one, in this command."""
    is_watched: bool = False
    """Somebody worked on it during this command."""
    keeps_checkpoints: bool = False

    @property
    def id(self) -> str:
        return self.point.id


def facts_of(case: Case, record: Record | None, attempt: AttemptState | None, environment: Mapping[str, Any]) -> Facts:
    """What is known of a point from its record and its tries; `environment` has the code that would run now."""
    if record is None:
        return Facts(attempt=attempt, starts=case.starts)
    return Facts(
        status=record.status,
        cause=record.cause,
        tries=len(record.tries),
        is_fresh=record.attempt != case.before,
        is_same_code=is_same_code(record, environment),
        attempt=attempt,
        starts=case.starts,
    )


def refused_record(case: Case, store: Store, reason: str, environment: Document) -> Document:
    """The record of a point that cannot run here."""
    outcome = {"status": "invalid", "reason": reason, "cause": "", "environment": environment}
    return base_record(case.id, store.experiment, store.tier, to_dict(case.point.run)) | outcome


def orders(
    case: Case, store: Store, datasets: Datasets, options: Options, environment: dict[str, Any]
) -> TrainingOrders:
    """What the ranks of the next try at a point are to do; `environment` is what its record says of this host."""
    run, cluster, saving = case.point.run, options.site.cluster, options.saving
    data = datasets.open(run.data.dataset)
    return TrainingOrders(
        id=case.id,
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
        checkpoints=store.checkpoints(case.id),
        keep_checkpoints=saving.keep_checkpoints,
        start=None if run.start is None else start_folder(run.start, store),
        # ranks of this machine end with the harness that reads what they write, and with its claim
        driver_pid=os.getpid() if options.is_local else None,
        claim=case.claim.folder if options.is_local and case.claim else None,
        token=secrets.token_hex(16),
        interface=cluster.interface,
        container=tuple(cluster.container),
        signal_seconds=cluster.signal_seconds,
        tries=case.tries,
    )


def start_folder(start: str, store: Store) -> Path:
    """The checkpoints that a run starts from: those of another run of the store, by its id, or a folder of them."""
    return store.checkpoints(start) if RUN_ID.fullmatch(start) else Path(start).resolve()


def why_refused(
    run: Run, store: Store, datasets: Datasets, options: Options, *, ends_to_come: Collection[str] = ()
) -> str | None:
    """Return why a run cannot be carried out with these options, in one line; None: it can.

    Args:
        ends_to_come: ids of runs that it may start from though they have not ended yet.
    """
    reason = options.saving.why_invalid(run) or why_invalid(run, datasets, options.site)
    return reason or (None if run.start in ends_to_come else why_no_start(run, store))


def why_no_start(run: Run, store: Store) -> str | None:
    """Why a run has no checkpoint to start from, in one line; None: it has one, or needs none."""
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
    """Why no checkpoint in a folder can be used, in one line; None: one can, as far as its metadata shows."""
    from impl.checkpoint import latest  # only a run that starts from a folder pays for PyTorch's import

    saved, damaged = latest(folder)
    return None if saved else f"start {start}: {'; '.join(damaged)}"


def first_to_start(ready: Sequence[Case], coming: Sequence[Case]) -> Case | None:
    """The first that is ready; one that starts from the end of a run that is to come waits for it."""

    def waits(start: str | None) -> bool:
        return start is not None and any(start == case.id for case in coming)

    return next((case for case in ready if not waits(case.point.run.start)), None)


def shape(point: Point) -> tuple[int, int]:
    """Points of one shape can be one array: ranks, and threads of each."""
    return point.run.plan.world_size, point.run.threads
