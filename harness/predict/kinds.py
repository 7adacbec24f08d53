"""Kinds of plans on a system: the errors on published steps of each, and what makes a plan's kind doubtful."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from harness.predict.csv_rows import CALIBRATE, read_rows
from harness.predict.interval import UNCALIBRATED, features, uncalibrated
from harness.predict.simulation import Done, predicted_seconds
from harness.predict.systems import load_system
from impl.simulator.system import System

BADLY = UNCALIBRATED
"""Mean relative error above which a kind is missed badly: as far off as constants that were fitted to nothing."""
MISSED = "is calibrated"
"""Part of a doubt about a kind that was fitted and is missed badly."""
MOST = 64
"""Rows of a table that are predicted, evenly chosen."""
Errors = Mapping[tuple[str, str], Sequence[float]]
"""Relative errors of predicted seconds, by a feature and its value."""


class Published(NamedTuple):
    """A published step on a system's devices and network that its constants were not fitted to."""

    file: str
    name: str
    run: Done
    seconds: float
    off: float
    """Relative error of the predicted seconds."""
    is_own: bool
    """True if it was measured with the system's software."""


def published(system: System) -> Iterator[Published]:
    """Yield published steps, predicted with the system's constants; of large tables some, evenly chosen."""
    from harness.predict.held_out import CASES, STEPS  # which imports this

    own = system.calibration.table if system.calibration is not None else ""
    measured_on = {rows.file: case.system for case in reversed(CASES) for rows in case.asked}
    for file, there in ((file, load_system(name)) for file, name in measured_on.items()):
        if (there.device, there.node) != (system.device, system.node):
            continue
        rows = [row for row in read_rows(STEPS / f"{file}.csv", system) if file != own or row.split != CALIBRATE]
        measured = [row.measured for row in rows if row.measured]
        for one in measured[:: -(-len(measured) // MOST) or 1]:
            off = predicted_seconds(one.run, system) / one.seconds - 1
            yield Published(file, one.name, one.run, one.seconds, off, there.stack == system.stack)


def errors_by_kind(system: System, rows: Iterable[Published] | None = None) -> Errors:
    """Return errors on the published steps of a system's machine that its constants were not fitted to.

    A feature that was fitted is judged by rows of the same software all of whose features were; another one by all rows
    that have it, of other software on the same devices and network too.

    `rows` are what `published` yields for the system, where that is known already.
    """
    found: dict[tuple[str, str], list[float]] = {}
    for one in published(system) if rows is None else rows:
        new, fitted = uncalibrated(one.run, system), features(one.run, system) if one.is_own else {}
        for kind in (new or fitted).items():
            found.setdefault(kind, []).append(one.off)
    return found


def kind_doubts(run: Done, system: System, errors: Errors) -> list[str]:
    """Return why the kind of a run's plan is doubtful, a text for each of its features; empty: it is not.

    A kind is doubtful if the constants were fitted to no such step, or to some and still miss others badly.
    """
    if system.calibration is None:
        return ["nothing was measured to calibrate it"]
    new, doubts = uncalibrated(run, system), list[str]()
    for name, value in features(run, system).items():
        off = errors.get((name, value), [])
        if name in new or (off and np.mean(np.abs(off)) > BADLY):
            are = "step with it is" if len(off) == 1 else "steps with it are"
            steps = f", and {len(off)} measured {are} predicted {_span(off)}" if off else ""
            doubts.append(f"{name} {value} {'is not calibrated' if name in new else MISSED}{steps}")
    return doubts


def _span(off: Sequence[float]) -> str:
    """Return the range of relative errors in words: 34% to 77% too fast."""
    ends = sorted((min(off), max(off)), key=abs)
    words = [f"{abs(end):.0%} too {'fast' if end < 0 else 'slow'}" for end in ends]
    if words[0] == words[1]:
        return words[0]
    if (ends[0] < 0) == (ends[1] < 0):
        words[0] = f"{abs(ends[0]):.0%}"
    return " to ".join(words)
