"""Functions of the verbs of the command line."""

import contextlib
import dataclasses
import json as json_format
import tempfile
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from harness.cli.which import OfWhich
from harness.experiment import folders
from harness.experiment.tiers import TIERS, Tier
from harness.launch.flags import Place, Saving, Trying, require_positive
from harness.records.attempts import Attempts
from harness.records.store import FINISHED, Store
from harness.terminal import Flag, columns, console, counted, print_json, print_tables, tell_ignored
from impl.errors import InputError
from impl.run import Run

if TYPE_CHECKING:
    from harness.analysis.render import Table
    from harness.experiment.experiment import Experiment
    from harness.records.record import Record

Format = Literal["md", "csv", "tex", "json", "parquet", "pdf"]


FEW = 8
"""Experiments of which `list` shows source, points and times of each tier."""


def list_experiments(
    text: tyro.conf.Positional[str | None] = None,
    /,
    *,
    markdown: Flag = False,
    out: Path | None = None,
    json: Flag = False,
) -> int:
    """List the experiments: id, question, and points of each tier; of a few also source and expected times.

    Args:
        text: Only experiments with this in their id, question or source.
        markdown: Print EXPERIMENTS.md: the experiments of each table of a paper, and the verdicts of each experiment.
        out: Folder of the records that --markdown shows; without it the committed ones.
        json: Print one JSON document instead of a table.
    """
    from rich.table import Table

    from harness.experiment.loading import experiment_ids, load
    from harness.report.results import described

    if markdown and (text or json):
        raise InputError("--markdown: prints the whole index; valid without WORD and without --json")
    if markdown:
        from harness.report import experiments_md

        print(experiments_md.index(experiments_md.read(out or folders.ARCHIVE)), end="")
        return 0
    every = [load(name) for name in experiment_ids()]
    found = [e for e in every if (text or "").lower() in f"{e.id} {e.question} {e.source}".lower()]
    if not found:
        raise InputError(f"{text!r} is in no id, question or source of an experiment; `lmscale list` shows all")
    if json:
        return print_json([described(e) for e in found])
    if len(found) > FEW:
        heads = [(e.id, "/".join(str(len(e.runs[tier])) for tier in TIERS)) for e in found]
        room = console().width - sum(max(map(len, column)) + 2 for column in zip(*heads, strict=True))
        questions = [textwrap.shorten(e.question, max(room, 20), placeholder="...") for e in found]
        print(columns([(*head, question) for head, question in zip(heads, questions, strict=True)]))
        print(f"\n{len(found)} experiments, with their points at {', '.join(TIERS)}; `list WORD` says more of a few")
        return 0
    table = Table("experiment", "question", "source", "tier", "points", "expected")
    table.columns[0].no_wrap = table.columns[3].no_wrap = True
    for e in found:
        for tier in TIERS:
            head = (e.id, e.question, e.source) if tier == TIERS[0] else ("", "", "")
            table.add_row(*head, tier, str(len(e.runs[tier])), e.cost[tier], end_section=tier == TIERS[-1])
    console().print(table)
    return 0


def run(
    which: OfWhich,
    place: Annotated[Place, tyro.conf.arg(name="")] = Place(),  # noqa: B008 - frozen
    jobs: int | None = None,
    trying: Annotated[Trying, tyro.conf.arg(name="")] = Trying(),  # noqa: B008 - frozen
    profile: Flag = False,
    forecast: str | None = None,
    saving: Annotated[Saving, tyro.conf.arg(name="")] = Saving(),  # noqa: B008 - frozen
    detach: Flag = False,
    dry_run: Flag = False,
    ghost: Flag = False,
    json: Flag = False,
) -> int:
    """Run the points of an experiment that have no finished record yet, then write its tables and figures.

    Args:
        which: Which points.
        place: Where they run.
        jobs: Points that run at the same time; by default one on this machine, for undisturbed timings, and on a
            cluster as many as its site file allows.
        trying: How long a try may take, and when there is another one.
        profile: Also measure where a step's time goes, and the time of its parts alone, after the timed steps.
        forecast: System, packaged or a YAML file, for which a step of each run is predicted before it begins, and its
            final loss where finished runs have a scaling law; records keep both, `claims --calibration` scores them.
        saving: Checkpoints and certificates, if any.
        detach: With --on slurm: end when all jobs are submitted; `watch`, or the same command, continues.
        dry_run: Print what would be run, and scripts for Slurm; nothing is written. The status is 1 if no point can.
        ghost: With --dry-run: also execute every point's ranks as `ghost` does; the status is 1 if they do not fit.
        json: Print one JSON document on standard output.
    """
    from harness.cli.status import tell_submitted
    from harness.cli.sweeps import carry_out, forecaster, nothing_written, refusals, require_certified, site_of
    from harness.launch.attempt import Options
    from harness.launch.dry_run import print_plan, print_refused
    from harness.launch.sweep import Sweep
    from harness.predict.ghost import all_fit
    from harness.report.results import tell_results

    if place.follows_torchrun():
        return 0
    require_positive(**{} if jobs is None else {"jobs": jobs})
    trying.require()
    saving.require(which.out, folders.OWN, profile=profile)
    _require_together(detach, ghost and (json or not dry_run), place, saving, jobs or 1)
    chosen = which.chosen(TIERS[0])
    found, _, store, points = chosen
    require_certified(points, store, saving)
    site = site_of(place, [point.run for point in points], is_there=not dry_run)
    how = {"forecast": forecaster(forecast, site), "profile": profile or found.profiles, "jobs": jobs, "detach": detach}
    options = Options(**vars(trying), site=site, saving=saving, **how)
    with nothing_written(store, which.data) as datasets:
        refused = refusals(points, store, datasets, options)
        if dry_run:
            print_plan(found, Sweep(store, datasets, options), points, json)
            return int(bool(refused) or (ghost and not all_fit({p.label: p.run for p in points}, site.device)))
        if refused:
            return print_refused(found, store, refused, None if which.sweep or which.data else which.words(), json)
    carry_out(points, store, datasets, options)
    return tell_submitted(chosen, which.words(data=True), json) if detach else tell_results(found, store, points, json)


def _require_together(detach: bool, is_ghost_alone: bool, place: Place, saving: Saving, jobs: int) -> None:
    if detach and saving.track:
        raise InputError("--track: follows points until they end; valid without --detach, or with `lmscale watch`")
    if place.on == "torchrun" and jobs > 1:
        raise InputError("--jobs: torchrun's processes carry out one point after another; valid with it: 1")
    if detach and place.on != "slurm":
        raise InputError("--detach: only jobs of a scheduler outlive this command; valid with --on slurm")
    if is_ghost_alone:
        raise InputError("--ghost: prints lines before anything is started; valid with --dry-run, without --json")


def table(
    experiment: tyro.conf.Positional[str],
    /,
    *,
    tier: Tier | None = None,
    format: Format | None = None,
    width: Literal["column", "page"] = "column",
    out: Path | None = None,
    json: Flag = False,
) -> int:
    """Print the tables of an experiment's records, and write them and the figures again; nothing is run.

    The committed records are only printed, unless --out names their folder.

    Args:
        experiment: Id of an experiment or its last word, or a file such as mine.py.
        tier: smoke, small or paper; without it the largest with measured records, else with simulated ones.
        format: Print the tables in this format instead of for the terminal. Into the folder EXPERIMENT-TIER, parquet
            writes a file of each and one of all records, and pdf the figures, for a paper.
        width: Width of figures with --format pdf: a paper's column (3.25 inches) or its page (6.75).
        out: Folder of records; without it your own in `runs` where there are some, else the committed ones.
        json: The same as --format json.
    """
    from harness.experiment.loading import load
    from harness.report import results

    found = load(experiment)
    tier = tier or folders.reading_tier(out, found.id) or TIERS[0]
    stores, store = folders.stores(out, found.id, tier), Store(folders.sweep_folder(out), found.id, tier)
    read = [(each, each.records()) for each in stores]
    records = [record for _, of_one in read for record in of_one]
    if not records:
        raise InputError(f"{store.folder} has no records; `lmscale run {found.id} --tier {tier}` makes them")
    own = [record for each, of_one in read if each.out == store.out for record in of_one]
    is_own = any(each.out == store.out for each in stores)
    files, made = results.write_results(store, found, own) if is_own else ([], [])
    if len(own) < len(records):
        made = results.all_tables(records, found.claims, table=found.table)
    for each in stores:
        tell_ignored(each)
    if json or format == "json":
        return print_json({**results.described(found), "tier": tier, **results.as_json(made), "files": files})
    if format is None:
        print_tables(made)
        others = results.other_points(found, records)
        statuses = [record.status for record in records if record not in others]
        of_tier = f"\n{found.id}, tier {tier}" + (f": {counted(statuses)}" if statuses else "")
        notes = [results.in_words_of_others(others), results.in_words_of_certified(records)]
        print(*filter(None, [of_tier, *notes, folders.read_from(out, [found.id])]), sep="\n")
        return 0
    if format in ("parquet", "pdf"):
        return _write_files(found, Path(f"{found.id.replace('/', '-')}-{tier}"), made, records, width, format)
    print("\n".join(map(results.WRITERS[format], made)))
    return 0


def _write_files(
    found: "Experiment",
    folder: Path,
    made: "list[Table]",
    records: "list[Record]",
    width: Literal["column", "page"],
    format: Format,
) -> int:
    """Write tables and records as Parquet, or figures as PDF; print the files, and titles of figures for captions."""
    from harness.analysis import parquet
    from harness.figures import printed

    if format == "parquet":
        files: list[object] = [*parquet.write(folder, made, records)]
    else:
        titles = printed.write(records, folder, width, table=found.table, figure=found.figure)
        files = [f"{path}  {title}" for path, title in titles.items()]
    print(f"{found.id}, written:", *files, sep="\n  ")
    return 0


def train(
    config: Annotated[Run, tyro.conf.arg(name="")] = Run(),  # noqa: B008 - frozen
    *,
    place: Annotated[Place, tyro.conf.arg(name="")] = Place(),  # noqa: B008 - frozen
    trying: Annotated[Trying, tyro.conf.arg(name="")] = Trying(),  # noqa: B008 - frozen
    saving: Annotated[Saving, tyro.conf.arg(name="")] = Saving(),  # noqa: B008 - frozen
    out: Path | None = None,
    json: Flag = False,
) -> int:
    """Train one run; every field is an option, and `--model NAME` starts from a named size.

    `--config FILE` starts from a run in a TOML or JSON file, or from that of a record; options change it.

    Args:
        config: What is trained and how.
        place: Where it runs.
        trying: How long a try may take, and when there is another one.
        saving: Checkpoints and certificates, if any.
        out: Keep the record, tables and figures in this folder; without it they are only printed.
        json: Print the record.
    """
    from harness.cli.sweeps import carry_out, nothing_written, require_certified, site_of
    from harness.experiment.experiment import Point
    from harness.launch.attempt import Options, why_refused
    from harness.report.results import all_tables, in_words_of_certified, write_results

    if place.follows_torchrun():
        return 0
    trying.require()
    saving.require(out)
    site = site_of(place, [config])
    if out is None:
        _require_no_out(place, config)
    with tempfile.TemporaryDirectory() as scratch:
        store = Store(out or Path(scratch), "train", "small")
        # a run requested by name is repeated whatever its last outcome
        options = Options(**vars(dataclasses.replace(trying, retry="all")), site=site, saving=saving)
        with nothing_written(store) as datasets:
            if reason := why_refused(config, store, datasets, options):
                raise InputError(reason)
        points = [Point(config, f"train {config.id}")]
        require_certified(points, store, saving)
        carry_out(points, store, datasets, options)
        record, document = store.read(config.id), store.document(config.id)
        assert record is not None
        if out:
            write_results(store)
    if json:
        print_json(document)
    else:
        print_tables(all_tables([record]))
        print(*filter(None, [in_words_of_certified([record])]))
        if config.keep_end:
            print(f"\ncheckpoint: {Attempts(store).checkpoints(config.id)}")
    return 0 if record.status in FINISHED else 1


def schema() -> int:
    """Print the JSON schema of a record; docs/record.schema.json is the same."""
    from harness.records import parse

    return print_json(parse.schema())


def _require_no_out(place: Place, run: Run) -> None:
    if place.on != "local":
        raise InputError(f"--on {place.on}: needs --out, a folder that all nodes see")
    if run.keep_end:
        raise InputError("--keep-end: needs --out, where the checkpoint is kept")


def prepare(
    *, text: str, tokenizer: str, out: Path, valid: str | None = None, valid_fraction: float = 0.05, json: Flag = False
) -> int:
    """Turn text into a token folder that runs can train on.

    Args:
        text: A text file, a .jsonl file (.gz, .xz) with a `text` field, a folder of such, or hf:NAME from the hub.
        tokenizer: byte, amino (of FASTA, or a protein a line), gpt2:VOCAB,MERGES (files), hf:FOLDER (with
            tokenizer.json), bpe:SIZE (trained on it).
        out: The folder to write.
        valid: Text to validate on; without it the tail of the training text is kept apart.
        valid_fraction: How much of the text that tail is.
        json: Print the manifest.
    """
    from rich.console import Console
    from rich.progress import Progress

    from impl.data.prepare import prepare as prepare_text
    from impl.data.tokens import TokenFolder

    before = None
    with contextlib.suppress(InputError):  # there is none, or a damaged one
        before = TokenFolder.open(out).sha256
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("tokenising", total=None)
        advance = lambda done, total: progress.update(task, completed=done, total=total or None)
        prepare_text(text, tokenizer, out, valid=valid, valid_fraction=valid_fraction, progress=advance)
    manifest = json_format.loads((out / "manifest.json").read_text())
    if json:
        return print_json(manifest)
    for split in ("train", "valid"):
        counts = manifest[split]
        print(f"{split}: {counts['tokens']:,} tokens, {counts['words']:,} words, {counts['bytes']:,} bytes")
    now = TokenFolder.open(out).sha256
    replaced = f", in place of dataset {before[:12]}" if before not in (None, now) else ""
    print(f"{out}: dataset {now[:12]}, vocabulary {manifest['vocab_size']:,}{replaced}")
    return 0
