"""What each verb of the command line does."""

import dataclasses
import json as json_format
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console, RenderableType
from rich.table import Table as ConsoleTable

from harness import document, figures, render, tables
from harness.bench import bench
from harness.draw import draw_timeline
from harness.environment import gpu_count
from harness.experiment import TIERS, Experiment, Point, Tier, experiment_ids, load, points
from harness.launch import Site, Where
from harness.memory import Flag, memory_from
from harness.progress import LiveDisplay
from harness.store import FINISHED, Record, Store
from harness.sweep import Options, Saving, Sweep
from harness.validity import Datasets, why_invalid
from impl.data.config import DataConfig
from impl.errors import InputError
from impl.plan import Plan
from impl.run import EngineName, Run

WIDEST = 1000
"""Columns of a terminal on which any table has room."""

Json = Flag
DeviceChoice = Literal["auto", "cpu", "cuda"]
Format = Literal["md", "csv", "tex", "json"]


def list_experiments(*, markdown: Flag = False, out: Path = Path("results"), json: Json = False) -> int:
    """List the experiments: id, question, source, and points and expected time of each tier.

    Args:
        markdown: Print EXPERIMENTS.md: all of each experiment, and what its committed records say.
        out: Folder of the records that --markdown shows.
        json: Print one JSON document instead of a table.
    """
    if markdown:
        print(document.experiments_markdown(out), end="")
        return 0
    found = [load(name) for name in experiment_ids()]
    if json:
        return _print_json([_described(e) for e in found])
    table = ConsoleTable("experiment", "question", "source", "tier", "points", "expected")
    table.columns[0].no_wrap = table.columns[3].no_wrap = True
    for e in found:
        for i, tier in enumerate(TIERS):
            head = (e.id, e.question, e.source) if i == 0 else ("", "", "")
            table.add_row(*head, tier, str(len(e.runs[tier])), e.cost[tier], end_section=tier == TIERS[-1])
    _console().print(table)
    return 0


def run(
    experiment: tyro.conf.Positional[str],
    /,
    *,
    tier: Tier = "smoke",
    on: Where = "local",
    only: str | None = None,
    jobs: int = 1,
    out: Path = Path("results"),
    data: str | None = None,
    time_limit: float = 24 * 3600.0,
    partition: str | None = None,
    ranks_per_node: int = 8,
    device: DeviceChoice = "auto",
    allow_oom: Flag = False,
    profile: Flag = False,
    saving: Annotated[Saving, tyro.conf.arg(name="")] = Saving(),  # noqa: B008 - frozen
    engine: EngineName | None = None,
    plan: Plan = Plan(),  # noqa: B008 - frozen
    plan_fields: tyro.conf.Suppress[frozenset[str]] = frozenset(),
    json: Json = False,
) -> int:
    """Run the points of an experiment that have no finished record yet, then write its tables and figures.

    Args:
        experiment: Id of an experiment, or its last word; `list` shows them.
        tier: smoke (CPU, a minute or so), small (one machine), paper (the paper's scale).
        on: Local processes, or a Slurm cluster.
        only: Only points whose label contains this, or matches it as a pattern, or whose id starts with it.
        jobs: Points that run at the same time; timings are only good with 1.
        out: Folder of records, tables and figures.
        data: Token folder to train on, in place of the experiment's.
        time_limit: Seconds a point may take.
        partition: Slurm partition.
        ranks_per_node: Ranks on one node of the cluster.
        device: cpu, or cuda with one GPU per rank; auto is cuda where this machine has a GPU for every rank.
        allow_oom: Start also what is predicted not to fit the memory of this machine.
        profile: Also look where a step's time goes, and what its parts take alone, after what is timed.
        saving: Checkpoints, if any.
        engine: Who trains every point: ours, DeepSpeed, or PyTorch's own parts; without it each point's own.
        plan: Fields of the parallel plan that are given replace those of every point.
        plan_fields: Which are given.
        json: Print one JSON document on standard output.
    """
    _require_positive(jobs=jobs, time_limit=time_limit, ranks_per_node=ranks_per_node)
    saving.require(out)
    found = load(experiment)
    chosen = points(_changed(found.runs[tier], data, engine, plan, plan_fields), only)
    site = _site(on, device, [p.run for p in chosen], partition, ranks_per_node, allow_oom=allow_oom)
    store = Store(out, found.id, tier)
    datasets = Datasets(_synthetic_cache(store))
    if data:
        datasets.open(data)
    store.require_writable()
    options = Options(site, jobs, time_limit, saving=saving, profile=profile or found.profiles)
    _sweep(chosen, store, datasets, options)
    return _tell_results(found, store, chosen, json)


def _tell_results(found: Experiment, store: Store, chosen: list[Point], json: bool) -> int:
    """Write the tables and figures of all records, print those of the chosen points; the exit status."""
    records = [r for r in map(store.read, (p.run.id for p in chosen)) if r is not None]
    files = _write_results(store, found)
    if json:
        shown = _as_json(records, found)
        _print_json({**_described(found), "tier": store.tier, "records": records, **shown, "files": files})
    else:
        _print_tables(records, found)
        print("\nwritten:")
        print(f"  {store.folder}/records ({len(store.records())} records)")
        for file in files:
            print(f"  {file}")
    return 1 if any(r["status"] not in (*FINISHED, "invalid") for r in records) else 0


def status(
    experiment: tyro.conf.Positional[str],
    /,
    *,
    tier: Tier = "smoke",
    out: Path = Path("results"),
    data: str | None = None,
    engine: EngineName | None = None,
    plan: Plan = Plan(),  # noqa: B008 - frozen
    plan_fields: tyro.conf.Suppress[frozenset[str]] = frozenset(),
    json: Json = False,
) -> int:
    """Say which points of an experiment are done, failed or missing, and why.

    Args:
        experiment: Id of an experiment, or its last word.
        tier: smoke, small or paper.
        out: Folder of records.
        data: Token folder, as given to `run`.
        engine: As given to `run`.
        plan: Fields of the parallel plan, as given to `run`.
        plan_fields: Which are given.
        json: Print one JSON document.
    """
    found = load(experiment)
    store = Store(out, found.id, tier)
    rows = []
    for point in points(_changed(found.runs[tier], data, engine, plan, plan_fields)):
        record = store.read(point.run.id)
        state = record["status"] if record else "missing"
        reason = (record or {}).get("reason")
        rows.append({"id": point.run.id, "point": point.label, "status": state, "reason": reason})
    counts = {s: sum(row["status"] == s for row in rows) for s in sorted({row["status"] for row in rows})}
    if json:
        return _print_json({"experiment": found.id, "tier": tier, "points": rows, "counts": counts})
    table = ConsoleTable("id", "point", "status", "reason")
    for row in rows:
        table.add_row(row["id"], row["point"], row["status"], row["reason"] or "")
    _console().print(table)
    print(f"{len(rows)} points: " + ", ".join(f"{n} {s}" for s, n in counts.items()))
    return 0


def table(
    experiment: tyro.conf.Positional[str],
    /,
    *,
    tier: Tier = "smoke",
    format: Format | None = None,
    out: Path = Path("results"),
    json: Json = False,
) -> int:
    """Write the tables and figures again from the records that are there; nothing is run.

    Args:
        experiment: Id of an experiment, or its last word.
        tier: smoke, small or paper.
        format: Print the tables in this format instead of for the terminal.
        out: Folder of records.
        json: The same as --format json.
    """
    found = load(experiment)
    store = Store(out, found.id, tier)
    records = store.records()
    if not records:
        raise InputError(f"{store.folder} has no records; `python -m harness run {found.id} --tier {tier}` makes them")
    files = _write_results(store, found)
    if json or format == "json":
        return _print_json({**_described(found), "tier": tier, **_as_json(records, found), "files": files})
    if format is None:
        _print_tables(records, found)
        return 0
    write = {"md": render.markdown, "csv": render.csv, "tex": render.latex}[format]
    print("\n".join(write(t) for t in tables.all_tables(records, found.claims, table=found.table)))
    return 0


def train_from(default: Run) -> Callable[..., int]:
    """The verb `train`, with options that start from `default`."""

    def train(
        config: Annotated[Run, tyro.conf.arg(name="")] = default,
        *,
        on: Where = "local",
        device: DeviceChoice = "auto",
        allow_oom: Flag = False,
        time_limit: float = 24 * 3600.0,
        saving: Annotated[Saving, tyro.conf.arg(name="")] = Saving(),  # noqa: B008 - frozen
        out: Path | None = None,
        json: Json = False,
    ) -> int:
        """Train one run; every field is an option, and `--model NAME` starts from a named size.

        Args:
            config: What is trained and how.
            on: Local processes, or a Slurm cluster.
            device: cpu, or cuda with one GPU per rank; auto is cuda where this machine has a GPU for every rank.
            allow_oom: Start also what is predicted not to fit the memory of this machine.
            time_limit: Seconds the run may take.
            saving: Checkpoints, if any.
            out: Keep the record, tables and figures in this folder; without it they are only printed.
            json: Print the record.
        """
        _require_positive(time_limit=time_limit)
        saving.require(out)
        site = _site(on, device, [config], allow_oom=allow_oom)
        with tempfile.TemporaryDirectory() as scratch:
            store = Store(out or Path(scratch), "train", "small")
            cache = _synthetic_cache(store)
            # what is refused leaves nothing in --out, the synthetic language neither
            there = Datasets(cache if cache.exists() else Path(scratch) / ".synthetic")
            if reason := saving.why_invalid(config) or why_invalid(config, there, site):
                raise InputError(reason)
            store.require_writable()
            options = Options(site=site, time_limit_seconds=time_limit, saving=saving)
            _sweep([Point(config, f"train {config.id}")], store, Datasets(cache), options)
            record = store.read(config.id)
            assert record is not None
            if out:
                _write_results(store)
        if json:
            _print_json(record)
        else:
            _print_tables([record])
        return 0 if record["status"] in FINISHED else 1

    return train


def prepare(
    *, text: str, tokenizer: str, out: Path, valid: str | None = None, valid_fraction: float = 0.05, json: Json = False
) -> int:
    """Turn text into a token folder that runs can train on.

    Args:
        text: A text file, a .jsonl file (.gz, .xz) with a `text` field, a folder of such, or hf:NAME from the hub.
        tokenizer: byte, gpt2:VOCAB,MERGES (files), or bpe:VOCAB_SIZE (trained on the text).
        out: The folder to write.
        valid: Text to validate on; without it the tail of the training text is kept apart.
        valid_fraction: How much of the text that tail is.
        json: Print the manifest.
    """
    from rich.progress import Progress

    from impl.data.prepare import prepare as prepare_text
    from impl.data.tokens import TokenFolder

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("tokenising", total=None)
        advance = lambda done, total: progress.update(task, completed=done, total=total or None)
        prepare_text(text, tokenizer, out, valid=valid, valid_fraction=valid_fraction, progress=advance)
    manifest = json_format.loads((out / "manifest.json").read_text())
    if json:
        return _print_json(manifest)
    for split in ("train", "valid"):
        counts = manifest[split]
        print(f"{split}: {counts['tokens']:,} tokens, {counts['words']:,} words, {counts['bytes']:,} bytes")
    print(f"{out}: dataset {TokenFolder.open(out).sha256[:12]}, vocabulary {manifest['vocab_size']:,}")
    return 0


def table_of(default: Run) -> dict[str, Callable[..., int]]:
    """The verbs by name; `train` and `memory` start from `default`."""
    return {
        "list": list_experiments,
        "run": run,
        "status": status,
        "table": table,
        "train": train_from(default),
        "timeline": draw_timeline,
        "memory": memory_from(default),
        "prepare": prepare,
        "bench": bench,
    }


def _require_positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise InputError(f"--{name.replace('_', '-')} {value}: must be more than 0, and finite")


def _site(
    on: Where,
    device: DeviceChoice,
    runs: Sequence[Run],
    partition: str | None = None,
    ranks_per_node: int = 8,
    *,
    allow_oom: bool = False,
) -> Site:
    """The place to run at; `auto` takes GPUs if they are enough for every run, so that all run on the same device.

    Raises:
        InputError: it is not there.
    """
    if device == "auto":
        enough = on == "local" and gpu_count() >= max(run.plan.world_size for run in runs)
        device = "cuda" if enough else "cpu"
    site = Site(on, partition, ranks_per_node, device, allow_oom)
    site.require()
    return site


def _sweep(chosen: list[Point], store: Store, datasets: Datasets, options: Options) -> None:
    done = sum((r := store.read(p.run.id)) is not None and r["status"] in FINISHED for p in chosen)
    with LiveDisplay(len(chosen), done) as display:
        Sweep(store, datasets, options, display).run(chosen)


def _synthetic_cache(store: Store) -> Path:
    """Where the embedded language lies: beside the experiments, so that all of them read one copy."""
    up = len(Path(store.experiment).parts) + 1
    return store.folder.parents[up - 1] / ".synthetic"


def _changed(
    runs: list[Run], data: str | None, engine: EngineName | None, plan: Plan, plan_fields: Iterable[str]
) -> list[Run]:
    """The runs on another token folder or by another engine if one is given, with these fields of the plan; what
    becomes equal, once."""
    given = {name: getattr(plan, name) for name in plan_fields}
    others: dict[str, Any] = {"data": DataConfig(dataset=data)} if data else {}
    others |= {"engine": engine} if engine else {}
    changed = [dataclasses.replace(run, plan=dataclasses.replace(run.plan, **given), **others) for run in runs]
    return list({run.id: run for run in changed}.values()) if given or engine else changed


def _write_results(store: Store, experiment: Experiment | None = None) -> list[str]:
    records, own = store.records(), experiment.table if experiment else None
    written = tables.write(records, store.tables, experiment.claims if experiment else (), table=own)
    return [str(path) for path in written + figures.write(records, store.figures, table=own)]


def _as_json(records: list[Record], experiment: Experiment) -> dict[str, Any]:
    shown = tables.all_tables(records, experiment.claims, table=experiment.table)
    return {"tables": [render.as_json(t) for t in shown]}


def _print_tables(records: list[Record], experiment: Experiment | None = None) -> None:
    claims, own = (experiment.claims, experiment.table) if experiment else ((), None)
    for t in tables.all_tables(records, claims, table=own):
        shown = render.console(t)
        _console(shown).print(shown)


def _console(table: RenderableType = "") -> Console:
    """Standard output, wide enough for the table: a narrow terminal wraps its lines, nothing is cut off."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    return Console(width=max(console.width, Console(width=WIDEST).measure(table).maximum))


def _described(e: Experiment) -> dict[str, Any]:
    tiers = {tier: {"points": len(e.runs[tier]), "expected": e.cost[tier]} for tier in TIERS}
    return {"id": e.id, "question": e.question, "source": e.source, "tiers": tiers}


def _print_json(document: Any) -> int:
    print(json_format.dumps(document, indent=1, allow_nan=False, default=str))
    return 0
