"""Writes what is made of experiments and records anew: `python -m tests.documents`, or `make documents`.

EXPERIMENTS.md, the table of the README, which is a summary of it, and the notebooks with their outputs; tests hold all
of them against the records.
"""

import re
import sys
from collections import Counter
from pathlib import Path

import tyro

from harness.document import experiments_markdown
from harness.places import PAPERS, title
from harness.store import write_atomically
from tests.notebooks.executed import SOURCES, executed

ROOT = Path(__file__).resolve().parents[1]
README, EXPERIMENTS = ROOT / "README.md", ROOT / "EXPERIMENTS.md"
TABLE = re.compile(r"(?<=<!-- verdicts by paper -->\n).*?(?=<!-- end of verdicts by paper -->)", re.DOTALL)
OVERVIEW = re.compile(r"^## All experiments$.*?(?=^## )", re.DOTALL | re.MULTILINE)
EXPERIMENT = re.compile(r"^\| \[([\w/]+)\]\(#[\w-]+\) \|.*\| ([^|]*) \| ([^|]*) \|$", re.MULTILINE)
COUNTED = re.compile(r"(\d+) (reproduced|partly|not reproduced)")
KINDS, VERDICTS = ("measured", "simulated"), ("reproduced", "partly", "not reproduced")
OWN = "our own questions"
"""Of what stands in no paper's folder."""


def main(only: str = "") -> None:
    """Write them.

    Args:
        only: Those whose path contains this, as `notebooks/`.
    """
    made = {EXPERIMENTS: lambda: experiments_markdown(ROOT / "results"), README: readme}
    made |= {source.with_suffix(".ipynb"): lambda source=source: executed(source) for source in SOURCES}
    chosen = {path: write for path, write in made.items() if only in str(path.relative_to(ROOT))}
    for i, (path, write) in enumerate(chosen.items(), 1):
        print(f"[{i}/{len(chosen)}] {path.relative_to(ROOT)}", file=sys.stderr, flush=True)
        write_atomically(path, write())


def readme() -> str:
    """The README with the verdicts that EXPERIMENTS.md has."""
    table = "\n".join(verdicts_by_paper(EXPERIMENTS.read_text())) + "\n"
    return TABLE.sub(lambda _: table, README.read_text())


def verdicts_by_paper(experiments: str) -> list[str]:
    """The lines of a table: how many claims were reproduced, partly or not, when measured and when simulated.

    Args:
        experiments: EXPERIMENTS.md, whose overview has these counts for every experiment.
    """
    overview = OVERVIEW.search(experiments)
    papers: dict[str, Counter[str]] = {}
    for name, *cells in EXPERIMENT.findall(overview[0] if overview else ""):
        folder = name.partition("/")[0]
        for paper in (title(folder) if folder in PAPERS else OWN, "all"):
            found = papers.setdefault(paper, Counter())
            found["experiments"] += 1
            for kind, cell in zip(KINDS, cells, strict=True):
                found.update({f"{kind} {verdict}": int(count) for count, verdict in COUNTED.findall(cell)})
    papers["all"] = papers.pop("all", Counter())  # last
    head = "| | experiments | measured: reproduced | partly | not | simulated: reproduced | partly | not |"
    keys = ["experiments", *(f"{kind} {verdict}" for kind in KINDS for verdict in VERDICTS)]
    rows = [" | ".join([f"| {paper}", *(str(found[key]) for key in keys)]) + " |" for paper, found in papers.items()]
    return [head, "|---" + "|--:" * len(keys) + "|", *rows]


if __name__ == "__main__":
    tyro.cli(main)
