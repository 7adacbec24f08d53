"""Live display of a sweep on standard error: a progress bar on a terminal, plain lines elsewhere."""

import time
from typing import Any

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
from harness.launch.follow import Display
from harness.records.printable import printable
from harness.records.record import Record

REFRESHES = 2
"""Updates of a terminal's display per second, few as the ranks may need the processor."""
PLAIN_SECONDS = 15.0
"""Time between two lines on a running point if the display is not a terminal."""


class LiveDisplay(Display):
    """Display, as a context, of the points that are done, and of step, loss and tokens/s of those that run."""

    def __init__(self, total: int, console: Console | None = None) -> None:
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
        self.queue = ""

    def __enter__(self) -> "LiveDisplay":
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def message(self, text: str) -> None:
        self.console.print(printable(text), soft_wrap=True, markup=False)

    def started(self, point: Point) -> None:
        steps = point.run.train.steps
        if (earlier := self.tasks.pop(point.id, None)) is not None:
            self.progress.remove_task(earlier)
        self.tasks[point.id] = self.progress.add_task(f"  {point.label}", total=steps, detail="starting")
        self.shown[point.id] = time.monotonic()

    def advanced(self, point: Point, steps: list[dict[str, Any]]) -> None:
        if not steps:
            return
        detail, done = _detail(point, steps), steps[-1]["step"] + 1
        self.progress.update(self.tasks[point.id], completed=done, detail=detail)
        now = time.monotonic()
        if not self.console.is_terminal and now - self.shown[point.id] > PLAIN_SECONDS:
            self.shown[point.id] = now
            self.message(f"  {point.label}: step {done}/{point.run.train.steps}, {detail}")

    def finished(self, point: Point, record: Record) -> None:
        self._count(point)
        self.message(f"[{self.count}/{self.total}] {point.label}: {_outcome(record)}")

    def skipped(self, point: Point) -> None:
        self._count(point)

    def waiting(self, pending: int, running: int, why: str = "") -> None:
        queue = f"{running} running, {pending} pending"
        self.progress.update(self.sweep, detail=queue)
        text = why if self.console.is_terminal else f"{queue}; waiting: {why}" if why else queue
        if text and text != self.queue:
            self.message(f"  {text}")
        self.queue = text

    def _count(self, point: Point) -> None:
        self.count += 1
        if (task := self.tasks.pop(point.id, None)) is not None:
            self.progress.remove_task(task)
        self.progress.update(self.sweep, completed=self.count)


def _detail(point: Point, steps: list[dict[str, Any]]) -> str:
    rate = point.run.tokens_per_step * len(steps) / max(1e-9, sum(s["seconds"] for s in steps))
    loss = steps[-1]["loss"]
    return f"loss {'not finite' if loss is None else format(loss, '.3f')}, {rate:,.0f} tokens/s"


def _outcome(record: Record) -> str:
    if record.status != "ok":
        return f"{record.status}: {record.reason}"
    return f"ok, last loss {record.losses[-1]:.4f}, {record.times.total_seconds or 0.0:.0f} s"
