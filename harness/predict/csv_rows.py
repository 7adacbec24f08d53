"""Predictions for a table of configurations: `predict --rows`."""

import csv
import dataclasses
import io
import math
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError
from rich.console import Console

from harness.analysis import render
from harness.experiment.published import FOLDER
from harness.predict.fit import Measured, constant_mfu, error_sizes, fit, percent_off
from harness.predict.interval import interval
from harness.predict.simulation import Simulated, predicted, simulated, vocabulary_of
from harness.predict.systems import load_system
from harness.records.printable import several
from harness.terminal import print_json, shown_progress
from impl.errors import InputError, first_problem
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
OF_MODEL = (
    *("family", "norm_placement", "norm", "kv_heads", "mlp", "positions", "biases", "tied", "dropout", "experts"),
    *("experts_per_token", "experts_every", "expert_size", "shared_expert_size", "expert_capacity"),
)
OPTIONAL = {
    **{"vocab": "model.vocab_size", **{name: f"model.{name}" for name in OF_MODEL}, "ffn": "model.mlp_size"},
    **{"precision": "precision", "fp32_gradients": "fp32_gradients"},
    **{name: f"plan.{name}" for name in vars(Plan()) if name not in REQUIRED},
}
"""Columns that a table may have. A cell that is left out counts as a field that is not given to `predict`."""
SECONDS, SPLIT, CALIBRATE, SYSTEM = "iteration_time_s", "split", "calibrate", "system"
MEMORY = "memory_gb"
"""Column of printed memory, which predictions ignore."""
NUMBERS = {*COUNTS, *OPTIONAL, SECONDS, MEMORY}
"""Columns in which a cell that reads as a number is one; other columns come back as they are."""
SHORTEST, LONGEST = 1e-9, 1e9
"""Bounds of measured seconds: a fit's arithmetic holds between them."""
GROUPS = ("all", "node")
"""Valid words of `zero_group`, besides a number of ranks: all of dp and cp, or those of one node."""
COUNTED = ("chunks", "vocab", "bucket_bytes", "kv_heads", "ffn", "cp", "ep")
"""Optional columns of positive integers."""
FLAGS = [name for name, field in OPTIONAL.items() if isinstance(attrgetter(field)(Run()), bool)]
TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


class Row(NamedTuple):
    """A line of the table."""

    cells: dict[str, Any]
    asked: Simulated | None
    """Run of the row; None: it cannot be predicted."""
    system: System | None
    problem: str | None = None
    """Reason why the row cannot be predicted."""
    left_out: Mapping[str, Any] = MappingProxyType({})
    """Optional columns that the row does not give, and the values assumed for them."""

    @property
    def split(self) -> str:
        return _split_of(self.cells)

    @property
    def measured(self) -> Measured | None:
        """Run and seconds of a row that was measured and can be predicted."""
        seconds = self.cells.get(SECONDS)
        if not seconds or self.asked is None:
            return None
        name = self.cells.get("name") or " ".join(str(self.cells[name]) for name in COUNTS)
        return Measured(name, self.asked.done, seconds)


class _Part(NamedTuple):
    """Rows of a table that are predicted for the same system."""

    system: System
    """The system, with constants fitted to its rows of split `calibrate`, if it has any."""
    rows: list[Row]
    fitted: list[Measured]
    answers: list[dict[str, Any]]


def predict_rows(path: Path, system: System | None, json: bool) -> int:
    """Print the table with predictions, from constants fitted to its rows of split `calibrate`, if any.

    Raises:
        InputError: the table is not valid, or no row of it can be predicted.
    """
    rows = read_rows(path, system)
    if all(row.problem for row in rows):
        raise InputError(f"--rows {path}: no row can be predicted; line 2: {rows[0].problem}")
    parts = _parts(rows)
    answered = {id(row): answer for part in parts for row, answer in zip(part.rows, part.answers, strict=True)}
    answers = [answered.get(id(row)) or answer(row, None) for row in rows]
    errors = {
        " ".join(filter(None, [part.system.name * (len(parts) > 1), split])): found
        for part in parts
        for split in dict.fromkeys(row.split for row in part.rows)
        if (found := errors_of(part, split))
    }
    assumed = {name: None for row in rows for name in row.left_out}
    left_out = {name: list(dict.fromkeys(r.left_out[name] for r in rows if name in r.left_out)) for name in assumed}
    not_read = [name for name in rows[0].cells if name not in NUMBERS - {MEMORY} | {SYSTEM, SPLIT, "name"}]
    if json:
        heads = [_head(part.system) for part in parts]
        head = heads[0] if len(heads) == 1 else {"systems": heads}
        return print_json({**head, "errors": errors, "left_out": left_out, "ignored": not_read, "rows": answers})
    table = csv.DictWriter(sys.stdout, list(answers[0]), lineterminator="\n")
    table.writeheader()
    table.writerows({name: render.raw(value) for name, value in row.items()} for row in answers)
    if not_read:
        print(f"columns that predictions ignore: {', '.join(not_read)}", file=sys.stderr)
    if left_out:
        texts = ", ".join(f"{name} {' or '.join(map(str, values))}" for name, values in left_out.items())
        print(f"columns or cells left out, and what they stand for: {texts}", file=sys.stderr)
    if problems := sum(row.problem is not None for row in rows):
        print(f"{problems} of {len(rows)} rows cannot be predicted: column problem says why", file=sys.stderr)
    for known, name in ((part.system.calibration, part.system.name) for part in parts):
        if known is not None:
            off = f"{known.mape:.1f} % off at rows left out, at most {known.worst:.1f} %"
            print(f"{name} ({known.stack}), fitted on {several(len(known.rows), 'row')}: {off}", file=sys.stderr)
    for split, found in errors.items():
        rows, seen = int(found["rows"]), int(found["fitted_to"])
        percent = ", ".join(f"{name} {value:.1f}" for name, value in [*found.items()][2:])
        how = f",{f' {seen} of' * (seen < rows)} which constants were fitted to" if seen else ""
        print(f"{split or 'measured'}: {several(rows, 'row')}{how}; in percent: {percent}", file=sys.stderr)
    return 0


def _parts(rows: Sequence[Row]) -> list[_Part]:
    """Return the rows that can be predicted, by system, with their predictions."""
    parts = []
    for system in {id(row.system): row.system for row in rows if row.asked}.values():
        assert system is not None  # as every row with a run has one
        own = [row for row in rows if row.asked and row.system is system]
        fitted = [row.measured for row in own if row.split == CALIBRATE and row.measured]
        if fitted:
            with Console(stderr=True).status(f"fitting {several(len(fitted), 'row')}"):
                system = fit(fitted, system)
        answers = [answer(row, system) for row in shown_progress(own, "predicting")]
        parts.append(_Part(system, own, fitted, answers))
    return parts


def _head(system: System) -> dict[str, Any]:
    known = system.calibration
    shown = known and {name: value for name, value in dataclasses.asdict(known).items() if name != "residuals"}
    constants = {name: one.value for name, one in system.all_constants.items()}
    return {"system": system.name, "stack": system.stack, "calibration": shown, "constants": constants}


def read_rows(path: Path, system: System | None) -> list[Row]:
    """Return the rows of a CSV file, for this system if they name none; one that cannot be predicted has the reason.

    Raises:
        InputError: the file is no table, or lacks a column.
    """
    valid = f"valid: a CSV file with columns {', '.join(COUNTS)}"
    try:
        text = read_text(path, encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not text"
        raise InputError(f"--rows {path}: {reason}; {valid}") from None
    reader = csv.DictReader(io.StringIO(text), restval="")
    try:
        lines = list(reader)
    except csv.Error as error:  # a cell that is too long for any value, a character that ends none
        raise InputError(f"--rows {path} line {reader.line_num + 1}: {error}; valid: a CSV file of values") from None
    if not lines:
        raise InputError(f"--rows {path}: has no rows; {valid}")
    names = list(filter(None, reader.fieldnames or ()))
    if missing := [name for name in COUNTS if name not in lines[0]]:
        optional = ", ".join([*OPTIONAL, SYSTEM])
        raise InputError(
            f"--rows {path}: has no column {', '.join(missing)}; it has {', '.join(names)}; optional are {optional}"
        )
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise InputError(f"--rows {path}: has column {', '.join(twice)} more than once; valid: each column once")
    rows, load = [], cache(load_system)
    for line in lines:
        surplus = [cell for cell in line.pop(None, ()) if cell.strip()]
        cells = {name: "" if cell.strip().lower() == "nan" else cell.strip() for name, cell in line.items() if name}
        try:
            if surplus:
                raise InputError(f"cell {surplus[0]!r:.40} has no column; valid: a cell with a comma in quotes")
            own = load(cells[SYSTEM]) if cells.get(SYSTEM) else system
            rows.append(_row(cells, own))
        except InputError as error:
            rows.append(Row({name: _cell(name, cell) for name, cell in cells.items()}, None, None, str(error)))
    return rows


def fitted_row(run: Run, system: System) -> str | None:
    """Return the name of the published row of this run that the system was fitted to; None if there is none."""
    if system.calibration is None or not (table := system.calibration.table):
        return None
    if table not in _FITTED:
        rows = [row for row in read_rows(FOLDER / "steps" / f"{table}.csv", system) if row.split == CALIBRATE]
        _FITTED[table] = {_key(one.run): one.name for one in (row.measured for row in rows) if one}
    return _FITTED[table].get(_key(run))


_FITTED: dict[str, dict[tuple[Any, ...], str]] = {}
"""Published runs that constants were fitted to, with their names, by the table that has them."""


def _key(run: Run) -> tuple[Any, ...]:
    """Return the fields by which a point of a table is the same run as a fitted row."""
    model, plan, train = run.model, run.plan, run.train
    shape = model.num_layers, model.hidden_size, model.num_heads, model.seq_len
    split = plan.dp, plan.cp, plan.tp, plan.pp, plan.zero_stage, plan.recompute
    return (*shape, *split, train.global_batch, train.microbatch)


def _row(cells: dict[str, str], system: System | None) -> Row:
    """Return the run that a line of the table describes.

    Raises:
        InputError: a cell is not what its column has, or the run is not simulated.
    """
    values = {name: _value(name, cell) for name, cell in cells.items()}
    if _split_of(cells) == CALIBRATE and not cells.get(SECONDS):
        raise InputError(f"{SECONDS} is empty; rows of {SPLIT} {CALIBRATE} need the seconds measured")
    if system is None:
        raise InputError("the row has no system; valid: --system, or a name in column system")
    columns = REQUIRED | {name: field for name, field in OPTIONAL.items() if cells.get(name)}
    given = {field: _truth(name, cells[name]) if name in FLAGS else values[name] for name, field in columns.items()}
    cp = values.get("cp") or 1
    if (group := values.get("zero_group")) in GROUPS:
        of_node = max(1, system.node.size.value // values["tp"])
        given["plan.zero_group"] = None if group == "all" else min(of_node, values["dp"] * cp)
    degrees = math.prod(values[name] for name in ("tp", "dp", "pp")) * cp
    if values["gpus"] != degrees:
        raise InputError(f"gpus {values['gpus']} is not tp x dp x pp{' x cp' * (cp > 1)}, {degrees}")
    try:
        asked = simulated(with_fields(Run(), given), given.keys(), system)
    except ValidationError as error:
        raise InputError(_first_problem(error)) from None
    left_out = {name: attrgetter(field)(asked.done) for name, field in OPTIONAL.items() if field not in given}
    if "vocab" in left_out:
        left_out["vocab"] = vocabulary_of(asked.done)
    return Row(values, asked, system, None, left_out)


def _split_of(cells: Mapping[str, Any]) -> str:
    """Return the split of a line; its case matters only in other names than `calibrate`."""
    split = str(cells.get(SPLIT, ""))
    return CALIBRATE if split.lower() == CALIBRATE else split


def _value(name: str, cell: str) -> Any:
    """Return a cell as a JSON value.

    Raises:
        InputError: it is no positive number in a column of those, or no valid word or list in a column of these.
    """
    value = _cell(name, cell)
    if cell and name == "tp3":
        degrees = re.split(r"[\sx,]+", cell.strip("()[] "))
        if len(degrees) != len("xyz") or not all(map(str.isdecimal, degrees)):
            raise InputError(f"{name} {cell!r:.40}; valid: the degrees of x, y and z, as 2 2 1")
        return tuple(map(int, degrees))
    if cell and name == "zero_group" and not (value in GROUPS or (isinstance(value, int) and value > 0)):
        raise InputError(f"{name} {cell!r:.40}; valid: {', '.join(GROUPS)}, or a positive integer")
    if (name in COUNTS or (name in COUNTED and cell)) and not (isinstance(value, int) and value > 0):
        raise InputError(f"{name} {repr(cell)[:40] if cell else 'is empty'}; valid: a positive integer")
    if name == SECONDS and cell and (isinstance(value, str) or not SHORTEST <= value <= LONGEST):
        raise InputError(f"{name} {cell!r:.40}; valid: positive seconds, {SHORTEST:g} to {LONGEST:g}")
    return value


def _truth(name: str, cell: str) -> bool:
    if (truth := TRUTH.get(str(_cell(name, cell)).lower())) is None:
        raise InputError(f"{name} {cell!r:.40}; valid: true, false")
    return truth


def _cell(name: str, cell: str) -> Any:
    """Return a cell as a JSON value; 8.0, as some programs write integers next to empty cells, is 8."""
    try:
        number = float(cell) if name in NUMBERS else math.nan
    except ValueError:
        return cell
    if not math.isfinite(number):
        return cell
    return int(number) if number.is_integer() else number


def _first_problem(error: ValidationError) -> str:
    """Return the first problem in words: the column, its value and what would be valid."""
    field, value, reason = first_problem(error)
    column = next((name for name, own in (REQUIRED | OPTIONAL).items() if own == field), field)
    return f"{column}: {reason}" if isinstance(value, dict) else f"{column} {value!r:.40}: {reason}"


def answer(row: Row, system: System | None) -> dict[str, Any]:
    """Return the row with its prediction."""
    names = ("predicted_s", "low_s", "high_s", "model_tflops_per_gpu", "hardware_tflops_per_gpu")
    names += ("memory_bytes", "fits", "fit", "doubts")
    if row.asked is None or system is None:
        return {**row.cells, **dict.fromkeys(names), "problem": row.problem}
    found = predicted(row.asked.done, system)
    low, high, warnings = interval(system, row.asked, found.seconds)
    rates = found.model_flops_per_gpu_s / 1e12, found.hardware_flops_per_gpu_s / 1e12
    needed = max(one.total for one in found.memory)
    values = (found.seconds, low, high, *rates, needed, found.fits, found.fit, "; ".join(warnings))
    return {**row.cells, **dict(zip(names, values, strict=True)), "problem": None}


def errors_of(part: _Part, split: str) -> dict[str, float]:
    """Return errors in percent of the measured rows of a split, and how many were fitted to; empty without any."""
    pairs = zip(part.rows, part.answers, strict=True)
    known = [(row.measured, one) for row, one in pairs if row.split == split and row.measured]
    if not known:
        return {}
    measured = np.array([row.seconds for row, _ in known], dtype=float)
    sizes = error_sizes(percent_off(np.array([one["predicted_s"] for _, one in known]), measured))
    inside = [one["low_s"] <= row.seconds <= one["high_s"] for row, one in known]
    seen = [split == CALIBRATE or fitted_row(row.run, part.system) is not None for row, _ in known]
    errors = {"rows": float(len(known)), "fitted_to": float(sum(seen))}
    errors |= dict(zip(("mape", "median", "max"), sizes, strict=True))
    errors["inside_interval"] = 100 * float(np.mean(inside))
    if part.fitted:
        base = constant_mfu(part.fitted, [row for row, _ in known])
        errors["constant_mfu_mape"] = error_sizes(percent_off(base, measured))[0]
    return errors
