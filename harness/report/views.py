"""Data for the report's templates: tables, figures, texts and verdicts, ready for display."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jinja2
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markupsafe import Markup

from harness.analysis.render import Column, Table
from harness.experiment import references
from harness.experiment.references import Place
from harness.experiment.verdicts import Judged, counts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATES = Path(__file__).parent / "templates"
PIXELS_PER_POINT = 1.1
"""Scale of a figure, whose letters have 10 points: screens show it no smaller, and narrow ones scroll it."""
KINDS = ("published", "simulated")
"""Words that mark the kind of a column by its heading; other columns are measured, or describe the row."""
MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")
MARKDOWN.add_render_rule("table_open", lambda *_: '<div class="scroll" tabindex="0"><table>\n')
MARKDOWN.add_render_rule("table_close", lambda *_: "</table></div>\n")
MARKDOWN.add_render_rule("image", lambda *shown: f'<span class="scroll">{RendererHTML.image(*shown)}</span>')
LINE = MarkdownIt("commonmark", {"html": False}).disable(["image", "link", "autolink"])
"""Renderer of texts that quote records: nothing is loaded or linked."""


def templates() -> jinja2.Environment:
    """Return the pages' templates; a name that is not given is an error."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    found.filters |= {"markdown": markdown, "said": said, "slug": slug}
    found.globals |= {
        "title_of": references.title,
        "page_of": page_of,
        "page_of_paper": page_of_paper,
        "link_to": link_to,
        "headline": headline,
        "naming": naming,
        "counts": counts,
    }
    return found


def slug(text: str) -> str:
    """Return a text as the name of a file or of an anchor."""
    return re.sub(r"[^a-z0-9_]+", "-", str(text).lower()).strip("-")


def page_of(experiment: str) -> str:
    """Return the file of an experiment's page."""
    return f"{slug(experiment)}.html"


def page_of_paper(paper: str) -> str:
    """Return the file of a paper's page, which has its tables and figures by their numbers."""
    return f"paper-{slug(paper)}.html"


def link_to(place: Place) -> str:
    """Return the link to a paper's table or figure."""
    return f"{page_of_paper(place.paper)}#{slug(str(place))}"


def markdown(text: str, *, images: str = "") -> Markup:
    """Return Markdown as HTML, with tables that scroll on narrow screens, and links as plain text.

    Links would lead out of the report.

    Args:
        images: Folder of the report in which images are; without it there are none.
    """
    tokens = MARKDOWN.parse(text)
    left_out = ("link_open", "link_close", *([] if images else ["image"]))
    for token in (t for t in tokens if t.children):
        token.children = [t for t in token.children or () if t.type not in left_out]
        for image in (t for t in token.children if t.type == "image"):
            image.attrSet("src", f"{images}{image.attrGet('src')}")
    return Markup(MARKDOWN.renderer.render(tokens, MARKDOWN.options, {}))


def said(text: str) -> Markup:
    """Return a line as HTML with its code marked, without links and images."""
    return Markup(LINE.renderInline(" ".join(text.split())))


class Heading(NamedTuple):
    """Heading of a column."""

    text: str
    unit: str
    kind: str
    """Word of KINDS, or empty."""
    is_text: bool


@dataclass(frozen=True)
class ShownTable:
    """Table for its template."""

    id: str
    title: str
    headings: list[Heading]
    rows: list[list[str]]
    notes: tuple[str, ...]
    csv: str
    """File of its unrounded values."""


def shown_table(table: Table, id: str, csv: str) -> ShownTable:
    headings = [Heading(c.header, c.unit, kind_of(c), c.text) for c in table.columns]
    return ShownTable(id, table.title, headings, table.cells(), table.notes, csv)


def kind_of(column: Column) -> str:
    """Return the kind of a column's numbers that its heading names; empty if none."""
    words = column.header.lower()
    return next((kind for kind in KINDS if kind in words), "")


@dataclass(frozen=True)
class ShownFigure:
    """Figure for its template."""

    file: str
    name: str
    title: str
    alt: str
    width: int
    height: int


def shown_figure(figure: "Figure", file: str, svg: str) -> ShownFigure:
    """Return a figure for its template, with the size of its SVG and the name of its file."""
    found = re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', svg)
    points = map(float, found.groups()) if found else figure.get_size_inches() * 72
    width, height = (round(PIXELS_PER_POINT * each) for each in points)
    name = Path(file).stem.replace("_", " ").replace("-", " ")
    return ShownFigure(file, name, heading(figure), alt(figure), width, height)


def heading(figure: "Figure") -> str:
    """Return the title of a figure, or those of its panels."""
    panels = [ax.get_title() or ax.get_title(loc="left") for ax in figure.axes if ax.get_visible()]
    return figure.get_suptitle() or "; ".join(filter(None, panels))


def alt(figure: "Figure") -> str:
    """Return a figure's alternative text for screen readers: title, panels, axes and the names of its lines."""
    shown = [ax for ax in figure.axes if ax.get_visible()]
    panels = [ax.get_title() or ax.get_title(loc="left") for ax in shown]
    legends = [*figure.legends, *(legend for ax in shown if (legend := ax.get_legend()) is not None)]
    names = dict.fromkeys(text.get_text() for legend in legends for text in legend.get_texts())
    axes = dict.fromkeys(f"{ax.get_ylabel()} against {ax.get_xlabel()}" for ax in shown if ax.get_xlabel())
    parts = [figure.get_suptitle(), "; ".join(filter(None, panels)), "; ".join(axes)]
    parts += [f"shown are {', '.join(names)}"] if names else []
    return ". ".join(part for part in parts if part) + "."


class Said(NamedTuple):
    """Verdict with its runs and numbers."""

    runs: str
    verdict: str
    numbers: str


@dataclass(frozen=True)
class ShownClaim:
    """Claim of a source, with its simulated and measured verdicts."""

    text: str
    source: str
    published: str
    simulated: list[Said]
    measured: list[Said]


def shown_claims(found: Iterable[Judged]) -> list[ShownClaim]:
    """Return one entry per claim; without verdicts if no run can decide it."""
    by_claim: dict[int, list[Judged]] = {}
    for one in found:
        by_claim.setdefault(id(one.claim), []).append(one)
    return [_shown_claim(rows) for rows in by_claim.values()]


def _shown_claim(rows: Sequence[Judged]) -> ShownClaim:
    claim = rows[0].claim
    told: dict[bool, list[Said]] = {False: [], True: []}
    for row in (r for r in rows if r.tier):
        told[bool(row.systems)].append(Said(", ".join(filter(None, [row.tier, row.systems])), row.verdict, row.numbers))
    return ShownClaim(claim.text, claim.source, claim.published, told[True], told[False])


def headline(claims: Sequence[ShownClaim]) -> ShownClaim | None:
    """Return the first claim with published numbers, else the first claim."""
    return next((claim for claim in claims if claim.published), claims[0] if claims else None)


def naming(place: Place, experiment: str, found: Iterable[Judged]) -> list[Judged]:
    """Return the verdicts on an experiment's claims whose source names this table or figure."""
    paper = experiment.partition("/")[0]
    return [one for one in found if place in references.places(one.claim.source, paper)]
