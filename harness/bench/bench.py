"""The verb `bench`: the repository's benchmarks, run by pytest, and their changes since a baseline."""

import json as json_format
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import ValidationError

from harness.analysis.render import Column, Table, as_json
from harness.bench.history import history as tell_history
from harness.bench.reports import BASELINE, FOLDER, MS, Report, name_of
from harness.launch.flags import require_positive
from harness.records.environment import CODE
from harness.records.store import write_atomically
from harness.terminal import Flag, print_json, print_tables
from impl.errors import InputError
from impl.files import read_bytes

NEEDED = ("pytest", "pytest_benchmark")
PATIENCE_SECONDS = 30
"""Seconds that pytest has to stop its ranks when it is interrupted."""
INTERRUPTED = 130
NONE_FAILED, SOME_FAILED = 0, 1
"""pytest's exit statuses when all chosen tests have run."""


def bench(
    *,
    only: str | None = None,
    keep: Path | None = None,
    compare: Path | None = None,
    tolerance: float = 0.15,
    history: Flag = False,
    json: Flag = False,
) -> int:
    """Time the parts, and other engines beside ours: the repository's benchmarks, on two idle cores.

    Args:
        only: Only benchmarks whose name contains this, or matches it as a pattern.
        keep: Folder for the side-by-side tables and baseline.json; its results of benchmarks that are not run stay.
        compare: A baseline.json, or a pytest-benchmark report: print which benchmarks are slower or faster than there.
        tolerance: Share of a benchmark's time by which it may differ.
        history: Measure nothing: print a line for each benchmark over the committed baselines, and the commits at
            which its time changed by more than the tolerance.
        json: Print one JSON document on standard output.
    """
    require_positive(tolerance=tolerance)
    if history and (keep or compare):
        raise InputError("--history: measures nothing; valid without --keep and --compare")
    if history:
        return tell_history(only, tolerance, json=json)
    before = _baseline(compare) if compare else None
    _require_benchmarks()
    keep = keep and keep.resolve()
    status, now = _measured(_chosen(only), keep, quiet=json)
    if status == INTERRUPTED:
        return _leave(now, keep)
    if now is None or status not in (NONE_FAILED, SOME_FAILED):
        print("error: no benchmark was measured; pytest's output above has the reason", file=sys.stderr)
        return 1
    table = compared(now, before, tolerance, all_of_them=only is None) if before else None
    written = [str(_kept(now, keep))] if keep else []
    if json:
        timings = [{"name": name, **stats.model_dump()} for name, stats in now.timings.items()]
        shown = as_json(table) if table is not None else None
        print_json({"machine": now.machine, "benchmarks": timings, "compared": shown, "files": written})
    else:
        if table is not None:
            print_tables([table])
        for file in written:
            print(f"written: {file}")
    return 1 if status == SOME_FAILED or (table is not None and any(table.frame["asks for a look"])) else 0


def _leave(now: Report | None, keep: Path | None) -> int:
    """Keep what had been measured before an interrupt, and say so; return the exit status."""
    left = "no baseline written"
    if keep and now and now.benchmarks:
        left = f"what had been measured is in {_kept(now, keep)}"
    print(f"interrupted; all ranks stopped, {left}", file=sys.stderr)
    return INTERRUPTED


def compared(now: Report, before: Report, tolerance: float, *, all_of_them: bool = True) -> Table:
    """Tabulate both medians of every benchmark, their ratio, and whether it is beyond the tolerance, either way.

    Slower: more than 1 + tolerance of the time before; faster: less than 1 / (1 + tolerance). There is no such verdict
    on another machine than the baseline's.

    Args:
        all_of_them: all benchmarks were to run: those of the baseline that are missing now are listed.
    """
    others = [
        f"{what} {then or 'unknown'} before, {now.machine[what] or 'unknown'} now"
        for what, then in before.machine.items()
        if then is None or then != now.machine[what]
    ]
    earlier, later = before.timings, now.timings
    rows = []
    for name in dict.fromkeys([*earlier, *later] if all_of_them else later):
        then, here = earlier.get(name), later.get(name)
        row: dict[str, Any] = {"name": name, "verdict": "", "asks for a look": False}
        if then is not None:
            row |= {"before": then.median, "before iqr": then.iqr}
        if here is not None:
            row |= {"now": here.median, "now iqr": here.iqr}
        if then is None or here is None:
            row["verdict"] = "new" if then is None else "not measured"
        else:
            ratio = row["ratio"] = here.median / then.median
            if not others and not 1 / (1 + tolerance) <= ratio <= 1 + tolerance:
                row |= {"verdict": "slower" if ratio > 1 else "faster", "asks for a look": True}
        rows.append(row)
    frame = pd.DataFrame(rows, columns=[*(column.key for column in COLUMNS), "asks for a look"])
    return Table("bench", "Benchmarks against the baseline", COLUMNS, frame, tuple(_notes(frame, others, tolerance)))


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
    found = _report(path)
    if found is None or not found.timings:
        what = "is no whole report of benchmarks" if path.exists() else "there is no such file"
        raise InputError(f"--compare {path}: {what}; `lmscale bench --keep DIR` writes DIR/{BASELINE}")
    return found


def _report(path: Path) -> Report | None:
    """Return the report in a file; None if there is none."""
    try:
        return Report.model_validate_json(read_bytes(path))
    except (OSError, ValidationError):
        return None


def _kept(now: Report, folder: Path) -> Path:
    """Write the baseline in a folder, and return its path: one line per benchmark, with the commit it was measured at.

    Benchmarks that only an earlier baseline there has, of the same machine, are kept.
    """
    path = folder / BASELINE
    earlier = _report(path)
    is_same = earlier is not None and earlier.machine == now.machine
    kept = {name_of(one.fullname): one for one in earlier.benchmarks} if earlier and is_same else {}
    kept |= {name_of(one.fullname): one.model_copy(update={"commit": now.commit}) for one in now.benchmarks}
    lines = ",\n".join(f"  {json_format.dumps(kept[name].model_dump())}" for name in sorted(kept))
    machine = json_format.dumps({"environment": now.environment}, indent=1)
    write_atomically(path, f'{{\n"machine_info": {machine},\n"benchmarks": [\n{lines}\n]\n}}\n')
    return path


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
    names = [name_of(line) for line in done.stdout.splitlines() if "::" in line and not line.startswith("ERROR")]
    if done.returncode or not names:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        raise InputError(f"the benchmarks in {FOLDER} cannot be read: {' '.join(last)}")
    kept = [name for name in names if only is None or only in name or fnmatch(name, only)]
    if not kept:
        functions = dict.fromkeys(name.partition("[")[0] for name in names)
        raise InputError(f"--only {only!r} matches no benchmark; there are: {', '.join(functions)}")
    return kept


def _measured(names: Sequence[str], keep: Path | None, *, quiet: bool) -> tuple[int, Report | None]:
    """Return pytest's exit status, or INTERRUPTED, and its report; its progress is shown, on stderr only if quiet."""
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
            status = INTERRUPTED
        finally:
            _stop(process, signal.SIGKILL)
            process.wait()
        return status, _report(report)


def _stop(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    """Send a signal to pytest and the ranks that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, how)


def _pytest(*arguments: object) -> list[str]:
    options = "addopts=--import-mode=importlib -p no:cacheprovider"
    command = [sys.executable, "-m", "pytest", "-c", CODE / "pyproject.toml", f"--rootdir={FOLDER.parents[1]}"]
    return [str(word) for word in (*command, "--override-ini", options, *arguments)]
