"""The verb `tune`: the best parallel plans for a model on a described system, and what matters most in them."""

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.launch.flags import require_positive
from harness.predict.interval import Interval, interval
from harness.predict.kinds import Errors, errors_by_kind, kind_doubts
from harness.predict.simulation import Done, Simulated, given_by, predicted, simulated, vocabulary_of
from harness.predict.systems import load_system
from harness.records.store import Store
from harness.records.writable import require_writable
from harness.terminal import Flag, Given, parse_bytes, print_json, shown, shown_progress
from harness.tune.measured import Machine, compared, run_here
from harness.tune.orders import in_grids, in_other_orders, others_of, shortest
from harness.tune.report import GIB, print_search
from harness.tune.search import (
    Judged,
    agreement,
    best_by_value,
    by_kind,
    estimates,
    front,
    importance,
    judged,
    judged_until,
    ranked,
    searched,
    study_of,
    unbeaten,
)
from impl.cost.parameters import count_parameters
from impl.data.batches import head_positions
from impl.errors import InputError
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Precision, Run
from impl.simulator.closed_form import ClosedForm
from impl.simulator.constants import CONSTANTS
from impl.simulator.plans import KNOBS, Plans, every, run_of
from impl.simulator.system import System

if TYPE_CHECKING:
    from optuna import Study

BATCH = 1536
"""Sequences; 3.1 million tokens where they have 2,048, as GPT-3's batches (Brown et al. 2020, table 2.1)."""
LEFT_FREE = 0.05
"""Share of a device's memory that the framework takes, or that is lost between allocations, where it is not known."""
TOKENS = 4096
"""Fewest tokens that each of several ranks gets of a sequence, as in recipes for Llama, unless `fix` names degrees."""
TOP = 20
"""Plans of different shape that are compared by events."""
MOST = 5
"""Largest factor by which more plans are compared by events where the first do not fit."""
SHAPES = 5
"""Shapes of a pipeline that are judged in other schedules."""
TRUSTED = 5
"""Plans of different shape, of kinds that the system was calibrated on, that are compared by events."""
SLOWEST = 2.0
"""Largest ratio of a plan's time to the fastest one's at which its lower memory counts."""
STEPS = 12
"""Training steps of a measured run."""


@dataclass(frozen=True)
class Task:
    """Model, system and limits of a search."""

    base: Run
    system: System
    gpus: int
    limit: float
    """Memory of a device in bytes."""
    fix: Sequence[str] = ()
    """Allowed values of knobs that are restricted."""
    others: Sequence[str] = ()
    """Schedules that only the event simulation can judge."""
    grids: bool = False
    """Whether plans that divide hidden features (`tp3`) are searched, too."""

    def simulated(self, run: Run) -> Simulated:
        """Return what is simulated for a plan; knobs that the software has a habit of are free where `fix` names them.

        Raises:
            InputError: the run is impossible, or is not simulated.
        """
        return simulated(run, self.given(run), self.system)

    def given(self, run: Run) -> frozenset[str]:
        """Return fields that count as given in a plan, by dotted name."""
        knobs = {"train.microbatch", "precision", *(f"plan.{knob}" for knob in KNOBS if knob != "microbatch")}
        named = {f"plan.{text.partition('=')[0]}" for text in self.fix}
        return given_by(run, knobs, self.system) | named

    def plans(self) -> Plans:
        """Return all valid plans whose knobs have the values of `fix`.

        Raises:
            InputError: an option names no knob or no value, or leaves no plan.
        """
        offload = self.system.device.kind != "cpu"
        node = self.system.node.size.value
        is_free = any(text.startswith("cp=") for text in self.fix)
        sharing = None if is_free else max(1, self.base.model.seq_len // TOKENS)
        batch = self.base.train.global_batch
        model = self.simulated(self.base).done.model  # with the software's dropout, which no ring has
        plans = every(model, self.gpus, batch, offload=offload, node=node, sharing=sharing)
        for text in self.fix:
            knob, _, wanted = text.partition("=")
            if knob not in KNOBS or not wanted:
                raise InputError(f"--fix {text!r}: must be KNOB=VALUE or KNOB=VALUE,VALUE; knobs: {', '.join(KNOBS)}")
            numbers = {str(value).lower(): number for value, number in plans.values(knob).items()}
            kept = [number for value, number in numbers.items() if value in wanted.lower().split(",")]
            if not kept:
                raise InputError(f"--fix {text!r} leaves no plan; valid: {', '.join(numbers)}")
            plans = plans.take(np.isin(plans[knob], kept))
        return self._of_habits(plans)

    def _of_habits(self, plans: Plans) -> Plans:
        """Return the plans that the system's software carries out: knobs of its habits have its values."""
        given = self.given(self.base)
        kept = np.ones(len(plans), dtype=bool)
        alone = {"overlap_grad_reduce": plans["dp"] * plans["cp"], "overlap_input_grad_reduce": plans["tp"]}
        for knob, ranks in alone.items():
            value = self.system.habits.fields.get(f"plan.{knob}")
            if value is not None and f"plan.{knob}" not in given:
                kept &= (plans[knob] == int(value)) | (ranks == 1)
        return plans.take(kept)

    def is_trusted(self, plans: Plans) -> np.ndarray:
        """Return whether each plan is of a kind that the system was calibrated on, and that it predicts well."""
        first, which = by_kind(plans)
        base = self.simulated(self.base).done
        doubts = [kind_doubts(Done(plans.run(i, base)), self.system, self.errors) for i in first.tolist()]
        return np.array([not texts for texts in doubts])[which]

    def form(self) -> ClosedForm:
        """Return the estimator of plans, with the habits of the system's software."""
        known, given = self.simulated(self.base).done, self.given(self.base)
        positions = head_positions(known.model)
        return ClosedForm(known, vocabulary_of(known), self.system, self.gpus, head_positions=positions, given=given)

    @cached_property
    def errors(self) -> Errors:
        """Errors of each kind of plan on published steps of the system."""
        return errors_by_kind(self.system)

    def events(self, run: Run) -> Judged:
        """Return the seconds of a run's step, simulated as events, and its exact memory."""
        found = predicted(self.simulated(run).done, self.system)
        size = max(memory.total for memory in found.memory)
        names = ("bubble", "mfu", "hfu", "model_flops_per_gpu_s")
        row = {"seconds": found.seconds, "bytes": size, **{name: getattr(found, name) for name in names}}
        if size > self.limit:
            row["reason"] = f"needs {size / GIB:.1f} GiB of {self.limit / GIB:.1f}"
        return row

    def with_warnings(self, row: Judged) -> Judged:
        """Add what makes a plan's prediction doubtful, and its kind."""
        done = self.simulated(run_of(row, self.base)).done
        return row | {
            "warnings": self.interval(row).warnings,
            "doubts": kind_doubts(done, self.system, self.errors),
            "fit": self.system.device.fit(row["bytes"]) if "bytes" in row else None,
        }

    def interval(self, row: Judged) -> Interval:
        """Return the interval of a plan's seconds, and what makes them doubtful."""
        return interval(self.system, self.simulated(run_of(row, self.base)), row["seconds"])

    def study(self, out: Path | None, judge: str) -> "Study":
        """Return the Optuna study of what a judge says of these plans, kept in a folder of `out` if there is one."""
        known = self.system.as_dict(), CONSTANTS, sorted(self.system.habits.fields.keys() - self.given(self.base))
        name = hashlib.sha256(repr((judge, self.base, *known, self.limit, self.gpus)).encode()).hexdigest()[:12]
        return study_of(name, out and out / "tune" / f"{judge}.optuna")


def tune(
    *,
    system: str,
    gpus: int,
    global_batch: int | None = None,
    precision: Precision | None = None,
    fix: tuple[str, ...] = (),
    top: int = TOP,
    others: tuple[str, ...] | None = None,
    grids: Flag = False,
    search: float = 0.0,
    trials: int = 0,
    measure: int = 0,
    steps: int = STEPS,
    device_memory: str | None = None,
    out: Path | None = None,
    default: Run = Run(),  # noqa: B008 - frozen
    given: Given = frozenset(),
    json: Flag = False,
) -> int:
    """Find the fastest parallel plans for a model that fit a system's memory; `--model NAME` says which model.

    All plans are estimated in closed form, the best simulated event by event. The fastest is marked as doubtful
    if the system was not calibrated on its kind of plan, or misses it badly; the fastest without doubt comes then
    too. With --measure the best are run on this machine, and their predicted order is compared with the measured.

    Args:
        system: A packaged system, or a YAML file as `calibrate` writes it.
        gpus: Devices, all of which a plan uses.
        global_batch: Sequences of a step; by default those of a `--config` file, else 1,536.
        precision: By default the file's, else the first of bf16, fp16, fp32 that the system has a peak rate for.
        fix: Allowed values of knobs, as tp=8 or schedule=one_f_one_b,interleaved. A knob that the system's software
            sets by itself is searched if it is named here, as overlap_grad_reduce=true,false.
        top: Number of plans of different shape that are simulated event by event.
        others: Schedules that only events judge, for the fastest pipelines; by default all, if `fix` names none.
        grids: Also judge the fastest plans with hidden features divided over tensor-parallel ranks (`plan.tp3`).
        search: Seconds to search for the shortest order of the fastest pipeline's passes, in any schedule.
        trials: Further plans that Optuna proposes, starting from the best; simulated, or with --measure run.
        measure: Number of plans that are run on this machine.
        steps: Training steps of each of these.
        device_memory: Memory of a device that a plan may use, as 80GB or 40GiB; by default 95% of it, or less.
        out: Folder of measured records and of trials, from which the same command continues.
        json: Print one JSON document on standard output.
    """
    global_batch, precision = _of_file(default, given, global_batch, precision)
    _require_numbers(trials, measure, search, out, gpus=gpus, global_batch=global_batch, top=top, steps=steps)
    found, recipe = load_system(system), Recipe(global_batch=global_batch, microbatch=1, steps=steps)
    task = Task(base_of(default, found, precision, recipe), found, gpus, _room(found, device_memory), fix)
    task = replace(task, base=task.simulated(task.base).asked, others=others_of(others, fix), grids=grids)
    real = _here(out, found) if measure and out is not None else None
    document, inside = _search(task, top, search)
    if trials:
        document["trials"] = _trials(task, inside, document["best"][: measure or top], trials, real, out)
    if real is not None:
        document["measured"] = compared(document.get("trials") or document["best"][:measure], task.base, real)
    return print_json(document) if json else print_search(document, found)


def _of_file(
    default: Run, given: Given, global_batch: int | None, precision: Precision | None
) -> tuple[int, Precision | None]:
    """Return the global batch and the precision: of options, else of a file's run, else BATCH and the system's."""
    of_file = default.train.global_batch if "train.global_batch" in given else BATCH
    return global_batch or of_file, precision or (default.precision if "precision" in given else None)


def _require_numbers(trials: int, measure: int, search: float, out: Path | None, **positive: int) -> None:
    require_positive(**positive)
    if min(trials, measure, search) < 0 or (measure and out is None):
        numbers = f"--trials {trials}, --measure {measure}, --search {search:g}"
        raise InputError(f"{numbers}: must be 0 or more; --measure needs --out")
    if out is not None and not (trials or measure):
        raise InputError("--out: is of what is tried and measured; valid with --trials or --measure")


def _room(system: System, wanted: str | None = None) -> float:
    """Return the bytes of a device that tensors may take."""
    device = system.device
    if wanted:
        if (size := parse_bytes(wanted)) > (most := device.memory_bytes.value):
            raise InputError(f"--device-memory {wanted}: a device of {system.name} has {shown(most)}; valid: no more")
        return size
    return device.room if device.framework_bytes is not None else (1 - LEFT_FREE) * device.memory_bytes.value


def base_of(default: Run, system: System, precision: Precision | None, recipe: Recipe) -> Run:
    """Return the run whose plan is searched."""
    if default.model == Run().model:
        raise InputError("tune needs --model: the name of a model size; as gpt-175b")
    return replace(default, plan=Plan(), train=recipe, precision=_precision(system, precision))


def _here(out: Path, system: System) -> Machine:
    store = Store(out, "tune", "small")
    require_writable(store.recorded)
    return partial(run_here, store=store, device=system.device.kind)


def best_plan(base: Run, system: System, gpus: int, fix: Sequence[str] = ()) -> Judged:
    """Return the plan with which this many devices of a system carry out the base's batch fastest, as `tune` finds it.

    Args:
        base: run of the search; of its plan only the size of buckets matters, and its microbatch does not.

    Raises:
        InputError: no plan is possible, or fits.
    """
    base = replace(base, plan=Plan(bucket_bytes=base.plan.bucket_bytes), train=replace(base.train, microbatch=1))
    task = Task(base, system, gpus, _room(system), fix)
    best = _search(task, TOP)[0]["best"]
    if not best:
        raise InputError(f"of the {TOP} fastest plans none is as small as it was estimated; valid: more devices")
    return best[0]


def _precision(system: System, wanted: Precision | None) -> Precision:
    known: list[Precision] = [each for each in ("bf16", "fp16", "fp32") if system.peak(each) is not None]
    if wanted is not None and system.peak(wanted) is None:
        raise InputError(f"--precision {wanted}: {system.name} has no peak rate for it; valid: {', '.join(known)}")
    return wanted or known[0]


def _trusted(task: Task, plans: Plans, seconds: np.ndarray) -> list[Judged]:
    """Return the fastest plans of kinds without doubt among those that fit by the closed form, as judged by events."""
    kept = np.flatnonzero(task.is_trusted(plans))
    if not len(kept):
        return []
    some = plans.take(kept)
    rows = [some.row(i) for i in ranked(some, seconds[kept], TRUSTED)]
    found = judged(rows, task.base, task.events)
    good = [task.with_warnings(row) for row in found if "reason" not in row]
    return sorted(good, key=lambda row: row["seconds"])


def _search(task: Task, top: int, search: float = 0.0) -> tuple[dict[str, Any], Plans]:
    """Return the document of the search, and the plans that fit."""
    plans, form = task.plans(), task.form()
    begin = time.perf_counter()
    found = estimates(form, plans)
    seconds = time.perf_counter() - begin
    fit = np.flatnonzero(found.bytes <= task.limit)
    if not len(fit):
        least = f"the smallest needs {shown(float(found.bytes.min()))} a device"
        raise InputError(f"none of {len(plans):,} plans fits {shown(task.limit)}: {least}; valid: more --gpus")
    inside, times = plans.take(fit), found.seconds[fit]
    smaller = front(times, found.bytes[fit], inside.oddity, SLOWEST)
    shapes = ranked(inside, times, MOST * top)
    row_of = lambda i: inside.row(i) | {"closed_form_seconds": float(times[i])}
    chosen = dict.fromkeys([*shapes[:top], *smaller])
    rows = list(map(row_of, chosen))
    rows += in_grids(rows, task.base, splits=plans["sequence_parallel"].min()) if task.grids else ()
    rows += _in_other_orders(task, plans, found.seconds)
    judge = lambda of: judged(shown_progress(of, "events"), task.base, task.events)
    first = judge(rows)
    more = judged_until(judge, [row_of(i) for i in shapes[top:] if i not in chosen], top, first)
    by_row, estimated = first + more, first[: len(chosen)] + more
    good = [task.with_warnings(row) for row in by_row if "reason" not in row]
    best = sorted(good, key=lambda row: row["seconds"])[:top]
    document = {
        "model": {"parameters": count_parameters(task.base.model, form.vocab_size)},
        **{"system": task.system.name, "stack": task.system.stack, "gpus": task.gpus, "memory_limit_bytes": task.limit},
        **{"global_batch": task.base.train.global_batch, "precision": task.base.precision},
        "plans": len(plans),
        "fitting": len(fit),
        "closed_form": {"seconds": seconds, "plans_per_s": len(plans) / seconds},
        "agreement": agreement(estimated),
        "best": best,
        "interval": task.interval(best[0])._asdict() if best else None,
        "pareto": unbeaten(good),
        "failed": [row for row in by_row if "reason" in row],
        "importance": importance(inside, times),
        "best_by_value": best_by_value(inside, times),
        "trusted": _trusted(task, inside, times),
        "order": _order(task, best, search),
    }
    return document, inside


def _in_other_orders(task: Task, plans: Plans, seconds: np.ndarray) -> list[Judged]:
    """Return the fastest shapes of a pipeline in other schedules, which may fit where 1F1B does not."""
    piped = np.flatnonzero((plans["pp"] > 1) & (plans["chunks"] == plans["chunks"].min()))
    if not len(piped) or not task.others:
        return []
    schedules = plans["schedule"][piped]
    piped = piped[schedules == schedules[np.argmin(seconds[piped])]]  # any one, as it is to be another
    some = plans.take(piped)
    shapes = [some.row(i) for i in ranked(some, seconds[piped], SHAPES)]
    return list(in_other_orders(shapes, task.base, task.others, task.fix))


def _order(task: Task, best: Sequence[Judged], search: float) -> dict[str, Any] | None:
    """Return the fastest pipeline's seconds, and what any order of its passes takes at least; None without one."""
    piped = next((row for row in best if row["pp"] > 1), None)
    if piped is None:
        return None
    done = task.simulated(run_of(piped, task.base)).done
    return {"seconds": piped["seconds"], **shortest(done, task.system, piped["seconds"], search)}


def _trials(
    task: Task, plans: Plans, first: Sequence[Judged], trials: int, real: Machine | None, out: Path | None
) -> list[Judged]:
    """Return Optuna's proposals as judged by events or real runs, the fastest first, then those that failed."""
    judge = task.events if real is None else lambda run: real([run])[0]
    rows = searched(task.study(out, "runs" if real else "events"), plans, first, task.base, judge, trials)
    if real is not None:
        rows = [row | {"predicted_seconds": task.events(run_of(row, task.base))["seconds"]} for row in rows]
    rows = [task.with_warnings(row) if "reason" not in row else row for row in rows]
    return sorted(rows, key=lambda row: row["seconds"] if "reason" not in row else math.inf)
