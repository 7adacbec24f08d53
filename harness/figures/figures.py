"""The figures of a sweep, each a pure function of its records; the same records give the same bytes."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from harness.analysis.perplexity import KINDS, comparable, scores, stem, title
from harness.analysis.render import Column, number
from harness.analysis.tables import MakesTable, scaled
from harness.figures import style as drawing
from harness.figures import timeline
from harness.figures.of_table import against_ranks, efficiency, lines, of_ideal, with_intervals
from harness.figures.style import COLOURS, HOLLOW, few, legend, line, mark, panels
from harness.records.labels import SHAPE, labels
from harness.records.measures import about, model_names, shape, size_name
from harness.records.parts import Evaluation
from harness.records.record import Record
from impl.model.norm_placement import order_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MakesFigure = Callable[[Sequence[Record]], "Figure | None"]
"""Function that draws an experiment's own figure; None if there is nothing to draw."""
SMOOTHED_SHARE = 0.02
"""Share of the steps that training loss is averaged over for drawing."""
MOST_PANELS, MOST_RUNS = 9, 80
"""Most models with a panel each; most runs that are all drawn, else `MOST_LINES` of them are."""
OWN = "own"
"""Stem of the files of an experiment's own figure if it has no table to be named after."""
ABOVE_START, DIVERGED = 1.03, 2.0
"""Upper end of the loss axis over the highest first loss; limit for a diverged run, over its own first loss."""


def write(
    records: Sequence[Record], folder: Path, *, table: MakesTable | None = None, figure: MakesFigure | None = None
) -> list[Path]:
    """Write all figures that there is data for as SVG and PNG (150 dpi), in place of those of an earlier call.

    Raises:
        InputError: the records are of several tiers.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with drawing.style():
        found = drawn(records, table=table, figure=figure)
        written = [path for name, one in found.items() for path in drawing.save_both(one, folder, name)]
    stems = ("curves", "scaling", "perplexity_*", "accuracy_*", "timeline_*", table([]).name if table else OWN)
    for old in {path for s in stems for path in folder.glob(f"{s}.*")} - set(written):
        old.unlink()
    return written


def drawn(
    records: Sequence[Record], *, table: MakesTable | None = None, figure: MakesFigure | None = None
) -> dict[str, "Figure"]:
    """Return all figures that there is data for, by the stem of their files; call it within `style`.

    Raises:
        InputError: the records are of several tiers.
    """
    own = None if figure or not table else table(records)
    name = table([]).name if table else OWN
    found = {name: figure(records) if figure else own and (efficiency(own) or lines(own))}
    found |= {"curves": curves(records), "scaling": scaling(records)}
    for name, kind, apart, chosen in comparable(records):
        found[stem(name, kind, apart)] = sizes(chosen, name, kind, apart)
    return {name: one for name, one in found.items() if one is not None} | timeline.of_records(records)


def curves(records: Sequence[Record]) -> "Figure | None":
    """Draw training loss (smoothed) and validation loss against tokens: a panel per model, a colour per point.

    None without such runs. Runs without validation, which measure speed, are left out, and those that learn to answer
    questions, whose loss is of another kind.
    """
    heading, learns_text = about(records), lambda r: not r.run.data.race
    trained = [r for r in records if len(r.losses) > 1 and (r.evaluations or r.has_diverged)]
    size_and_placement = lambda r: (r.resolved.parameters or math.inf, order_of(r.run.model.norm_placement))
    trained = sorted(filter(learns_text, trained), key=size_and_placement)
    if not trained:
        return None
    chosen, there = set(few(list(dict.fromkeys(r.point for r in trained)))[0]), len(trained)
    trained = few([r for r in trained if r.point in chosen], MOST_RUNS, drawing.MOST_LINES)[0]
    note = drawing.left_out(len(trained), there, "runs")
    names = model_names(records)
    texts = labels([record.point for record in trained], SHAPE)
    models = [names[shape(record.run)] for record in trained]
    if len(set(texts)) == 1 or len(set(models)) > MOST_PANELS:
        texts = [f"{m} {t}".strip() if len(set(texts)) > 1 else m for m, t in zip(models, texts, strict=True)]
        models = [""] * len(texts)
    shown, points = list(dict.fromkeys(models)), list(dict.fromkeys(texts))
    figure, axes = panels(len(shown))
    for record, model, text in zip(trained, models, texts, strict=True):
        _curve(axes[shown.index(model)], record, COLOURS[points.index(text) % len(COLOURS)])
    for ax, name in zip(axes, shown, strict=True):
        ax.set(title=name, xlabel="tokens", ylabel="loss (nats per token)", xscale="log")
        own = {record.run.model.family for record, model in zip(trained, models, strict=True) if model == name}
        _from_the_first_loss(ax, [record for record in trained if record.run.model.family in own])
    handles = [line(text, COLOURS[i % len(COLOURS)]) for i, text in enumerate(points) if text]
    handles += [line(f"training, mean over {SMOOTHED_SHARE:.0%} of the steps", alpha=0.6)]
    handles += [line("validation", marker="o")]
    if any(record.run.model.family == "bert" for record in trained):
        handles += [line("BERT's training: plus next sentence", linestyle="")]
    if any(record.has_diverged for record in trained):
        handles += [line("diverged", marker="x", linestyle="")]
    if any(_floor(record) for record in trained):
        handles += [line("entropy floor", "black", linestyle="--")]
    legend(figure, handles)
    figure.suptitle(f"Training and validation loss{heading}{note}")
    return figure


def _from_the_first_loss(ax: "Axes", alike: Sequence[Record]) -> None:
    """Set the loss axis from the lowest loss of all runs up to their highest first one."""
    runs = [(record, losses) for record in alike if len(losses := _finite(record)[1])]
    held_out = [e.per("tokens") for record in alike for e in _validations(record)]
    known = [*(losses.min() for _, losses in runs), *held_out, *filter(None, map(_floor, alike))]
    highest = [losses[0] for _, losses in runs]
    highest += [min(losses[-1], DIVERGED * losses[0]) for record, losses in runs if record.has_diverged]
    if known:
        top, bottom = ABOVE_START * max(highest or known), min(known)
        ax.set_ylim(bottom - 0.05 * (top - bottom), top)


def _validations(record: Record) -> list[Evaluation]:
    return [e for e in record.evaluations if e.name == "valid" and math.isfinite(e.per("tokens"))]


def _finite(record: Record) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the steps whose loss is finite, and these losses."""
    losses = np.array(record.losses)
    at = np.flatnonzero(np.isfinite(losses))
    return at, losses[at]


def running_mean(values: Sequence[float] | np.ndarray, window: int) -> list[float]:
    """Return the mean over the last `window` values, fewer at the start, so that no value depends on later ones."""
    return pd.Series(values).rolling(window, min_periods=1).mean().tolist()


def _curve(ax: "Axes", record: Record, colour: str) -> None:
    tokens, (steps, losses) = record.run.tokens_per_step, _finite(record)
    smooth = running_mean(losses, max(1, round(SMOOTHED_SHARE * len(losses))))
    shown, _ = few(range(len(losses)), drawing.MOST_POINTS, drawing.MOST_POINTS)
    after = [(record.steps[steps[i]].step + 1) * tokens for i in shown]
    ax.plot(after, [smooth[i] for i in shown], color=colour, alpha=0.45, linewidth=1)
    if record.has_diverged and after:
        at = after[-1], min(smooth[-1], DIVERGED * smooth[0])
        ax.plot(*at, marker="x", markersize=8, markeredgewidth=2, color=colour)
    held_out = [(e.step * tokens, e.per("tokens")) for e in _validations(record)]
    ax.plot(*zip(*held_out, strict=True), color=colour, marker="o", markersize=4, linewidth=1.2) if held_out else None
    if floor := _floor(record):
        ax.axhline(floor, color="black", linestyle="--", linewidth=1)


def _floor(record: Record) -> float | None:
    """Return the nats per token that no left-to-right model can be expected to beat; None if unknown."""
    entropy = record.resolved.data.entropy if record.resolved.data else None
    return entropy.floor if entropy and record.run.model.family == "gpt" else None


def scaling(records: Sequence[Record]) -> "Figure | None":
    """Draw throughput and scaling efficiency against ranks; ideal is the baseline's throughput per device.

    Each device has panels of its own if there are more lines than colours. None if no runs differ in their number of
    ranks.
    """
    heading, rows = about(records), scaled(records)
    found, note = _scaling_lines(rows) if not rows.empty else ([], "")
    if not found:
        return None
    rows = pd.concat([group for _, _, group in found])
    has_efficiency = any(group["efficiency"].notna().sum() > 1 for _, _, group in found)
    devices = list(dict.fromkeys(device for device, _, _ in found))
    width = 2 if has_efficiency else 1
    figure, axes = panels(width * len(devices), across=2 if len(devices) > 1 else 3)
    marks = {text: mark(i) for i, text in enumerate(dict.fromkeys(text for _, text, _ in found))}
    for i, device in enumerate(devices):
        of_device = {text: group for own, text, group in found if own == device}
        _scaling_panels(axes[width * i : width * (i + 1)], of_device, marks, f", {device}" if device else "")
    against_ranks(axes, rows["ranks"])
    drawn = [dict(zip(*ax.get_legend_handles_labels()[::-1], strict=True)) for ax in axes[::width]]
    handles = [next(of[text] for of in drawn if text in of) for text in marks] + [line("ideal", "black", linestyle=":")]
    if any(rows["oversubscribed"]):
        handles.append(line("oversubscribed: no efficiency", marker="o", **HOLLOW))
    legend(figure, handles)
    simulated = ", simulated" if all(record.is_simulated for record in records) else ""
    figure.suptitle(f"Scaling{heading}{simulated}{note}")
    return figure


def _scaling_panels(
    axes: Sequence["Axes"], lines: Mapping[str, pd.DataFrame], marks: Mapping[str, dict[str, Any]], where: str
) -> None:
    """Draw throughput, and in a second panel efficiency, with this end of their titles."""
    left, *right = axes
    for text, group in lines.items():
        ranks, rate = list(group["ranks"]), list(group["tokens_per_second"])
        ideal = [rate[0] * r / ranks[0] for r in ranks]
        left.plot(ranks, ideal, color=marks[text]["color"], linestyle=":", linewidth=1)
        with_intervals(left, group, "tokens_per_second", 1.0, label=text, **marks[text])
        for ax in right:
            with_intervals(ax, group, "efficiency", 0.01, label=text, **marks[text])
        for r, value, over in zip(ranks, rate, group["oversubscribed"], strict=True):
            left.plot(r, value, zorder=3, markerfacecolor="white", **marks[text]) if over else None
    _rates(left, [rate for group in lines.values() for rate in group["tokens_per_second"]])
    left.set(ylabel="throughput (tokens/s)", title=f"Throughput{where}")
    for ax in right:
        of_ideal(ax, title=f"Scaling efficiency{where}")


def _rates(ax: "Axes", rates: Sequence[float]) -> None:
    """Format an axis of throughput, logarithmic if the rates differ widely."""
    from matplotlib.ticker import LogLocator, NullLocator

    if max(rates) > drawing.WIDE * min(rates):
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_minor_locator(NullLocator())
    else:
        drawing.with_room_above(ax)
    ax.yaxis.set_major_formatter(lambda value, _: number(value, 3))


def _scaling_lines(rows: pd.DataFrame) -> tuple[list[tuple[str, str, pd.DataFrame]], str]:
    """Return the lines of a scaling figure: device of its panels, empty if all share them, name, and rows.

    Each is from its baseline on. With them: the suffix of the title.
    """
    rest = rows[rows["baseline"] != "baseline"]
    by = ["kind", "model", "curve", "device_name"]
    several = {name for name in by if len(set(rest[name])) > 1} | {"kind"}
    found = []
    groups = rest.groupby([*by, "baseline_point"], sort=False, dropna=False)
    are_apart = "device_name" in several and groups.ngroups > len(drawing.COLOURS)
    several -= {"device_name"} if are_apart else set()
    chosen, of_row = few(range(groups.ngroups))[0], groups.ngroup()
    for i in chosen:
        group = rest.loc[of_row == i]
        row = group.iloc[0]
        is_first = (rows["point"] == row["baseline_point"]) & (rows["baseline"] == "baseline")
        is_first &= (rows["kind"] == row["kind"]) & (rows["device_name"] == row["device_name"])
        text = " ".join(str(row[name]) for name in by if name in several).strip()
        group = pd.concat([rows[is_first], group])
        device = str(row["device_name"]) if are_apart else ""
        found += [(device, text, group)] if len(set(group["ranks"])) > 1 else []
    names = [(device, text) for device, text, _ in found]
    named = [
        (device, f"{text} from batch={group['global_batch'].iloc[0]}" if names.count(name) > 1 else text, group)
        for name, (device, text, group) in zip(names, found, strict=True)
    ]
    return named, drawing.left_out(len(found), groups.ngroups - len(chosen) + len(found), "lines")


def sizes(records: Sequence[Record], name: str, kind: str, apart: str = "") -> "Figure | None":
    """Draw perplexity or accuracy against parameters, a line per norm placement; None for fewer than two sizes.

    Raises:
        InputError: as `harness.analysis.perplexity.perplexity_table`.
    """
    points = scores(records, name, kind)
    known = pd.DataFrame(points[points["parameters"].notna()])
    if len(set(known["model"])) < 2:
        return None
    known["line"] = labels(list(known["point"]), SHAPE)
    names, note = few(list(dict.fromkeys(known["line"])))
    main, (figure, (ax,)) = KINDS[kind][2][0], panels(1)
    for i, name_of_line in enumerate(names):
        _sizes_line(ax, pd.DataFrame(known[known["line"] == name_of_line]), main, i)
    handles = [line(text, **mark(i)) for i, text in enumerate(names) if text]
    if any(known["diverged_runs"]):
        handles.append(line("diverged (runs)", marker="x", linestyle=""))
    if any(known["floor"].notna()):
        floor = known["floor"].dropna().iloc[0]
        ax.axhline(floor, color="black", linestyle="--", linewidth=1)
        ax.set_ylim(bottom=floor - 0.05 * (ax.get_ylim()[1] - floor))
        handles.append(line("entropy floor", "black", linestyle="--"))
    if main.unit == "%":  # accuracy has a floor of 0, and low ones should look low
        ax.set_ylim(0, max(1.0, 1.05 * ax.get_ylim()[1]))
    ax.set(xscale="log", xlabel="parameters", ylabel=main.heading)
    sizes_of = known.sort_values("parameters", ascending=False)  # a model's smallest size, which it is named by, last
    ticks = sorted(dict(zip(sizes_of["model"], sizes_of["parameters"], strict=True)).values())
    ax.set_xticks(ticks, [size_name(round(tick)) for tick in ticks])
    ax.minorticks_off()
    legend(figure, handles)
    figure.suptitle(f"{title(records, name, kind, apart)}{note}")
    return figure


def _sizes_line(ax: "Axes", points: pd.DataFrame, main: Column, i: int) -> None:
    means = pd.DataFrame(points[[isinstance(v, float) and math.isfinite(v) for v in points[main.key]]])
    values = [value / main.scale for value in means[main.key]]
    widths = list(means[f"{main.key}_half_width"].fillna(0.0).astype(float) / main.scale)
    ax.errorbar(list(means["parameters"]), values, widths, capsize=3, **mark(i))
    top = ax.get_xaxis_transform()  # diverged runs have no value on the axis
    for x, runs in zip(points["parameters"], points["diverged_runs"], strict=True):
        if runs:
            y = 0.97 - 0.06 * i
            cross = {**mark(i), "marker": "x", "markersize": 7, "markeredgewidth": 2}
            ax.plot(x, y, transform=top, clip_on=False, **cross)
            where = {"xycoords": top, "textcoords": "offset points", "ha": "right", "va": "center"}
            ax.annotate(runs, (x, y), (-8, 0), size=8, **where)
