"""A table of configurations, with predictions beside them: `predict --rows`."""

import csv
import dataclasses
import io
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError
from rich.console import Console
from rich.progress import Progress, track

from harness.answers import print_json
from harness.fitting import Measured, constant_mfu, fit, interval, percent_off
from impl.errors import InputError
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from impl.simulator.step import predict
from impl.simulator.system import System

COUNTS = ("gpus", "global_batch", "micro_batch", "hidden", "heads", "layers", "seq_len", "tp", "dp", "pp")
"""Columns that every table has, of positive integers."""
OPTIONAL = {
    "chunks": "1",
    "schedule": "",  # one_f_one_b, or interleaved where there are chunks
    "zero_stage": "0",
    "recompute": "full",
    "vocab": "51200",  # Megatron's
    "sequence_parallel": "false",
    "precision": "",  # the first that the system has a peak of
    "dropout": "0.1",  # Megatron's
    "overlap_grad_reduce": "false",
    "overlap_input_grad_reduce": "false",
    "scatter_gather": "true",
    "fp32_gradients": "false",
}
"""Columns that it may have, and what an empty cell stands for."""
SECONDS, SPLIT, CALIBRATE = "iteration_time_s", "split", "calibrate"
BUCKET_BYTES = {True: 2**29, False: 2**34}
"""Gradients are reduced at once, of ZeRO's stage 3 in parts."""
TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
EVALUATIONS = 200
"""Of all fitted rows, in a fit: what its progress is shown against."""


class Row(NamedTuple):
    """A line of the table."""

    cells: dict[str, Any]
    run: Run
    vocab_size: int
    seconds: float | None
    problem: str | None
    """Why it cannot be predicted."""

    @property
    def split(self) -> str:
        return str(self.cells.get(SPLIT, ""))

    @property
    def is_measured(self) -> bool:
        return self.seconds is not None and not self.problem

    @property
    def measured(self) -> Measured:
        assert self.seconds is not None
        name = self.cells.get("name") or " ".join(str(self.cells[name]) for name in COUNTS)
        return Measured(name, self.run, self.vocab_size, self.seconds)


def predict_rows(path: Path, system: System, json: bool) -> int:
    """Print the table with predictions, from constants fitted to its rows of split `calibrate` where there are some.

    Raises:
        InputError: what is wrong with the table, or that no row of it can be predicted.
    """
    rows = read_rows(path, system)
    if all(row.problem for row in rows):
        raise InputError(f"--rows {path}: no row can be predicted; the first: {rows[0].problem}")
    fitted = [row.measured for row in rows if row.is_measured and row.split == CALIBRATE]
    system = fitted_to(fitted, system)
    console = Console(stderr=True)
    answers = [answer(row, system) for row in track(rows, "predicting", console=console, transient=True)]
    splits = dict.fromkeys(row.split for row in rows)
    errors = {split: found for split in splits if (found := errors_of(rows, answers, split, fitted))}
    known = system.calibration
    if json:
        shown = known and {name: value for name, value in dataclasses.asdict(known).items() if name != "residuals"}
        constants = {name: one.value for name, one in system.all_constants.items()}
        head = {"system": system.name, "stack": system.stack, "calibration": shown, "constants": constants}
        return print_json({**head, "errors": errors, "rows": answers})
    table = csv.DictWriter(sys.stdout, list(answers[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(answers)
    if known is not None:
        told = f"{known.mape:.1f} % off at rows left out, at most {known.worst:.1f} %"
        print(f"{system.name} ({known.stack}), fitted on {len(known.rows)} rows: {told}", file=sys.stderr)
    for split, found in errors.items():
        said = ", ".join(f"{name} {value:.1f}" for name, value in found.items() if name != "rows")
        print(f"{split or 'measured'}: {found['rows']:.0f} rows; in percent: {said}", file=sys.stderr)
    return 0


def read_rows(path: Path, system: System) -> list[Row]:
    """The rows of a CSV file.

    Raises:
        InputError: the file, the line, the column, its value and what would be valid.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not text"
        raise InputError(f"--rows {path}: {reason}; valid: a CSV file with columns {', '.join(COUNTS)}") from None
    lines = list(csv.DictReader(io.StringIO(text), restkey="", restval=""))
    if not lines:
        raise InputError(f"--rows {path}: has no rows; valid: a CSV file with columns {', '.join(COUNTS)}")
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
    """A row as Megatron would train it, where it does not say otherwise.

    Raises:
        InputError: a cell is not what its column has.
    """
    count = {name: _count(name, cells[name]) for name in COUNTS}
    said = {name: cells.get(name) or default for name, default in OPTIONAL.items()}
    is_so = {name: _truth(name, said[name]) for name, default in OPTIONAL.items() if default in ("true", "false")}
    chunks, vocab_size = _count("chunks", said["chunks"]), _count("vocab", said["vocab"])
    precision = said["precision"] or next(iter(system.device.peak_flops))
    sizes: dict[str, Any] = {"num_layers": count["layers"], "hidden_size": count["hidden"], "num_heads": count["heads"]}
    plan = {
        **{name: count[name] for name in ("tp", "dp", "pp")},
        **{name: is_so[name] for name in is_so if name != "fp32_gradients"},
        "chunks": chunks,
        "schedule": said["schedule"] or ("interleaved" if chunks > 1 else "one_f_one_b"),
        "zero_stage": _number(said["zero_stage"]),
        "recompute": said["recompute"],
        "bucket_bytes": BUCKET_BYTES[_number(said["zero_stage"]) == 3],
    }
    try:
        run = Run(
            model=ModelConfig(
                **sizes, seq_len=count["seq_len"], vocab_size=vocab_size, dropout=_number(said["dropout"])
            ),
            plan=Plan(**plan),
            train=Recipe(global_batch=count["global_batch"], microbatch=count["micro_batch"]),
            precision=precision,  # type: ignore[arg-type]
            fp32_gradients=is_so["fp32_gradients"] or precision not in ("fp16", "bf16"),
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(f"{where} {first['input']!r:.40}: {first['msg'].removeprefix('Value error, ')}") from None
    problem = run.why_invalid()
    if system.peak(precision) is None:
        problem = f"precision {precision} is not known of {system.name}; valid: {', '.join(system.device.peak_flops)}"
    if run.plan.world_size != count["gpus"]:
        problem = f"gpus {count['gpus']} is not tp x dp x pp, {run.plan.world_size}"
    return Row({name: _number(cell) for name, cell in cells.items()}, run, vocab_size, _seconds(cells), problem)


def fitted_to(rows: Sequence[Measured], system: System) -> System:
    """The system with constants fitted to these rows, with progress; itself where there are none."""
    if not rows:
        return system
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"fitting {len(rows)} rows", total=EVALUATIONS)
        return fit(rows, system, progress=lambda tried: progress.update(task, completed=min(tried, EVALUATIONS)))


def answer(row: Row, system: System) -> dict[str, Any]:
    """The row, with what is predicted."""
    names = ("predicted_s", "low_s", "high_s", "tflops_per_gpu", "memory_bytes", "fits", "doubts")
    if row.problem:
        return {**row.cells, **dict.fromkeys(names), "problem": row.problem}
    found = predict(row.run, row.vocab_size, system, stages="even")
    low, high, doubts = interval(system, row.run, found.seconds)
    needed = max(one.total for one in found.memory)
    rate = found.hardware_flops_per_gpu_s / 1e12
    values = (found.seconds, low, high, rate, needed, found.fits, "; ".join(doubts))
    return {**row.cells, **dict(zip(names, values, strict=True)), "problem": None}


def errors_of(
    rows: Sequence[Row], answers: Sequence[dict[str, Any]], split: str, fitted: Sequence[Measured]
) -> dict[str, float]:
    """Of the rows of a split that have been measured, in percent; empty where none has."""
    known = [(row, one) for row, one in zip(rows, answers, strict=True) if row.split == split and row.is_measured]
    if not known:
        return {}
    measured = np.array([row.seconds for row, _ in known], dtype=float)
    off = abs(percent_off(np.array([one["predicted_s"] for _, one in known]), measured))
    inside = [one["low_s"] <= row.seconds <= one["high_s"] for row, one in known]
    errors = {"rows": len(known), "mape": off.mean(), "median": np.median(off), "max": off.max()}
    errors["inside_interval"] = 100 * np.mean(inside)
    if fitted:
        base = constant_mfu(fitted, [row.measured for row, _ in known])
        errors["constant_mfu_mape"] = abs(percent_off(base, measured)).mean()
    return {name: float(value) for name, value in errors.items()}


def _count(name: str, cell: str) -> int:
    count = _number(cell)
    if not isinstance(count, int) or count < 1:
        raise InputError(f"{name} {cell!r:.40}; valid: a positive integer")
    return count


def _truth(name: str, cell: str) -> bool:
    if (said := str(_number(cell)).lower()) not in TRUTH:
        raise InputError(f"{name} {cell!r:.40}; valid: true, false")
    return TRUTH[said]


def _seconds(cells: dict[str, str]) -> float | None:
    cell = cells.get(SECONDS, "")
    if not cell:
        if cells.get(SPLIT) == CALIBRATE:
            raise InputError(f"{SECONDS} is empty; rows of {SPLIT} {CALIBRATE} need the seconds measured")
        return None
    seconds = _number(cell)
    if not isinstance(seconds, int | float) or seconds <= 0:
        raise InputError(f"{SECONDS} {cell!r:.40}; valid: positive seconds")
    return seconds


def _number(cell: str) -> Any:
    """A cell as JSON has it; 8.0, as some programs write integers beside empty cells, is 8."""
    try:
        number = float(cell)
    except ValueError:
        return cell
    if not math.isfinite(number):
        return cell
    return int(number) if number.is_integer() else number
