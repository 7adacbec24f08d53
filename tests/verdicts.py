"""Derives every verdict again from the records and the claims alone: `python -m tests.verdicts`.

Compares them with the committed ones: claim by claim in the tables of each tier and on the page of each experiment, and
counted in EXPERIMENTS.md and README.md. Prints each that differs and how many are equal; exit status 1 if any differs.
"""

import csv
import re
import sys
from collections.abc import Callable, Iterator
from difflib import SequenceMatcher
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from harness.analysis import render
from harness.experiment.claims_table import claims_table
from harness.experiment.tiers import TIERS
from harness.experiment.verdicts import verdicts_table
from harness.records.store import Store
from harness.report import experiments_md
from harness.report.experiments_md import page_of
from tests.documents import EXPERIMENTS, README, ROOT, TABLE, alike, found

HEAD = re.compile(r"^\|.*\n\| ---.*\n", re.MULTILINE)
"""Head of a table in Markdown, with the rule below it."""


class Pair(NamedTuple):
    """One line of a committed file that says a verdict or counts some, and the same line from the records."""

    path: str
    """File, relative to the project's folder."""
    committed: str
    """Line of the file; empty if it has none."""
    derived: str
    """Line from the records; empty if they give none."""

    @property
    def is_equal(self) -> bool:
        """True if both say the same, but for the last digits of numbers."""
        return alike(self.derived, self.committed)


class Kept(NamedTuple):
    """What a committed file says, according to the records."""

    path: str
    lines_of: Callable[[str], list[str]]
    """Its lines with verdicts, of its text."""
    derived: list[str]
    """Same lines, from the records."""


@cache
def kept() -> list[Kept]:
    """Return every file with verdicts, or counts of them."""
    files = []
    for experiment, records, judged in found():
        for tier in TIERS:
            path = Store(Path("results"), experiment.id, tier).tables / "claims.csv"
            own = [one for one in records if one.tier == tier]
            made = render.csv(claims_table(experiment.claims, own)) if own and experiment.claims else ""
            files.append(Kept(str(path), _of_tier, _of_tier(made)))
        table = render.markdown(verdicts_table(experiment.id, judged), padded=False)
        files.append(Kept(page_of(experiment.id), _of_page, _rows(table)))
    index = experiments_md.index(found())
    overview = Kept(EXPERIMENTS.name, _overview, _overview(index))
    return [*files, overview, Kept(README.name, _by_kind, _by_kind(index))]


def pairs(committed: Path = ROOT) -> Iterator[Pair]:
    """Yield every verdict and every count of verdicts, from the files below a folder and from the records.

    Those are side by side that stand between the same equal lines.
    """
    for path, lines_of, derived in kept():
        lines = lines_of((committed / path).read_text() if (committed / path).exists() else "")
        for _, i, j, k, m in SequenceMatcher(None, lines, derived, autojunk=False).get_opcodes():
            yield from (Pair(path, *it) for it in zip_longest(lines[i:j], derived[k:m], fillvalue=""))


def _of_tier(table: str) -> list[str]:
    """Return the verdicts of a table of claims in CSV, of every kind of run."""
    lines: list[str] = []
    for row in csv.DictReader(table.splitlines()):
        claim = "; ".join(value for name, value in row.items() if not name.startswith(("verdict", "numbers")))
        systems = [name.removeprefix("verdict") for name in row if name.startswith("verdict")]
        lines += [f"{claim}{system}: {row[f'verdict{system}']}; {row[f'numbers{system}']}" for system in systems]
    return lines


def _of_page(page: str) -> list[str]:
    """Return the rows of the verdicts on an experiment's page."""
    return _rows(page.partition("\n## Claims\n")[2].partition("\n## ")[0])


def _rows(text: str) -> list[str]:
    """Return the rows of the tables in Markdown."""
    return [line for line in HEAD.sub("", text).splitlines() if line.startswith("|")]


def _overview(index: str) -> list[str]:
    """Return the lines of EXPERIMENTS.md that count verdicts: of all, by kind, and by experiment."""
    section = index.partition("\n## All experiments\n")[2].partition("\n## ")[0]
    return [*re.findall(r"^\d+ experiments\..*", section, re.MULTILINE), *_rows(section)]


def _by_kind(text: str) -> list[str]:
    """Return the rows of the table of verdicts by kind of claim."""
    return [row for table in TABLE.finditer(text) if table[2] == "verdicts by kind" for row in _rows(table[3])]


def main() -> int:
    """Print what differs, and return the exit status."""
    every = list(pairs())
    different = [one for one in every if not one.is_equal]
    for path, committed, derived in different:
        print(path, f"  committed: {committed}", f"  derived:   {derived}", sep="\n")
    print(f"{len(every) - len(different)} of {len(every)} verdicts and counts of verdicts are what the records give")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
