"""HTML of the report: Markdown, tables and figures, with links that stay inside the report."""

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jinja2
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markupsafe import Markup

from harness.analysis.render import Column, Table
from harness.experiment import references
from harness.experiment.references import Place
from harness.experiment.verdicts import VERDICTS
from harness.report.experiments_md import Links

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATES = Path(__file__).parent / "templates"
PIXELS_PER_POINT = 1.1
"""Scale of a figure, whose letters have 10 points: screens show it no smaller, and narrow ones scroll it."""
KINDS = ("published", "simulated")
"""Words that mark the kind of a column by its heading; other columns are measured, or describe the row."""
MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")
MARKDOWN.add_render_rule("table_open", lambda *_: '<div class="scroll markdown" tabindex="0"><table>\n')
MARKDOWN.add_render_rule("table_close", lambda *_: "</table></div>\n")
MARKDOWN.add_render_rule("fence", lambda *shown: RendererHTML.fence(*shown).replace("<pre>", '<pre tabindex="0">', 1))
LINE = MarkdownIt("commonmark", {"html": False}).disable(["image", "link", "autolink"])
"""Renderer of texts that quote records: nothing is loaded or linked."""


def templates() -> jinja2.Environment:
    """Return the pages' templates; a name that is not given is an error."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    found.filters |= {"line": line, "slug": slug, "kind": kind_of}
    found.globals |= {"page_of": page_of, "page_of_paper": page_of_paper}
    found.globals |= {"title_of": references.title, "verdicts": VERDICTS}
    return found


def slug(text: object) -> str:
    """Return a text as the name of a file or of an anchor."""
    return re.sub(r"[^a-z0-9_]+", "-", str(text).lower()).strip("-")


def page_of(experiment: str) -> str:
    """Return the file of an experiment's page."""
    return f"{slug(experiment)}.html"


def page_of_paper(paper: str) -> str:
    """Return the file of a paper's page, which has its tables and figures by their numbers."""
    return f"paper-{slug(paper)}.html"


class PageLinks(Links):
    """Markdown links of the index, to pages of the report."""

    def experiment(self, name: str) -> str:
        return f"[{name}]({page_of(name)})"

    def paper(self, paper: str) -> str:
        return f"[{references.title(paper)}]({page_of_paper(paper)})"

    def place(self, place: Place) -> str:
        return f"[{place}]({page_of_paper(place.paper)}#{slug(place)})"


def markdown(text: str, *, link: Callable[[str], str] = lambda _: "") -> Markup:
    """Return Markdown as HTML, with anchors of headings, and tables that scroll on narrow screens.

    Args:
        link: function that returns where a link leads in the report; a link that leads nowhere is plain text.
    """
    tokens, anchors = MARKDOWN.parse(text), set[str]()
    for before, token in pairwise(tokens):
        if before.type == "heading_open" and (anchor := slug(token.content)) not in anchors:
            anchors.add(anchor)
            before.attrSet("id", anchor)
        if token.children:
            token.children = _in_report(token.children, link)
    return Markup(MARKDOWN.renderer.render(tokens, MARKDOWN.options, {}))


def _in_report(tokens: list[Token], link: Callable[[str], str]) -> list[Token]:
    """Return the tokens of a line without images, and with links of the report alone."""
    kept: list[Token] = []
    target = ""
    for token in tokens:
        if token.type == "link_open":
            target = link(str(token.attrGet("href")))
            token.attrSet("href", target)
        is_kept = {"link_open": target, "link_close": target, "image": ""}.get(token.type, True)
        kept += [token] if is_kept else []
    return kept


def line(text: str) -> Markup:
    """Return a line as HTML with its code marked, without links and images."""
    return Markup(LINE.renderInline(" ".join(text.split())))


def kind_of(column: Column) -> str:
    """Return the kind of a column's numbers that its heading names; empty if none."""
    words = column.header.lower()
    return next((kind for kind in KINDS if kind in words), "")


class ShownTable(NamedTuple):
    """Table for its template, with its anchor and the file of its unrounded values, if any."""

    table: Table
    id: str = ""
    csv: str = ""


class ShownFigure(NamedTuple):
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
    shown = [ax for ax in figure.axes if ax.get_visible()]
    panels = "; ".join(filter(None, (ax.get_title() or ax.get_title(loc="left") for ax in shown)))
    legends = [*figure.legends, *(legend for ax in shown if (legend := ax.get_legend()) is not None)]
    names = dict.fromkeys(text.get_text() for legend in legends for text in legend.get_texts())
    axes = dict.fromkeys(f"{ax.get_ylabel()} against {ax.get_xlabel()}" for ax in shown if ax.get_xlabel())
    # alternative text for screen readers: title, panels, axes and the names of the lines
    parts = [figure.get_suptitle(), panels, "; ".join(axes), f"shown are {', '.join(names)}" if names else ""]
    alt = ". ".join(filter(None, parts)) + "."
    return ShownFigure(file, name, figure.get_suptitle() or panels, alt, width, height)
