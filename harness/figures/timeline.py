"""Timeline of a pipeline schedule, simulated or measured: rows of actions, text, or a figure."""

import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.figures.style import COLOURS, inches_of, save, style
from harness.records.labels import SHAPE, labels
from harness.records.record import Record
from impl.pipeline.schedule import Op, Schedule
from impl.pipeline.simulate import Number, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {Op.F: "forward", Op.B: "backward", Op.I: "input gradient", Op.W: "weight gradient"}
FILL = {Op.F: COLOURS[0], Op.B: COLOURS[2], Op.I: COLOURS[3], Op.W: COLOURS[4]}
IDLE, LIGHTEST = "#EDEDED", 0.6
"""Colour of bubbles; share of white in the last chunk's colours."""
CODES = {Op.F: "0123456789", Op.B: "abcdefghij", Op.I: "abcdefghij", Op.W: "ABCDEFGHIJ"}
"""Characters for a microbatch's last digit in a drawing without room for `F3`."""
MOST_COLUMNS = 20
"""Widths of the terminal that an exact drawing may have before it is cut; longer ones are rounded to one width."""
INCHES, RANK_INCHES, DIGIT_INCHES = 12.0, 0.3, 0.075
MOST_TIMELINES = 6


def actions(schedule: Schedule) -> list[list[str]]:
    """Return every rank's row of actions, such as 0F3: stage 0, forward, microbatch 3."""
    return [[str(action) for action in row] for row in schedule.rows]


def document(timeline: Timeline) -> dict[str, Any]:
    """Return the JSON document of the command line; times in seconds, or in the unit of the given costs."""
    return {
        "spans": timeline.as_rows(),
        "step_time": float(timeline.step_time),
        "bubble": float(timeline.bubble),
        "bubble_per_rank": [float(timeline.bubble_of(rank)) for rank in timeline.rows],
        "peak_in_flight": [timeline.peak_in_flight(rank) for rank in timeline.rows],
        "microbatches_in_flight": [float(timeline.microbatches_in_flight(rank)) for rank in timeline.rows],
    }


def of_records(records: Sequence[Record]) -> dict[str, "Figure"]:
    """Draw the measured last step under the prediction from its own times, for one run of each trusted schedule.

    The run with the fewest microbatches is drawn.
    """
    texts = labels([record.point for record in records], SHAPE)
    first: dict[tuple[str, int], tuple[str, Figure]] = {}
    for record, text in sorted(zip(records, texts, strict=True), key=lambda pair: pair[0].run.microbatches):
        schedule = record.run.plan.schedule, record.run.plan.chunks
        if schedule in first or len(first) == MOST_TIMELINES or not record.has_trusted_code:
            continue
        if record.timeline:
            name = re.sub(r"[^\w.]+", "_", text or schedule[0])
            both = {"predicted": record.simulated_timeline(), "measured": record.timeline}
            first[schedule] = f"timeline_{name}", draw(both)
    return dict(first.values())


def heading(name: str, timeline: Timeline, unit: str) -> str:
    """Return step time, bubble fraction and each rank's activations in flight as text."""
    in_flight = " ".join(f"{float(timeline.microbatches_in_flight(rank)):.3g}" for rank in timeline.rows)
    step, bubble = float(timeline.step_time), float(timeline.bubble)
    return f"{name}: step {step:.4g} {unit}, bubble {bubble:.4g}, microbatches in flight {in_flight}"


def text(name: str, timeline: Timeline, unit: str = "s", width: int = 120) -> str:
    """Return one line per rank; F3 is the forward pass of microbatch 3, and without room each action is a character.

    Exact times have one or a few columns per unit and are cut at the width; others are rounded to it.
    """
    label = len(f"r{max(timeline.rows)} ")
    room = width - label - 2
    digits = len(str(max(span.action.microbatch for span in timeline.spans)))
    column = _unit(timeline, at_least=timeline.step_time / (MOST_COLUMNS * room)) or timeline.step_time / room
    units = round(timeline.step_time / column)
    shortest = int(min(span.end - span.start for span in timeline.spans) / column)
    each = next((n for n in (digits + 2, digits + 1) if n * units <= room), 1)
    whole = each * shortest > digits
    gap = each > digits + 1
    lines = [heading(name, timeline, unit)]
    for rank, row in timeline.rows.items():
        cells, chunks = ["."] * (units * each), sorted({span.action.stage for span in row})
        for span in row:
            first, last = (round((time - timeline.start) / column) * each for time in (span.start, span.end))
            last = max(last, first + 1)
            op, stage, microbatch = span.action
            name = op.lower() if chunks.index(stage) % 2 else op
            mark = f"{name}{microbatch}" if whole else CODES[op][microbatch % 10] * (last - first)
            cells[first:last] = mark.ljust(last - first - gap, "-") + " " * gap
        lines.append(f"{f'r{rank}':<{label}}|{''.join(cells)[:room]}{'|' if len(cells) <= room else '>'}")
    return "\n".join([*lines, *_notes(timeline, whole, float(column) / each, unit, units * each, room)])


def _notes(timeline: Timeline, whole: bool, column: float, unit: str, columns: int, room: int) -> list[str]:
    meant: dict[str, str] = {}  # by what stands for it: digits leave no room to tell the two backward passes apart
    for op in NAMES:
        if any(span.action.op is op for span in timeline.spans):
            mark = op if whole else f"{CODES[op][0]}-{CODES[op][-1]}"
            meant[mark] = f"{meant[mark]}/{NAMES[op]}" if mark in meant else NAMES[op]
    chunks = len({span.action.stage for span in timeline.spans}) > len(timeline.rows)
    marks = [f"{mark} {name}" for mark, name in meant.items()]
    more = (" (lower case: chunks 1, 3, ...)" if chunks else "") if whole else " (last digit of the microbatch)"
    notes = [f"{', '.join(marks)}{more}, . idle; a column is {column:.4g} {unit}"]
    return [*notes, f"cut: {room} of {columns} columns are shown, the figure shows all"] if columns > room else notes


def _unit(timeline: Timeline, at_least: Number) -> Fraction | None:
    """Return the greatest common divisor of all starts and ends; None if times are not exact, or it is too small."""
    times = [time - timeline.start for span in timeline.spans for time in (span.start, span.end)]
    exact = [Fraction(time) for time in times if not isinstance(time, float)]
    if len(exact) < len(times):
        return None
    scale = math.lcm(*(time.denominator for time in exact))
    unit = Fraction(math.gcd(*(int(time * scale) for time in exact)), scale)
    return unit if unit >= at_least else None


def draw(panels: Mapping[str, Timeline], unit: str = "s") -> "Figure":
    """Draw timelines by name, one below the other on the same time axis."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    heights = [len(timeline.rows) * RANK_INCHES + 0.45 for timeline in panels.values()]
    figure = Figure(figsize=(inches_of(INCHES), sum(heights) + 0.9), layout="constrained")
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)
    longest = max(timeline.step_time for timeline in panels.values())
    legend: dict[str, str] = {}
    for axes, (name, timeline) in zip(grid.flat, panels.items(), strict=True):
        legend |= _bars(axes, timeline, float(longest))
        axes.set_title(heading(name, timeline, unit), loc="left")
    grid.flat[-1].set_xlabel(f"time ({unit})")
    order = [*NAMES.values(), "idle"]
    labels = sorted(legend, key=lambda label: (order.index(label.split(",")[0]), label))
    handles = [Patch(color=legend[label], label=label) for label in labels]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), round(inches_of(INCHES) / 2)))
    return figure


def _bars(axes: "Axes", timeline: Timeline, longest: float) -> dict[str, str]:
    """Draw one bar per action, and return the colour of each kind."""
    legend: dict[str, str] = {"idle": IDLE}
    step = float(timeline.step_time)
    for rank, row in timeline.rows.items():
        axes.broken_barh([(0, step)], (rank - 0.42, 0.84), facecolors=IDLE)
        chunks = sorted({span.action.stage for span in row})
        kinds: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for span in row:
            op, stage, microbatch = span.action
            start, seconds = float(span.start - timeline.start), float(span.end - span.start)
            chunk = chunks.index(stage)
            label = NAMES[op] + (f", chunk {chunk}" if chunk else "")
            colour, ink = _shade(FILL[op], LIGHTEST * chunk / max(len(chunks) - 1, 1))
            kinds.setdefault((label, colour), []).append((start, seconds))
            if seconds / longest * (inches_of(INCHES) - 1) > DIGIT_INCHES * len(str(microbatch)):
                axes.text(start + seconds / 2, rank, str(microbatch), size=7, color=ink, ha="center", va="center")
        for (label, colour), bars in kinds.items():
            # edges leave room for the bar
            widths = [min(0.5, 10 * seconds / longest * inches_of(INCHES)) for _, seconds in bars]
            axes.broken_barh(bars, (rank - 0.42, 0.84), facecolors=colour, edgecolor="white", linewidth=widths)
            legend[label] = colour
    axes.set(
        xlim=(0, longest), ylim=(max(timeline.rows) + 0.5, -0.5), yticks=list(timeline.rows), ylabel="pipeline rank"
    )
    axes.grid(False)
    return legend


def _shade(colour: str, lighter: float) -> tuple[str, str]:
    """Return a colour mixed with white, and the readable colour of text on it."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    mixed = [round(c + (255 - c) * lighter) for c in (red, green, blue)]
    light = 0.299 * mixed[0] + 0.587 * mixed[1] + 0.114 * mixed[2]
    return "#" + "".join(f"{c:02X}" for c in mixed), "black" if light > 140 else "white"


def write(panels: Mapping[str, Timeline], stem: Path, unit: str = "s") -> list[Path]:
    """Write the figure of `draw` as PNG (150 dpi) and SVG, or for a stem that ends in .pdf as a paper's column.

    Raises:
        OSError: the folder cannot be written.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    if stem.suffix == ".pdf":
        from harness.figures import printed  # which imports all figures

        with printed.for_paper("column"):
            return [printed.save(draw(panels, unit), stem, "column")]
    with style():
        figure = draw(panels, unit)
        return [save(figure, stem.with_name(f"{stem.name}.{suffix}")) for suffix in ("png", "svg")]
