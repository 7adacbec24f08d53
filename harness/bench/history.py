"""Benchmarks over commits: a line for each, from the committed baselines, with the commits at which its time changed.

The rule is small. Of the medians that one machine measured, in the order of commits, a series is divided where the
geometric means before and after differ most for their number. The division stands if they differ by more than the
tolerance, and by three standard errors: noise is the larger of the quartiles' distance within runs and the scatter
around both means. Both parts are then divided by the same rule. Two measurements alone decide nothing.
"""

import math
import subprocess
from collections.abc import Sequence
from fnmatch import fnmatch
from statistics import fmean, median, pstdev
from typing import Any, NamedTuple

import pandas as pd
from pydantic import ValidationError

from harness.analysis.render import Column, Table, as_json, texts
from harness.bench.reports import BASELINE, MS, Report, name_of
from harness.records.environment import CODE
from harness.terminal import print_json, print_tables
from impl.errors import InputError

PATH = f"results/bench/{BASELINE}"
ERRORS = 3.0
"""Standard errors by which two parts of a series have to differ."""
LEAST = 3
"""Measurements of a series that may be divided."""
OF_QUARTILES = 1.35
"""Standard deviations between the quartiles of a normal distribution."""
BARS = "▁▂▃▄▅▆▇█"
COLUMNS = (
    *texts(name="Benchmark", machine="Machine"),
    Column(key="n", header="n"),
    Column(key="first", header="First", **MS),
    Column(key="last", header="Last", **MS),
    *texts(course="Course", changes="Changed"),
)


class AtCommit(NamedTuple):
    """Benchmark at one commit."""

    commit: str
    seconds: float
    noise: float
    """Standard deviation of a round, relative to the median."""


class Change(NamedTuple):
    """Commit from which on a benchmark takes another time."""

    commit: str
    ratio: float
    """Time from that commit on over the time before it."""

    def __str__(self) -> str:
        return f"{100 * (self.ratio - 1):+.0f}% at {self.commit[:8]}"


def changes(series: Sequence[AtCommit], tolerance: float) -> list[Change]:
    """Return the commits at which the time of a series changed."""
    logs = [math.log(one.seconds) for one in series]
    best, at = 0.0, 0
    for i in range(1, len(series)):
        step = abs(fmean(logs[i:]) - fmean(logs[:i])) / math.sqrt(1 / i + 1 / (len(series) - i))
        best, at = max((best, at), (step, i))
    if not at or len(series) < LEAST:
        return []
    before, after = logs[:at], logs[at:]
    scatter = max(pstdev(before), pstdev(after))
    noise = max(scatter, median(one.noise for one in series))
    step = fmean(after) - fmean(before)
    if abs(step) <= math.log1p(tolerance) or best <= ERRORS * noise:
        return []
    parts = changes(series[:at], tolerance), changes(series[at:], tolerance)
    return [*parts[0], Change(series[at].commit, math.exp(step)), *parts[1]]


def committed() -> list[Report]:
    """Return the baselines of all commits, the oldest first.

    Raises:
        InputError: there are none, as in an installed package.
    """
    log = _git("log", "--reverse", "--format=%H", "--", PATH)
    found = []
    for commit in log.split():
        try:
            found.append(Report.model_validate_json(_git("show", f"{commit}:{PATH}")))
        except ValidationError:
            continue  # of another version, or removed
    if not found:
        raise InputError(f"--history: no commit has {PATH}; valid in a checkout, after `lmscale bench --keep`")
    return found


def series_of(reports: Sequence[Report]) -> dict[tuple[str, str], list[AtCommit]]:
    """Return what each machine measured of each benchmark, in order, each measurement once."""
    found: dict[tuple[str, str], dict[str, AtCommit]] = {}
    for report in reports:
        machine = ", ".join(str(value) for value in report.machine.values() if value is not None)
        for one in report.benchmarks:
            stats = one.stats
            noise = stats.iqr / stats.median / OF_QUARTILES
            commit = one.commit or report.commit or "unknown"
            if stats.rounds > 1:
                measured = found.setdefault((name_of(one.fullname), machine), {})
                measured.setdefault(f"{commit} {stats.median}", AtCommit(commit, stats.median, noise))
    return {key: [*measured.values()] for key, measured in sorted(found.items())}


def history(only: str | None, tolerance: float, *, json: bool) -> int:
    """Print a line for each benchmark over the committed baselines.

    Args:
        only: part of a benchmark's name, or a pattern of it.
        tolerance: share of a time by which it has to change.
        json: print one JSON document.
    """
    rows = []
    for (name, machine), series in series_of(committed()).items():
        if only is None or only in name or fnmatch(name, only):
            found = [str(change) for change in changes(series, tolerance)]
            row: dict[str, Any] = {
                "name": name.replace("test_", "").replace(".py::", ": "),
                "machine": machine,
                "n": len(series),
                "course": course(series),
            }
            row |= {"first": series[0].seconds, "last": series[-1].seconds, "changes": ", ".join(found)}
            rows.append(row)
    if not rows:
        raise InputError(f"--only {only!r}: no committed benchmark has this in its name, or matches it")
    changed = sum(bool(row["changes"]) for row in rows)
    notes = (f"Changed: by more than {100 * tolerance:g}%, and three standard errors, on one machine. {changed} did.",)
    table = Table("history", "Benchmarks over commits", COLUMNS, pd.DataFrame(rows), notes)
    if json:
        return print_json(as_json(table))
    print_tables([table])
    return 0


def course(series: Sequence[AtCommit]) -> str:
    """Return a series as bars, the slowest one the highest."""
    low, high = (pick(one.seconds for one in series) for pick in (min, max))
    top = len(BARS) - 1
    return "".join(BARS[round(top * (one.seconds - low) / (high - low)) if high > low else 0] for one in series)


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", CODE, *words], capture_output=True, text=True)
    return done.stdout
