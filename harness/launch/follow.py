"""Progress of a sweep: what its attempts write is shown on a terminal as bars, elsewhere as lines."""

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from harness.experiment.experiment import Point
from harness.launch.trackers import Trackers
from harness.rank.failure import end_of
from harness.rank.json_files import read_as
from harness.rank.results import RESUMED, Resumption, step_of
from harness.records.printable import printable
from harness.records.record import Record
from harness.records.store import Document

LOOK_SECONDS = 1.0
"""Time between two looks at the steps of a running point."""
LATEST = 10
"""Number of steps passed to a display."""
TAIL_BYTES = 2**14
"""Bytes at the end of a log that are read for them."""
REFRESHES = 2
"""Updates of a terminal's display per second, few as the ranks may need the processor."""
PLAIN_SECONDS = 15.0
"""Time between two lines on a running point if the display is not a terminal."""


class Display:
    """Display, as a context, of the points that are done, and of step, loss and tokens/s of those that run."""

    def __init__(self, total: int = 0, console: Console | None = None, trackers: Trackers | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            refresh_per_second=REFRESHES,
            disable=not self.console.is_terminal,
        )
        self.total, self.count = total, 0
        self.sweep = self.progress.add_task("points", total=total, detail="")
        self.tasks: dict[str, TaskID] = {}
        self.shown: dict[str, float] = {}
        """Times of the last line on each running point."""
        self.queue = ""
        self.trackers = trackers or Trackers()
        self.trackers.message = self.message

    def __enter__(self) -> "Display":
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
        self.trackers.close()

    def message(self, text: str) -> None:
        """Show a line of text."""
        self.console.print(printable(text), soft_wrap=True, markup=False)

    def started(self, point: Point) -> None:
        """Show that a point has started."""
        self._remove(point)
        self.tasks[point.id] = self.progress.add_task(
            f"  {point.label}", total=point.run.train.steps, detail="starting"
        )
        self.shown[point.id] = time.monotonic()

    def advanced(self, point: Point, steps: Sequence[Document]) -> None:
        """Show the latest steps of a running point, the last of them last; none before the first."""
        if not steps:
            return
        loss, done = steps[-1]["loss"], steps[-1]["step"] + 1
        rate = point.run.tokens_per_step * len(steps) / max(1e-9, sum(step["seconds"] for step in steps))
        detail = f"loss {'not finite' if loss is None else format(loss, '.3f')}, {rate:,.0f} tokens/s"
        self.progress.update(self.tasks[point.id], completed=done, detail=detail)
        now = time.monotonic()
        if not self.console.is_terminal and now - self.shown[point.id] > PLAIN_SECONDS:
            self.shown[point.id] = now
            self.message(f"  {point.label}: step {done}/{point.run.train.steps}, {detail}")

    def finished(self, point: Point, record: Record) -> None:
        """Show the outcome of a point."""
        self.trackers.finished(point, record)
        self.counted(point)
        outcome = f"{record.status}: {record.reason}"
        if record.status == "ok":
            outcome = f"ok, last loss {record.losses[-1]:.4f}, {record.times.total_seconds or 0.0:.0f} s"
        self.message(f"[{self.count}/{self.total}] {point.label}: {outcome}")

    def waiting(self, pending: int, running: int, why: str = "") -> None:
        """Show how many points a scheduler has pending and running, and why the others wait, if they do."""
        queue = f"{running} running, {pending} pending"
        self.progress.update(self.sweep, detail=queue)
        text = why if self.console.is_terminal else f"{queue}; waiting: {why}" if why else queue
        if text and text != self.queue:
            self.message(f"  {text}")
        self.queue = text

    def counted(self, point: Point) -> None:
        """Show that nothing more is to be done for a point."""
        self.count += 1
        self._remove(point)
        self.progress.update(self.sweep, completed=self.count)

    def _remove(self, point: Point) -> None:
        """Remove the bar of an attempt that has ended, if there is one."""
        if (task := self.tasks.pop(point.id, None)) is not None:
            self.progress.remove_task(task)


class Follower:
    """Reports to a display on one attempt at a point: the step it resumes at, and its steps."""

    def __init__(self, display: Display, point: Point, attempt: Path, *, is_shown: bool) -> None:
        self.display, self.point, self.attempt, self.is_shown = display, point, attempt, is_shown
        self.looked = 0.0
        self.has_resumed = False

    def look(self) -> None:
        """Report what is new, at most once in LOOK_SECONDS."""
        now = time.monotonic()
        if now - self.looked < LOOK_SECONDS:
            return
        self.looked = now
        if not self.is_shown:
            self.is_shown = True
            self.display.started(self.point)
        self.catch_up()
        self.display.advanced(self.point, latest_steps(self.attempt / "rank-0.steps.jsonl"))

    def catch_up(self) -> None:
        """Have trackers follow the attempt up to now, and report once which step it was resumed at, if it was."""
        self.display.trackers.follow(self.point, self.attempt)
        if self.has_resumed or (found := read_as(Resumption, self.attempt / RESUMED)) is None:
            return
        self.has_resumed = True
        label, steps = self.point.label, self.point.run.train.steps
        for warning in found.warnings:
            self.display.message(f"{label}: {warning}")
        what = f"goes on from step {found.resumed[-1]} of {steps}" if found.resumed else "begins again at step 0"
        self.display.message(f"{label}: {what}")


def latest_steps(log: Path) -> list[Document]:
    """Return the last steps in whole lines of a growing log; other lines are ignored."""
    lines = end_of(log, TAIL_BYTES).split("\n")
    return [step for line in lines[-LATEST - 1 : -1] if (step := step_of(line)) is not None]
