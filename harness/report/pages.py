"""Pages of the report, each written as soon as its content is known."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from markupsafe import Markup

from harness.analysis import render, tables
from harness.analysis.render import Column, Table, shown
from harness.experiment import references
from harness.experiment.experiment import Experiment
from harness.experiment.folders import findings_of
from harness.experiment.published import FOLDER, VERIFIED, papers
from harness.experiment.references import Place
from harness.experiment.tiers import TIERS, Tier
from harness.experiment.verdicts import counts, headline_table, in_words, verdicts_of, verdicts_table
from harness.figures import figures, style
from harness.records.parts import Environment
from harness.records.printable import printable
from harness.records.record import Record
from harness.report import planner, results
from harness.report.experiments_md import Found, content, index_sections
from harness.report.html import (
    TEMPLATES,
    PageLinks,
    ShownFigure,
    ShownTable,
    markdown,
    page_of,
    page_of_paper,
    shown_figure,
    slug,
    templates,
)

KIND, MANIFEST = "lmscale_report", "report.json"
"""Field that identifies a folder as a report, and the file that has it."""
FILES = ("style.css", "search.js", "tables.js", "planner.js")
"""Files of the templates that the pages load."""


def _texts(**headers: str) -> tuple[Column, ...]:
    """Return columns of text, by key."""
    return tuple(Column(key=key, header=header, text=True) for key, header in headers.items())


ENVIRONMENT = (
    *_texts(
        source="source", device_name="device", system="system", stack="software", device="kind", backend="backend",
        cpu_capability="instructions", processor="processor",
    ),
    Column(key="records", header="records"),
    Column(key="cores", header="cores"),
    Column(key="memory_bytes", header="memory", unit="GiB", si="B", scale=2**30, digits=3),
    *_texts(
        os="operating system", python="Python", packages="packages", variables="variables", lock_sha256="lock file",
        commit="commit", experiments="experiments", commands="commands",
    ),
)  # fmt: skip
COUNTED = ("records", "experiments", "commands")
"""Columns that are not fields of an environment."""
SHAPE = {"tp": "t", "pp": "p", "dp": "d", "gpus": "GPUs", "global_batch": "batch", "value": "published"}
PRINTED = (
    *_texts(quantity="quantity", model="model", norm_placement="norm placement"),
    *(Column(key=key, header=header) for key, header in SHAPE.items()),
    *_texts(unit="unit", verified="verified", note="note"),
)
HEADLINES = _texts(
    experiment="experiment", text="headline", published="published", simulated="simulated", measured="measured"
)


class Part(NamedTuple):
    """Results from the records of one tier."""

    tier: Tier
    text: str
    """Where the records are from, and how many points they are of."""
    figures: list[ShownFigure]
    tables: list[ShownTable]


class Report:
    """Pages, tables and figures in a folder.

    Args:
        folder: folder that they are written to.
        results: folder of records.
    """

    def __init__(self, folder: Path, results: Path) -> None:
        self.folder, self.results = folder, results
        self.entries: list[tuple[str, str]] = []
        """What can be searched: texts, and where they lead."""
        self.templates = templates()
        self.found: list[Found] = []
        self.pages: list[str] = []

    def add(self, e: Experiment, records: Sequence[Record]) -> None:
        """Write an experiment's page: that of the repository, then all tables and figures of every tier."""
        found = Found(e, list(records), verdicts_of(e, records))
        self.found.append(found)
        self.entries.append((f"{e.id}: {e.question}", page_of(e.id)))
        self.entries += [(f"claim: {claim.text} ({e.id})", f"{page_of(e.id)}#claims") for claim in e.claims]
        by_tier: dict[Tier, list[Record]] = {
            tier: [record for record in records if record.tier == tier] for tier in reversed(TIERS)
        }
        self._page(
            page_of(e.id),
            "experiment.html",
            heading=e.id,
            content=list(self._content(found)),
            tiers=[self._part(e, tier, of_tier) for tier, of_tier in by_tier.items() if of_tier],
            places=references.of_experiment(e),
        )

    def _content(self, found: Found) -> Iterator[Markup | ShownTable]:
        """Yield the parts of an experiment's page."""
        to_tier = {str(tier): f"#{tier}" for tier in TIERS}
        for part in content(found, findings_of(self.results, found.experiment.id)):
            if isinstance(part, str):
                yield markdown(part, link=lambda target: to_tier.get(target, ""))
            elif part.name == "verdicts":
                yield self._table(part, found.experiment.id, part.name)
            else:
                yield ShownTable(part)

    def _part(self, e: Experiment, tier: Tier, records: Sequence[Record]) -> Part:
        made, there = results.all_tables(records, table=e.table), f"{e.id}/{tier}"
        with style.style():
            drawn = figures.drawn(records, table=e.table, figure=e.figure)
            shown_figures = [self._figure(figure, there, name) for name, figure in drawn.items()]
        shown_tables = [self._table(table, there, table.name) for table in (*made, environments(records))]
        self.entries += [(f"{t.table.title}: {e.id}, {tier}", f"{page_of(e.id)}#{t.id}") for t in shown_tables]
        return Part(tier, f"{_where(records)}. {tables.denominators(records)}.", shown_figures, shown_tables)

    def _table(self, table: Table, place: str, name: str) -> ShownTable:
        """Write a table's file of unrounded values, and return the table for its template."""
        file = Path("tables", *map(slug, place.split("/")), f"{slug(name)}.csv")
        self._write(file, render.csv(table))
        return ShownTable(table, slug(f"{place.rpartition('/')[2]} {name}"), file.as_posix())

    def _figure(self, figure: Any, place: str, name: str) -> ShownFigure:
        file = Path("figures", *map(slug, place.split("/")), f"{slug(name)}.svg")
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        style.save(figure, path)
        return shown_figure(figure, file.as_posix(), path.read_text())

    def finish(self) -> dict[str, Any]:
        """Write the pages of papers, verdicts and environments, and the index; return the manifest."""
        for paper, places in references.answered(found.experiment for found in self.found).items():
            self._paper(paper, places)
        records = [record for found in self.found for record in found.records]
        verdicts = [one for found in self.found for one in found.judged]
        of_each = [
            (e.id, ShownTable(verdicts_table(e.id, of_one), slug(e.id)), page_of(e.id))
            for e, _, of_one in self.found
            if of_one
        ]
        self._page("claims.html", "tables.html", heading="Verdicts", text=in_words(counts(verdicts)), tables=of_each)
        every = environments(records)
        ran = (every.title, self._table(every, "all", "environments"), "")
        self._page("environments.html", "tables.html", heading="Environments", text=_where(records), tables=[ran])
        self._page("planner.html", "planner.html", heading="Planner", data=planner.embedded(self.results))
        self._page(
            "index.html",
            "index.html",
            heading="The papers, rerun",
            body=markdown(index_sections(self.found, PageLinks()), link=str),
            counted=_counted(records),
            where=_where(records),
            headlines=ShownTable(self._headlines()),
        )
        for name in FILES:
            shutil.copyfile(TEMPLATES / name, self.folder / name)
        self._write(Path("entries.js"), f"const ENTRIES = {json.dumps(self.entries, separators=(',', ':'))};\n")
        files = sorted(path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file())
        manifest = {
            KIND: 1,
            "pages": self.pages,
            "experiments": len(self.found),
            "records": _counted(records),
            "claims": counts(verdicts),
            "files": [*files, MANIFEST],
        }
        self._write(Path(MANIFEST), json.dumps(manifest, indent=1) + "\n")
        return manifest

    def _headlines(self) -> Table:
        """Return the table of each experiment's first claim with published numbers, else its first claim."""
        rows = [
            {"experiment": found.experiment.id, **row}
            for found in self.found
            for row in headline_table(found.experiment.id, found.judged).frame.to_dict("records")
        ]
        return Table("headlines", "Headlines", HEADLINES if rows else (), pd.DataFrame(rows))

    def _paper(self, paper: str, by_place: Mapping[Place, Sequence[str]]) -> None:
        """Write a paper's page: its tables and figures by their numbers, with printed values and our verdicts."""
        csv = ""
        if paper in papers():
            csv = f"published/{paper}.csv"
            self._write(Path(csv), (FOLDER / f"{paper}.csv").read_text())
        rows = references.printed(paper)
        sections = []
        for place, ids in by_place.items():
            claims = []
            for e, _, verdicts in (found for found in self.found if found.experiment.id in ids):
                own = e.id.partition("/")[0]
                of_place = [one for one in verdicts if place in references.places(one.claim.source, own)]
                claims.append((e, ShownTable(verdicts_table(e.id, of_place))))
            printed = printed_table(str(place), rows.get(place, []))
            sections.append((place, ShownTable(printed, slug(f"{place} printed"), csv), claims))
            self.entries.append((f"{place} of {references.title(paper)}", f"{page_of_paper(paper)}#{slug(place)}"))
        others = [row for where, of_place in rows.items() if isinstance(where, str) for row in of_place]
        text = ShownTable(printed_table("In the text", others, with_place=True), "in-the-text", csv)
        heading = references.title(paper)
        self._page(page_of_paper(paper), "paper.html", heading=heading, sections=sections, text=text)

    def _page(self, name: str, template: str, **shown: Any) -> None:
        text = self.templates.get_template(template).render(**shown)
        self._write(Path(name), text)
        self.pages.append(name)

    def _write(self, file: Path, text: str) -> None:
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _counted(records: Iterable[Record]) -> dict[str, int]:
    simulated = [record.is_simulated for record in records]
    return {"measured": simulated.count(False), "simulated": simulated.count(True)}


def _where(records: Sequence[Record]) -> str:
    """Return the devices that records were measured on, and the systems that they were simulated for."""
    places = {
        "measured on": {r.environment.device_name or "an unknown device" for r in records if _has_run(r)},
        "simulated for": {f"{r.environment.system} ({r.environment.stack})" for r in records if r.is_simulated},
    }
    parts = [f"{what} {', '.join(sorted(names))}" for what, names in places.items() if names]
    return printable("; ".join(parts) or "nothing ran")


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


def printed_table(title: str, rows: Sequence[Mapping[Any, Any]], *, with_place: bool = False) -> Table:
    """Return the table of published numbers; without columns if there are none."""
    frame = pd.DataFrame([{**row, "value": f"{row['value']:.10g}"} for row in rows])
    place = _texts(where="place") if with_place else ()
    words = {row["verified"] for row in rows}
    notes = tuple(f"Verified, {word}: {meaning}." for word, meaning in VERIFIED.items() if word in words)
    return Table("printed", title, shown((*place, *PRINTED), frame) if rows else (), frame, notes)
