"""Points of a sweep on their way to a record: the options, the orders of an attempt, and why there can be none."""

import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from harness.experiment.experiment import Point
from harness.launch.claim_lock import Claim
from harness.launch.decide import is_forgotten
from harness.launch.flags import Saving, Trying
from harness.launch.follow import Follower
from harness.launch.preflight import Datasets, summary, why_invalid
from harness.launch.slurm import Site, orders_at
from harness.predict.forecast import Forecasts
from harness.rank.job import JobState, job_of
from harness.rank.orders import TrainingOrders
from harness.rank.supervisor import START_SECONDS
from harness.records.attempts import Attempts
from harness.records.labels import RUN_ID
from harness.records.record import Record
from harness.records.store import FINISHED, Document, Store
from impl.errors import in_one_line
from impl.own_code import hashes
from impl.run import Run
from impl.simulator.system import System

CHECKPOINT = re.compile(r"step-\d{8,}")
"""Name of a finished checkpoint's folder, as in impl.checkpoint, whose import needs PyTorch."""

NAMED = 5
"""Number of points that a message names."""


@dataclass(frozen=True, kw_only=True)
class Options(Trying):
    """Options of a sweep: where and how its points run."""

    site: Site = field(default_factory=Site)
    jobs: int | None = None
    """Points that run at the same time; None for one on this machine, and the site's limit on a cluster."""
    saving: Saving = field(default_factory=Saving)
    profile: bool = False
    """True if one more step is profiled after the timed ones."""
    forecast: System | None = None
    """System for which a step and the final loss of each run are predicted before it begins; None: no forecast."""
    detach: bool = False
    """True if the sweep ends as soon as everything is submitted to the scheduler."""

    @property
    def is_local(self) -> bool:
        """True if ranks are processes of this machine."""
        return self.site.on == "local"

    @property
    def at_once(self) -> int:
        """Return the number of points that may run at the same time; 0 for no limit."""
        if self.jobs is not None:
            return self.jobs
        return 1 if self.is_local else self.site.cluster.at_once


class Jobs(Protocol):
    """Access to the jobs of attempts."""

    def states(self, attempts: Sequence[Path]) -> dict[Path, JobState]: ...
    def cancel(self, attempts: Sequence[Path]) -> None: ...
    def forget(self, attempt: Path) -> None: ...


@dataclass(eq=False)
class Entry:
    """Point of a sweep on its way to a record."""

    point: Point
    before: str | None = ""
    """Attempt of the record that existed at the first look; "" before that."""
    claim: Claim | None = None
    attempt: Path | None = None
    """Attempt that is live, or being started."""
    is_local: bool = False
    """True if its ranks are processes of a machine."""
    follower: Follower | None = None
    starts: int = 0
    record: Record | None = None
    """Record at the last look."""
    is_watched: bool = False
    """True if it was seen to run during this command."""

    @property
    def id(self) -> str:
        """Id of the run."""
        return self.point.id

    @property
    def is_fresh(self) -> bool:
        """True if the record is of this command, not of an earlier one."""
        return self.record is not None and self.record.attempt != self.before

    @property
    def tries(self) -> list[Document]:
        """Outcomes of attempts before the next one, in this command."""
        if self.record is None or not self.is_fresh:
            return []
        return [*map(asdict, self.record.tries), self.record.as_try()]


def left_alone(points: Sequence[Point]) -> str:
    """Return a message on points that would fail again."""
    names = ", ".join(point.label for point in points[:NAMED]) + ", ..." * (len(points) > NAMED)
    what = "1 point is" if len(points) == 1 else f"{len(points)} points are"
    return f"{what} left alone, since the same code failed: {names}; --retry all runs them again"


def left_running(count: int, experiment: str) -> str:
    """Return a message on points whose jobs go on without the command that was interrupted."""
    left = "1 point goes on" if count == 1 else f"{count} points go on"
    # no other verb takes the run of `train`
    shows, ends = ("the same command", "`scancel`") if experiment == "train" else ("`watch`", "`cancel`")
    return f"{left} without this command: {shows} shows them, {ends} ends them"


def shape(point: Point) -> tuple[int, int]:
    """Return the ranks of a point and the threads of each; points that agree in both can be one array of jobs."""
    return point.run.plan.world_size, point.run.threads


def orders(
    entry: Entry, store: Store, datasets: Datasets, options: Options, environment: Document, forecasts: Forecasts
) -> TrainingOrders:
    """Return the orders of the next attempt at a point; `environment` is this host's in its record."""
    run, site, saving = entry.point.run, options.site, options.saving
    data = datasets.open(run.data.dataset)
    forecast, loss = forecasts.of(run, data)
    return TrainingOrders(
        **orders_at(site, run),
        id=entry.id,
        experiment=store.experiment,
        tier=store.tier,
        data=data.path.resolve(),
        data_summary=summary(data, run.data.dataset),
        environment=environment | ({"own_code": own} if (own := hashes(run)) else {}),
        time_limit_seconds=options.time_limit,
        hang_seconds=options.hang_seconds,
        # a hang is noticed before that, and reported better
        collective_timeout_seconds=2 * max(options.hang_seconds, START_SECONDS),
        profile=options.profile and not saving.certify,
        checkpoint_every=saving.checkpoint_every,
        checkpoints=Attempts(store).checkpoints(entry.id),
        keep_checkpoints=saving.keep_checkpoints,
        certify=saving.certify,
        start=None if run.start is None else start_folder(run.start, store),
        # ranks of this machine end with the claim of their harness
        claim=entry.claim.folder if options.is_local and entry.claim else None,
        forecast=forecast,
        loss_forecast=loss,
        tries=entry.tries,
    )


def free(attempt: Path, state: JobState | None, store: Store, jobs: Jobs) -> None:
    """Cancel a job that is over but in Slurm's queue, where it holds nodes, or would start again.

    A controller that has forgotten jobs may have given the number to another one, which goes on.
    """
    if (job := job_of(attempt)) and is_forgotten(attempt, state):
        others = (job_of(one) for one in Attempts(store).all() if one != attempt)
        if all(other is None or other.job != job.job for other in others):
            jobs.cancel([attempt])


def start_folder(start: str, store: Store) -> Path:
    """Return the folder of checkpoints that a run starts from, given by its path or by another run's id."""
    return Attempts(store).checkpoints(start) if RUN_ID.fullmatch(start) else Path(start).resolve()


def why_refused(
    run: Run, store: Store, datasets: Datasets, options: Options, *, ends_to_come: Collection[str] = ()
) -> str | None:
    """Return why a run cannot be carried out with these options, in one line; None if it can.

    It may start from the runs `ends_to_come`, which have not ended yet.

    Raises:
        OSError: the embedded language cannot be written.
    """
    reason = options.saving.why_invalid(run) or why_invalid(run, datasets, options.site)
    return reason or (None if run.start is None or run.start in ends_to_come else why_no_start(run.start, store))


def refusal(run: Run, store: Store, datasets: Datasets, options: Options) -> Document | None:
    """Return the outcome of a run that is not to start: it cannot be carried out, or a disk fails; None if it is to."""
    try:
        reason = why_refused(run, store, datasets, options)
    except OSError as error:
        return {"status": "failed", "reason": in_one_line(error), "cause": "disk"}
    return None if reason is None else {"status": "invalid", "reason": reason, "cause": ""}


def why_no_start(start: str, store: Store) -> str | None:
    """Return why there is no checkpoint to start from, in one line; None if there is one."""
    folder, is_run = start_folder(start, store), RUN_ID.fullmatch(start)
    if any(CHECKPOINT.fullmatch(path.name) for path in folder.glob("step-*")):
        if is_run:
            return None
        from impl.checkpoint import latest  # only a run that starts from a folder pays for PyTorch's import

        saved, damaged = latest(folder)
        return None if saved else f"start {start}: {'; '.join(damaged)}"
    if not is_run:
        return f"start {start}: no checkpoint in {folder}"
    head = store.head(start)
    if head is None or head.status not in FINISHED:
        state = "has not ended" if head is None else f"ended as {head.status}"
        return f"start {start}: that run {state}; when it has come to its end, the same command goes on here"
    return f"start {start}: the checkpoint of that run is gone; without its record, `run` trains it again"
