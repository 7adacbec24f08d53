"""Rendering of tables as Markdown, CSV, JSON or for the terminal; numbers are scaled and rounded only here."""

import functools
import math
import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from harness.records.frames import is_missing, rows_of
from harness.records.printable import printable

if TYPE_CHECKING:
    import rich.console

MISSING = "–"
EMBEDS = re.compile(r"!(?=\[)|<(?=[a-zA-Z/!])")
"""Beginning of an image or of HTML in Markdown."""
FORMULA = re.compile(r"^[=@]|^[+-](?=.*(\w\(|[|!]))")
"""Beginning of a text that spreadsheets would calculate, which may run programs."""
HEADING_CHARS, CELL_CHARS, NOTE_CHARS = 8, 36, 110
"""Widths of a heading, a cell and a note on a terminal above which they are wrapped."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """Format of one column of a table; the frame itself holds SI units."""

    key: str
    """Column of the frame."""
    header: str
    unit: str = ""
    """Unit of the shown number."""
    scale: float = 1.0
    """SI units in one shown unit."""
    si: str = ""
    """Unit in the frame, in CSV and in JSON."""
    digits: int = 4
    """Significant digits of a number without an interval; whole numbers keep all of theirs."""
    interval: str | None = None
    """Column of the frame with the half-width of the 95% interval."""
    text: bool = False
    of: Callable[[Any], Any] | None = None
    """Function of a point that returns the column's value; None for the measure of that name."""

    @property
    def heading(self) -> str:
        return f"{self.header} ({self.unit})" if self.unit else self.header


@dataclass(frozen=True)
class Table:
    """Raw numbers in SI units, their format, and notes.

    A text in a column of numbers is the reason for a missing number.
    """

    name: str
    """Stem of the table's files."""
    title: str
    columns: tuple[Column, ...]
    frame: pd.DataFrame
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Make title and notes printable, as they may quote records."""
        object.__setattr__(self, "title", printable(self.title))
        object.__setattr__(self, "notes", tuple(map(printable, self.notes)))

    @functools.cached_property
    def cells(self) -> list[list[str]]:
        """Formatted texts, row by row, computed once for all formats."""
        used = {key for c in self.columns for key in (c.key, c.interval)}
        rows = rows_of(self.frame.loc[:, [name for name in self.frame if name in used]])
        return [[cell(row[c.key], row.get(c.interval or ""), c) for c in self.columns] for row in rows]

    def _repr_markdown_(self) -> str:
        """Return the Markdown that a notebook shows."""
        return markdown(self) if len(self.frame) else f"{self.title}: no records yet."


def texts(**headers: str) -> tuple[Column, ...]:
    """Return columns of text, by the keys of their headers."""
    return tuple(Column(key=key, header=header, text=True) for key, header in headers.items())


def shown(columns: Iterable[Column], frame: pd.DataFrame) -> tuple[Column, ...]:
    """Return the columns that the frame has and that have a value in some row."""
    return tuple(c for c in columns if c.key in frame and any(not is_missing(v) and v != "" for v in frame[c.key]))


def cell(value: Any, half_width: Any, column: Column) -> str:
    """Return one value as text, scaled and with its interval."""
    if isinstance(value, str):
        return printable(" ".join(value.split()))
    if is_missing(value):
        return MISSING
    if column.text or isinstance(value, bool):
        return str(value)
    shown = value / column.scale
    if is_missing(half_width) or not math.isfinite(shown):
        return number(shown, column.digits)
    return number_with_interval(shown, half_width / column.scale, column.digits)


def number(value: float, digits: int = 4) -> str:
    """Return a number with significant digits, all of those before the point; exponents only far from one."""
    if not math.isfinite(value):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e9:
        return f"{int(value):,}"
    if not 1e-4 <= abs(value) < 1e9:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{_decimals(value, digits)}f}"


def number_with_interval(value: float, half_width: float, digits: int = 4) -> str:
    """Return `1234 ± 56`, with decimals by the half-width; a tiny one adds at most two digits to the value."""
    if half_width == 0 or value == 0:
        return f"{number(value, digits)} ± {number(half_width, 2)}"
    if not 1e-4 <= abs(value) < 1e9:
        return f"{value:.{digits - 1}e} ± {half_width:.1e}"
    decimals = min(_decimals(half_width, 2), _decimals(value, digits + 2))
    width = f"{half_width:,.{decimals}f}"
    return f"{value:,.{decimals}f} ± {width}" if width.strip("0.") else f"{number(value, digits)} ± 0"


def _decimals(value: float, digits: int) -> int:
    rounded = float(f"{abs(value):.{digits - 1}e}")  # 9.9996 has one digit before the point, its rounded value has two
    return max(0, digits - 1 - math.floor(math.log10(rounded)))


def markdown(table: Table, *, padded: bool = True) -> str:
    """Return a heading, a pipe table if there are columns, and the notes as a list.

    Args:
        padded: pad the cells of a column to equal width, to be readable as plain text.
    """
    if not table.columns:
        return f"### {_plain_markdown(table.title)}\n"
    cells = table.cells
    columns = [[c.heading, *(row[i] for row in cells)] for i, c in enumerate(table.columns)]
    columns = [[_plain_markdown(text).replace("|", "\\|") for text in column] for column in columns]
    widths = [max(3, *map(len, column)) if padded else 3 for column in columns]
    pads: list[Callable[[str, int], str]] = [str.ljust if c.text else str.rjust for c in table.columns]
    filled = [[pad(text, w) for text in column] for column, w, pad in zip(columns, widths, pads, strict=True)]
    heading, *rows = zip(*filled, strict=True)
    rules = ["-" * w if c.text else "-" * (w - 1) + ":" for c, w in zip(table.columns, widths, strict=True)]
    lines = [f"| {' | '.join(row)} |" for row in (heading, rules, *rows)]
    notes = ["", *(f"- {_plain_markdown(note)}" for note in table.notes)] if table.notes else []
    return "\n".join([f"### {_plain_markdown(table.title)}", "", *lines, *notes]) + "\n"


def _plain_markdown(text: str) -> str:
    """Return the text with images and HTML escaped, which would load files named by a record."""
    return EMBEDS.sub(r"\\\g<0>", text)


def csv(table: Table) -> str:
    """Return unrounded SI values as CSV, units in the header, half-widths in columns of their own; without notes."""
    columns = _raw_columns(table)
    rows = table.frame.loc[:, [key for key, _ in columns]].map(raw)
    return rows.to_csv(index=False, header=[heading for _, heading in columns], lineterminator="\n")


def raw(value: Any) -> Any:
    """Return a value for CSV, with ' before a text that would be a formula."""
    if is_missing(value):
        return ""
    return FORMULA.sub(r"'\g<0>", printable(value)) if isinstance(value, str) else value


def _raw_columns(table: Table) -> list[tuple[str, str]]:
    columns = []
    for c in table.columns:
        unit = f" ({c.si})" if c.si else ""
        columns.append((c.key, c.header + unit))
        if c.interval and any(table.frame[c.interval].notna()):
            columns.append((c.interval, f"{c.header}, 95% half-width{unit}"))
    return columns


def as_json(table: Table) -> dict[str, Any]:
    """Return a JSON document: the columns with their SI units, and unrounded rows."""
    keys = [key for c in table.columns for key in (c.key, c.interval) if key]
    rows = [{key: _for_json(row[key]) for key in keys} for row in rows_of(table.frame)]
    columns = [{"key": c.key, "header": c.header, "unit": c.si, "half_width": c.interval} for c in table.columns]
    return {"name": table.name, "title": table.title, "columns": columns, "rows": rows, "notes": list(table.notes)}


def _for_json(value: Any) -> Any:
    if is_missing(value):
        return None
    value = value.item() if hasattr(value, "item") else value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value  # JSON has no infinity


def console(table: Table) -> "rich.console.Group":
    """Return the table for a terminal: title above, notes below, headings and long cells wrapped between words."""
    import rich.box
    import rich.console
    import rich.table
    from rich.text import Text

    out = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    cells = [[_broken(text, CELL_CHARS) for text in row] for row in table.cells]
    for i, column in enumerate(table.columns):
        widest = max((len(line) for row in cells for line in row[i].split("\n")), default=0)
        heading = _broken(column.header, max(widest, HEADING_CHARS)) + (f"\n({column.unit})" if column.unit else "")
        justify = "left" if column.text else "right"
        out.add_column(Text(heading), justify=justify, vertical="bottom", no_wrap=True)
    for row in cells:
        out.add_row(*map(Text, row))
    notes = [Text(_broken(note, NOTE_CHARS)) for note in table.notes]
    return rich.console.Group("", Text(table.title, style="bold"), out, *notes)


def _broken(text: str, chars: int) -> str:
    return "\n".join(textwrap.wrap(text, chars, break_long_words=False, break_on_hyphens=False))
