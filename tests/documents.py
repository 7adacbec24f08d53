"""Writes what is made of experiments and records anew: `python -m tests.documents`, or `make documents`.

Tables and figures beside the records, EXPERIMENTS.md with the page of each experiment, the tables of the README, which
sum it and the side-by-side benchmarks up, and the notebooks with their outputs; tests hold all of them against the
records.
"""

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import tyro

from harness.analysis.render import markdown
from harness.experiment.experiment import TIERS
from harness.experiment.loading import experiment_ids, load
from harness.experiment.verdicts import records_of
from harness.records.store import Store, read_json, write_atomically
from harness.report import experiments_md
from harness.report.experiments_md import Found, page_of, tracked_files
from harness.report.results import write_results
from tests.notebooks.executed import SOURCES, executed
from tests.null_models import Idealised, null_models_table, on_ideal_machines

ROOT = Path(__file__).resolve().parents[1]
README, EXPERIMENTS = ROOT / "README.md", ROOT / "EXPERIMENTS.md"
NULL_MODELS = ROOT / "results" / "null_models.md"
TABLE = re.compile(r"(<!-- (\w.*) -->\n)(.*?)(<!-- end of \2 -->)", re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
IDENTIFIER = re.compile(r"\b[a-z]+[0-9a-f]{10}\b")
"""What Matplotlib calls the parts of an SVG: a hash of their coordinates."""
DESCRIPTION = re.compile(r"<dc:description>(\w+)</dc:description>")
RELATIVE, ABSOLUTE = 1e-6, 1e-3
"""How far numbers may be off: other processors and versions of libraries round the last digits otherwise."""
PRECISIONS = ("fp32", "bf16")
PLANS = {
    "one rank": "one rank", "dp": "data parallel", "zero-1": "ZeRO 1", "zero-2": "ZeRO 2", "zero-3": "ZeRO 3",
    "tp": "tensor parallel", "tp-sequence": "tensor, sequence parallel", "gpipe": "pipeline, GPipe",
    "1f1b": "pipeline, 1F1B", "interleaved": "pipeline, interleaved", "zb-v": "pipeline, ZB-V",
    "dualpipe-v": "pipeline, DualPipeV", "hsdp": "ZeRO 3 within groups", "ring": "context parallel, ring",
}  # fmt: skip
"""What the README calls the plans of the side-by-side benchmarks."""


def main(only: str = "") -> None:
    """Write them.

    Args:
        only: Those whose path contains this, as `notebooks/` or `results/ptdp2021`.
    """
    folders = {store.folder: (store, name) for name, store in stores() if only in str(store.folder.relative_to(ROOT))}
    for store, name in folders.values():
        print(store.folder.relative_to(ROOT), file=sys.stderr, flush=True)
        write_results(store, load(name))
    made = {**experiment_pages(), NULL_MODELS: null_models, README: readme}
    made |= {source.with_suffix(".ipynb"): lambda source=source: executed(source) for source in SOURCES}
    chosen = {path: write for path, write in made.items() if only in str(path.relative_to(ROOT))}
    for i, (path, write) in enumerate(chosen.items(), 1):
        print(f"[{i}/{len(chosen)}] {path.relative_to(ROOT)}", file=sys.stderr, flush=True)
        write_atomically(path, write())


@cache
def found() -> list[Found]:
    """Return every experiment with its committed records and the verdicts that these give, read once."""
    return experiments_md.read(ROOT / "results")


def experiment_pages() -> dict[Path, Callable[[], str]]:
    """Return EXPERIMENTS.md and the page of every experiment, with what writes each."""
    by_name = cache(lambda: {one.experiment.id: one for one in found()})
    pages: dict[Path, Callable[[], str]] = {EXPERIMENTS: lambda: experiments_md.index(found())}
    for name in experiment_ids():
        pages[ROOT / page_of(name)] = lambda name=name: experiments_md.page(by_name()[name], ROOT / "results")
    return pages


@cache
def idealised(name: str) -> list[Idealised]:
    """Return an experiment's simulated verdicts on idealised machines."""
    experiment = load(name)
    return list(on_ideal_machines(experiment, records_of(experiment, ROOT / "results")))


def null_models() -> str:
    """Return the simulated verdicts of all experiments on idealised machines, as Markdown."""
    found = [one for name in experiment_ids() for one in idealised(name)]
    return markdown(null_models_table(found), padded=False)


def stores() -> list[tuple[str, Store]]:
    """Return the experiments with committed tables, by name, each tier's store for itself."""
    tracked = tracked_files(ROOT / "results")
    folders = None if tracked is None else {path.parents[1] for path in tracked if path.parent.name == "tables"}
    every = [(name, Store(ROOT / "results", name, tier)) for name in experiment_ids() for tier in TIERS]
    return [(name, s) for name, s in every if s.tables.exists() and (folders is None or s.folder.resolve() in folders)]


def alike(made: str, kept: str) -> bool:
    """Whether two texts are the same but for the last digits of their numbers."""
    if made == kept:
        return True
    made, kept = (IDENTIFIER.sub("", DESCRIPTION.sub("", text)) for text in (made, kept))
    pairs = [list(map(float, NUMBER.findall(text))) for text in (made, kept)]
    return NUMBER.sub("", made) == NUMBER.sub("", kept) and all(
        a == b or abs(a - b) <= max(RELATIVE * abs(a), ABSOLUTE if "<svg" in made else ABSOLUTE * RELATIVE)
        for a, b in zip(*pairs, strict=True)
    )


def readme() -> str:
    """The README with the verdicts that EXPERIMENTS.md has, and the step times that the benchmarks kept."""
    kept = [read_json(ROOT / "results" / "bench" / f"{name}.json") or {} for name in ("single_process", "engines")]
    tables = {
        **{found[2]: found[3].splitlines() for found in TABLE.finditer(EXPERIMENTS.read_text())},
        "engines": beside_peers(cell for document in kept for cell in document.get("cells", ())),
    }
    return TABLE.sub(lambda it: "".join([it[1], *(f"{line}\n" for line in tables[it[2]]), it[4]]), README.read_text())


def beside_peers(cells: Iterable[Mapping[str, Any]]) -> list[str]:
    """The lines of a table: ours over the best peer's step time, with its interval, for every plan and precision."""
    found = {(cell["plan"], cell["precision"]): cell for cell in cells}
    lines = [f"| | {' | | '.join(f'{precision}: ours / best peer' for precision in PRECISIONS)} | |", "|---" * 5 + "|"]
    for plan, name in PLANS.items():
        row = [name]
        for cell in (found.get((plan, precision)) for precision in PRECISIONS):
            if cell is None:
                row += ["not measured", ""]
                continue
            it = cell["peers"][cell["best"]]
            row += [f"{it['value']:.3f} [{it['low']:.3f}, {it['high']:.3f}]", cell["best"]]
        lines.append(f"| {' | '.join(row)} |")
    return lines


if __name__ == "__main__":
    tyro.cli(main)
