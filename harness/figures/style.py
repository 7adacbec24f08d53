"""Style of all figures: colours, panels, legends, and files that are equal for equal figures."""

import hashlib
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from harness.records.measures import about
from harness.records.record import Record
from harness.records.store import write_atomically
from impl.grouping import by_key

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend
    from matplotlib.lines import Line2D

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F3C8D", "#444444")
"""Colours that are distinguishable with all kinds of colour vision (Okabe and Ito 2008), then two more."""
MARKERS = "os^Dv<>P"
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "lmscale", "font.size": 10, "axes.titlesize": 11, "axes.grid": True, "grid.alpha": 0.3,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "legend.fontsize": 9,
    "lines.linewidth": 1.6, "axes.axisbelow": True, "legend.handlelength": 2.6,
}  # fmt: skip
XY = tuple[float, float]
_T = TypeVar("_T")
MOST_LINES, OF_MORE, MOST_POINTS = 32, 12, 5000
"""Most lines that differ in colour or marker; lines drawn if there are more; most points of a line."""
MOST_TICKS = 10
WIDE = 20
"""Ratio of the largest to the smallest value above which they share no linear axis."""
DASHED: dict[str, Any] = {"linestyle": "--", "markerfacecolor": "white"}
"""Style of published values."""
HOLLOW: dict[str, Any] = {"linestyle": "", "markerfacecolor": "white"}
"""Style of points whose ranks share cores."""
LETTERS_PER_INCH, SMALL_LETTERS_PER_INCH, HANDLE_LETTERS = 14, 19, 8
"""Letters per inch of a legend, on a screen and printed; letters that a line's sample and the gap behind take."""
LEGEND_LINES, LINE_INCHES = 3, 0.2
"""Lines of a legend that figures have room for, and the height that each further line adds."""
PANEL_INCHES, PANEL_SHAPE = 2.0, 0.75
"""Least width of a printed figure's panels, and their height over their width."""
_PRINTED: ContextVar[float | None] = ContextVar("printed", default=None)


def style() -> AbstractContextManager[None]:
    """Return the context in which figures are drawn and saved."""
    import matplotlib

    return matplotlib.rc_context(STYLE)


@contextmanager
def printed(inches: float) -> Iterator[None]:
    """Return the context in which figures are as wide as this, for a page; else more panels make them wider."""
    token = _PRINTED.set(inches)
    try:
        yield
    finally:
        _PRINTED.reset(token)


def inches_of(on_screen: float) -> float:
    """Return the width of a figure in inches, given that on a screen."""
    return _PRINTED.get() or on_screen


def mark(i: int) -> dict[str, Any]:
    """Return colour and marker of the i-th line; 64 differ."""
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[(i + i // len(COLOURS)) % len(MARKERS)]}


def few(items: Sequence[_T], most: int = MOST_LINES, drawn: int = OF_MORE) -> tuple[Sequence[_T], str]:
    """Return the items, or `drawn` of more than `most`, evenly spaced from first to last, and a suffix of the title."""
    chosen = items if len(items) <= most else [items[i * (len(items) - 1) // (drawn - 1)] for i in range(drawn)]
    return chosen, left_out(len(chosen), len(items), "lines")


def left_out(drawn: int, there: int, what: str) -> str:
    """Return a suffix of the title if not all items are drawn; else an empty text."""
    return f", {drawn} of {there:,} {what} drawn" if drawn < there else ""


def panels(count: int, across: int = 3) -> tuple["Figure", list["Axes"]]:
    """Return a new figure with this number of axes, at most `across` in a row."""
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    columns = min(count, across) if count != 4 else 2
    if (inches := _PRINTED.get()) is not None:
        columns = min(columns, int(inches / PANEL_INCHES))
    rows = math.ceil(count / columns)
    size = (7.0, 4.2) if count == 1 else (4.4 * columns, 3.3 * rows)
    wide, down = size if inches is None else (inches, PANEL_SHAPE * inches / columns * rows)
    figure = Figure(figsize=(wide, down + 0.8), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for spare in axes[count:]:
        spare.set_visible(False)
    return figure, axes[:count]


def line(text: str, color: str = "#888888", **style: Any) -> "Line2D":
    """Return a line for a legend only."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color=color, label=text, **style)


def legend(figure: "Figure", handles: Sequence[Any]) -> None:
    """Add a legend below the panels, where it hides nothing, in as many columns as fit."""
    if handles:
        longest = max(len(str(handle.get_label())) for handle in handles) + HANDLE_LETTERS
        width, height = figure.get_size_inches()
        letters = LETTERS_PER_INCH if _PRINTED.get() is None else SMALL_LETTERS_PER_INCH
        columns = max(1, min(len(handles), 4, int(width * letters / longest)))
        lines_beyond = math.ceil(len(handles) / columns) - LEGEND_LINES
        figure.set_size_inches(width, height + LINE_INCHES * max(0, lines_beyond))
        figure.legend(handles=handles, loc="outside lower center", ncols=columns)


def with_room_above(ax: "Axes", bottom: float | None = 0.0) -> None:
    """Start the axis of values at `bottom`, or at its present end if None, with room above the highest markers."""
    low, high = ax.get_ylim()
    bottom = low if bottom is None else bottom
    ax.set_ylim(bottom, high + 0.05 * (high - bottom))


def beside_published(
    title: str, x: str, y: str, ours: Mapping[str, Sequence[XY]], published: Mapping[str, Sequence[XY]]
) -> "Figure | None":
    """Draw lines through points, each with its published values dashed; None if none of ours has two points."""
    if not any(len(points) > 1 for points in ours.values()):
        return None
    figure, (ax,) = panels(1)
    names = list(dict.fromkeys((*ours, *published)))
    for i, name in enumerate(names):
        for points, how in ((ours.get(name), {}), (published.get(name), DASHED)):
            if points:
                ax.plot(*zip(*points, strict=True), **(mark(i) | how))
    ticks = sorted({at for points in (*ours.values(), *published.values()) for at, _ in points})
    if ticks[-1] > 8 * ticks[0] > 0:
        ax.set_xscale("log", base=2)
    if len(ticks) <= MOST_TICKS:
        ax.set_xticks(ticks)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.3g}" if value < 1000 else f"{value:g}")
    ax.minorticks_off()
    ax.set(xlabel=x, ylabel=y)
    with_room_above(ax, bottom=None if any(at < 0 for line in ax.lines for at in np.ravel(line.get_ydata())) else 0.0)
    handles = [line(name, **mark(i)) for i, name in enumerate(names)]
    legend(figure, [*handles, *([line("published", marker="o", **DASHED)] if published else [])])
    figure.suptitle(title)
    return figure


def figure_of(
    title: str,
    x: str,
    y: str,
    found: Callable[[Sequence[Record]], Iterable[_T]],
    name: Callable[[_T], str],
    at: Callable[[_T], float],
    ours: Callable[[_T], float],
    published: Callable[[_T], float] = lambda _: math.nan,
) -> "Callable[[Sequence[Record]], Figure | None]":
    """Return a function that draws a line for each name through (at, ours), with (at, published) dashed.

    A value of NaN is left out. Simulated records are drawn if none was measured.
    """

    def draw(records: Sequence[Record]) -> "Figure | None":
        records, simulated = to_draw(records)
        drawn = list(found(records))
        both = [
            by_key((name(one), (at(one), value(one))) for one in drawn if not math.isnan(value(one)))
            for value in (ours, published)
        ]
        return beside_published(f"{title}{about(records)}{simulated}", x, y, *both)

    return draw


def content(figure: "Figure") -> str:
    """Return a hash of a figure's content: its texts, colours and sizes, and its numbers to four digits.

    An SVG file contains it, so that a check whether the file is up to date needs no layout, which takes far longer.
    """
    parts: list[Any] = [STYLE, figure.get_size_inches(), figure.get_suptitle(), *map(_texts, figure.legends)]
    for ax in figure.axes:
        parts += [ax.get_title(), ax.get_visible(), _texts(ax.get_legend()), [text.get_text() for text in ax.texts]]
        for axis, limits in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim())):
            formatter = axis.get_major_formatter()
            parts += [axis.get_label_text(), axis.get_scale(), limits, getattr(formatter, "seq", ())]
        for line in ax.lines:
            look = line.get_color(), line.get_linestyle(), line.get_marker(), line.get_label()
            parts += [look, line.get_xydata()]
        for patch in ax.patches:
            shape = patch.get_patch_transform().transform_path(patch.get_path())
            parts += [shape.vertices, patch.get_facecolor(), patch.get_hatch()]
        for group in ax.collections:
            parts += [group.get_offsets(), group.get_facecolor(), group.get_edgecolor()]
            parts += [path.vertices for path in group.get_paths()]
    return hashlib.sha256("\n".join(map(_rounded, parts)).encode()).hexdigest()[:16]


def _texts(legend: "Legend | None") -> list[str]:
    return [text.get_text() for text in legend.get_texts()] if legend else []


def _rounded(part: Any) -> str:
    if isinstance(part, str | bool | dict):
        return str(part)
    if isinstance(part, np.ndarray | float | int):
        return " ".join(f"{value:.4g}" for value in np.ravel(np.ma.filled(part, math.nan)))
    return " ".join(map(_rounded, part)) if isinstance(part, tuple | list) else str(part)


def save_both(figure: "Figure", folder: Path, name: str) -> list[Path]:
    """Save a figure as SVG and, with the same layout, as PNG (150 dpi)."""
    written = [save(figure, folder / f"{name}.svg")]
    figure.set_layout_engine("none")  # the layout is already computed
    return [*written, save(figure, folder / f"{name}.png")]


def save(figure: "Figure", path: Path) -> Path:
    """Save a figure atomically, without date and version, so that equal figures give equal files."""
    out = io.BytesIO()
    own = {"Date": None, "Creator": None, "Description": content(figure)}
    without = {
        ".svg": own,
        ".png": {"Software": None},
        ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    }
    box = None if path.suffix == ".pdf" else "tight"  # a printed figure is as wide as it was made
    figure.savefig(out, format=path.suffix[1:], dpi=150, metadata=without[path.suffix], bbox_inches=box)
    write_atomically(path, out.getvalue(), is_lasting=False)
    return path


def to_draw(records: Sequence[Record]) -> tuple[list[Record], str]:
    """Return the measured records, or all if none was measured, and the suffix of a title for the latter case."""
    ran = [record for record in records if not record.is_simulated]
    return (ran, "") if ran or not records else (list(records), ", simulated")
