"""Follows the tries at points that run, for a display."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from harness.experiment.experiment import Point
from harness.rank.collect import step_of
from harness.records.record import Record
from harness.records.store import RESUMED, read_json

LOOK_SECONDS = 1.0
"""How often a running point's steps are read for the display."""
MOST_BYTES = 2**20
"""Read at a time; a log that has grown by more has the same end."""
LATEST = 10
"""Steps that are shown."""


class Display(Protocol):
    """Shows how a sweep gets on; harness.launch.progress has one for people."""

    def message(self, text: str) -> None: ...
    def started(self, point: Point) -> None: ...
    def advanced(self, point: Point, steps: list[dict[str, Any]]) -> None:
        """The latest steps of a point that runs, the last of them last; empty before the first."""

    def finished(self, point: Point, record: Record) -> None: ...
    def skipped(self, point: Point) -> None:
        """Nothing was to be done for this point."""

    def waiting(self, pending: int, running: int, why: str = "") -> None:
        """So many points wait for a scheduler, and so many run; `why` the others wait, if they do."""


class Follower:
    """Tells a display how one try at a point gets on: what it goes on from, and its steps."""

    def __init__(self, display: Display, point: Point, attempt: Path, *, is_told: bool) -> None:
        self.display, self.point, self.attempt = display, point, attempt
        self.is_told = is_told
        """The display knows that the point has started."""
        self.log = StepLog(attempt / "rank-0.steps.jsonl")
        self.looked = 0.0
        self.has_resumed = False

    def look(self) -> None:
        """Tell what has come, at most once in LOOK_SECONDS."""
        now = time.monotonic()
        if now - self.looked < LOOK_SECONDS:
            return
        self.looked = now
        if not self.is_told:
            self.is_told = True
            self.display.started(self.point)
        self.tell_resumed()
        self.display.advanced(self.point, self.log.latest())

    def tell_resumed(self) -> None:
        """Tell once which step the try went on from, if it did."""
        found = None if self.has_resumed else read_json(self.attempt / RESUMED)
        if not isinstance(found, dict) or not isinstance(found.get("warnings"), list) or "step" not in found:
            return
        self.has_resumed = True
        label, steps = self.point.label, self.point.run.train.steps
        for warning in found["warnings"]:
            self.display.message(f"{label}: {warning}")
        what = f"goes on from step {found['step']} of {steps}" if found["step"] else "begins anew"
        self.display.message(f"{label}: {what}")


def again(point: Point, record: Record, tries: int, retries: int) -> str:
    """Says that a point is run once more after what its record tells."""
    follows = f"try {tries + 1} of {retries + 1} follows" if tries else "runs again"
    return f"{point.label}: {record.status}: {record.reason}; {follows}"


def left_alone(points: Sequence[Point]) -> str:
    """Says which points are not run, since they would fail again."""
    names = ", ".join(point.label for point in points[:5]) + (", ..." if len(points) > 5 else "")
    what = "1 point is" if len(points) == 1 else f"{len(points)} points are"
    return f"{what} left alone, since the same code failed: {names}; --retry all runs them again"


class StepLog:
    """The end of a growing file of steps, read on from where the last look ended."""

    def __init__(self, path: Path) -> None:
        self.path, self.read = path, 0
        self.kept: list[dict[str, Any]] = []

    def latest(self) -> list[dict[str, Any]]:
        """The last whole lines; what is no step is left out."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                if size < self.read:  # written anew by a rank that went on from a checkpoint
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
