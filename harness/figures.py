"""The figures of a sweep, each a pure function of its records; the same records give the same bytes."""

import io
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from harness.beside import twin
from harness.labels import SHAPE, Record, labels, point
from harness.measures import about, diverged, float_or_nan, frame, microbatches, model_names, shape, size_name
from harness.measures import tokens_per_step as tokens_of
from harness.perplexity import KINDS, comparable, scores, stem, title
from harness.render import Column, Table, number
from harness.scaling import scaling_rows
from harness.statistics import running_mean
from harness.tables import MakesTable
from impl.model.norm_placement import PLACEMENTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F3C8D", "#444444")
"""Told apart with every kind of colour vision (Okabe and Ito 2008), then two more."""
MARKERS = "os^Dv<>P"
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "lmscale", "font.size": 10, "axes.titlesize": 11, "axes.grid": True, "grid.alpha": 0.3,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "legend.fontsize": 9,
    "lines.linewidth": 1.6, "axes.axisbelow": True,
}  # fmt: skip
SMOOTHED_SHARE = 0.02
"""Share of the steps over which training loss is averaged for drawing."""
MOST_PANELS = 9

MOST_TIMELINES = 6

WIDE = 20
"""Ratio of the largest to the smallest value above which an axis is logarithmic."""


def write(records: Sequence[Record], folder: Path, *, table: MakesTable | None = None) -> list[Path]:
    """Every figure there is data for as PNG (150 dpi) and SVG, in place of what an earlier call wrote to the folder.

    Raises:
        InputError: the records are of several tiers.
        OSError: the folder cannot be written.
    """
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    own = table(records) if table else None
    with matplotlib.rc_context(STYLE):
        figures = {"curves": curves(records), "scaling": scaling(records)}
        figures |= {own.name: efficiency(own) or lines(own)} if own else {}
        for name, kind, apart, chosen in comparable(records):
            figures[stem(name, kind, apart)] = sizes(chosen, name, kind, apart)
        for name, figure in figures.items():
            if figure is not None:
                written += [save(figure, folder / f"{name}.{suffix}") for suffix in ("png", "svg")]
    written += timelines(records, folder)
    stems = ("curves", "scaling", "perplexity_*", "accuracy_*", "timeline_*", *([own.name] if own else []))
    for old in {path for s in stems for path in folder.glob(f"{s}.*")} - set(written):
        old.unlink()
    return written


def save(figure: "Figure", path: Path) -> Path:
    """Whole or not at all, and without the date and version that would make equal figures differ."""
    content = io.BytesIO()
    metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else {"Software": None}
    figure.savefig(content, format=path.suffix[1:], dpi=150, metadata=metadata, bbox_inches="tight")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content.getvalue())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def curves(records: Sequence[Record]) -> "Figure | None":
    """Training loss (smoothed) and validation loss against tokens: a panel for each model, a colour for each point.

    Runs that were not validated, which are there for their speed, are left out.
    """
    heading = about(records)
    trained = [r for r in records if len(r.get("steps") or ()) > 1 and (r.get("evaluations") or diverged(r))]
    if not trained:
        return None
    names, configs = model_names(records), [record["config"] for record in trained]
    texts = labels([point(config) for config in configs], trained, SHAPE)
    models = [names[shape(config)] for config in configs]
    if len(set(texts)) == 1 or len(set(models)) > MOST_PANELS:
        texts = [f"{m} {t}".strip() if len(set(texts)) > 1 else m for m, t in zip(models, texts, strict=True)]
        models = [""] * len(texts)
    order = sorted(range(len(trained)), key=lambda i: _size_and_placement(trained[i]))
    panels, points = list(dict.fromkeys(models[i] for i in order)), list(dict.fromkeys(texts[i] for i in order))
    figure, axes = _panels(len(panels))
    for i in order:
        _curve(axes[panels.index(models[i])], trained[i], COLOURS[points.index(texts[i]) % len(COLOURS)])
    for ax, name in zip(axes, panels, strict=True):
        ax.set(title=name, xlabel="tokens", ylabel="loss (nats per token)", xscale="log")
        ax.sharey(axes[0]) if ax is not axes[0] else None
    handles = [_line(COLOURS[i % len(COLOURS)], text) for i, text in enumerate(points) if text]
    handles += [_line("#888888", f"training, mean over {SMOOTHED_SHARE:.0%} of the steps", alpha=0.6)]
    handles += [_line("#888888", "validation", marker="o")]
    if any(diverged(record) for record in trained):
        handles += [_line("#888888", "diverged", marker="x", linestyle="")]
    if any(_floor(record) for record in trained):
        handles += [_line("black", "entropy floor", linestyle="--")]
    _legend(figure, handles)
    figure.suptitle(f"Training and validation loss{heading}")
    return figure


def _curve(ax: "Axes", record: Record, colour: str) -> None:
    tokens = tokens_of(record["config"])
    steps = [(s["step"] + 1, float_or_nan(s.get("loss"))) for s in record["steps"]]
    finite = [(step, loss) for step, loss in steps if math.isfinite(loss)]
    smooth = running_mean([loss for _, loss in finite], max(1, round(SMOOTHED_SHARE * len(finite))))
    ax.plot([step * tokens for step, _ in finite], smooth, color=colour, alpha=0.45, linewidth=1)
    if diverged(record) and finite:
        ax.plot(finite[-1][0] * tokens, smooth[-1], marker="x", markersize=8, markeredgewidth=2, color=colour)
    held_out = [
        (e["step"] * tokens, e["nats"] / e["tokens"])
        for e in record.get("evaluations") or ()
        if e["name"] == "valid" and e.get("tokens") and math.isfinite(float_or_nan(e.get("nats")))
    ]
    ax.plot(*zip(*held_out, strict=True), color=colour, marker="o", markersize=4, linewidth=1.2) if held_out else None
    if floor := _floor(record):
        ax.axhline(floor, color="black", linestyle="--", linewidth=1)


def _floor(record: Record) -> float | None:
    """Nats per token that no left-to-right model can be expected to beat; None where not known."""
    entropy = ((record.get("resolved") or {}).get("data") or {}).get("entropy")
    if not entropy or record["config"]["model"]["family"] != "gpt":
        return None
    return (entropy.get("valid") or entropy)["nats_per_token"]


def scaling(records: Sequence[Record]) -> "Figure | None":
    """Throughput and scaling efficiency against ranks; ideal is the baseline's throughput per device, kept."""
    from matplotlib.ticker import LogLocator, NullLocator

    heading, rows = about(records), frame(records)
    if rows.empty:
        return None
    rows = scaling_rows(pd.DataFrame(rows[(rows["status"] == "ok") & rows["tokens_per_second"].notna()]), records)
    if rows.empty:
        return None
    figure, (left, right) = _panels(2)
    for i, (text, group) in enumerate(_scaling_lines(rows)):
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        ranks, rate = list(group["ranks"]), list(group["tokens_per_second"])
        left.plot(ranks, [rate[0] * r / ranks[0] for r in ranks], color=colour, linestyle=":", linewidth=1)
        _points(left, group, "tokens_per_second", 1.0, color=colour, marker=marker, label=text)
        _points(right, group, "efficiency", 0.01, color=colour, marker=marker, label=text)
        for r, value, over in zip(ranks, rate, group["oversubscribed"], strict=True):
            left.plot(r, value, marker=marker, color=colour, markerfacecolor="white", zorder=3) if over else None
    _against_ranks((left, right), rows["ranks"])
    rates = list(rows["tokens_per_second"])
    if max(rates) > WIDE * min(rates):
        left.set_yscale("log")
        left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        left.yaxis.set_minor_locator(NullLocator())
    else:
        left.set_ylim(bottom=0)
    left.yaxis.set_major_formatter(lambda value, _: number(value, 3))
    left.set(ylabel="throughput (tokens/s)", title="Throughput")
    _of_ideal(right, title="Scaling efficiency")
    handles = [*left.get_legend_handles_labels()[0], _line("black", "ideal", linestyle=":")]
    if any(rows["oversubscribed"]):
        handles.append(
            _line("#888888", "oversubscribed: no efficiency", marker="o", markerfacecolor="white", linestyle="")
        )
    _legend(figure, handles)
    figure.suptitle(f"Scaling{heading}")
    return figure


def _scaling_lines(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The lines of a scaling figure with their names, each from its baseline on."""
    rest = rows[rows["baseline"] != "baseline"]
    by = ["kind", "model", "curve", "device_name"]
    several = {name for name in by if len(set(rest[name])) > 1} | {"kind"}
    lines = []
    for _, group in rest.groupby([*by, "baseline_point"], sort=False, dropna=False):
        row = group.iloc[0]
        is_first = (rows["point"] == row["baseline_point"]) & (rows["baseline"] == "baseline")
        is_first &= (rows["kind"] == row["kind"]) & (rows["device_name"] == row["device_name"])
        text = " ".join(str(row[name]) for name in by if name in several).strip()
        lines.append((text, pd.concat([rows[is_first], group])))
    return lines


def efficiency(table: Table) -> "Figure | None":
    """Efficiency against ranks as a table has it, a line for each `line` of its rows, dashed where published.

    None: the table has no such columns, or no line with two points.
    """
    if not {"line", "ranks", "efficiency", "published"} <= set(table.frame):
        return None
    rows = table.frame
    if (simulated := twin("efficiency")) in rows and not any(rows["efficiency"].notna()):
        rows = rows.assign(efficiency=rows[simulated])  # nothing was measured
    rows = pd.DataFrame(rows[rows["efficiency"].notna() | rows["published"].notna()])
    names = [name for name in dict.fromkeys(rows["line"]) if name]
    lines = [pd.DataFrame(rows[rows["line"].isin(["", name])]) for name in names]
    if not any(line["efficiency"].notna().sum() > 1 for line in lines):
        return None
    figure, (ax,) = _panels(1)
    dashed: dict[str, Any] = {"linestyle": "--", "markerfacecolor": "white"}
    for i, (name, line) in enumerate(zip(names, lines, strict=True)):
        style: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
        _points(ax, line.dropna(subset="efficiency"), "efficiency", 0.01, label=name, **style)
        printed = line.dropna(subset="published")
        if len(printed) > 1:
            ax.plot(list(printed["ranks"]), [100 * value for value in printed["published"]], **style, **dashed)
    _against_ranks((ax,), rows["ranks"])
    _of_ideal(ax)
    _legend(figure, [*ax.get_legend_handles_labels()[0], _line("#888888", "published", marker="o", **dashed)])
    figure.suptitle(table.title)
    return figure


def lines(table: Table) -> "Figure | None":
    """The rate of model FLOPs against the `at` of a table's rows, a line for each `line`; the published ones beside it.

    They have a panel of their own, as they count recomputed operations. None: the table has no such columns, or no
    line with two points.
    """
    if not {"line", "at", "model_flops_per_second_per_device", "published_rate"} <= set(table.frame):
        return None
    panels = {
        "measured, model FLOPs": ("model_flops_per_second_per_device", "solid"),
        "simulated, model FLOPs": (twin("model_flops_per_second_per_device"), "dotted"),
        "simulated, recomputation counted": (twin("counted_rate"), "dotted"),
        "published, recomputation counted": ("published_rate", "dashed"),
    }
    known = {
        text: pd.DataFrame(table.frame.dropna(subset=key)) for text, (key, _) in panels.items() if key in table.frame
    }
    known = {text: rows for text, rows in known.items() if rows["line"].duplicated().any()}
    if "simulated, recomputation counted" in known and "measured, model FLOPs" not in known:
        known.pop("simulated, model FLOPs", None)  # it has nothing to stand beside
    if not known:
        return None
    figure, axes = _panels(len(known))
    names = list(dict.fromkeys(table.frame["line"]))
    for ax, (heading, rows) in zip(axes, known.items(), strict=True):
        key, style = panels[heading]
        ticks = sorted(set(rows["at"]), key=_by_numbers)
        for name, line in rows.sort_values("at", key=lambda at: at.map(ticks.index)).groupby("line", sort=False):
            at, rates = [ticks.index(x) for x in line["at"]], [rate / 1e12 for rate in line[key]]
            i = names.index(name)
            colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
            ax.plot(at, rates, color=colour, marker=marker, linestyle=style, label=name)
            crowded = [(x, y) for x, y, over in zip(at, rates, line["oversubscribed"], strict=True) if over]
            ax.plot(*zip(*crowded, strict=True), marker, color=colour, markerfacecolor="white") if crowded else None
        ax.set_xticks(range(len(ticks)), ticks, rotation=30 if len(" ".join(ticks)) > 50 else 0)
        ax.set(title=heading, ylabel="TFLOP/s per device", ylim=(0, None))
        ax.legend(fontsize=8)
    figure.suptitle(table.title)
    return figure


def _by_numbers(text: str) -> list[tuple[int, str]]:
    """What sorts `ranks 64` before `ranks 128`."""
    return [(int(part or 0), word) for word, part in re.findall(r"(\D*)(\d*)", text)]


def timelines(records: Sequence[Record], folder: Path) -> list[Path]:
    """The measured last step under the prediction from its own times: of every schedule the run with least to draw."""
    from harness import timeline  # which draws with this module

    texts = labels([point(record["config"]) for record in records], records, SHAPE)
    first: dict[tuple[str, int], list[Path]] = {}
    for record, text in sorted(zip(records, texts, strict=True), key=lambda pair: microbatches(pair[0]["config"])):
        measured, plan = timeline.measured(record), record["config"]["plan"]
        schedule = plan.get("schedule"), plan.get("chunks")
        if measured and schedule not in first and len(first) < MOST_TIMELINES:
            panels = {"predicted": timeline.predicted(record, measured), "measured": measured}
            name = re.sub(r"[^\w.]+", "_", text or plan["schedule"])
            first[schedule] = timeline.write(panels, folder / f"timeline_{name}")
    return [path for paths in first.values() for path in paths]


def _against_ranks(axes: Iterable["Axes"], ranks: Iterable[int]) -> None:
    ticks = sorted(set(ranks))
    for ax in axes:
        ax.set_xscale("log", base=2)
        ax.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
        ax.set(xlabel="ranks", xlim=(ticks[0] / 1.2, ticks[-1] * 1.2))


def _of_ideal(ax: "Axes", **labels: str) -> None:
    ax.axhline(100, color="black", linestyle=":", linewidth=1)
    ax.set(ylabel="efficiency (%)", ylim=(0, None), **labels)


def _points(ax: "Axes", rows: pd.DataFrame, measure: str, scale: float, **style: Any) -> None:
    """A line through the means, with 95% intervals where there are any."""
    values, widths = rows[measure] / scale, rows[f"{measure}_half_width"].fillna(0.0) / scale
    ax.errorbar(list(rows["ranks"]), list(values), yerr=list(widths), capsize=3, **style)


def sizes(records: Sequence[Record], name: str, kind: str, apart: str = "") -> "Figure | None":
    """Perplexity or accuracy against parameters, a line for each norm placement; None: fewer than two sizes.

    Raises:
        InputError: as `harness.perplexity.perplexity_table`.
    """
    points, _ = scores(records, name, kind)
    known = pd.DataFrame(points[points["parameters"].notna()])
    if len(set(known["model"])) < 2:
        return None
    known["line"] = labels(list(known["point"]), records, SHAPE)
    lines = list(dict.fromkeys(known["line"]))
    main, (figure, (ax,)) = KINDS[kind][2][0], _panels(1)
    for i, line in enumerate(lines):
        _sizes_line(ax, pd.DataFrame(known[known["line"] == line]), main, i)
    handles = [_line(COLOURS[i % 8], line, marker=MARKERS[i % 8]) for i, line in enumerate(lines) if line]
    if any(known["diverged_runs"]):
        handles.append(_line("#888888", "diverged (runs)", marker="x", linestyle=""))
    if any(known["floor"].notna()):
        floor = known["floor"].dropna().iloc[0]
        ax.axhline(floor, color="black", linestyle="--", linewidth=1)
        ax.set_ylim(bottom=floor - 0.05 * (ax.get_ylim()[1] - floor))
        handles.append(_line("black", "entropy floor", linestyle="--"))
    ax.set(xscale="log", xlabel="parameters", ylabel=main.heading)
    ticks = sorted(dict(zip(known["model"], known["parameters"], strict=True)).values())
    ax.set_xticks(ticks, [size_name(round(tick)) for tick in ticks])
    ax.minorticks_off()
    _legend(figure, handles)
    figure.suptitle(title(records, name, kind, apart))
    return figure


def _sizes_line(ax: "Axes", points: pd.DataFrame, main: Column, i: int) -> None:
    colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
    means = pd.DataFrame(points[[isinstance(v, float) and math.isfinite(v) for v in points[main.key]]])
    values = [value / main.scale for value in means[main.key]]
    widths = list(means[f"{main.key}_half_width"].fillna(0.0).astype(float) / main.scale)
    ax.errorbar(list(means["parameters"]), values, widths, color=colour, marker=marker, capsize=3)
    top = ax.get_xaxis_transform()  # what diverged has no place on the axis of values
    for x, runs in zip(points["parameters"], points["diverged_runs"], strict=True):
        if runs:
            y = 0.97 - 0.06 * i
            ax.plot(x, y, marker="x", markersize=7, markeredgewidth=2, color=colour, transform=top, clip_on=False)
            ax.annotate(
                runs, (x, y), (-8, 0), xycoords=top, textcoords="offset points", ha="right", va="center", size=8
            )


def _panels(count: int) -> tuple["Figure", list["Axes"]]:
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    columns = min(count, 3) if count != 4 else 2
    rows = math.ceil(count / columns)
    width, height = (7.0, 4.2) if count == 1 else (4.4 * columns, 3.3 * rows)
    figure = Figure(figsize=(width, height + 0.8), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for spare in axes[count:]:
        spare.set_visible(False)
    return figure, axes[:count]


def _line(colour: str, text: str, **style: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, label=text, **style)


def _legend(figure: "Figure", handles: list[Any]) -> None:
    """Below the panels, where it hides nothing."""
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 4))


def _size_and_placement(record: Record) -> tuple[float, int]:
    count = (record.get("resolved") or {}).get("parameters") or math.inf
    return count, list(PLACEMENTS).index(record["config"]["model"]["norm_placement"])
