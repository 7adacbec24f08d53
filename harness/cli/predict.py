"""The verb `predict`: time and memory of an experiment, one run, or a table of configurations on a described system."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from harness.cli.which import plan_fields
from harness.experiment.experiment import Experiment, changed, points
from harness.experiment.folders import OWN
from harness.experiment.loading import load
from harness.experiment.tiers import Tier
from harness.predict.goodput import HOUR, Failures, goodput
from harness.predict.interval import EXTRAPOLATES, interval
from harness.predict.memory import print_memory
from harness.predict.simulated_record import document_of, why_no_room
from harness.predict.simulation import Simulated, given_by, predicted, simulated, vocabulary_of
from harness.predict.steps_of_a_run import as_logged, with_imbalance, with_uneven_experts, with_unlike_devices
from harness.predict.systems import load_system, names
from harness.records.labels import differing
from harness.records.measures import size_name
from harness.records.parse import of_document
from harness.records.record import Record
from harness.records.store import Store
from harness.records.writable import require_writable
from harness.report.results import all_tables, as_json, described, print_written, write_results
from harness.terminal import Flag, Given, counted, print_json, print_tables, shown, shown_progress, tell_ignored
from impl.cost.parameters import count_parameters
from impl.errors import InputError
from impl.run import Run, to_dict
from impl.simulator.step import Prediction
from impl.simulator.system import OWN_STACK, Calibration, System

WAITS_FOR = {
    "tp": "within layers",
    "cp": "for tokens",
    "pp": "for other stages",
    "dp": "gradients",
    "ends": "the tied embedding's gradients",
    "ep": "for experts",
    "zero": "parameters",
}
"""What a rank waits for, in words, by the axis that it communicates over."""


@dataclass(frozen=True)
class Circumstances:
    """Circumstances of one run that are no fields of it."""

    slowdown: tuple[float, ...] = ()
    """How many times as long a rank's computing takes, pipeline rank by pipeline rank."""
    stack: str | None = None
    """Software that will run, if it is not the system's: the interval is wider then."""
    spread: float = 0.0
    """Standard deviation of log(computing seconds) over devices: also predict quantiles of a step of the slowest."""
    imbalance: tuple[float, ...] = ()
    """Rows of the fullest rank of experts over the mean, or their p10 p50 p90; if left out, routers choose evenly."""


def predict(
    experiment: tyro.conf.Positional[str | None] = None,
    /,
    *,
    system: str | None = None,
    config: Annotated[Run, tyro.conf.arg(name="")] = Run(),  # noqa: B008 - frozen
    rows: Path | None = None,
    tier: Tier = "paper",
    only: str | None = None,
    under: Annotated[Circumstances, tyro.conf.arg(name="")] = Circumstances(),
    failures: Annotated[Failures, tyro.conf.arg(name="")] = Failures(),  # noqa: B008 - frozen
    out: Path = OWN,
    given: Given = frozenset(),
    json: Flag = False,
) -> int:
    """Predict the time and the memory of a training step on a described system; nothing is run.

    Args:
        experiment: Id of an experiment or its last word, or a file such as mine.py: its points become simulated
            records, in tables with measured and published numbers. Without it and --rows, one run is predicted.
        system: A packaged system, or a YAML file as `calibrate` writes it; a row that names one in its column
            `system` is predicted for that.
        config: The run; `--model NAME` starts from a named size. A field that is not given has the system's default
            where its file has one. A given field wins over what the system's software always does (`habits` of its
            file), which holds for the others. With an experiment, the fields of the plan that are given replace
            those of every point.
        rows: A CSV file of configurations, which is printed with predictions; a column that is left out is as a
            field that is not given, and a row that cannot be predicted has the reason instead. Rows whose `split`
            is `calibrate` have `iteration_time_s`, and the constants are fitted to them first.
        tier: smoke, small or paper.
        only: Predict the points of an experiment whose label contains or matches this, or whose id begins with it.
        under: What one run is predicted under.
        failures: What goodput is predicted for.
        out: Folder of records.
        given: Fields of a run that are given, by dotted name.
        json: Print one JSON document on standard output.
    """
    found = None if system is None else load_system(system)
    are_many = rows is not None or experiment is not None
    if are_many and any([*asdict(under).values(), failures.mtbf]):
        names_of_one = "--slowdown, --stack, --spread, --imbalance and --mtbf"
        raise InputError(f"{names_of_one} are for one run; valid: without --rows and an experiment")
    if experiment is None and (only is not None or tier != "paper" or out != OWN):
        raise InputError("--only, --tier and --out are of an experiment's points; valid: with an experiment")
    if failures.mtbf is None and failures != Failures():
        raise InputError("--checkpoint-seconds and --restart-seconds are of goodput; valid: with --mtbf")
    of_plan = plan_fields(given)
    is_run = bool(given) if rows is not None else len(given) > len(of_plan)
    _require_one({"--rows": rows is not None, "an experiment": experiment is not None, "fields of a run": is_run})
    if rows is not None:
        from harness.predict.csv_rows import predict_rows  # csv_rows fits, which imports SciPy

        return predict_rows(rows, found, json)
    if found is None:
        raise InputError(f"predict needs --system; valid: {', '.join(names())}, or a YAML file")
    if experiment is not None:
        named = load(experiment)
        runs = changed(named.runs[tier], None, None, config.plan, of_plan)
        return predict_experiment(named, runs, only, given, Store(out, named.id, tier, found.name), found, json)
    return predict_run(simulated(config, given, found), found, under, failures, json)


def _require_one(inputs: Mapping[str, bool]) -> None:
    if sum(inputs.values()) > 1:
        asked = " and ".join(text for text, is_given in inputs.items() if is_given)
        raise InputError(f"predict is given {asked}; valid: one of them")


def predict_experiment(
    found: Experiment, runs: list[Run], only: str | None, given: Given, store: Store, system: System, json: bool
) -> int:
    """Write a simulated record of every point, then all tables and figures again; print those of the points."""
    chosen, varied = [point.run for point in points(runs, only)], differing(runs)
    require_writable(store.recorded)
    given_in = {run.id: given | given_by(run, varied, system) for run in chosen}
    documents = [document_of(run, store, system, given_in[run.id]) for run in shown_progress(chosen, "predicting")]
    for document in documents:
        store.write(document)
    records = [of_document(document) for document in documents]
    everything = Store(store.out, found.id, store.tier)
    files, _ = write_results(everything, found)
    tell_ignored(everything)
    ids = {record.id for record in records}
    measured = [record for record in everything.records() if record.id in ids]
    made = all_tables([*measured, *records], found.claims, table=found.table)
    if json:
        head = {**described(found), "tier": store.tier, "system": system.name, "stack": system.stack}
        return print_json({**head, "records": documents, **as_json(made), "files": files})
    print_tables(made)
    print(f"\n{counted([record.status for record in records])}, predicted for {system.name} ({system.stack})")
    for warning in _warnings(records, system):
        print(f"warning: {warning}")
    print_written(store, len(store.records()), files)
    return 0


def _warnings(records: Sequence[Record], system: System) -> Iterable[str]:
    """Yield what makes predictions doubtful, once; of sizes without calibration, only their names."""
    found = [record.prediction.warnings for record in records]
    beyond = {text.split()[1]: None for texts in found for text in texts if text.startswith(EXTRAPOLATES)}
    if beyond:
        count = sum(any(text.startswith(EXTRAPOLATES) for text in texts) for texts in found)
        there = f"of {len(records)} points extrapolate beyond what {system.name} was calibrated on"
        yield f"{count} {there}: {', '.join(beyond)}"
    yield from dict.fromkeys(text for texts in found for text in texts if not text.startswith(EXTRAPOLATES))


def predict_run(asked: Simulated, system: System, under: Circumstances, failures: Failures, json: bool) -> int:
    """Print the time of a run's step, where it goes, the memory of every pipeline rank, and goodput under failures."""
    pp, slowdown = asked.done.plan.pp, under.slowdown
    if slowdown and (len(slowdown) != pp or not all(0 < factor < math.inf for factor in slowdown)):
        raise InputError(f"--slowdown {slowdown}: must be a number above 0 for each of {pp} pipeline ranks")
    system = with_imbalance(asked.done, system, under.imbalance)
    found = predicted(asked.done, system, dict(enumerate(slowdown)))
    document = _document(asked, system, found, under.stack)
    if asked.done.plan.ep > 1 and len(under.imbalance) != 1:
        document["steps_of_uneven_experts"] = with_uneven_experts(asked.done, system, under.imbalance)._asdict()
    if logged := as_logged(system, document["devices"], found.seconds):
        document["steps_as_logged"] = logged._asdict()
    if under.spread:
        document["steps_of_unlike_devices"] = with_unlike_devices(asked.done, system, under.spread)._asdict()
    if failures.mtbf is not None:
        document["goodput"] = {**asdict(failures), **goodput(document["devices"], failures)._asdict()}
    if json:
        return print_json(document)
    _print(document, found, system)
    return 0


def _document(asked: Simulated, system: System, found: Prediction, stack: str | None) -> dict[str, Any]:
    """Return all that is predicted of a run, in SI units."""
    run, known = asked.asked, system.calibration
    names = ("tokens_per_s", "model_flops_per_gpu_s", "hardware_flops_per_gpu_s", "mfu", "hfu", "bubble", "exposed")
    return {
        "system": system.name,
        "stack": system.stack,
        "hardware": system.hardware,
        "parameters": count_parameters(run.model, vocabulary_of(run)),
        "devices": run.plan.world_size,
        "config": to_dict(run),
        "seconds": found.seconds,
        **interval(system, asked, found.seconds, stack)._asdict(),
        **{name: getattr(found, name) for name in names},
        "parts": [{"pipeline_rank": i, "seconds": parts} for i, parts in enumerate(found.parts)],
        "memory": [{"pipeline_rank": i, "bytes": memory.as_dict()} for i, memory in enumerate(found.memory)],
        "device_memory_bytes": system.device.memory_bytes.value,
        "room_bytes": system.device.room,
        "besides_bytes": asdict(system.device.taken),
        "fits": found.fits,
        "fit": found.fit,
        "calibration": None if known is None else _calibration(known),
        "assumed": asked.assumed,
    }


def _calibration(known: Calibration) -> dict[str, Any]:
    """Return the numbers of fitted and held-out rows, and the errors of a calibration."""
    names = ("stack", "mape", "worst", "constant_mfu_mape", "calculon_mape", "interval", "ranges", "features")
    counts = {"rows": len(known.rows), "held_out": len(known.held_out)}
    return {name: getattr(known, name) for name in names} | counts


def _print(document: Mapping[str, Any], found: Prediction, system: System) -> None:
    model, config = size_name(document["parameters"]), document["config"]
    print(f"{model} parameters on {document['devices']:,} x {system.hardware}, {system.name} ({system.stack})")
    train, sequence = config["train"], config["model"]["seq_len"]
    batches = f"a batch of {train['global_batch']:,}, microbatches of {train['microbatch']}"
    print(f"{config['precision']}, {batches}, sequences of {sequence:,} tokens\n")
    rates = {name: document[f"{name}_flops_per_gpu_s"] / 1e12 for name in ("model", "hardware")}
    shares = {name: f", {100 * share:.1f}%" if (share := document[name]) is not None else "" for name in ("mfu", "hfu")}
    lines = {
        "step": f"{_seconds(found.seconds)} ({_seconds(document['low'])} to {_seconds(document['high'])}: nine of ten)",
        "throughput": f"{found.tokens_per_s:,.0f} tokens/s",
        "model FLOPs (MFU)": f"{rates['model']:.1f} TFLOP/s per device{shares['mfu']}",
        "with recomputation (HFU)": f"{rates['hardware']:.1f} TFLOP/s per device{shares['hfu']}",
        "bubble": f"{100 * found.bubble:.1f}% of the computing",
        "exposed communication": _exposed(found) or "none",
    }
    if of := document.get("goodput"):
        checkpoints = f"a checkpoint of {_seconds(of['checkpoint_seconds'])} every {of['interval'] / 60:.3g} min"
        lines["goodput"] = f"{100 * of['share']:.1f}% of the time, {of['share'] * found.tokens_per_s:,.0f} tokens/s"
        lines["goodput"] += f": a failure every {of['mean_seconds'] / HOUR:.3g} h, {checkpoints}"
    for name in ("steps_as_logged", "steps_of_unlike_devices", "steps_of_uneven_experts"):
        if of := document.get(name):
            lines[name.replace("_", " ")] = ", ".join(f"{of[share]:.4g} s ({share})" for share in ("p10", "p50", "p90"))
    width = max(map(len, lines))
    print("\n".join(f"{name:<{width}}  {text}" for name, text in lines.items()))
    print_memory(found.memory)
    most, there = max(m.total for m in found.memory), system.device.memory_bytes.value
    doubt = system.device.taken.doubt(found.fit)
    print(f"{found.fit}: {shown(most)} of {shown(there)} ({most / there:.0%}){doubt}")
    if not system.stack.startswith(OWN_STACK):
        print("memory is that of this suite's engine; other software may keep more, as all logits in fp32")
    if document["assumed"]:
        assumed = ", ".join(f"{name} {value}" for name, value in document["assumed"].items())
        print(f"not given, and assumed for {system.name}: {assumed}")
    for warning in [*filter(None, [why_no_room(found, system)]), *document["warnings"]]:
        print(f"warning: {warning}")


def _seconds(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds >= 0.1 else f"{1e3 * seconds:.4g} ms"


def _exposed(found: Prediction) -> str:
    """Return waits as `1.2 s within layers (6%)`, for every axis that takes a thousandth of the step."""
    waits = {WAITS_FOR.get(axis, axis): s for axis, s in found.exposed.items() if s > 1e-3 * found.seconds}
    return ", ".join(f"{_seconds(s)} {text} ({s / found.seconds:.1%})" for text, s in waits.items())
