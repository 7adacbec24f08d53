"""Progress of running attempts for a display."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.experiment.experiment import Point
from harness.rank.results import step_of
from harness.records.record import Record
from harness.records.store import RESUMED, read_json

LOOK_SECONDS = 1.0
"""Time between two looks at the steps of a running point."""
MOST_BYTES = 2**20
"""Longest part of a log that is read at a time; the end is the same if it has grown by more."""
LATEST = 10
"""Number of steps passed to a display."""


class Display:
    """Display of a sweep's progress; this one shows nothing."""

    def message(self, text: str) -> None:
        """Show a line of text."""

    def started(self, point: Point) -> None:
        """Show that a point has started."""

    def advanced(self, point: Point, steps: list[dict[str, Any]]) -> None:
        """Show the latest steps of a running point, the last of them last; none before the first."""

    def finished(self, point: Point, record: Record) -> None:
        """Show the outcome of a point."""

    def skipped(self, point: Point) -> None:
        """Show that nothing was to be done for a point."""

    def waiting(self, pending: int, running: int, why: str = "") -> None:
        """Show how many points a scheduler has pending and running, and why the others wait, if they do."""


class Follower:
    """Reports to a display on one attempt at a point: the step it resumes at, and its steps.

    Args:
        is_shown: True if the display already shows that the point has started.
    """

    def __init__(self, display: Display, point: Point, attempt: Path, *, is_shown: bool) -> None:
        self.display, self.point, self.attempt, self.is_shown = display, point, attempt, is_shown
        self.log = StepLog(attempt / "rank-0.steps.jsonl")
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
        self.show_resumed()
        self.display.advanced(self.point, self.log.latest())

    def show_resumed(self) -> None:
        """Report once which step the attempt was resumed at, if it was."""
        found = None if self.has_resumed else read_json(self.attempt / RESUMED)
        if not isinstance(found, dict) or not isinstance(found.get("warnings"), list) or "step" not in found:
            return
        self.has_resumed = True
        label, steps = self.point.label, self.point.run.train.steps
        for warning in found["warnings"]:
            self.display.message(f"{label}: {warning}")
        what = f"goes on from step {found['step']} of {steps}" if found["step"] else "begins again at step 0"
        self.display.message(f"{label}: {what}")


def again(point: Point, record: Record, tries: int, retries: int) -> str:
    """Return the message that a point is run once more after the outcome in its record."""
    follows = f"try {tries + 1} of {retries + 1} follows" if tries else "runs again"
    return f"{point.label}: {record.status}: {record.reason}; {follows}"


def left_alone(points: Sequence[Point]) -> str:
    """Return the message that points are not run, since they would fail again."""
    names = ", ".join(point.label for point in points[:5]) + (", ..." if len(points) > 5 else "")
    what = "1 point is" if len(points) == 1 else f"{len(points)} points are"
    return f"{what} left alone, since the same code failed: {names}; --retry all runs them again"


class StepLog:
    """End of a growing log of steps; each look reads on from where the last one ended."""

    def __init__(self, path: Path) -> None:
        self.path, self.read = path, 0
        self.kept: list[dict[str, Any]] = []

    def latest(self) -> list[dict[str, Any]]:
        """Return the last steps in whole lines; other lines are ignored."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                if size < self.read:  # rewritten by a rank that resumed from a checkpoint
                    self.read, self.kept = 0, []
                self.read = file.seek(max(self.read, size - MOST_BYTES))
                text = file.read(size - self.read)
        except OSError:
            return self.kept
        whole = text[: text.rfind(b"\n") + 1]
        self.read += len(whole)
        new = [step_of(line) for line in whole.decode(errors="replace").split("\n")[-LATEST - 1 : -1]]
        self.kept = (self.kept + [step for step in new if step is not None])[-LATEST:]
        return self.kept
