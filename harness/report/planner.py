"""The report's planner: the closed form as tables and a program for a browser, for some models on some systems.

Tables hold what the laws of operations, collectives and states give for the plans of a grid; the program is the closed
form's own arithmetic on them, as `harness.report.traced` recorded it.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from harness.predict.interval import BASELINE, EXTRAPOLATES, OCTAVE, features, interval, log_bounds, sizes
from harness.predict.kinds import Errors, Published, errors_by_kind, kind_doubts, published
from harness.predict.systems import load_system
from harness.records.statistics import NINE_TENTHS
from harness.records.store import write_atomically
from harness.report.traced import rows_of, traced
from harness.terminal import shown_progress
from harness.tune.tune import TOKENS, Task, base_of
from impl.cost.flops import model_flops
from impl.errors import InputError
from impl.files import read_text
from impl.model.sizes import named
from impl.recipe import Recipe
from impl.run import Run
from impl.simulator.plans import DEFAULTS, KNOBS, NAMES, Plans, run_of
from impl.simulator.system import System

SYSTEMS = ("selene", "dgx_h100", "frontier")
"""Calibrated systems that the planner has."""
MODELS = ("gpt-175b", "ptdp-39.1b", "llama-2-13b", "llama-3.1-70b", "mixtral-8x7b")
"""Models that the planner has; all of these systems align their heads."""
GRID: dict[str, tuple[Any, ...]] = {
    **{"tp": (1, 2, 4, 8, 16), "cp": (1, 2), "pp": (1, 2, 4, 8, 16, 32), "dp": tuple(2**n for n in range(9))},
    "ep": (1, 2, 4, 8),
    **{"zero_stage": (0, 1, 2, 3), "recompute": NAMES["recompute"], "sequence_parallel": (False, True)},
    **{"microbatch": (1, 2, 4), "schedule": NAMES["schedule"], "chunks": (1, 2, 4)},
}
"""Values of the knobs that the planner has; others keep their defaults."""
GPUS = tuple(2**n for n in range(13))
BATCHES = (64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
ACCURACY = "accuracy.md"
FOLDER = "LMSCALE_CACHE"
"""Environment variable with the folder of what is kept between commands; without it `~/.cache/lmscale`."""
Row = dict[str, Any]
"""Values of some knobs."""


def document(results: Path) -> dict[str, Any]:
    """Return all that the planner's page has; accuracy.md of the folder has errors by distance from what was fitted."""
    programs, plans, described = dict[str, int](), {}, {}
    for system in map(load_system, shown_progress(SYSTEMS, "tables of the planner")):
        rows = list(published(system))
        errors = errors_by_kind(system, rows)
        described[system.name] = _system(system, rows)
        for name in MODELS:
            task = task_of(name, system)
            form, row = task.form(), {"tp": 2, "pp": 2, "dp": 2, "microbatch": 1}
            found = _texts(task, errors) | {"model": _model(task, form.vocab_size)}
            program = json.dumps(traced(form, plans_of([row])))
            form.estimate(plans_of(list(_covering(task, found["reasons"]))))
            found |= {"program": programs.setdefault(program, len(programs)), "laws": rows_of(form)}
            plans[f"{system.name} {name}"] = found
    return {
        "programs": list(map(json.loads, programs)),
        "systems": described,
        "plans": plans,
        "grid": GRID | {"system": SYSTEMS, "model": MODELS, "gpus": GPUS, "batch": BATCHES},
        "most_dp": max(GRID["dp"]),
        "names": NAMES,
        "defaults": {knob: _number(knob, value) for knob, value in DEFAULTS.items()},
        "features": {"names": list(BASELINE), "octave": OCTAVE, "nine_tenths": NINE_TENTHS},
        "shifts": _shifts(results / ACCURACY),
    }


def embedded(results: Path) -> Markup:
    """Return `document` as JSON inside an HTML page, kept in the user's cache for as long as it stays the same."""
    path, of = Path(os.environ.get(FOLDER) or "~/.cache/lmscale").expanduser() / "planner", _fingerprint(results)
    with contextlib.suppress(OSError, UnicodeDecodeError):
        known, _, text = read_text(path).partition("\n")
        if known == f"{of} {_digest(text)}":
            return Markup(text)
    text = json.dumps(document(results), separators=(",", ":"), allow_nan=False).replace("<", r"\u003c")
    with contextlib.suppress(OSError):  # a cache that cannot be written is none
        write_atomically(path, f"{of} {_digest(text)}\n{text}")
    return Markup(text)


def _fingerprint(results: Path) -> str:
    """Return a digest of all that decides the document: the program with its data, accuracy.md and the grid."""
    source = Path(__file__).parents[2]
    files = [path for room in ("impl", "harness") for path in sorted((source / room).rglob("*")) if path.is_file()]
    read = [path for path in (*files, results / ACCURACY) if path.suffix != ".pyc" and path.exists()]
    return _digest(*(str(path.read_bytes()) for path in read), repr((GRID, SYSTEMS, MODELS)), np.__version__)


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def task_of(model: str, system: System) -> Task:
    """Return the search of which the planner shows plans: that of `tune`."""
    base = base_of(Run(model=named(model)), system, None, Recipe(global_batch=BATCHES[0], microbatch=1))
    task = Task(base, system, GPUS[-1], system.device.room)
    return replace(task, base=task.simulated(base).asked)


def plans_of(rows: Sequence[Row]) -> Plans:
    """Return plans as columns, knobs that are left out at their defaults."""
    number = lambda knob, row: _number(knob, row.get(knob, DEFAULTS.get(knob)))
    return Plans({knob: np.array([number(knob, row) for row in rows]) for knob in KNOBS})


def _number(knob: str, value: Any) -> int:
    return NAMES[knob].index(value) if knob in NAMES else int(value or 0)


def _degrees(task: Task, reasons: Mapping[str, str]) -> Iterator[Row]:
    """Yield degrees and sequence parallelism of possible plans."""
    model = task.base.model
    for tp, cp, pp, dp, splits in itertools.product(*(GRID[name] for name in ("tp", "cp", "pp", "dp")), (0, 1)):
        fits = tp * cp * pp * dp <= GPUS[-1] and pp <= model.num_layers
        if fits and splits <= (tp > 1) and _key(tp, cp, splits) not in reasons:
            shares = math.gcd(model.experts or 1, cp * dp)
            for ep in (ep for ep in GRID["ep"] if shares % ep == 0):
                yield {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "ep": ep, "sequence_parallel": splits}


def _key(*values: int) -> str:
    return " ".join(map(str, values))


def _covering(task: Task, reasons: Mapping[str, str]) -> Iterator[Row]:
    """Yield plans whose laws are those of all plans of the grid: no law depends on all of the knobs."""
    for row in _degrees(task, reasons):
        for stage in GRID["zero_stage"] if row["dp"] * row["cp"] > 1 else (0,):
            yield row | {"microbatch": 1, "zero_stage": stage}
        for microbatch, recompute in itertools.product(GRID["microbatch"], GRID["recompute"]):
            yield row | {"microbatch": microbatch, "recompute": recompute}
        for chunks in GRID["chunks"] if (row["tp"], row["dp"]) == (1, row["ep"]) else ():
            if row["pp"] * chunks <= task.base.model.num_layers:
                yield row | {"microbatch": 1, "chunks": chunks}


def _system(system: System, rows: Sequence[Published]) -> dict[str, Any]:
    """Return the page's data about a system, with the published steps on it."""
    known = system.calibration
    return {
        "stack": system.stack,
        "hardware": system.hardware,
        "node": system.node.size.value,
        "memory": system.device.memory_bytes.value,
        "taken": [system.device.taken.least, system.device.taken.most],
        "ranges": known.ranges if known else {},
        "published": [
            {
                **{"file": one.file, "name": one.name, "seconds": one.seconds, "off": one.off},
                "batch": one.run.train.global_batch,
                **{"sizes": sizes(one.run), "features": BASELINE | features(one.run, system)},
            }
            for one in rows
        ],
    }


def _model(task: Task, vocab_size: int) -> dict[str, Any]:
    run = task.base
    return {
        **{"layers": run.model.num_layers, "hidden_size": run.model.hidden_size, "seq_len": run.model.seq_len},
        "experts": run.model.experts,
        **{"precision": run.precision, "peak": task.system.peak(run.precision)},
        "flops": model_flops("ptdp", run.model, 1, vocab_size),
    }


def _texts(task: Task, errors: Errors) -> dict[str, Any]:
    """Return why plans are impossible, and what makes predictions doubtful, by the values of knobs that decide it."""
    degrees = itertools.product(GRID["tp"], GRID["cp"], (0, 1))
    reasons = {_key(tp, cp, sp): _why_impossible(task, tp, cp, sp) for tp, cp, sp in degrees}
    layers, stages = task.base.model.num_layers, {}
    for pp, chunks in itertools.product(GRID["pp"], GRID["chunks"]):
        if pp * chunks > layers:
            stages[pp * chunks] = _reason(task, {"pp": pp, "chunks": chunks, "schedule": "interleaved"})
    bounds = {
        _key(tp, microbatch): log_bounds(task.system.calibration, _run(task, {"tp": tp, "microbatch": microbatch}))
        for tp, microbatch in itertools.product(GRID["tp"], GRID["microbatch"])
    }
    differ = itertools.product((1, 2), repeat=2)
    possible = [tp for tp in GRID["tp"] if not reasons[_key(tp, 1, 0)]]
    return {
        "reasons": {key: text for key, text in reasons.items() if text},
        "stages": stages,
        "kinds": _kinds(task, errors),
        "features": {tp: features(task.simulated(_run(task, {"tp": tp})).done, task.system) for tp in possible},
        "bounds": bounds,
        "are_equal": task.system.habits.stages == "even",
        "differences": {
            _key(tp, dp): task.simulated(_run(task, {"tp": tp, "dp": dp})).differences for tp, dp in differ
        },
    }


def _run(task: Task, row: Row) -> Run:
    return run_of(DEFAULTS | {"microbatch": 1} | row, task.base)


def _reason(task: Task, row: Row) -> str:
    """Return why a plan is impossible; empty: it is not."""
    try:
        task.simulated(_run(task, row))
    except InputError as error:
        return str(error)
    return ""


def _why_impossible(task: Task, tp: int, cp: int, splits: int) -> str:
    """Return why degrees within a layer and a sequence are impossible, or not in the planner; empty: they are."""
    if reason := _reason(task, {"tp": tp, "cp": cp, "sequence_parallel": bool(splits)}):
        return reason
    few = cp > max(1, task.base.model.seq_len // TOKENS)
    return f"plan.cp {cp} leaves a rank fewer than {TOKENS:,} tokens of a sequence: not in the planner" if few else ""


def _kinds(task: Task, errors: Errors) -> dict[str, list[str]]:
    """Return for each feature of a plan, with its value, the warning about it and the doubt about its kind."""
    deciding = ("zero_stage", "recompute", "sequence_parallel", "schedule", "tp", "cp")
    changes = [{name: value} for name in deciding for value in GRID[name]]
    found = {}
    for change in changes:
        row = {"tp": 2, "pp": 2, "dp": 2, "chunks": 1 + ("interleaved" in change.values())} | change
        if _reason(task, row):
            continue
        asked = task.simulated(_run(task, row))
        warned, doubts = interval(task.system, asked, 1.0).warnings, kind_doubts(asked.done, task.system, errors)
        for name, own in features(asked.done, task.system).items():
            starts = ((warned, f"{EXTRAPOLATES} {name} {own},"), (doubts, f"{name} {own} is "))
            about = [next((text for text in texts if text.startswith(start)), "") for texts, start in starts]
            found[f"{name} {own}"] = about
    return found


def _shifts(path: Path) -> dict[str, list[str]]:
    """Return the rows of accuracy.md's table of errors by distance from what was fitted; empty if there is none."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    table = text.partition("### Errors by distance from what was fitted")[2].partition("###")[0]
    rows = re.findall(r"^\| *([a-z][\w ]*?) *\| *([\d,]+) \| *([\d.]+) \| *([\d.]+) \|$", table, re.MULTILINE)
    return {kind: [*numbers] for kind, *numbers in rows}
