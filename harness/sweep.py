"""Runs the points of an experiment that are missing, and keeps a record of each, whatever came of it."""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol

import submitit
import tyro

from harness.collect import base_record, record_of, steps_so_far
from harness.environment import CODE, host_environment
from harness.experiment import Point
from harness.launch import STOP, Site
from harness.store import FINISHED, RESUMED, Record, Store, read_json, write_atomically
from harness.validity import Datasets, summary, warnings, why_invalid
from impl.errors import InputError
from impl.run import Run, to_dict

POLL_SECONDS = 0.25
LOOK_SECONDS = 1.0
"""How often a running point's steps are read for the display."""


class Display(Protocol):
    """Shows how a sweep gets on; harness.progress has one for people."""

    def message(self, text: str) -> None: ...
    def started(self, point: Point) -> None: ...
    def advanced(self, point: Point, steps: list[dict[str, Any]]) -> None: ...
    def finished(self, point: Point, record: Record) -> None: ...


@dataclass(frozen=True)
class Saving:
    """Checkpoints of the points of a sweep."""

    checkpoint_every: int = 0
    """Steps between checkpoints; what was interrupted or failed goes on from its last one. 0: none are written."""
    keep_checkpoints: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Keep the checkpoints of what is finished, too."""

    def require(self, out: Path | None) -> None:
        """Check that it makes sense with this folder for records.

        Raises:
            InputError: it does not.
        """
        every = self.checkpoint_every
        if every < 0:
            raise InputError(f"--checkpoint-every {every}: must be a number of steps, or 0 for no checkpoints")
        if self.keep_checkpoints and not every:
            raise InputError("--keep-checkpoints: none are written; --checkpoint-every says after how many steps")
        if every and out is None:
            raise InputError(f"--checkpoint-every {every}: needs --out, where the same command finds them again")

    def why_invalid(self, run: Run) -> str | None:
        """Why no checkpoints of this run can be saved, in one line; None: they can, or need not."""
        if not self.checkpoint_every or run.engine == "native":
            return None
        return f"--checkpoint-every {self.checkpoint_every}: the {run.engine} engine saves none here; valid with native"


@dataclass(frozen=True)
class Options:
    """Where and how the points of a sweep run."""

    site: Site = field(default_factory=Site)
    jobs: int = 1
    time_limit_seconds: float = 24 * 3600.0
    collective_timeout_seconds: float = 600.0
    saving: Saving = Saving()
    profile: bool = False
    """Look where a step's time goes, after what is timed."""


@dataclass
class Job:
    point: Point
    attempt: Path
    job: submitit.Job[None]
    looked: float = 0.0
    has_told: bool = False
    """It has been said what it goes on from."""


class Sweep:
    """The points of one experiment at one tier, the store that holds their records, and where they run."""

    def __init__(self, store: Store, datasets: Datasets, options: Options, display: Display) -> None:
        self.store, self.datasets, self.options, self.display = store, datasets, options, display
        self.environment = host_environment(_command())

    def run(self, points: list[Point]) -> None:
        """Run every point that has no finished record; a point that fails does not end the sweep.

        Raises:
            KeyboardInterrupt: after all ranks were stopped; unfinished points keep no record.
        """
        queue = [point for point in points if not self._done(point)]
        active: list[Job] = []
        try:
            while queue or active:
                while queue and len(active) < self.options.jobs:
                    if (job := self._start(queue.pop(0))) is not None:
                        active.append(job)
                for job in list(active):
                    if job.job.done():
                        self._finish(job)
                        active.remove(job)
                    else:
                        self._look(job)
                if active:
                    time.sleep(POLL_SECONDS)
        except BaseException:
            with _undisturbed():
                stop(active)
                for job in active:
                    self.store.forget_attempt(job.attempt)
            raise

    def _done(self, point: Point) -> bool:
        record = self.store.read(point.run.id)
        return record is not None and record["status"] in FINISHED

    def _start(self, point: Point) -> Job | None:
        """Launch a point; one that cannot run becomes a record with its reason."""
        options = self.options
        reason = options.saving.why_invalid(point.run) or why_invalid(point.run, self.datasets, options.site)
        if reason is not None:
            record = {**base_record(self._identity(point)), "status": "invalid", "reason": reason}
            self.store.write({**record, "environment": self.environment})
            self.display.finished(point, record)
            return None
        for warning in warnings(point.run, self.options.site):
            self.display.message(f"{point.label}: {warning}")
        self.display.started(point)
        attempt = self.store.new_attempt(point.run.id)
        try:
            return Job(point, attempt, self._launch(point, attempt))
        except BaseException:
            self.store.forget_attempt(attempt)
            raise

    def _launch(self, point: Point, attempt: Path) -> submitit.Job[None]:
        """Write down what the ranks are to do, and start them."""
        data = self.datasets.open(point.run.data.dataset)
        spec = {
            **self._identity(point),
            "ranks": point.run.plan.world_size,
            "on": self.options.site.on,
            "device": self.options.site.device,
            "data": str(data.path.resolve()),
            "data_summary": summary(data, point.run.data.dataset),
            "environment": self.environment,
            "code": str(CODE),
            "folder": str(Path.cwd()),
            "submitted": time.time(),
            "time_limit_seconds": self.options.time_limit_seconds,
            "collective_timeout_seconds": self.options.collective_timeout_seconds,
            "profile": self.options.profile,
            "checkpoint_every": self.options.saving.checkpoint_every,
            "checkpoints": str(self.store.checkpoints(point.run.id)),
            "driver_pid": os.getpid() if self.options.site.on == "local" else None,
        }
        write_atomically(attempt / "spec.json", json.dumps(spec))
        return self.options.site.submit(attempt, point.run.plan.world_size, self.options.time_limit_seconds)

    def _identity(self, point: Point) -> dict[str, Any]:
        run = point.run
        return {"id": run.id, "experiment": self.store.experiment, "tier": self.store.tier, "run": to_dict(run)}

    def _finish(self, job: Job) -> None:
        self._tell_resumed(job)
        record = record_of(job.attempt)
        self.store.write(record)
        if record["status"] in FINISHED:
            self.store.forget_attempts(record["id"])
            if not self.options.saving.keep_checkpoints:
                self.store.forget_checkpoints(record["id"])
        self.display.finished(job.point, record)

    def _look(self, job: Job) -> None:
        now = time.monotonic()
        if now - job.looked >= LOOK_SECONDS:
            job.looked = now
            self._tell_resumed(job)
            self.display.advanced(job.point, steps_so_far(job.attempt))

    def _tell_resumed(self, job: Job) -> None:
        found = None if job.has_told else read_json(job.attempt / RESUMED)
        if found is None:
            return
        job.has_told = True
        for warning in found["warnings"]:
            self.display.message(f"{job.point.label}: {warning}")
        steps = job.point.run.train.steps
        self.display.message(f"{job.point.label}: goes on from step {found['step']} of {steps}")


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C while the ranks are being stopped changes nothing."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop(jobs: list[Job]) -> None:
    """Cancel the jobs and wait until their ranks are gone, a few seconds at most."""
    for job in jobs:
        (job.attempt / STOP).touch()
        job.job.cancel(check=False)
    for _ in range(40):
        if all(job.job.done() for job in jobs):
            return
        time.sleep(POLL_SECONDS)


def _command() -> list[str]:
    """The command as typed, without the path of the program."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]
