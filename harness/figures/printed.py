"""Figures as PDF files for a paper: vector, fonts embedded, as wide as a column or a page, without a title."""

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from harness.analysis.tables import MakesTable
from harness.figures import style
from harness.figures.figures import MakesFigure, drawn
from harness.records.record import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Width = Literal["column", "page"]
INCHES: dict[Width, float] = {"column": 3.25, "page": 6.75}
"""Widths of papers with two columns, as of ICML's."""
SMALL: dict[Any, Any] = {
    "font.size": 7, "axes.titlesize": 7, "legend.fontsize": 6.5, "legend.handlelength": 2.0, "lines.linewidth": 1.0,
    "lines.markersize": 3.0, "axes.linewidth": 0.6, "pdf.fonttype": 42,
}  # fmt: skip
"""Fonts of a caption's size; type 42 embeds TrueType, which is searched and selected as text."""

LETTERS_PER_INCH = 16
"""Letters of a panel's title."""


def write(
    records: Sequence[Record], folder: Path, width: Width, *,
    table: MakesTable | None = None, figure: MakesFigure | None = None,
) -> dict[Path, str]:  # fmt: skip
    """Write all figures that there is data for as PDF; return their titles, which are for captions, by file.

    Raises:
        InputError: the records are of several tiers.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with for_paper(width):
        found = drawn(records, table=table, figure=figure)
        titles = {name: one.get_suptitle() for name, one in found.items()}
        return {save(one, folder / f"{name}.pdf", width): titles[name] for name, one in found.items()}


@contextmanager
def for_paper(width: Width) -> Iterator[None]:
    """Return the context in which figures are drawn and saved."""
    import matplotlib

    with style.style(), matplotlib.rc_context(SMALL), style.printed(INCHES[width]):
        yield


def save(figure: "Figure", path: Path, width: Width) -> Path:
    """Save a figure at this width and without its title."""
    across, down = figure.get_size_inches()
    figure.suptitle("")
    figure.set_size_inches(INCHES[width], down * min(1.0, INCHES[width] / across))
    for ax in figure.axes:
        _break_titles(ax, INCHES[width])
    return style.save(figure, path)


def _break_titles(ax: "Axes", inches: float) -> None:
    spec = ax.get_subplotspec()
    letters = int(inches * LETTERS_PER_INCH / (spec.get_gridspec().ncols if spec else 1))
    for side in ("left", "center"):
        if text := ax.get_title(side):
            ax.set_title(textwrap.fill(text, letters), loc=side)
