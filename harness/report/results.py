"""Tables and figures of a sweep: made from its records, written to its folder, and printed."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from harness.analysis import render
from harness.analysis.breakdown import profile_tables
from harness.analysis.latex import latex
from harness.analysis.perplexity import perplexity_tables
from harness.analysis.render import Table
from harness.analysis.tables import MakesTable, failures_table, scaling_table, throughput_table
from harness.experiment.claims import Claim
from harness.experiment.claims_table import claims_table
from harness.experiment.experiment import Experiment, Point
from harness.experiment.tiers import TIERS
from harness.experiment.verdicts import sound
from harness.figures import figures
from harness.records.record import Record
from harness.records.store import FINISHED, Store, write_atomically
from harness.terminal import counted, print_json, print_tables, tell_ignored


def all_tables(
    records: Sequence[Record], claims: Sequence[Claim] = (), *, table: MakesTable | None = None
) -> list[Table]:
    """Return all tables that have rows, with the experiment's own and the verdicts on the claims.

    Raises:
        InputError: the records are of several tiers.
    """
    tables = [throughput_table(records), *profile_tables(records), scaling_table(records)]
    tables += perplexity_tables(records)
    tables += [table(records)] if table else []
    tables += [failures_table(records), *([claims_table(sound(claims), records)] if claims else [])]
    return [table for table in tables if len(table.frame)]


def other_points(experiment: Experiment, records: Sequence[Record]) -> list[Record]:
    """Return the records of points that the experiment does not have: run with options, or before it was changed."""
    ids = {run.id for runs in experiment.runs.values() for run in runs}
    return [record for record in records if record.id not in ids]


def in_words_of_others(others: Sequence[Record]) -> str:
    """Return a line about records of points that the experiment does not have; empty if there are none."""
    what = "1 record is of a point" if len(others) == 1 else f"{len(others)} records are of points"
    return f"{what} that the experiment does not have (run with options, or before a change)" if others else ""


def in_words_of_certified(records: Sequence[Record]) -> str:
    """Return a line about records with a certificate, which have no times; empty if there are none."""
    count = sum(record.certified for record in records)
    what = "1 run is certified and not timed" if count == 1 else f"{count} runs are certified and not timed"
    return f"{what}: hashing is in its steps; `lmscale certify` compares certificates" if count else ""


def write(tables: Sequence[Table], folder: Path, *, table: MakesTable | None = None) -> list[Path]:
    """Write these tables as Markdown, CSV and LaTeX, in place of those of an earlier call.

    Args:
        table: the experiment's own, whose files are removed if it has no rows any more.

    Raises:
        OSError: the folder cannot be written.
    """
    texts = {folder / f"{t.name}.{suffix}": text(t) for t in tables for suffix, text in WRITERS.items()}
    for path, text in texts.items():
        write_atomically(path, text)
    stems = [*STEMS, *([table([]).name] if table else [])]
    for old in {path for stem in stems for path in folder.glob(f"{stem}.*")} - set(texts):
        old.unlink()
    return list(texts)


STEMS = ("throughput", "limit", "breakdown", "scaling", "failures", "claims", "perplexity_*", "accuracy_*")
"""Files of tables that are removed if their table has no rows any more."""
WRITERS: dict[str, Callable[[Table], str]] = {"md": render.markdown, "csv": render.csv, "tex": latex}


def tell_results(found: Experiment, store: Store, chosen: list[Point], json: bool, *, were_run: bool = True) -> int:
    """Write the tables and figures of all records, print those of the chosen points, and return the exit status.

    If all points `were_run`, one without a record counts as failed.
    """
    everything = store.with_simulated()
    ids, measured = dict.fromkeys(point.id for point in chosen), {r.id: r for r in everything if not r.is_simulated}
    records = [measured[id] for id in ids if id in measured]
    shown = records + [record for record in everything if record.is_simulated and record.id in ids]
    files, made = write_results(store, found, everything)
    if len(shown) < len(everything):
        made = all_tables(shown, found.claims, table=found.table)
    tell_ignored(store)
    if json:
        documents = [store.document(record.id) for record in records]
        print_json({**described(found), "tier": store.tier, "records": documents, **as_json(made), "files": files})
    else:
        print_tables(made)
        statuses = counted([measured[id].status if id in measured else "missing" for id in ids])
        print(*filter(None, [f"\n{statuses}", in_words_of_certified(records)]), sep="\n")
        print_written(store, len(measured), files)
    is_lost = were_run and len(records) < len(ids)
    return int(is_lost or any(r.status not in (*FINISHED, "invalid") for r in records))


def write_results(
    store: Store, experiment: Experiment | None = None, records: list[Record] | None = None
) -> tuple[list[str], list[Table]]:
    """Write the tables and figures of all records, read here if not given; return the files, and the tables."""
    records = store.with_simulated() if records is None else records
    claims, table, figure = (experiment.claims, experiment.table, experiment.figure) if experiment else ((), None, None)
    made = all_tables(records, claims, table=table)
    written = write(made, store.tables, table=table)
    written += figures.write(records, store.figures, table=table, figure=figure)
    return [str(path) for path in written], made


def print_written(store: Store, count: int, files: Iterable[str]) -> None:
    """Print the folder of the records, their number, and the files that are made of them."""
    print("\nwritten:", f"{store.recorded} ({count} records)", *files, sep="\n  ")


def as_json(made: list[Table]) -> dict[str, Any]:
    return {"tables": [render.as_json(t) for t in made]}


def described(e: Experiment) -> dict[str, Any]:
    """Return an experiment's question, source and cost."""
    tiers = {tier: {"points": len(e.runs[tier]), "expected": e.cost[tier]} for tier in TIERS}
    return {"id": e.id, "question": e.question, "source": e.source, "tiers": tiers}
