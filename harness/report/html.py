"""HTML of tables and figures for the report's pages, and the templates of pages that stand by themselves."""

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2
from markupsafe import Markup, escape

from harness.analysis.render import Column, Table
from harness.experiment.verdicts import VERDICTS
from harness.figures import hover

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATES = Path(__file__).parent / "templates"
PIXELS_PER_POINT = 1.1
"""Scale of a figure, whose letters have 10 points: screens show it no smaller, and narrow ones scroll it."""
KINDS = ("published", "simulated")
"""Words that mark the kind of a column by its heading; other columns are measured, or describe the row."""
CODE = re.compile(r"`([^`]+)`")


@cache
def templates() -> jinja2.Environment:
    """Return the templates; a name that is not given is an error."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    found.filters |= {"line": line, "slug": slug, "kind": kind_of}
    found.globals |= {"verdicts": VERDICTS}
    return found


def part(name: str, *shown: Any) -> str:
    """Return the HTML that a macro of parts.html renders."""
    return str(getattr(templates().get_template("parts.html").module, name)(*shown))


def slug(text: object) -> str:
    """Return a text as the name of a file or of an anchor."""
    return re.sub(r"[^a-z0-9_]+", "-", str(text).lower()).strip("-")


def line(text: str) -> Markup:
    """Return a line as HTML with its code marked, without links and images."""
    return Markup(CODE.sub(r"<code>\1</code>", str(escape(" ".join(text.split())))))


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
    """Figure for its template; values of points are shown where a pointer or the arrow keys are."""

    file: str
    name: str
    alt: str
    width: int
    height: int
    values: dict[str, Any]


def read_figure(file: str, svg: str, alt: str) -> ShownFigure:
    """Return a figure for its template, with the size and the points of its SVG, which the page finds at `file`."""
    *size, lines = hover.points(svg)
    named = lambda name, said: f"{name}: {said}" if name else said
    points = [(round(x, 1), round(y, 1), named(one.name, said)) for one in lines for x, y, said in one.points]
    width, height = (round(PIXELS_PER_POINT * each) for each in size)
    name = re.sub("[_-]", " ", Path(file).stem)
    return ShownFigure(file, name, alt, width, height, {"size": size, "points": points} if points else {})


def alt_of(figure: "Figure") -> str:
    """Return a figure's text for screen readers: title, panels, axes and the names of the lines."""
    shown = [ax for ax in figure.axes if ax.get_visible()]
    panels = "; ".join(filter(None, (ax.get_title() or ax.get_title(loc="left") for ax in shown)))
    legends = [*figure.legends, *(legend for ax in shown if (legend := ax.get_legend()) is not None)]
    names = dict.fromkeys(text.get_text() for legend in legends for text in legend.get_texts())
    axes = dict.fromkeys(f"{ax.get_ylabel()} against {ax.get_xlabel()}" for ax in shown if ax.get_xlabel())
    parts = [figure.get_suptitle(), panels, "; ".join(axes), f"shown are {', '.join(names)}" if names else ""]
    return ". ".join(filter(None, parts)) + "."
