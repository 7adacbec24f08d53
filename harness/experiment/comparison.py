"""Comparison of layouts' rates with a published figure: its points as runs, one table, checks on relative speed."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import pandas as pd

from harness.analysis.render import Column, Table
from harness.analysis.scaling import ratio
from harness.analysis.tables import BUBBLE, FLOP_RATE, MARK, MODEL, PERCENT, RANKS, RUNS, TERA, measured
from harness.experiment.claims import Check, Claim, Evidence, Row, tally
from harness.experiment.published import published
from harness.records.frames import rows_of
from harness.records.measures import IN_THE_PLAN, about, frame, size_name
from harness.records.measures import combine as combine_repeats
from harness.records.record import Record, point
from harness.records.store import SIMULATED
from impl.cost.flops import hardware_flops, model_flops
from impl.cost.parameters import count_parameters
from impl.run import Run

Printed = Mapping[Any, Any]
"""Row of a file in `harness/experiment/published`."""
RATE_UNIT = "TFLOP/s per GPU"
MIB = 2**20
POINTS = 0.05
"""Largest distance of a relative speed from the published one to count as equal; assumed, as devices differ."""
COLUMNS = {
    "ranks": RANKS,
    "tp": Column(key="tp", header="tp"),
    "pp": Column(key="pp", header="pp"),
    "dp": Column(key="dp", header="dp"),
    "schedule": Column(key="schedule", header="schedule", text=True),
    "chunks": Column(key="chunks", header="chunks"),
    "scatter_gather": Column(key="scatter_gather", header="scatter/gather", text=True),
    "zero_stage": Column(key="zero_stage", header="ZeRO stage"),
    "microbatch": Column(key="microbatch", header="microbatch"),
    "global_batch": Column(key="global_batch", header="global batch"),
}
SENT = (
    Column(key="pp_bytes_sent", header="sent to other stages", unit="MiB", si="B", scale=MIB, digits=3),
    Column(key="tp_bytes_sent", header="sent within layers", unit="MiB", si="B", scale=MIB, digits=3),
)
PREDICTED = Column(key="predicted_bubble", header="simulated", unit="%", si="fraction", scale=PERCENT, digits=3)
RELATIVE = Column(
    key="relative", header="relative", unit="%", si="fraction", scale=PERCENT, digits=3, interval="relative_half_width"
)
COUNTED = Column(
    key="counted_rate", header="rate, recomputation counted", unit="TFLOP/s", si="FLOP/s", scale=TERA, digits=3
)
COUNTED_ALIKE = "Recomputation counted: ours as the paper's, by equation 3; these two are to be compared."
PRINTED = (
    Column(
        key="published_rate", header="published, recomputation counted", unit="TFLOP/s", si="FLOP/s", scale=TERA,
        digits=3,
    ),
    Column(key="published_relative", header="published, relative", unit="%", si="fraction", scale=PERCENT, digits=3),
)  # fmt: skip
MEASURES = (
    FLOP_RATE.key, "tokens_per_second", "bubble", "predicted_bubble", "pipeline_seconds", "predicted_pipeline_seconds",
    "microbatches_in_flight", "in_flight_bytes", *(column.key for column in SENT),
)  # fmt: skip


def combine(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the points of timed runs, repeats combined."""
    if not rows.empty:
        rows = pd.DataFrame(rows[(rows["status"] == "ok") & rows[FLOP_RATE.key].notna()]).drop_duplicates("id")
    return combine_repeats(rows, ("point", "source", "device_name"), MEASURES) if len(rows) else []


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Published figure of rates per GPU: the runs of its points, and how they are compared."""

    paper: str
    """Name of the paper in `harness.experiment.published`."""
    where: str
    name: str
    """Name of the table."""
    title: str
    run_of: Callable[[Printed], Run]
    shown: tuple[str, ...]
    """Fields of a point that vary, of COLUMNS; the last is the horizontal axis unless `at` is given."""
    baseline: Callable[[Row], Any]
    """Function of a row whose smallest value in a group marks the baseline of relative speeds."""
    relative_to: str
    group: tuple[str, ...] = ("global_batch",)
    """Fields that compared points have in common."""
    line: tuple[str, ...] = ("global_batch",)
    at: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    hardware: str = "A100s"
    """Hardware of the printed rates."""

    @property
    def runs(self) -> list[Run]:
        """Runs of all points of the figure, in its order."""
        return [run for run, _ in self._points]

    @cached_property
    def printed(self) -> dict[Run, dict[str, Any]]:
        """Rows of the figure's points for the table, by the point of their run."""
        made = {point(run): self._row(run, rate) for run, rate in self._points}
        for row in made.values():
            group = [other for other in made.values() if self._same_group(row, other)]
            row["published_relative"] = row["published_model_rate"] / min(group, key=self.baseline)[FLOP_RATE.key]
        return {key: {**row, FLOP_RATE.key: math.nan} for key, row in made.items()}

    @cached_property
    def _points(self) -> list[tuple[Run, float]]:
        rows = published(self.paper).query("where == @self.where and unit == @RATE_UNIT").to_dict("records")
        return [(self.run_of(row), row["value"] * TERA) for row in rows]

    def _row(self, run: Run, rate: float) -> dict[str, Any]:
        """Return the columns of a record's row; the rate in model FLOPs is the printed one without recomputed FLOPs."""
        model, batch, plan = run.model, run.train.global_batch, run.plan
        share = model_flops("ptdp", model, batch) / hardware_flops("ptdp", model, batch, recompute="full")
        return {
            **{name: getattr(plan, name) for name in IN_THE_PLAN},
            "model": f"GPT {size_name(count_parameters(model).total)}",
            "global_batch": batch,
            "microbatch": run.train.microbatch,
            "ranks": plan.world_size,
            "published_rate": rate,
            "published_model_rate": rate * share,
            FLOP_RATE.key: rate * share,
        }

    def _same_group(self, a: Row, b: Row) -> bool:
        return all(a[name] == b[name] for name in self.group)

    def compared(self, rows: pd.DataFrame) -> list[dict[Any, Any]]:
        """Return the points of timed runs, relative to their group's baseline on one device; NaN if oversubscribed."""
        points = combine(rows)
        out = []
        for row in points:
            group = [other for other in points if self._same_group(row, other) and not other["oversubscribed"]]
            group = [other for other in group if other["device_name"] == row["device_name"]]
            baseline = min(group, key=self.baseline, default=None)
            estimate = ratio(row, baseline, FLOP_RATE.key) if baseline else None
            relative = estimate.mean if estimate else math.nan
            width = math.nan if estimate is None or estimate.half_width is None else estimate.half_width
            beside = self.printed.get(row["point"], {})
            both = {column.key: beside.get(column.key, math.nan) for column in PRINTED}
            counted = {COUNTED.key: as_the_paper_counts(row)}
            out.append({**row, "relative": relative, "relative_half_width": width, **counted, **both})
        return out

    def known(self, rows: Sequence[Row]) -> list[dict[Any, Any]]:
        """Return the compared points whose relative speed is known."""
        return [row for row in self.compared(pd.DataFrame(list(rows))) if not math.isnan(row["relative"])]

    def groups(self, rows: Sequence[Row]) -> list[list[dict[Any, Any]]]:
        """Return the known points in groups of two or more, each on one device."""
        found: dict[tuple[Any, ...], list[dict[Any, Any]]] = {}
        for row in self.known(rows):
            found.setdefault((row["device_name"], *(row[name] for name in self.group)), []).append(row)
        return [group for _, group in sorted(found.items()) if len(group) > 1]

    def table(self, records: Sequence[Record]) -> Table:
        """Return the table of our points, then of the figure's; a point of the figure that was run here is one row."""
        title = f"{self.title}{about(records)}"
        ours = self.compared(frame(records))
        if not ours:
            return Table(self.name, title, (), pd.DataFrame())
        order = lambda row: tuple(str(row[name]).zfill(9) for name in (*self.line, *self._axis()))
        there = {row["point"] for row in ours}
        absent = [row for key, row in self.printed.items() if key not in there]
        rows = pd.DataFrame([*sorted(ours, key=order), *absent])
        rows["scatter_gather"] = ["on" if is_on else "off" for is_on in rows["scatter_gather"]]
        rows["line"], rows["at"] = (
            [self._text(row, names) for row in rows_of(rows)] for names in (self.line, self._axis())
        )
        rows["device_name"] = rows["device_name"].fillna(rows["device_name"].iloc[0])
        rows["oversubscribed"] = rows["oversubscribed"].eq(True)
        for column, degree in zip(SENT, ("pp", "tp"), strict=True):
            rows[column.key] = rows[column.key].where(rows[degree] > 1)  # a single rank sends nothing
        columns = (
            MODEL, RANKS, *(COLUMNS[name] for name in self.shown), FLOP_RATE, RELATIVE, COUNTED, *PRINTED, BUBBLE,
            PREDICTED, *SENT, RUNS, MARK,
        )  # fmt: skip
        notes = [COUNTED_ALIKE] if any(rows[COUNTED.key].notna()) else []
        return measured(self.name, title, columns, rows, [*self._notes(), *notes, *self.notes])

    def _axis(self) -> tuple[str, ...]:
        return self.at or self.shown[-1:]

    def _text(self, row: Row, names: Iterable[str]) -> str:
        return ", ".join(row[name] if name == "model" else f"{COLUMNS[name].header} {row[name]}" for name in names)

    def _notes(self) -> list[str]:
        where = f"{self.where}, read off the plot," if self.where.startswith("figure") else self.where
        return [
            "Rates: ours counts model FLOPs (palm_12), the operations that training needs. Published: the paper's "
            f"{where} on {self.hardware}; it counts the recomputed forward pass (equation 3), so these two are not to "
            f"be compared. Relative: to {self.relative_to}, ours and published in model FLOPs.",
            "Bubble: idle over computing time of all pipeline ranks in the last step; simulated: the same schedule "
            "with the run's own median times, and transfers that take none. Sent: the busiest rank's bytes in a step.",
        ]


def as_the_paper_counts(row: Row) -> float:
    """Return a device's FLOP/s with the recomputed forward pass, by PTD-P's equation 3; NaN if not all recomputed."""
    run: Run = row["point"]
    if run.plan.recompute != "full" or run.model.vocab_size is None:
        return math.nan
    flops = hardware_flops("ptdp", run.model, run.train.global_batch, recompute="full")
    return flops * row["tokens_per_second"] / run.tokens_per_step / row["ranks"]


def as_published(figure: Figure) -> Check:
    """Return a check that the points have the figure's relative speeds, within POINTS; baselines are not counted."""

    def check(rows: Sequence[Row]) -> Evidence | None:
        ours = [row for group in figure.groups(rows) for row in group if not math.isnan(row["published_relative"])]
        off = [
            abs(row["relative"] - row["published_relative"])
            for row in ours
            if (row["relative"], row["published_relative"]) != (1, 1)
        ]
        if not off:
            return None
        return tally([one <= POINTS for one in off], "points", f"furthest {100 * max(off):.1f} points off")

    return check


def rates_near(figure: Figure, within: float, fitted: Collection[str] = ()) -> Check:
    """Return a check that the rates, recomputation counted, are the figure's within a share of them.

    A claim with this check names its hardware.

    Args:
        fitted: models, as tables name them, that a system's constants were fitted to: their simulation is no evidence.
    """

    def check(rows: Sequence[Row]) -> Evidence | None:
        points = [row for row in figure.compared(pd.DataFrame(list(rows))) if not math.isnan(row["published_rate"])]
        fair = [row for row in points if row["source"] != SIMULATED or row["model"] not in fitted]
        off = [row[COUNTED.key] / row["published_rate"] - 1 for row in fair if not math.isnan(row[COUNTED.key])]
        furthest = max(off, key=abs, default=0.0)
        return tally((abs(one) <= within for one in off), "points", f"furthest {furthest:+.1%} off")

    return check


def ordered(figure: Figure, along: str, *, falls: bool = True, by: float = 0.0) -> Check:
    """Return a check that speed falls, or rises, with a field in every group, at every step by over this share."""

    def check(rows: Sequence[Row]) -> Evidence | None:
        lines = [sorted(group, key=lambda row: row[along]) for group in figure.groups(rows)]
        lines = [line for line in lines if line[0][along] != line[-1][along]]
        steps = [(a["relative"], b["relative"]) for line in lines for a, b in pairwise(line)]
        held = [a > b * (1 + by) if falls else b > a * (1 + by) for a, b in steps]
        return tally(held, "steps", "; ".join(shown(line, along) for line in lines))

    return check


def ends(figure: Figure, along: str) -> Check:
    """Return a check that in every group the smallest value of a field is fastest, and the largest slowest."""

    def check(rows: Sequence[Row]) -> Evidence | None:
        lines = [sorted(group, key=lambda row: row["relative"]) for group in figure.groups(rows)]
        held = [
            (line[-1][along], line[0][along]) == (min(row[along] for row in line), max(row[along] for row in line))
            for line in lines
        ]
        return tally(held, "batches", "; ".join(shown(line[::-1], along) for line in lines))

    return check


def faster_at_larger_batch(figure: Figure) -> Check:
    """Return a check that every layout is faster at a larger batch."""

    def check(rows: Sequence[Row]) -> Evidence | None:
        layouts: dict[tuple[Any, ...], list[dict[Any, Any]]] = {}
        for row in sorted(figure.known(rows), key=lambda row: row["global_batch"]):
            layouts.setdefault(tuple(row[name] for name in ("device_name", "tp", "pp", "dp")), []).append(row)
        pairs = [(a, b) for layout in layouts.values() for a, b in pairwise(layout)]
        if not pairs:
            return None
        gains = sorted(b[FLOP_RATE.key] / a[FLOP_RATE.key] for a, b in pairs)
        numbers = f"{gains[0]:.3f} to {gains[-1]:.3f} times as fast as at the next smaller batch"
        return tally([gain > 1 for gain in gains], "pairs", numbers)

    return check


def shown(line: Sequence[Row], *along: str) -> str:
    """Return the relative speeds of a group as text: `batch 8: 100% (pp 1), 86% (pp 2)`."""
    numbers = (f"{row['relative']:.0%} ({' '.join(f'{name} {row[name]}' for name in along)})" for row in line)
    return f"batch {line[0]['global_batch']}: {', '.join(numbers)}"


def in_print(figure: Figure, *along: str) -> str:
    """Return the figure's relative speeds as text, in the format of `shown`."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in figure.printed.values():
        line = {**row, "relative": row["published_relative"]}
        groups.setdefault(tuple(row[name] for name in figure.group), []).append(line)
    lines = [sorted(group, key=lambda row: tuple(row[name] for name in along)) for _, group in sorted(groups.items())]
    return "; ".join(shown(line, *along) for line in lines)


def as_simulated(rows: Sequence[Row]) -> Evidence | None:
    """Check that pipelined steps last as long as simulated with their own times, within a tenth."""
    found = combine(pd.DataFrame(list(rows)))
    found = [row for row in found if not math.isnan(row["pipeline_seconds"]) and not row["oversubscribed"]]
    if not found:
        return None
    ratios = sorted(row["pipeline_seconds"] / row["predicted_pipeline_seconds"] for row in found)
    numbers = f"{ratios[0]:.3f} to {ratios[-1]:.3f} of the simulated time"
    return tally([abs(one - 1) <= 0.1 for one in ratios], "points", numbers)


AS_SIMULATED = Claim(
    text="a step lasts as long as its schedule says, simulated with the run's own times, within 10%",
    source="our own",
    check=as_simulated,
)
