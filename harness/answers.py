"""What verbs say about experiments and records: tables for people, one document for programs, files for both."""

import json as json_format
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from rich.console import Console, RenderableType

from harness import figures, render, tables
from harness.beside import is_simulated
from harness.experiment import TIERS, Experiment, Point
from harness.render import Table
from harness.states import counted
from harness.store import FINISHED, Record, Store

_T = TypeVar("_T")
WIDEST = 1000
"""Columns of a terminal on which any table has room."""
TABLE_ROWS = 200
"""Beyond these there are bare columns: a table that is fitted to so many takes its time."""


def tell_results(found: Experiment, store: Store, chosen: list[Point], json: bool) -> int:
    """Write the tables and figures of all records, print those of the chosen points; the exit status."""
    everything = store.with_simulated()
    ids, measured = dict.fromkeys(point.id for point in chosen), {r["id"]: r for r in everything if not is_simulated(r)}
    records = [measured[id] for id in ids if id in measured]
    shown = records + [record for record in everything if is_simulated(record) and record["id"] in ids]
    files, made = write_results(store, found, everything)
    if len(shown) < len(everything):
        made = made_of(shown, found)
    tell_ignored(store)
    if json:
        print_json({**described(found), "tier": store.tier, "records": records, **as_json(made), "files": files})
    else:
        print_tables(made)
        print(f"\n{counted([measured[id]['status'] if id in measured else 'missing' for id in ids])}")
        print("\nwritten:")
        print(f"  {store.folder}/records ({len(measured)} records)")
        for file in files:
            print(f"  {file}")
    return 1 if any(r["status"] not in (*FINISHED, "invalid") for r in records) else 0


def write_results(
    store: Store, experiment: Experiment | None = None, records: list[Record] | None = None
) -> tuple[list[str], list[Table]]:
    """Write the tables and figures of all records; the files, and the tables.

    Args:
        records: of the store, where they have been read.
    """
    records = store.with_simulated() if records is None else records
    own, figure = (experiment.table, experiment.figure) if experiment else (None, None)
    made = made_of(records, experiment)
    written = tables.write_made(made, store.tables, table=own)
    written += figures.write(records, store.figures, table=own, figure=figure)
    return [str(path) for path in written], made


def made_of(records: list[Record], experiment: Experiment | None = None) -> list[Table]:
    """The tables of records."""
    claims, own = (experiment.claims, experiment.table) if experiment else ((), None)
    return tables.all_tables(records, claims, table=own)


def as_json(made: list[Table]) -> dict[str, Any]:
    return {"tables": [render.as_json(t) for t in made]}


def print_tables(made: list[Table]) -> None:
    """Tables for the terminal; those with more than TABLE_ROWS rows as bare columns."""
    for t in made:
        if len(t.frame) > TABLE_ROWS:
            cells = [[c.heading for c in t.columns], *t.cells()]
            print("", t.title, columns(cells), *t.notes, sep="\n")
        else:
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
