"""The verb `tune`: the best parallel plans for a model on a described system, and what matters most in them."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from harness.launch.flags import require_positive
from harness.predict.interval import EXTRAPOLATES, interval, is_beyond
from harness.predict.simulation import as_simulated, completed, predicted, vocabulary_of
from harness.predict.systems import load_system
from harness.records.measures import size_name
from harness.records.store import Store
from harness.terminal import Flag, console, parse_bytes, print_json, shown, shown_progress
from harness.tune.measured import Machine, compared, print_compared, run_here
from harness.tune.search import Journal, Judged, best_by_value, estimates, front, importance, judged, ranked, searched
from impl.cost.parameters import count_parameters
from impl.data.batches import head_positions
from impl.errors import InputError
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Precision, Run, to_dict
from impl.simulator.closed_form import ClosedForm
from impl.simulator.plans import DEFAULTS, KNOBS, Plans, every, run_of
from impl.simulator.system import System

BATCH = 1536
"""Sequences; 3.1 million tokens where they have 2,048, as GPT-3's batches (Brown et al. 2020, table 2.1)."""
LEFT_FREE = 0.05
"""Share of a device's memory that the framework and its libraries take, or that is lost between allocations."""
TOP = 20
"""Plans of different shape that are compared by events."""
SLOWEST = 2.0
"""Largest ratio of a plan's time to the fastest one's at which its lower memory counts."""
GIB = 2**30
STEPS = 12
"""Training steps of a measured run."""


@dataclass(frozen=True)
class _Task:
    """Model, system and limits of a search."""

    base: Run
    system: System
    gpus: int
    limit: float
    """Bytes of a device."""

    def plans(self, fix: Sequence[str]) -> Plans:
        """Return all valid plans whose knobs have the values of `--fix`.

        Raises:
            InputError: an option names no knob or no value, or leaves no plan.
        """
        offload = self.system.device.kind != "cpu"
        plans = every(self.base.model, self.gpus, self.base.train.global_batch, offload=offload)
        for text in fix:
            knob, _, wanted = text.partition("=")
            if knob not in KNOBS or not wanted:
                raise InputError(f"--fix {text!r}: must be KNOB=VALUE or KNOB=VALUE,VALUE; knobs: {', '.join(KNOBS)}")
            values = np.array([str(value).lower() for value in plans.values(knob)])
            kept = np.isin(values, wanted.lower().split(","))
            if not kept.any():
                raise InputError(f"--fix {text!r} leaves no plan; valid: {', '.join(dict.fromkeys(values.tolist()))}")
            plans = plans.take(kept)
        return plans

    def events(self, run: Run) -> Judged:
        """Return the seconds of a run's step, simulated as events, and its exact memory."""
        found = predicted(run, self.system)
        size = max(memory.total for memory in found.memory)
        names = ("bubble", "mfu", "hfu", "model_flops_per_gpu_s")
        row = {"seconds": found.seconds, "bytes": size, **{name: getattr(found, name) for name in names}}
        if size > self.limit:
            row["reason"] = f"needs {size / GIB:.1f} GiB of {self.limit / GIB:.1f}"
        return row

    def with_warnings(self, row: Judged) -> Judged:
        """Add what makes a plan's prediction doubtful."""
        return row | {"warnings": interval(self.system, run_of(row, self.base), row["seconds"]).warnings}

    def journal(self, out: Path | None, judge: str) -> Journal:
        """Return the journal of a judge, in a folder of `out` if there is one."""
        constants = {name: constant.value for name, constant in sorted(self.system.all_constants.items())}
        known = self.system.name, self.system.habits, constants
        path = out and out / "tune" / f"{judge}.jsonl"
        return Journal.of(path, judge, self.base, *known, self.limit, self.gpus)


def tune_from(default: Run) -> Callable[..., int]:
    """Return the verb `tune`, for the model of `default`."""

    def tune(
        *,
        system: str,
        gpus: int,
        global_batch: int = BATCH,
        precision: Precision | None = None,
        fix: tuple[str, ...] = (),
        top: int = TOP,
        trials: int = 0,
        measure: int = 0,
        steps: int = STEPS,
        device_memory: str | None = None,
        out: Path | None = None,
        json: Flag = False,
    ) -> int:
        """Find the fastest parallel plans for a model that fit a system's memory; `--model NAME` says which model.

        All plans are estimated in closed form, the best are carried out as events. With --measure the best are run on
        this machine, and the predicted order of them is compared with the measured one.

        Args:
            system: A packaged system, or a YAML file as `calibrate` writes it.
            gpus: Devices, all of which a plan uses.
            global_batch: Sequences of a step.
            precision: By default the first of bf16, fp16, fp32 that the system has a peak rate for.
            fix: Knobs that keep to some values, as tp=8 or schedule=one_f_one_b,interleaved.
            top: Plans of different shape that are judged by events.
            trials: Let Optuna search with this many, from the best of the closed form on; judged by events, or with
                --measure for real.
            measure: Plans that are run on this machine.
            steps: Training steps of each of these.
            device_memory: What a plan may take of a device, as 80GB or 40GiB; by default 95% of what the system has.
            out: Folder of the journal, which the same command goes on from, and of measured records.
            json: Print one JSON document on standard output.
        """
        require_positive(gpus=gpus, global_batch=global_batch, top=top, steps=steps)
        found = load_system(system)
        if default.model == Run().model:
            raise InputError("tune needs --model: the name of a model size; as gpt-175b")
        if min(trials, measure) < 0 or (measure and out is None):
            raise InputError(f"--trials {trials}, --measure {measure}: must be 0 or more; --measure needs --out")
        limit = parse_bytes(device_memory) if device_memory else (1 - LEFT_FREE) * found.device.memory_bytes.value
        recipe = Recipe(global_batch=global_batch, microbatch=1, steps=steps)
        base = replace(default, plan=Plan(), train=recipe, precision=_precision(found, precision))
        base, _ = completed(base, _searched(base), found)
        task = _Task(base, found, gpus, limit)
        real = _here(out, found) if measure and out is not None else None
        document, inside = _search(task, task.plans(fix), top, out)
        if trials:
            document["trials"] = _trials(task, inside, document["best"][: measure or top], trials, real, out)
        if real is not None:
            chosen = [row | {"seconds": row["predicted_seconds"]} for row in document.get("trials", ())]
            document["measured"] = compared(chosen or document["best"][:measure], base, real)
        return print_json(document) if json else _print(document, task)

    return tune


def _here(out: Path, system: System) -> Machine:
    store = Store(out, "tune", "small")
    store.require_writable()
    return partial(run_here, store=store, device=system.device.kind)


def best_plan(base: Run, system: System, gpus: int, fix: Sequence[str] = ()) -> Judged:
    """Return the plan with which this many devices of a system carry out the base's batch fastest, as `tune` finds it.

    Args:
        base: run of the search; of its plan only the size of buckets matters, and its microbatch does not.
        fix: values of knobs, as the verb's `--fix`.

    Raises:
        InputError: no plan is possible, or fits.
    """
    base = replace(base, plan=Plan(bucket_bytes=base.plan.bucket_bytes), train=replace(base.train, microbatch=1))
    task = _Task(base, system, gpus, (1 - LEFT_FREE) * system.device.memory_bytes.value)
    best = _search(task, task.plans(fix), TOP, None)[0]["best"]
    if not best:
        raise InputError(f"of the {TOP} fastest plans none is as small as it was estimated; valid: more devices")
    return best[0]


def _searched(base: Run) -> set[str]:
    """Return fields of a run that a search sets, by dotted name: the others have the system's defaults."""
    model = (f"model.{name}" for name in to_dict(base)["model"])
    return {"precision", "train.microbatch", *(f"plan.{knob}" for knob in KNOBS if knob != "microbatch"), *model}


def _precision(system: System, wanted: Precision | None) -> Precision:
    known: list[Precision] = [each for each in ("bf16", "fp16", "fp32") if system.peak(each) is not None]
    if wanted is not None and system.peak(wanted) is None:
        raise InputError(f"--precision {wanted}: {system.name} has no peak rate for it; valid: {', '.join(known)}")
    return wanted or known[0]


def _search(task: _Task, plans: Plans, top: int, out: Path | None) -> tuple[dict[str, Any], Plans]:
    """Return the document of the search, and the plans that fit."""
    known, vocab_size = as_simulated(task.base, task.system), vocabulary_of(task.base)
    form = ClosedForm(known, vocab_size, task.system, task.gpus, head_positions=head_positions(known.model))
    begin = time.perf_counter()
    found = estimates(form, plans)
    seconds = time.perf_counter() - begin
    fit = np.flatnonzero(found.bytes <= task.limit)
    if not len(fit):
        least = f"the smallest needs {shown(float(found.bytes.min()))} a device"
        raise InputError(f"none of {len(plans):,} plans fits {shown(task.limit)}: {least}; valid: more --gpus")
    inside, times = plans.take(fit), found.seconds[fit]
    smaller = front(times, found.bytes[fit], inside.oddity, SLOWEST)
    chosen = dict.fromkeys([*ranked(inside, times, top), *smaller])
    rows = [inside.row(i) | {"closed_form_seconds": float(times[i])} for i in chosen]
    by_row = judged(shown_progress(rows, "events"), task.base, task.events, task.journal(out, "events"))
    good = [task.with_warnings(row) for row in by_row if "reason" not in row]
    best = sorted(good, key=lambda row: row["seconds"])[:top]
    took, needed = (np.array([row[name] for row in good]) for name in ("seconds", "bytes"))
    unbeaten = front(took, needed) if good else []
    off = [row["closed_form_seconds"] / row["seconds"] - 1 for row in by_row if "seconds" in row]
    document = {
        "model": {"parameters": count_parameters(task.base.model, vocab_size).total},
        **{"system": task.system.name, "stack": task.system.stack, "gpus": task.gpus, "memory_limit_bytes": task.limit},
        **{"global_batch": task.base.train.global_batch, "precision": task.base.precision},
        "plans": len(plans),
        "fitting": len(fit),
        "closed_form": {"seconds": seconds, "plans_per_s": len(plans) / seconds},
        "agreement": {"mean": float(np.mean(np.abs(off))), "worst": float(max(off, key=abs))} if off else None,
        "best": best,
        "interval": interval(task.system, run_of(best[0], task.base), best[0]["seconds"])._asdict() if best else None,
        "pareto": [good[i] for i in unbeaten],
        "failed": [row for row in by_row if "reason" in row],
        "importance": importance(inside, times),
        "best_by_value": best_by_value(inside, times),
    }
    return document, inside


def _trials(
    task: _Task, plans: Plans, first: Sequence[Judged], trials: int, real: Machine | None, out: Path | None
) -> list[Judged]:
    """Return Optuna's proposals as judged by events or real runs, the fastest first, then those that failed."""
    judge = task.events if real is None else lambda run: real([run])[0]
    rows = searched(task.journal(out, "runs" if real else "events"), plans, first, task.base, judge, trials)
    if real is not None:
        rows = [row | {"predicted_seconds": task.events(run_of(row, task.base))["seconds"]} for row in rows]
    rows = [task.with_warnings(row) if "reason" not in row else row for row in rows]
    return sorted(rows, key=lambda row: row["seconds"] if "reason" not in row else math.inf)


def _print(document: Mapping[str, Any], task: _Task) -> int:
    took, rate = document["closed_form"]["seconds"], document["closed_form"]["plans_per_s"]
    size = size_name(document["model"]["parameters"])
    print(
        f"{size} on {task.gpus:,} x {task.system.hardware} ({task.system.name}, {task.system.stack}), batch "
        f"{task.base.train.global_batch:,}: {document['plans']:,} plans in closed form in {took:.1f} s ({rate:,.0f} a "
        f"second), of which {document['fitting']:,} fit {shown(task.limit)}"
    )
    if agreement := document["agreement"]:
        print(
            f"events say within {agreement['mean']:.2%} of that on average, {abs(agreement['worst']):.2%} at most; "
            f"{len(document['failed'])} plans failed"
        )
    if interval := document["interval"]:
        print(f"the fastest takes {interval['low']:.4g} to {interval['high']:.4g} s, nine times of ten")
        for warning in interval["warnings"]:
            if not is_beyond(warning):
                print(f"warning: {warning}")
    for title, rows in (("fastest", document["best"]), ("faster or smaller than all others", document["pareto"])):
        _print_plans(title, rows)
        if doubts := _beyond(rows):
            known = task.system.calibration is not None
            print(f"warning: * {f'{task.system.name} was not calibrated on ' * known}{doubts}")
    _print_knobs(document["importance"], document["best_by_value"])
    if tried := document.get("trials"):
        failed = sum("reason" in row for row in tried)
        fastest = f"; the fastest takes {tried[0]['seconds']:.4g} s" if failed < len(tried) else ""
        print(f"Optuna: {len(tried)} plans, {failed} failed{fastest}")
    if "measured" in document:
        print_compared(document["measured"])
    return 0


def _beyond(rows: Sequence[Judged]) -> str:
    """Return sizes and features that systems were not calibrated on, each with the numbers of its plans."""
    numbers: dict[str, list[int]] = {}
    for number, row in enumerate(rows, 1):
        for warning in filter(is_beyond, row["warnings"]):
            what = warning.removeprefix(EXTRAPOLATES).partition(", calibrated on")[0].strip()
            numbers.setdefault(what, []).append(number)
    plans = lambda of: "all plans" if len(of) == len(rows) else f"plan{'s' * (len(of) > 1)} {', '.join(map(str, of))}"
    return "; ".join(f"{what} ({plans(of)})" for what, of in numbers.items())


def _print_plans(title: str, rows: Sequence[Judged]) -> None:
    names = ("tp", "pp", "dp", "microbatch", "schedule", "chunks", "recompute", "zero_stage")
    table = Table("", "step (s)", "TFLOP/s", "MFU", "GiB", *names, "besides", title=title, title_justify="left")
    for column in table.columns:
        column.no_wrap = True
    for number, row in enumerate(rows, 1):
        mfu = "" if row["mfu"] is None else f"{row['mfu']:.1%}"
        odd = [knob for knob in KNOBS if knob not in (*names, "microbatch") and row[knob] != DEFAULTS.get(knob)]
        besides = ", ".join(knob if row[knob] is True else f"no {knob}" for knob in odd)
        rate = row["model_flops_per_gpu_s"] / 1e12
        numbers = (f"{row['seconds']:.3f}", f"{rate:.1f}", mfu, f"{row['bytes'] / GIB:.1f}")
        star = "*" * any(map(is_beyond, row["warnings"]))
        table.add_row(f"{number}{star}", *numbers, *(str(row[name]) for name in names), besides)
    console(table).print(table)


def _print_knobs(shares: Mapping[str, float], by_value: Mapping[str, Mapping[str, float]]) -> None:
    heads = ("knob", "importance", "fastest step (s) with each value")
    table = Table(*heads, title="what matters most", title_justify="left")
    for knob in sorted(by_value, key=lambda knob: -shares.get(knob, 0.0)):
        values = sorted(by_value[knob].items(), key=lambda item: item[1])
        told = ", ".join(f"{value} {seconds:.4g}" for value, seconds in values[:8])
        table.add_row(knob, f"{shares.get(knob, 0.0):.0%}", told + (", ..." if len(values) > 8 else ""))
    console(table).print(table)
