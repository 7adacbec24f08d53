"""What verbs say about experiments and records: tables for people, one document for programs, files for both."""

import json as json_format
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from rich.console import Console, RenderableType

from harness import figures, render, tables
from harness.experiment import TIERS, Experiment, Point
from harness.states import counted
from harness.store import FINISHED, Record, Store

_T = TypeVar("_T")
WIDEST = 1000
"""Columns of a terminal on which any table has room."""


def tell_results(found: Experiment, store: Store, chosen: list[Point], json: bool) -> int:
    """Write the tables and figures of all records, print those of the chosen points; the exit status."""
    read = {point.id: store.read(point.id) for point in chosen}
    records = [record for record in read.values() if record is not None]
    simulated = [record for other in store.simulated() for record in other.records() if record["id"] in read]
    files = write_results(store, found)
    tell_ignored(store)
    if json:
        shown = as_json(records + simulated, found)
        print_json({**described(found), "tier": store.tier, "records": records, **shown, "files": files})
    else:
        print_tables(records + simulated, found)
        print(f"\n{counted([record['status'] if record else 'missing' for record in read.values()])}")
        print("\nwritten:")
        print(f"  {store.folder}/records ({len(store.records())} records)")
        for file in files:
            print(f"  {file}")
    return 1 if any(r["status"] not in (*FINISHED, "invalid") for r in records) else 0


def write_results(store: Store, experiment: Experiment | None = None) -> list[str]:
    """Write the tables and figures of all records; the files."""
    records, own = store.with_simulated(), experiment.table if experiment else None
    figure = experiment.figure if experiment else None
    written = tables.write(records, store.tables, experiment.claims if experiment else (), table=own)
    return [str(path) for path in written + figures.write(records, store.figures, table=own, figure=figure)]


def as_json(records: list[Record], experiment: Experiment) -> dict[str, Any]:
    """The tables of records."""
    shown = tables.all_tables(records, experiment.claims, table=experiment.table)
    return {"tables": [render.as_json(t) for t in shown]}


def print_tables(records: list[Record], experiment: Experiment | None = None) -> None:
    """The tables of records, for the terminal."""
    claims, own = (experiment.claims, experiment.table) if experiment else ((), None)
    for t in tables.all_tables(records, claims, table=own):
        shown = render.console(t)
        console(shown).print(shown)


def tell_ignored(store: Store) -> None:
    """Say on standard error which files among the records are none."""
    for path, why in store.ignored.items():
        print(f"ignored: {path}: {render.printable(why)}", file=sys.stderr)


def console(table: RenderableType = "") -> Console:
    """Standard output, wide enough for the table: a narrow terminal wraps its lines, nothing is cut off."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    return Console(width=max(console.width, Console(width=WIDEST).measure(table).maximum))


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text under each other, as many as there may be; the last column is not filled up."""
    widths = [max(map(len, column), default=0) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def shown_progress(items: Sequence[_T], what: str) -> Iterator[_T]:
    """The items, one after another, with a bar on a terminal's standard error."""
    from rich.progress import Progress

    screen = Console(stderr=True)
    with Progress(console=screen, transient=True, disable=not screen.is_terminal) as progress:
        yield from progress.track(items, description=what)


def described(e: Experiment) -> dict[str, Any]:
    """An experiment's question, source and cost."""
    tiers = {tier: {"points": len(e.runs[tier]), "expected": e.cost[tier]} for tier in TIERS}
    return {"id": e.id, "question": e.question, "source": e.source, "tiers": tiers}


def print_json(document: Any) -> int:
    """The one document of a verb."""
    print(json_format.dumps(document, indent=1, allow_nan=False, default=str))
    return 0
