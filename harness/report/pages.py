"""Pages of the report, each written as soon as its content is known."""

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from harness.analysis import render, tables
from harness.analysis.render import Column, Table, shown
from harness.experiment import references
from harness.experiment.experiment import Experiment
from harness.experiment.published import FOLDER, papers, published
from harness.experiment.references import Place
from harness.experiment.tiers import TIERS, Tier
from harness.experiment.verdicts import Judged, counts, in_words, judged, verdicts_table
from harness.figures import figures, style
from harness.records.record import Environment, Record
from harness.report import results
from harness.report.experiments_md import OPEN, PLANNED
from harness.report.views import (
    TEMPLATES,
    ShownClaim,
    ShownFigure,
    ShownTable,
    markdown,
    naming,
    page_of,
    page_of_paper,
    shown_claims,
    shown_figure,
    shown_table,
    slug,
    templates,
)

KIND, MANIFEST = "lmscale_report", "report.json"
"""Field that identifies a folder as a report, and the file that has it."""
MEMORY = Column(key="memory_bytes", header="memory", unit="GiB", si="B", scale=2**30, digits=3)
ENVIRONMENT = (
    *(Column(key=key, header=header, text=True) for key, header in (
        ("source", "source"), ("device_name", "device"), ("system", "system"), ("stack", "software"),
        ("device", "kind"), ("backend", "backend"), ("cpu_capability", "instructions"), ("processor", "processor"),
    )),
    Column(key="records", header="records"), Column(key="cores", header="cores"), MEMORY,
    *(Column(key=key, header=header, text=True) for key, header in (
        ("os", "operating system"), ("python", "Python"), ("packages", "packages"), ("variables", "variables"),
        ("lock_sha256", "lock file"), ("commit", "commit"),
    )),
    Column(key="experiments", header="experiments", text=True),
    Column(key="commands", header="commands", text=True),
)  # fmt: skip
COUNTED = ("records", "experiments", "commands")
"""Columns that are not fields of an environment."""
PRINTED = (
    *(Column(key=key, header=key.replace("_", " "), text=True) for key in ("quantity", "model", "norm_placement")),
    *(Column(key=key, header=header) for key, header in (
        ("tp", "t"), ("pp", "p"), ("dp", "d"), ("gpus", "GPUs"), ("global_batch", "batch"), ("value", "published"),
    )),
    *(Column(key=key, header=key, text=True) for key in ("unit", "how", "note")),
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Results from the records of one tier."""

    tier: Tier
    told: str
    figures: list[ShownFigure]
    tables: list[ShownTable]
    more: list[ShownTable]
    """Tables of every run, and of their environments."""


@dataclass(frozen=True)
class Entry:
    """Entry of an experiment in the index."""

    experiment: Experiment
    found: list[Judged]
    records: list[Record]

    @property
    def claims(self) -> list[ShownClaim]:
        return shown_claims(self.found)

    @property
    def page(self) -> str:
        return page_of(self.experiment.id)

    @property
    def paper(self) -> str:
        """Folder of the experiment, which may not be that of a paper."""
        return self.experiment.id.rpartition("/")[0]


class Report:
    """Pages, tables and figures in a folder.

    Args:
        folder: folder that they are written to.
        results: folder of records; documents in it become pages, too.
    """

    def __init__(self, folder: Path, results: Path) -> None:
        self.folder, self.results = folder, results
        self.templates = templates()
        self.entries: list[Entry] = []
        self.pages: list[str] = []

    def add(self, e: Experiment, records: Sequence[Record]) -> None:
        """Write an experiment's page, with its tables and figures."""
        entry = Entry(e, judged(e, records), list(records))
        by_tier: dict[Tier, list[Record]] = {
            tier: [record for record in records if record.tier == tier] for tier in reversed(TIERS)
        }
        self._page(
            entry.page,
            "experiment.html",
            entry=entry,
            e=e,
            tiers=TIERS,
            csv=self._table(verdicts_table(e.id, entry.found), e.id, "verdicts").csv if entry.found else "",
            parts_=[self._part(e, tier, of_tier) for tier, of_tier in by_tier.items() if of_tier],
            places=references.of_experiment(e),
        )
        self.entries.append(entry)

    def _part(self, e: Experiment, tier: Tier, records: Sequence[Record]) -> Part:
        own = e.table(records).name if e.table else None
        made = results.all_tables(records, table=e.table)
        main = [t for t in made if t.name == own or t.name.startswith(("perplexity", "accuracy"))]
        main += [t for t in made if t.name == "scaling" and not main]
        names = {t.name for t in main}
        there = f"{e.id}/{tier}"
        with style.style():
            drawn = figures.drawn(records, table=e.table, figure=e.figure)
            shown_figures = [self._figure(figure, there, name) for name, figure in drawn.items()]
        return Part(
            tier,
            f"{_where(records)}. {tables.denominators(records)}.",
            shown_figures,
            [self._table(t, there, t.name) for t in sorted(main, key=lambda t: t.name != own)],
            [self._table(t, there, t.name) for t in (*made, environments(records)) if t.name not in names],
        )

    def _table(self, table: Table, place: str, name: str) -> ShownTable:
        """Write a table's file of unrounded values, and return the table for its template."""
        file = Path("tables", *map(slug, place.split("/")), f"{slug(name)}.csv")
        self._write(file, render.csv(table))
        return shown_table(table, slug(f"{place.rpartition('/')[2]} {name}"), file.as_posix())

    def _figure(self, figure: Any, place: str, name: str) -> ShownFigure:
        file = Path("figures", *map(slug, place.split("/")), f"{slug(name)}.svg")
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        style.save(figure, path)
        return shown_figure(figure, file.as_posix(), path.read_text())

    def finish(self) -> dict[str, Any]:
        """Write the pages of papers, verdicts, environments and documents, and the index; return the manifest."""
        by_paper = references.answered(entry.experiment for entry in self.entries)
        for paper, found in by_paper.items():
            self._paper(paper, found)
        everything = [record for entry in self.entries for record in entry.records]
        found = [one for entry in self.entries for one in entry.found]
        self._page("claims.html", "claims.html", entries=self.entries, found=found)
        ran = self._table(environments(everything), "all", "environments")
        self._page("environments.html", "environments.html", table=ran)
        self._page(
            "index.html",
            "index.html",
            by_paper=by_paper,
            entries={entry.experiment.id: entry for entry in self.entries},
            placed={name for of_paper in by_paper.values() for ids in of_paper.values() for name in ids},
            found=found,
            where=_where(everything),
            counted=_counted(everything),
            documents=self._documents(),
            planned=PLANNED,
            open=OPEN,
        )
        shutil.copyfile(TEMPLATES / "style.css", self.folder / "style.css")
        return self._manifest(everything, found)

    def _paper(self, paper: str, found: Mapping[Place, Sequence[str]]) -> None:
        """Write a paper's page: its tables and figures by their numbers, with printed values and our verdicts."""
        csv = ""
        if paper in papers():
            csv = f"published/{paper}.csv"
            self._write(Path(csv), (FOLDER / f"{paper}.csv").read_text())
        rows = _printed(paper)
        sections = []
        for place, ids in found.items():
            own = [entry for entry in self.entries if entry.experiment.id in ids]
            claims = [(entry, shown_claims(naming(place, entry.experiment.id, entry.found))) for entry in own]
            printed = shown_table(_printed_table(str(place), rows.get(str(place), [])), slug(f"{place} printed"), csv)
            sections.append((place, printed, claims))
        text = [row for where, of_place in rows.items() if not references.PLACE.match(where) for row in of_place]
        in_text = shown_table(_printed_table("In the text", text, with_place=True), "in-the-text", csv)
        self._page(page_of_paper(paper), "paper.html", paper=paper, sections=sections, text=in_text)

    def _documents(self) -> list[tuple[str, str]]:
        """Write a page for each document in the folder of records; return their titles and files."""
        found = []
        is_inside = lambda path: path.resolve().is_relative_to(self.results.resolve())  # no link leads elsewhere
        for path in filter(is_inside, [*sorted(self.results.glob("*.md")), *sorted(self.results.glob("bench/*.md"))]):
            text = path.read_text(encoding="utf-8")
            name = f"document-{slug(path.stem)}"
            heading = next((line.lstrip("# ") for line in text.splitlines() if line.startswith("#")), path.stem)
            for image in filter(is_inside, sorted(path.parent.glob(f"{path.stem}*.png"))):
                target = self.folder / "documents" / image.name
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(image, target)
            body = markdown(text, images="documents/")
            self._page(f"{name}.html", "document.html", heading=heading, body=body)
            found.append((heading, f"{name}.html"))
        return found

    def _page(self, name: str, template: str, **shown: Any) -> None:
        text = self.templates.get_template(template).render(**shown)
        self._write(Path(name), text)
        self.pages.append(name)

    def _write(self, file: Path, text: str) -> None:
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def _manifest(self, records: Sequence[Record], found: Sequence[Judged]) -> dict[str, Any]:
        files = sorted(path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file())
        manifest = {
            KIND: 1,
            "pages": self.pages,
            "experiments": len(self.entries),
            "records": _counted(records),
            "claims": counts(found),
            "files": [*files, MANIFEST],
        }
        self._write(Path(MANIFEST), json.dumps(manifest, indent=1) + "\n")
        return manifest


def told(manifest: Mapping[str, Any]) -> str:
    """Return a summary of a report in a few lines."""
    counted = ", ".join(f"{count} {kind}" for kind, count in manifest["records"].items())
    return f"{manifest['experiments']} experiments, records: {counted}\n{in_words(manifest['claims'])}"


def _counted(records: Iterable[Record]) -> dict[str, int]:
    simulated = [record.is_simulated for record in records]
    return {"measured": simulated.count(False), "simulated": simulated.count(True)}


def _where(records: Sequence[Record]) -> str:
    """Return the devices that records were measured on, and the systems that they were simulated for."""
    ran = {r.environment.device_name or "an unknown device" for r in records if _has_run(r)}
    systems = {f"{r.environment.system} ({r.environment.stack})" for r in records if r.is_simulated}
    parts = [f"measured on {', '.join(sorted(ran))}"] if ran else []
    return "; ".join([*parts, *([f"simulated for {', '.join(sorted(systems))}"] if systems else [])]) or "nothing ran"


def _has_run(record: Record) -> bool:
    return not record.is_simulated and record.status != "invalid" and record.environment != Environment()


def environments(records: Sequence[Record]) -> Table:
    """Return the table of the records' environments: one row per device, software and commit."""
    rows: dict[str, dict[str, Any]] = {}
    for record in records:
        if (environment := record.environment) != Environment():
            about = _environment(environment) | {"source": record.source}
            row = rows.setdefault(json.dumps(about, sort_keys=True), {**about, "records": 0, "of": {}, "by": {}})
            row["records"] += 1
            row["of"][record.experiment] = row["by"][_command(environment)] = None
    for row in rows.values():
        row["experiments"], row["commands"] = (", ".join(sorted(filter(None, row.pop(key)))) for key in ("of", "by"))
    frame = pd.DataFrame([rows[key] for key in sorted(rows)])
    return Table("environment", "Where the records are from", shown(ENVIRONMENT, frame) if rows else (), frame)


def _command(environment: Environment) -> str:
    words = (environment.command or [])[1:]
    return f"lmscale {' '.join(words)}" if words else ""


def _environment(environment: Environment) -> dict[str, Any]:
    """Return the fields that distinguish environments, as short texts."""
    named = lambda pairs: ", ".join(f"{name} {value}" for name, value in (pairs or {}).items())
    git, is_cpu = environment.git, environment.processor == environment.device_name
    changed = " with changes" if git and git.dirty else ""
    return {
        column.key: getattr(environment, column.key, None) for column in ENVIRONMENT if column.key not in COUNTED
    } | {
        "processor": None if is_cpu else environment.processor,
        "packages": named(environment.packages),
        "variables": named(environment.variables),
        "lock_sha256": (environment.lock_sha256 or "")[:12],
        "commit": f"{git.commit[:12]}{changed}" if git and git.commit else "",
    }


def _printed(paper: str) -> dict[str, list[dict[Any, Any]]]:
    """Return the numbers that a paper prints, by their place in it."""
    rows = published(paper).to_dict("records") if paper in papers() else []
    by_place: dict[str, list[dict[Any, Any]]] = {}
    for row in rows:
        found = references.places(row["where"], paper)
        for place in map(str, found) if found else [row["where"]]:
            by_place.setdefault(place, []).append(row)
    return by_place


def _printed_table(title: str, rows: Sequence[Mapping[Any, Any]], *, with_place: bool = False) -> Table:
    frame = pd.DataFrame([{**row, "value": f"{row['value']:.10g}"} for row in rows])
    place = (Column(key="where", header="place", text=True),) if with_place else ()
    return Table("printed", title, shown((*place, *PRINTED), frame) if rows else (), frame)
