"""Input and output of all verbs: tables at full width, progress, one JSON document, sizes in bytes."""

import contextlib
import json as json_format
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, get_args

import tyro

from harness.records.printable import printable
from harness.records.store import FINISHED, Store
from impl.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from harness.analysis.render import Table

_T = TypeVar("_T")
WIDEST = 1000
"""Columns of a terminal that any table fits."""
TABLE_ROWS = 200
"""Most rows of a fitted table; larger ones are printed as bare columns, which is much faster."""
LINE_SECONDS = 5
"""Seconds between lines of progress where there is no terminal."""


def tell_ignored(store: Store) -> None:
    """Report on standard error which files in place of records were ignored, and why."""
    for path, why in store.ignored.items():
        print(printable(f"ignored: {path}: {why}"), file=sys.stderr)


def console(table: "RenderableType" = "") -> "Console":
    """Return standard output, wide enough for the table: a narrow terminal wraps lines, and nothing is cut off."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 120)
    return Console(width=max(console.width, Console(width=WIDEST).measure(table).maximum))


def print_tables(tables: Iterable["Table"]) -> None:
    """Print tables; those with more than TABLE_ROWS rows as bare columns."""
    from harness.analysis import render  # verbs without tables start faster

    for table in tables:
        if len(table.frame) > TABLE_ROWS:
            cells = [[column.heading for column in table.columns], *table.cells]
            print("", table.title, columns(cells), *table.notes, sep="\n")
        else:
            shown = render.console(table)
            console(shown).print(shown)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of text as aligned columns, for any number of rows; the last column is not padded."""
    widths = [max(map(len, column), default=0) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def shown_progress(items: Sequence[_T], what: str) -> Iterator[_T]:
    """Yield the items, with a progress bar on standard error, or a line every 5 s where that is no terminal."""
    from rich.console import Console
    from rich.progress import Progress

    screen = Console(stderr=True)
    if screen.is_terminal:
        with Progress(console=screen, transient=True) as progress:
            yield from progress.track(items, description=what)
        return
    done, began, is_over = 0, time.monotonic(), threading.Event()

    def lines() -> None:
        while not is_over.wait(LINE_SECONDS):
            after = f"after {time.monotonic() - began:.0f} s"
            with contextlib.suppress(OSError, ValueError):  # as where the reader of a pipe has left
                print(f"{what}: {done} of {len(items)} done {after}", file=sys.stderr, flush=True)

    teller = threading.Thread(target=lines, daemon=True)
    teller.start()
    try:
        for item in items:
            yield item
            done += 1
    finally:
        is_over.set()
        teller.join()


def print_json(document: Any) -> int:
    """Print the only JSON document of a verb, and return exit status 0."""
    print(json_format.dumps(document, indent=1, allow_nan=False, default=str))
    return 0


UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


LEAST_MEMORY = 2**20
"""Bytes that any device has: fewer are a number without its unit."""
SIZES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "TiB": 2**40, **UNITS}


Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
Unset = Annotated[_T, tyro.conf.DisallowNone]
"""Option that is None only where it is left out: neither --help nor an error lists None."""
OPTIONS = tyro.constructors.ConstructorRegistry()
Given = tyro.conf.Suppress[frozenset[str]]
"""Fields of a run, by dotted name, that a command line gives, defaults too; `harness.cli.main` fills them in."""


@OPTIONS.primitive_rule
def _unset(option: tyro.constructors.PrimitiveTypeInfo) -> Any:
    """Return how an option's values are read and named, without None; None: by tyro's own rules."""
    kinds = get_args(option.type)
    if type(None) not in kinds or tyro.conf.DisallowNone not in option.markers:
        return None
    left: Any = Union[tuple(kind for kind in kinds if kind is not type(None))]  # noqa: UP007 - of a tuple
    spec = OPTIONS.get_primitive_spec(tyro.constructors.PrimitiveTypeInfo.make(left, option.markers))
    assert isinstance(spec, tyro.constructors.PrimitiveConstructorSpec)
    shown = lambda value: ["None"] if value is None else spec.str_from_instance(value)
    return replace(spec, is_instance=lambda value: value is None or spec.is_instance(value), str_from_instance=shown)


def parse_bytes(text: str) -> float:
    """Return the bytes in a text, as 80GB, 40 GiB or 3.2e10.

    Raises:
        InputError: the text is no amount of memory.
    """
    found = re.fullmatch(r"\s*(\d+\.?\d*(?:e\+?\d+)?)\s*([A-Za-z]*)\s*", text)
    if not found or (found[2] or "B") not in SIZES or float(found[1]) * SIZES[found[2] or "B"] < LEAST_MEMORY:
        raise InputError(f"--device-memory {text!r} is no amount of memory; valid: 80GB, 40GiB, 3.2e10 and the like")
    return float(found[1]) * SIZES[found[2] or "B"]


def shown(size: float) -> str:
    """Return a number of bytes as text: `51.2 GiB`."""
    unit = next((unit for unit, scale in UNITS.items() if size >= scale), "KiB")
    return f"{size / UNITS[unit]:.3g} {unit}" if size < 999.5 * UNITS[unit] else f"{size / UNITS[unit]:,.0f} {unit}"


def counted(words: Sequence[str]) -> str:
    """Return how many of all points finished, and the number of each status."""
    order = ("ok", "nan", "invalid", "oom", "failed", "timeout", "running", "pending", "unknown", "ended", "missing")
    counts = {word: words.count(word) for word in (*order, *sorted(set(words) - set(order)))}
    done = sum(counts[status] for status in FINISHED)
    return f"{done} of {len(words)} points finished: " + ", ".join(f"{n} {word}" for word, n in counts.items() if n)
