"""Pages of the report as Markdown, from which MkDocs makes the site: experiments, papers, verdicts, environments."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from harness.analysis import render, tables
from harness.analysis.render import Column, Table, shown, texts
from harness.experiment import references
from harness.experiment.experiment import Experiment
from harness.experiment.folders import findings_of
from harness.experiment.published import FOLDER, VERIFIED, papers
from harness.experiment.references import Place
from harness.experiment.tiers import TIERS, Tier
from harness.experiment.verdicts import counts, headline_table, in_words, verdicts_of, verdicts_table
from harness.figures import figures, style
from harness.records.environment import commits
from harness.records.parts import Environment
from harness.records.printable import printable
from harness.records.record import Record
from harness.report import results
from harness.report.experiments_md import Found, Links, content, index_sections, page_of
from harness.report.html import ShownTable, alt_of, part, read_figure, slug

INDEX = "EXPERIMENTS.md"
EXTERNAL = re.compile(r"!?\[([^\[\]]*)\]\([^)\s]*:[^)]*\)|!(?=\[)")
"""What loads an image in Markdown, or links to another site, as a text of a record may."""
FIRST = "---\nsearch:\n  boost: 10\n---"
"""Head of a page that a search finds first."""


ENVIRONMENT = (
    *texts(
        source="source", device_name="device", system="system", stack="software", device="kind", backend="backend",
        cpu_capability="instructions", processor="processor",
    ),
    Column(key="records", header="records"),
    Column(key="cores", header="cores"),
    Column(key="memory_bytes", header="memory", unit="GiB", si="B", scale=2**30, digits=3),
    *texts(
        os="operating system", python="Python", packages="packages", variables="variables", lock_sha256="lock file",
        commit="commit", experiments="experiments", commands="commands",
    ),
)  # fmt: skip
COUNTED = ("records", "experiments", "commands")
"""Columns that are not fields of an environment."""
SHAPE = {"tp": "t", "pp": "p", "dp": "d", "gpus": "GPUs", "global_batch": "batch", "value": "published"}
PRINTED = (
    *texts(quantity="quantity", model="model", norm_placement="norm placement"),
    *(Column(key=key, header=header) for key, header in SHAPE.items()),
    *texts(unit="unit", verified="verified", note="note"),
)
HEADLINES = texts(
    experiment="experiment", text="headline", published="published", simulated="simulated", measured="measured"
)


class SiteLinks(Links):
    """Markdown links from a page to others of the site."""

    def __init__(self, page: str) -> None:
        self.root = root_of(page)

    def experiment(self, name: str) -> str:
        return f"[{name}]({self.root}{page_of(name)})"

    def paper(self, paper: str) -> str:
        return f"[{references.title(paper)}]({self.root}papers/{paper}.md)"

    def place(self, place: Place) -> str:
        return f"[{place}]({self.root}{page_of_place(place)})"


def root_of(page: str) -> str:
    """Return the way from a page to the site's folder."""
    return "../" * page.count("/")


def page_of_place(place: Place) -> str:
    """Return the page of a paper's table or figure."""
    return f"papers/{place.paper}-{slug(place)}.md"


class Pages:
    """Markdown, tables and figures in a folder, of records in another.

    Tables and figures are HTML, which Markdown here cannot contain: `html` has each by the mark that stands for it.
    """

    def __init__(self, folder: Path, results: Path) -> None:
        self.folder, self.results = folder, results
        self.html: dict[str, str] = {}
        self.found: list[Found] = []

    def add(self, e: Experiment, records: Sequence[Record]) -> None:
        """Write an experiment's page: that of the repository, then all tables and figures of every tier."""
        found = Found(e, list(records), verdicts_of(e, records))
        self.found.append(found)
        page = page_of(e.id)
        links = SiteLinks(page)
        places = [f"{links.paper(one.paper)}, {links.place(one)}" for one in references.of_experiment(e)]
        name, question, *others = content(found, findings_of(self.results, e.id))
        text = [str(name), str(question), "; ".join(places), self._put("legend")]
        for one in others:
            text.append(one if isinstance(one, str) else self._titled(one, page, e.id))
        for tier in TIERS[::-1]:
            if of_tier := [record for record in records if record.tier == tier]:
                text += self._tier(e, tier, of_tier, page)
        body = "\n\n".join(text)
        for tier in TIERS:
            body = body.replace(f"[{tier}]({tier})", f"[{tier}](#tier-{tier})")
        self.write(page, body)

    def _titled(self, table: Table, page: str, place: str) -> str:
        file = self._csv(table, place, table.name, page) if table.name == "verdicts" else ""
        return f"### {table.title}\n\n" * bool(table.title) + self._put("grid", ShownTable(table, csv=file))

    def _tier(self, e: Experiment, tier: Tier, records: Sequence[Record], page: str) -> Iterator[str]:
        """Yield the parts of a page on the records of one tier."""
        where = f"{_where(records)}. {tables.denominators(records)}."
        yield f"## Tier {tier}\n\n{where[0].upper()}{where[1:]}"
        there = f"{e.id}/{tier}"
        with style.style():
            for name, figure in figures.drawn(records, table=e.table, figure=e.figure).items():
                file = Path("figures", *map(slug, there.split("/")), f"{slug(name)}.svg")
                path = self.folder / file
                path.parent.mkdir(parents=True, exist_ok=True)
                style.save(figure, path)
                shown_at = f"{root_of(page)}{file.as_posix()}"
                yield self._put("figure", read_figure(shown_at, path.read_text(), alt_of(figure)))
        for table in (*results.all_tables(records, table=e.table), environments(records)):
            file = self._csv(table, there, table.name, page)
            yield self._put("details", ShownTable(table, slug(f"{tier} {table.name}"), file))

    def _put(self, macro: str, *shown: Any) -> str:
        """Return the mark of HTML that a macro makes."""
        mark = f"@@{len(self.html)}@@"
        self.html[mark] = part(macro, *shown)
        return mark

    def _csv(self, table: Table, place: str, name: str, page: str) -> str:
        """Write a table's file of unrounded values, and return where the page finds it."""
        file = Path("tables", *map(slug, place.split("/")), f"{slug(name)}.csv")
        self.write(file.as_posix(), render.csv(table))
        return f"{root_of(page)}{file.as_posix()}"

    def finish(self) -> dict[str, Any]:
        """Write the pages of papers, verdicts and environments, and the index; return what the manifest says of them.

        A site without documents gets a first page.
        """
        placed = references.answered(found.experiment for found in self.found)
        for paper, places in placed.items():
            self._paper(paper, places)
        records = [record for found in self.found for record in found.records]
        verdicts = [one for found in self.found for one in found.judged]
        of_each = [
            (e.id, ShownTable(verdicts_table(e.id, of_one), slug(e.id)), f"results/{e.id}/index.html")
            for e, _, of_one in self.found
            if of_one
        ]
        said = [f"# Verdicts\n\n{in_words(counts(verdicts))}.", self._put("legend"), self._put("together", of_each)]
        self.write("claims.md", "\n\n".join(said))
        every, page = environments(records), "environments.md"
        table = ShownTable(every, "environments", self._csv(every, "all", "environments", page))
        self.write(page, f"# Environments\n\n{_where(records)}\n\n{self._put('grid', table)}")
        counted = _counted(records)
        said = [
            f"# The papers, rerun\n\n{counted['measured']} measured and {counted['simulated']} simulated records: "
            f"{_where(records)}.\n\n[Verdicts](claims.md), [environments](environments.md).",
            index_sections(self.found, SiteLinks(INDEX)),
            f"## Headlines\n\n{self._put('legend')}\n\n{self._put('grid', ShownTable(self._headlines()))}",
        ]
        for name in (INDEX, *(() if (self.folder / "README.md").exists() else ("index.md",))):
            self.write(name, "\n\n".join(said))
        return {"experiments": len(self.found), "records": counted, "claims": counts(verdicts)}

    def nav(self) -> list[dict[str, Any]]:
        """Return the site's sections with their pages."""
        listed = [f"papers/{paper}.md" for paper in references.answered(found.experiment for found in self.found)]
        pages = [page_of(found.experiment.id) for found in self.found]
        others = [INDEX, "claims.md", "environments.md", {"Planner": "planner.html"}]
        return [{"Experiments": [*others, *pages]}, {"Papers": listed}]

    def _headlines(self) -> Table:
        """Return the table of each experiment's first claim with published numbers, else its first claim."""
        rows = [
            {"experiment": found.experiment.id, **row}
            for found in self.found
            for row in headline_table(found.experiment.id, found.judged).frame.to_dict("records")
        ]
        return Table("headlines", "Headlines", HEADLINES if rows else (), pd.DataFrame(rows))

    def _paper(self, paper: str, by_place: Mapping[Place, Sequence[str]]) -> None:
        """Write a paper's page, and one for each of its tables and figures: printed values, and our verdicts.

        A page's title counts most in a search, so that `ptd-p figure 12` finds it first.
        """
        csv, page = f"published/{paper}.csv", f"papers/{paper}.md"
        title, rows, links = references.title(paper), references.printed(paper), SiteLinks(page)
        numbers = ""
        if paper in papers():
            self.write(csv, (FOLDER / f"{paper}.csv").read_text())
            numbers = f"[Published numbers](../{csv})"
        listed = []
        for place, ids in by_place.items():
            said = ", ".join(map(links.experiment, ids)) or "published numbers only"
            listed.append(f"- {links.place(place)}: {said}")
            text = [FIRST, f"# {title}, {place}", self._put("legend")]
            for e, _, verdicts in (found for found in self.found if found.experiment.id in ids):
                own = e.id.partition("/")[0]
                of_place = [one for one in verdicts if place in references.places(one.claim.source, own)]
                text += [f"{links.experiment(e.id)}: {e.question}", *self._grid(verdicts_table(e.id, of_place))]
            if printed := rows.get(place, []):
                text += ["## Published numbers", *self._grid(printed_table("", printed))]
            self.write(page_of_place(place), "\n\n".join(text))
        others = [row for where, of_place in rows.items() if isinstance(where, str) for row in of_place]
        grid = self._grid(printed_table("In the text", others, with_place=True))
        in_text = ["## In the text", *grid] if grid else []
        self.write(page, "\n\n".join([f"# {title}", numbers, "\n".join(listed), *in_text]))

    def _grid(self, table: Table) -> list[str]:
        return [self._put("grid", ShownTable(table))] if table.columns else []

    def write(self, name: str, text: str) -> None:
        """Write a page, of which nothing is loaded or linked from elsewhere, or another file."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(EXTERNAL.sub(r"\1", text) if path.suffix == ".md" else text, encoding="utf-8")


def _counted(records: Iterable[Record]) -> dict[str, int]:
    simulated = [record.is_simulated for record in records]
    return {"measured": simulated.count(False), "simulated": simulated.count(True)}


def _where(records: Sequence[Record]) -> str:
    """Return the devices that records were measured on, and the systems that they were simulated for."""
    ran = [r for r in records if not r.is_simulated and r.status != "invalid" and r.environment != Environment()]
    places = {
        "measured on": {r.environment.device_name or "an unknown device" for r in ran},
        "simulated for": {f"{r.environment.system} ({r.environment.stack})" for r in records if r.is_simulated},
    }
    parts = [f"{what} {', '.join(sorted(names))}" for what, names in places.items() if names]
    return printable("; ".join(parts) or "nothing ran")


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
    is_cpu = environment.processor == environment.device_name
    return {
        column.key: getattr(environment, column.key, None) for column in ENVIRONMENT if column.key not in COUNTED
    } | {
        "processor": None if is_cpu else environment.processor,
        "packages": named(environment.packages),
        "variables": named(environment.variables),
        "lock_sha256": (environment.lock_sha256 or "")[:12],
        "commit": commits(environment.git) if environment.git else "",
    }


def printed_table(title: str, rows: Sequence[Mapping[Any, Any]], *, with_place: bool = False) -> Table:
    """Return the table of published numbers; without columns if there are none."""
    frame = pd.DataFrame([{**row, "value": f"{row['value']:.10g}"} for row in rows])
    place = texts(where="place") if with_place else ()
    words = {row["verified"] for row in rows}
    notes = tuple(f"Verified, {word}: {meaning}." for word, meaning in VERIFIED.items() if word in words)
    return Table("printed", title, shown((*place, *PRINTED), frame) if rows else (), frame, notes)
