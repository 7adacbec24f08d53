"""Figures of an experiment's own table: a line per line of its rows, dashed where published."""

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from harness.analysis.render import Table
from harness.analysis.simulated_columns import twin
from harness.figures import style as drawing
from harness.figures.style import DASHED, HOLLOW, few, legend, line, mark, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def efficiency(table: Table) -> "Figure | None":
    """Draw a table's efficiency against ranks, a line for each `line` of its rows, dashed where published.

    If nothing was measured, simulated values are drawn and the title names them so. None if the table has no such
    columns, or no line has two points.
    """
    if not {"line", "ranks", "efficiency", "published"} <= set(table.frame):
        return None
    rows, simulated, suffix = table.frame, twin("efficiency"), ""
    if simulated in rows and not any(rows["efficiency"].notna()):
        rows, suffix = rows.assign(efficiency=rows[simulated]), ", simulated"
    rows = pd.DataFrame(rows[rows["efficiency"].notna() | rows["published"].notna()])
    names, note = few([name for name in dict.fromkeys(rows["line"]) if name])
    own = [pd.DataFrame(rows[rows["line"].isin(["", name])]) for name in names]
    if not any(of_line["efficiency"].notna().sum() > 1 for of_line in own):
        return None
    figure, (ax,) = panels(1)
    for i, (name, of_line) in enumerate(zip(names, own, strict=True)):
        with_intervals(ax, of_line.dropna(subset="efficiency"), "efficiency", 0.01, label=name, **mark(i))
        printed = of_line.dropna(subset="published")
        if name in set(printed["line"]):  # the baseline's row alone is no line
            ax.plot(list(printed["ranks"]), [100 * value for value in printed["published"]], **mark(i), **DASHED)
    against_ranks((ax,), rows["ranks"])
    of_ideal(ax)
    drawn = [line("published", marker="o", **DASHED)] if len(rows["published"].dropna()) else []
    legend(figure, [*ax.get_legend_handles_labels()[0], *drawn])
    figure.suptitle(f"{table.title}{suffix}{note}")
    return figure


def lines(table: Table) -> "Figure | None":
    """Draw the rate of model FLOPs against `at` of a table's rows, a line for each `line`, and the published rates.

    Published rates have a panel of their own, as they count recomputed operations. None if the table has no such
    columns, or no line has two points.
    """
    if not {"line", "at", "flop_rate", "published_rate"} <= set(table.frame):
        return None
    kinds = {
        "measured, model FLOPs": ("flop_rate", "solid"),
        "simulated, model FLOPs": (twin("flop_rate"), "dotted"),
        "simulated, recomputation counted": (twin("counted_rate"), "dotted"),
        "published, recomputation counted": ("published_rate", "dashed"),
    }
    names, note = few(list(dict.fromkeys(table.frame["line"])))
    rows = pd.DataFrame(table.frame[table.frame["line"].isin(names)])
    known = {text: pd.DataFrame(rows.dropna(subset=key)) for text, (key, _) in kinds.items() if key in rows}
    known = {text: rows for text, rows in known.items() if rows["line"].duplicated().any()}
    if "simulated, recomputation counted" in known and "measured, model FLOPs" not in known:
        known.pop("simulated, model FLOPs", None)  # there is nothing to compare it with
    if not known:
        return None
    figure, axes = panels(len(known))
    for ax, (heading, rows) in zip(axes, known.items(), strict=True):
        _rate_lines(ax, rows, *kinds[heading], names)
        ax.set(title=heading, ylabel="TFLOP/s per device")
        drawing.with_room_above(ax)
    tops = [ax.get_ylim()[1] for ax in axes]
    for ax, own in zip(axes, tops, strict=True):  # beside a GPU's rates those of a few cores are no line at all
        ax.set_ylim(0, max(top for top in tops if top <= drawing.WIDE * own))
    there = [name for name in names if name and any(name in set(rows["line"]) for rows in known.values())]
    handles = [line(name, **mark(names.index(name))) for name in there]
    if any(rows["oversubscribed"].eq(True).any() for rows in known.values()):
        handles.append(line("oversubscribed", marker="o", **HOLLOW))
    legend(figure, handles)
    figure.suptitle(f"{table.title}{note}")
    return figure


def _rate_lines(ax: "Axes", rows: pd.DataFrame, key: str, style: str, names: Sequence[str]) -> None:
    """Draw one panel; the common part of all ticks, as `global batch` of `global batch 12`, names their axis."""
    ticks = sorted(set(rows["at"]), key=_by_numbers)
    rows = rows.assign(x=pd.Categorical(rows["at"], ticks).codes).sort_values("x")
    for name, of_line in rows.groupby("line", sort=False):
        own = mark(names.index(str(name)))
        with_intervals(ax, of_line, key, 1e12, at="x", linestyle=style, label=name, **own)
        crowded = pd.DataFrame(of_line[of_line["oversubscribed"]])
        ax.plot(list(crowded["x"]), list(crowded[key] / 1e12), zorder=3, **HOLLOW, **own) if len(crowded) else None
    named = [re.fullmatch(r"([^\d,]+) (\d+)", tick) for tick in ticks]
    shared = {found[1] for found in named if found}
    if all(named) and len(shared) == 1:
        ax.set_xlabel(shared.pop())
        ticks = [found[2] for found in named if found]
    ax.set_xticks(few(range(len(ticks)))[0], few(ticks)[0], rotation=30 if len(" ".join(ticks)) > 40 else 0)


def _by_numbers(text: str) -> list[tuple[float, str]]:
    """Return a sort key with `ranks 64` before `ranks 128`, and `GPT 7.5B` before `GPT 1T`."""
    found = re.findall(r"(\D*)(\d*\.?\d*)([KMBT]?)\b", text)
    return [(float(digits or 0) * 1e3 ** " KMBT".find(unit), word) for word, digits, unit in found]


def against_ranks(axes: Iterable["Axes"], ranks: Iterable[int]) -> None:
    """Format axes of ranks, by factors of two, with a tick at each number of ranks."""
    ticks = sorted(set(ranks))
    for ax in axes:
        ax.set_xscale("log", base=2)
        ax.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
        ax.set(xlabel="ranks", xlim=(ticks[0] / 1.2, ticks[-1] * 1.2))


def of_ideal(ax: "Axes", **labels: str) -> None:
    """Format an axis of efficiency in percent, with a line at 100."""
    ax.axhline(100, color="black", linestyle=":", linewidth=1)
    ax.set(ylabel="efficiency (%)", **labels)
    drawing.with_room_above(ax)


def with_intervals(ax: "Axes", rows: pd.DataFrame, measure: str, scale: float, at: str = "ranks", **style: Any) -> None:
    """Draw a line through the means, with 95% intervals if there are any."""
    width = f"{measure}_half_width"
    widths = list(rows[width].fillna(0.0) / scale) if width in rows else None
    ax.errorbar(list(rows[at]), list(rows[measure] / scale), yerr=widths, capsize=3, **style)
