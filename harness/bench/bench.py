"""The verb `bench`: the repository's benchmarks, run by pytest, and their changes since a baseline."""

import json as json_format
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd

from harness.analysis import render
from harness.analysis.render import Column, Table
from harness.records.environment import CODE
from harness.records.store import read_json, write_atomically
from harness.terminal import Flag, console, print_json
from impl.errors import InputError

FOLDER = CODE / "tests" / "bench"
BASELINE = "baseline.json"
NEEDED = ("pytest", "pytest_benchmark")
PATIENCE_SECONDS = 30
"""Seconds that pytest has to stop its ranks when it is interrupted."""
INTERRUPTED = 130
NONE_FAILED, SOME_FAILED = 0, 1
"""pytest's exit statuses when all chosen tests have run."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one benchmark's rounds."""

    median: float
    iqr: float
    rounds: int


@dataclass(frozen=True)
class Report:
    """Timings by name, and the machine they were measured on: processor, cores and torch, None where not known."""

    machine: dict[str, Any]
    timings: dict[str, Timing]


def bench(
    *,
    only: str | None = None,
    keep: Path | None = None,
    compare: Path | None = None,
    tolerance: float = 0.15,
    json: Flag = False,
) -> int:
    """Time the parts, and other engines beside ours: the repository's benchmarks, on two idle cores.

    Args:
        only: Only benchmarks whose name contains this, or matches it as a pattern.
        keep: Folder for the side-by-side tables and baseline.json; its results of benchmarks that are not run stay.
        compare: A baseline.json, or a pytest-benchmark report: print which benchmarks are slower or faster than there.
        tolerance: Share of a benchmark's time by which it may differ.
        json: Print one JSON document on standard output.
    """
    if not 0 < tolerance < math.inf:
        raise InputError(f"--tolerance {tolerance}: must be more than 0, and finite")
    before = _baseline(compare) if compare else None
    _require_benchmarks()
    keep = keep and keep.resolve()
    try:
        names = _chosen(only)
        status, document = _measured(names, keep, quiet=json)
    except KeyboardInterrupt:
        print("interrupted; all ranks stopped, no baseline written", file=sys.stderr)
        return INTERRUPTED
    now = _report(document)
    if now is None or status not in (NONE_FAILED, SOME_FAILED):
        print("error: no benchmark was measured; pytest's output above has the reason", file=sys.stderr)
        return 1
    table = compared(now, before, tolerance, all_of_them=only is None) if before else None
    written = [str(keep / BASELINE)] if keep else []
    if keep:
        write_atomically(keep / BASELINE, _smaller(document, read_json(keep / BASELINE)))
    if json:
        timings = [{"name": name, **asdict(timing)} for name, timing in now.timings.items()]
        shown = render.as_json(table) if table is not None else None
        print_json({"machine": now.machine, "benchmarks": timings, "compared": shown, "files": written})
    else:
        if table is not None:
            console(render.console(table)).print(render.console(table))
        for file in written:
            print(f"written: {file}")
    return 1 if status == SOME_FAILED or (table is not None and any(table.frame["asks for a look"])) else 0


def compared(now: Report, before: Report, tolerance: float, *, all_of_them: bool = True) -> Table:
    """Tabulate both medians of every benchmark, their ratio, and whether it is beyond the tolerance, either way.

    Slower: more than 1 + tolerance of the time before; faster: less than 1 / (1 + tolerance). There is no such verdict
    on another machine than the baseline's.

    Args:
        all_of_them: all benchmarks were to run: those of the baseline that are missing now are listed.
    """
    others = [
        f"{what} {before.machine[what] or 'unknown'} before, {now.machine[what] or 'unknown'} now"
        for what in now.machine
        if before.machine[what] is None or before.machine[what] != now.machine[what]
    ]
    rows = []
    for name in dict.fromkeys([*before.timings, *now.timings]):
        then, here = before.timings.get(name), now.timings.get(name)
        if here is None and not all_of_them:
            continue
        ratio = here.median / then.median if here and then else None
        verdict = "new" if then is None else "not measured" if here is None else ""
        is_far = ratio is not None and not others and not 1 / (1 + tolerance) <= ratio <= 1 + tolerance
        if is_far and ratio is not None:
            verdict = "slower" if ratio > 1 else "faster"
        row = {"name": name, "ratio": ratio, "verdict": verdict, "asks for a look": is_far}
        for when, timing in (("before", then), ("now", here)):
            row[when] = timing.median if timing else None
            row[f"{when} iqr"] = timing.iqr if timing else None
        rows.append(row)
    frame = pd.DataFrame(rows, columns=[*(column.key for column in COLUMNS), "asks for a look"])
    return Table("bench", "Benchmarks against the baseline", COLUMNS, frame, tuple(_notes(frame, others, tolerance)))


MS: dict[str, Any] = {"unit": "ms", "scale": 1e-3, "si": "s"}
COLUMNS = (
    Column(key="name", header="Benchmark", text=True),
    Column(key="before", header="Before, median", **MS),
    Column(key="before iqr", header="Before, quartiles apart", digits=2, **MS),
    Column(key="now", header="Now, median", **MS),
    Column(key="now iqr", header="Now, quartiles apart", digits=2, **MS),
    Column(key="ratio", header="Now / before", digits=3),
    Column(key="verdict", header="Verdict", text=True),
)


def _notes(frame: pd.DataFrame, others: Sequence[str], tolerance: float) -> list[str]:
    if others:
        return [f"No verdict: another machine than the baseline's ({'; '.join(others)})."]
    changed = sum(map(bool, frame["asks for a look"]))
    meaning = f"Slower, faster: beyond {100 * tolerance:g}% either way; both ask for a look."
    return [meaning, f"{changed} of {len(frame)} benchmarks changed by more than that." if changed else "None changed."]


def _baseline(path: Path) -> Report:
    found = _report(read_json(path))
    if found is None or not found.timings:
        what = "is no whole report of benchmarks" if path.is_file() else "there is no such file"
        raise InputError(f"--compare {path}: {what}; `lmscale bench --keep DIR` writes DIR/{BASELINE}")
    return found


def _report(document: Any) -> Report | None:
    """Return the contents of a pytest-benchmark report, without benchmarks of one round; None: it is no such report."""
    try:
        environment = document["machine_info"].get("environment", {})
        timings = {
            _name(found["fullname"]): Timing(float(found["stats"]["median"]), float(found["stats"]["iqr"]), rounds)
            for found in document["benchmarks"]
            if (rounds := int(found["stats"]["rounds"])) > 1
        }
        machine = {key: environment.get(key) for key in ("processor", "cores")}
        machine["torch"] = environment.get("packages", {}).get("torch")
    except (TypeError, KeyError, ValueError, AttributeError):
        return None
    are_times = all(0 < timing.median < math.inf and 0 <= timing.iqr < math.inf for timing in timings.values())
    return Report(machine, timings) if are_times else None


def _smaller(document: dict[str, Any], earlier: Any) -> str:
    """Return the report as it is committed: no rounds, one line per benchmark, with the commit it was measured at.

    Benchmarks that only an earlier report of the same machine has are kept.
    """
    environment = document["machine_info"]["environment"]
    commit = (environment.get("git") or {}).get("commit")
    now, then = _report(document), _report(earlier)
    is_same = now is not None and then is not None and now.machine == then.machine
    kept = {_name(found["fullname"]): found for found in earlier["benchmarks"]} if is_same else {}
    for found in document["benchmarks"]:
        stats = {key: found["stats"][key] for key in ("median", "iqr", "rounds")}
        kept[_name(found["fullname"])] = {"fullname": found["fullname"], "commit": commit, "stats": stats}
    lines = ",\n".join(f"  {json_format.dumps(kept[name])}" for name in sorted(kept))
    machine = json_format.dumps({"environment": environment}, indent=1)
    return f'{{\n"machine_info": {machine},\n"benchmarks": [\n{lines}\n]\n}}\n'


def _require_benchmarks() -> None:
    """Check that the benchmarks can be run.

    Raises:
        InputError: they, or what they need, are not installed.
    """
    if not FOLDER.is_dir():
        raise InputError(f"{FOLDER}: no benchmarks there; they are in the repository, not in the installed package")
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise InputError(f"benchmarks need {' and '.join(missing)}: pip install -e '.[dev]'")


def _chosen(only: str | None) -> list[str]:
    """Return the names of all benchmarks, or of those that `only` is part of or matches."""
    done = subprocess.run(_pytest("--collect-only", "-q", FOLDER), cwd=CODE, capture_output=True, text=True)
    names = [_name(line) for line in done.stdout.splitlines() if "::" in line and not line.startswith("ERROR")]
    if done.returncode or not names:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        raise InputError(f"the benchmarks in {FOLDER} cannot be read: {' '.join(last)}")
    kept = [name for name in names if only is None or only in name or fnmatch(name, only)]
    if not kept:
        functions = dict.fromkeys(name.partition("[")[0] for name in names)
        raise InputError(f"--only {only!r} matches no benchmark; there are: {', '.join(functions)}")
    return kept


def _measured(names: Sequence[str], keep: Path | None, *, quiet: bool) -> tuple[int, Any]:
    """Return pytest's exit status and its report; its progress is shown, on standard error only if quiet."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = _pytest(
            "-v",
            "--tb=short",
            "--benchmark-only",
            "--benchmark-columns=median,iqr,rounds",
            "--benchmark-sort=fullname",
            f"--benchmark-json={report}",
            *([f"--keep={keep}"] if keep else []),
            *(f"{FOLDER}/{name}" for name in names),
        )
        process = subprocess.Popen(command, cwd=CODE, stdout=2 if quiet else None, start_new_session=True)
        try:
            status = process.wait()
        except KeyboardInterrupt:
            _stop(process, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE_SECONDS)
            raise
        finally:
            _stop(process, signal.SIGKILL)
            process.wait()
        return status, read_json(report)


def _stop(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    """Send a signal to pytest and the ranks that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, how)


def _pytest(*arguments: object) -> list[str]:
    options = "addopts=--import-mode=importlib -p no:cacheprovider"
    command = [sys.executable, "-m", "pytest", "-c", CODE / "pyproject.toml", f"--rootdir={FOLDER.parents[1]}"]
    return [str(word) for word in (*command, "--override-ini", options, *arguments)]


def _name(node: str) -> str:
    """Return a benchmark's name: its file in the folder of benchmarks, its function, its parameters."""
    file, _, function = node.partition("::")
    return f"{file.rpartition(f'{FOLDER.name}/')[2]}::{function}"
