"""Predictions for a table of configurations: `predict --rows`."""

import csv
import dataclasses
import io
import math
import sys
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError
from rich.console import Console
from rich.progress import Progress, track

from harness.predict.fit import Measured, constant_mfu, fit, percent_off
from harness.predict.interval import interval
from harness.predict.simulation import as_simulated, completed, predicted, vocabulary_of
from harness.terminal import print_json
from impl.errors import InputError
from impl.files import read_text
from impl.plan import Plan
from impl.run import Run, with_fields
from impl.simulator.system import System

REQUIRED = {
    **{"global_batch": "train.global_batch", "micro_batch": "train.microbatch"},
    **{"hidden": "model.hidden_size", "heads": "model.num_heads", "layers": "model.num_layers"},
    **{"seq_len": "model.seq_len", "tp": "plan.tp", "dp": "plan.dp", "pp": "plan.pp"},
}
"""Columns that every table has, of positive integers, and the fields of a run that they set."""
COUNTS = ("gpus", *REQUIRED)
OPTIONAL = {
    **{"vocab": "model.vocab_size", "family": "model.family", "norm_placement": "model.norm_placement"},
    **{"dropout": "model.dropout", "precision": "precision", "fp32_gradients": "fp32_gradients"},
    **{name: f"plan.{name}" for name in vars(Plan()) if name not in REQUIRED},
}
"""Columns that a table may have. A cell that is left out counts as a field that is not given to `predict`."""
SECONDS, SPLIT, CALIBRATE = "iteration_time_s", "split", "calibrate"
TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
EVALUATIONS = 200
"""Predictions of all fitted rows that a fit is expected to make: the total of its progress bar."""


class Row(NamedTuple):
    """A line of the table."""

    cells: dict[str, Any]
    run: Run
    seconds: float | None
    problem: str | None
    """Reason why the row cannot be predicted."""
    left_out: dict[str, Any]
    """Optional columns that the row does not give, and the values assumed for them."""

    @property
    def split(self) -> str:
        return str(self.cells.get(SPLIT, ""))

    @property
    def measured(self) -> Measured | None:
        """Run and seconds of a row that was measured and can be predicted."""
        if self.seconds is None or self.problem:
            return None
        name = self.cells.get("name") or " ".join(str(self.cells[name]) for name in COUNTS)
        return Measured(name, self.run, self.seconds)


def predict_rows(path: Path, system: System, json: bool) -> int:
    """Print the table with predictions, from constants fitted to its rows of split `calibrate`, if any.

    Raises:
        InputError: the table is not valid, or no row of it can be predicted.
    """
    rows = read_rows(path, system)
    if all(row.problem for row in rows):
        raise InputError(f"--rows {path}: no row can be predicted; the first: {rows[0].problem}")
    fitted = [row.measured for row in rows if row.split == CALIBRATE and row.measured]
    if fitted:
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(f"fitting {len(fitted)} rows", total=EVALUATIONS)
            system = fit(fitted, system, progress=lambda tried: bar.update(task, completed=min(tried, EVALUATIONS)))
    answers = [answer(row, system) for row in track(rows, "predicting", console=Console(stderr=True), transient=True)]
    splits = dict.fromkeys(row.split for row in rows)
    errors = {split: found for split in splits if (found := errors_of(rows, answers, split, fitted))}
    known, left_out = system.calibration, _left_out(rows)
    not_read = [name for name in rows[0].cells if name not in {*COUNTS, *OPTIONAL, SECONDS, SPLIT, "name"}]
    if json:
        shown = known and {name: value for name, value in dataclasses.asdict(known).items() if name != "residuals"}
        constants = {name: one.value for name, one in system.all_constants.items()}
        head = {"system": system.name, "stack": system.stack, "calibration": shown, "constants": constants}
        return print_json({**head, "errors": errors, "left_out": left_out, "ignored": not_read, "rows": answers})
    table = csv.DictWriter(sys.stdout, list(answers[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(answers)
    notes = []
    if not_read:
        notes.append(f"columns that predictions ignore: {', '.join(not_read)}")
    if left_out:
        assumed = ", ".join(f"{name} {' or '.join(map(str, values))}" for name, values in left_out.items())
        notes.append(f"columns or cells left out, and what they stand for: {assumed}")
    if known is not None:
        errors_left_out = f"{known.mape:.1f} % off at rows left out, at most {known.worst:.1f} %"
        notes.append(f"{system.name} ({known.stack}), fitted on {len(known.rows)} rows: {errors_left_out}")
    for split, found in errors.items():
        percent = ", ".join(f"{name} {value:.1f}" for name, value in found.items() if name != "rows")
        notes.append(f"{split or 'measured'}: {found['rows']:.0f} rows; in percent: {percent}")
    for note in notes:
        print(note, file=sys.stderr)
    return 0


def read_rows(path: Path, system: System) -> list[Row]:
    """Return the rows of a CSV file.

    Raises:
        InputError: the message has the file, the line, the column, its value and what would be valid.
    """
    valid = f"valid: a CSV file with columns {', '.join(COUNTS)}"
    try:
        text = read_text(path, encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not text"
        raise InputError(f"--rows {path}: {reason}; {valid}") from None
    reader = csv.DictReader(io.StringIO(text), restkey="", restval="")
    try:
        lines = list(reader)
    except csv.Error as error:  # a cell that is too long for any value, a character that ends none
        raise InputError(f"--rows {path} line {reader.line_num + 1}: {error}; valid: a CSV file of values") from None
    if not lines:
        raise InputError(f"--rows {path}: has no rows; {valid}")
    if missing := [name for name in COUNTS if name not in lines[0]]:
        raise InputError(f"--rows {path}: has no column {', '.join(missing)}; optional are {', '.join(OPTIONAL)}")
    rows = []
    for number, line in enumerate(lines, 2):
        cells = {name: "" if value.strip().lower() == "nan" else value.strip() for name, value in line.items() if name}
        try:
            rows.append(row_of(cells, system))
        except InputError as error:
            raise InputError(f"--rows {path} line {number}: {error}") from None
    return rows


def row_of(cells: dict[str, str], system: System) -> Row:
    """Return the run that a line of the table describes.

    Raises:
        InputError: a cell is not what its column has.
    """
    count = {name: _count(name, cells[name]) for name in COUNTS}
    given: dict[str, Any] = {field: count[name] for name, field in REQUIRED.items()}
    given |= {field: _typed(name, field, cells[name]) for name, field in OPTIONAL.items() if cells.get(name)}
    try:
        run, _ = completed(with_fields(Run(), given), given.keys(), system)
    except ValidationError as error:
        raise InputError(_first_problem(error)) from None
    problem = next(iter(run.problems()), None)
    try:
        as_simulated(run, system)
    except InputError as error:
        problem = str(error)
    if run.plan.world_size != count["gpus"]:
        problem = f"gpus {count['gpus']} is not tp x dp x pp, {run.plan.world_size}"
    left_out = {name: attrgetter(field)(run) for name, field in OPTIONAL.items() if field not in given}
    if "vocab" in left_out:
        left_out["vocab"] = vocabulary_of(run)
    return Row({name: _number(cell) for name, cell in cells.items()}, run, _seconds(cells), problem, left_out)


def _typed(name: str, field: str, cell: str) -> Any:
    """Return a cell of an optional column with its field's type; the field checks its range.

    Raises:
        InputError: the cell has another type.
    """
    if isinstance(attrgetter(field)(Run()), bool):
        if (truth := TRUTH.get(str(_number(cell)).lower())) is None:
            raise InputError(f"{name} {cell!r:.40}; valid: true, false")
        return truth
    return _count(name, cell) if name in ("chunks", "vocab", "bucket_bytes") else _number(cell)


def _count(name: str, cell: str) -> int:
    count = _number(cell)
    if not isinstance(count, int) or count < 1:
        raise InputError(f"{name} {cell!r:.40}; valid: a positive integer")
    return count


def _seconds(cells: dict[str, str]) -> float | None:
    cell = cells.get(SECONDS, "")
    if not cell and cells.get(SPLIT) == CALIBRATE:
        raise InputError(f"{SECONDS} is empty; rows of {SPLIT} {CALIBRATE} need the seconds measured")
    seconds = _number(cell) if cell else None
    if seconds is not None and (isinstance(seconds, str) or seconds <= 0):
        raise InputError(f"{SECONDS} {cell!r:.40}; valid: positive seconds")
    return seconds


def _number(cell: str) -> Any:
    """Return a cell as a JSON value; 8.0, as some programs write integers next to empty cells, is 8."""
    try:
        number = float(cell)
    except ValueError:
        return cell
    if not math.isfinite(number):
        return cell
    return int(number) if number.is_integer() else number


def _first_problem(error: ValidationError) -> str:
    """Return the first problem in words: the column, its value and what would be valid."""
    first = error.errors()[0]
    field, reason = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
    column = next((name for name, own in (REQUIRED | OPTIONAL).items() if own == field), field)
    return f"{column}: {reason}" if isinstance(first["input"], dict) else f"{column} {first['input']!r:.40}: {reason}"


def _left_out(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Return the values assumed for left-out cells, by column."""
    found: dict[str, dict[Any, None]] = {}
    for row in rows:
        for name, value in row.left_out.items():
            found.setdefault(name, {})[value] = None
    return {name: list(values) for name, values in found.items()}


def answer(row: Row, system: System) -> dict[str, Any]:
    """Return the row with its prediction."""
    names = ("predicted_s", "low_s", "high_s", "tflops_per_gpu", "memory_bytes", "fits", "doubts")
    if row.problem:
        return {**row.cells, **dict.fromkeys(names), "problem": row.problem}
    found = predicted(row.run, system)
    low, high, warnings = interval(system, row.run, found.seconds)
    rate, needed = found.hardware_flops_per_gpu_s / 1e12, max(one.total for one in found.memory)
    values = (found.seconds, low, high, rate, needed, found.fits, "; ".join(warnings))
    return {**row.cells, **dict(zip(names, values, strict=True)), "problem": None}


def errors_of(
    rows: Sequence[Row], answers: Sequence[dict[str, Any]], split: str, fitted: Sequence[Measured]
) -> dict[str, float]:
    """Return errors in percent of the measured rows of a split; empty without any."""
    pairs = zip(rows, answers, strict=True)
    known = [(row.measured, one) for row, one in pairs if row.split == split and row.measured]
    if not known:
        return {}
    measured = np.array([row.seconds for row, _ in known], dtype=float)
    off = abs(percent_off(np.array([one["predicted_s"] for _, one in known]), measured))
    inside = [one["low_s"] <= row.seconds <= one["high_s"] for row, one in known]
    errors = {"rows": len(known), "mape": off.mean(), "median": np.median(off), "max": off.max()}
    errors["inside_interval"] = 100 * np.mean(inside)
    if fitted:
        base = constant_mfu(fitted, [row for row, _ in known])
        errors["constant_mfu_mape"] = abs(percent_off(base, measured)).mean()
    return {name: float(value) for name, value in errors.items()}
