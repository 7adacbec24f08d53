"""Findings of an experiment: prose in `results/ID/FOUND.md` whose numbers come from the tables beside it.

No measured number is typed. Numbers of settings may be typed (4 chunks, 7.6M parameters), as may those of a sentence
with the word "published" or with a figure, table or section of a paper, and those below the heading `## History`, for
records that are gone.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from impl.errors import InputError
from impl.files import read_text

FILE = "FOUND.md"
PLACEHOLDER = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
UNIT = re.compile(r" \([^()]*\)$")
"""Unit at the end of a heading."""
FORM = "{{TIER/TABLE | HEADING=CELL, HEADING=CELL | HEADING}}"


def findings(folder: Path) -> str:
    """Return the findings in an experiment's folder of results, with its placeholders filled; empty if it has none.

    A placeholder `{{small/interleaving | chunks=2, global batch=4 | relative}}` stands for one cell of the table
    `small/tables/interleaving.md`: that of the row with these cells, under that heading. A `;` separates cells where a
    cell has a comma, a cell or heading may be given by its beginning (`claim=the bubble...`), and a heading needs its
    unit only where two differ in nothing else.

    Raises:
        InputError: a placeholder has another form, or names no cell, several, or an empty one.
    """
    path = folder / FILE
    if not path.is_file():
        return ""
    return PLACEHOLDER.sub(lambda found: _cell(folder, found.group(1)), read_text(path)).strip()


def _cell(folder: Path, placeholder: str) -> str:
    parts = [" ".join(part.split()) for part in placeholder.split("|")]
    where = f"{folder / FILE}: {{{{{' | '.join(parts)}}}}}"
    if len(parts) != 3 or "/" not in parts[0]:
        raise InputError(f"{where}: valid is {FORM}")
    tier, _, name = parts[0].partition("/")
    table = folder / tier / "tables" / f"{name}.md"
    if not table.is_file():
        raise InputError(f"{where}: there is no table {table}")
    headings, *rows = _lines(table) or [[]]
    column = _column(headings, parts[2], where)
    for named in filter(None, re.split("; " if ";" in parts[1] else ", ", parts[1])):
        heading, _, cell = named.partition("=")
        at = _column(headings, heading, where)
        rows = [row for row in rows if _is(row[at], cell)]
    if len(rows) != 1:
        raise InputError(f"{where}: {len(rows)} rows have these cells; it must be one")
    if rows[0][column] in {"", "–"}:
        raise InputError(f"{where}: the cell is empty")
    return rows[0][column]


def _column(headings: Sequence[str], name: str, where: str) -> int:
    found = [i for i, heading in enumerate(headings) if _is(heading, name) or UNIT.sub("", heading) == name]
    if len(found) != 1:
        raise InputError(f"{where}: {len(found) or 'no'} headings are {name!r}; valid: {', '.join(headings)}")
    return found[0]


def _is(cell: str, named: str) -> bool:
    return cell.startswith(named.removesuffix("...")) if named.endswith("...") else cell == named


def _lines(table: Path) -> list[list[str]]:
    """Return the cells of a Markdown table's headings, and of each of its rows."""
    lines = [line for line in read_text(table).splitlines() if line.startswith("|")]
    cells = (re.split(r"(?<!\\)\|", line)[1:-1] for line in lines[:1] + lines[2:])
    return [[cell.strip().replace("\\|", "|") for cell in row] for row in cells]
