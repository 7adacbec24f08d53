"""Comparison of layouts' rates with a published figure: its points as runs, one table, checks on relative speed."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from typing import Any

from harness.analysis import columns
from harness.analysis.columns import BATCH, MODEL, PP_SENT, RANKS, TP_SENT, printed, share, value, values
from harness.analysis.points import Measure, Point, points, relative
from harness.analysis.render import Column, Table
from harness.analysis.tables import BUBBLE, FLOP_RATE, MARK, RUNS, TERA
from harness.analysis.tabulate import tabulate
from harness.experiment.checks import all_hold, known, larger, largest, within_points, within_share
from harness.experiment.claims import Check, Claim, Evidence, Part, Tolerance, tally
from harness.experiment.published import published
from harness.records.measures import about, size_name
from harness.records.record import Record, point
from harness.records.statistics import UNKNOWN, Estimate
from impl.cost.flops import hardware_flops, model_flops
from impl.cost.parameters import count_parameters
from impl.grouping import by_key
from impl.run import Run

Printed = Mapping[Any, Any]
"""Row of a file in `harness/experiment/published`."""
RATE_UNIT = "TFLOP/s per GPU"
POINTS = Tolerance(0.05, "devices and software differ from the paper's; plots are read to 1 point", "2026-11-21")
"""Largest distance of a relative speed from the published one."""
RELATIVE = share("relative", "relative", relative)
PRINTED_RATE = printed("published_rate", "published, recomputation counted", "TFLOP/s", TERA, "FLOP/s")
PRINTED_RELATIVE = share("published_relative", "published, relative", lambda point: point.printed.get("relative"))
BUBBLE_NOTE = (
    "Bubble: idle over computing time of all pipeline ranks in the last step, of a predicted step with its transfers; "
    "beside a measured one, simulated: the same schedule with the run's own median times, and transfers that take none."
)
COUNTED_ALIKE = "Recomputation counted: ours as the paper's, by equation 3; these two are to be compared."
flop_rate: Measure = attrgetter("flop_rate")


def rate_with_recomputation(point: Point) -> Estimate:
    """Return a device's FLOP/s with the recomputed forward pass, by PTD-P's equation 3; NaN if not all recomputed."""
    run = point.run
    if run.plan.recompute != "full" or run.model.vocab_size is None:
        return UNKNOWN
    flops = hardware_flops("ptdp", run.model, run.train.global_batch, recompute="full")
    rate = point.estimate(lambda record: record.tokens_per_second)
    return rate.scaled(flops / run.tokens_per_step / run.plan.world_size)


COUNTED = Column(
    key="counted_rate", header="rate, recomputation counted", unit="TFLOP/s", si="FLOP/s", scale=TERA, digits=3,
    of=lambda point: rate_with_recomputation(point).mean,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Points of a paper's figure or table: their runs, and how their speeds are compared."""

    paper: str
    """Name of the paper in `harness.experiment.published`."""
    where: str
    """Figure, table or section of the paper."""
    name: str
    """Name of the table."""
    title: str
    run_of: Callable[[Printed], Run]
    """Function of a printed row that returns its run."""
    shown: tuple[Column, ...]
    """Fields of a run that vary, as columns; the last is the horizontal axis unless `at` is given."""
    relative_to: str
    """Description of the points whose speed is 1, for the table's note, as `one chunk a rank at the same batch`."""
    baseline: Callable[[Point], Any] | None = None
    """Function of a point whose smallest value in a group marks the baseline; None for the fastest point."""
    group: tuple[Column, ...] = (BATCH,)
    """Fields that compared points have in common."""
    line: tuple[Column, ...] = (BATCH,)
    """Fields that points of one line of the figure have in common."""
    at: tuple[Column, ...] = ()
    notes: tuple[str, ...] = ()
    hardware: str = "A100s"
    """Hardware of the printed rates."""
    more: tuple[Column, ...] = (PP_SENT, TP_SENT)
    """Further columns of the table, after those of rates and bubbles."""

    @property
    def runs(self) -> list[Run]:
        """Runs of all points of the figure, in its order."""
        return [run for run, _ in self._rates]

    @cached_property
    def printed(self) -> dict[Run, Point]:
        """Points of the figure with the numbers `published_rate`, `model_rate` and `relative`, by their runs.

        `model_rate` is the printed rate without recomputed FLOPs.
        """
        made = {point(run): self._point(run, rate) for run, rate in self._rates}
        first = {run: self._baseline(one, made.values()) for run, one in made.items()}
        return {
            run: replace(one, printed={**one.printed, "relative": self._speed(one) / self._speed(first[run] or one)})
            for run, one in made.items()
        }

    @cached_property
    def _rates(self) -> list[tuple[Run, float]]:
        rows = published(self.paper).query("where == @self.where and unit == @RATE_UNIT").to_dict("records")
        return [(self.run_of(row), row["value"] * TERA) for row in rows]

    def _point(self, run: Run, rate: float) -> Point:
        model, batch = run.model, run.train.global_batch
        part = model_flops("ptdp", model, batch) / hardware_flops("ptdp", model, batch, recompute="full")
        name = f"GPT {size_name(count_parameters(model))}"
        return Point(point(run), model=name, printed={"published_rate": rate, "model_rate": rate * part})

    def _speed(self, one: Point) -> float:
        """Return the measure of a point that was run, else the printed rate in model FLOPs."""
        return one.mean(flop_rate) if one.records else one.printed["model_rate"]

    def _baseline(self, one: Point, others: Iterable[Point]) -> Point | None:
        """Return the baseline of a point among those of its group on one device that share no cores."""
        group = [
            other
            for other in others
            if values(one, self.group) == values(other, self.group)
            and (one.device, other.is_oversubscribed) == (other.device, False)
        ]
        return min(group, key=self.baseline or (lambda other: -self._speed(other)), default=None)

    def points(self, records: Sequence[Record]) -> list[Point]:
        """Return the timed points, relative to their group's baseline on one device; NaN if oversubscribed."""
        found = points(records, flop_rate)
        out = []
        for one in found:
            first = self._baseline(one, found)
            out.append(replace(one.against(first, flop_rate), printed=self._printed_over(one, first)))
        return out

    def _printed_over(self, one: Point, first: Point | None) -> Mapping[str, float]:
        """Return what is printed for a point, its relative speed over that of the baseline that ours is relative to."""
        there = self.printed.get(one.run)
        base = first and self.printed.get(first.run)
        if there is None or base is None:
            return there.printed if there else {}
        return {**there.printed, "relative": there.printed["relative"] / base.printed["relative"]}

    def known(self, records: Sequence[Record]) -> list[Point]:
        """Return the compared points whose relative speed is known."""
        return known(self.points(records))

    def groups(self, records: Sequence[Record], *, printed: bool = False) -> list[list[Point]]:
        """Return the known points in groups of two or more, each on one device; only the paper's if `printed`."""
        meant = [one for one in self.known(records) if one.printed or not printed]
        found = by_key(((one.device, *values(one, self.group)), one) for one in meant)
        return [group for _, group in sorted(found.items()) if len(group) > 1]

    def lines(self, records: Sequence[Record], along: Column) -> list[list[Point]]:
        """Return the groups whose points differ in a field, in order of that field."""
        lines = [sorted(group, key=lambda one: value(one, along)) for group in self.groups(records)]
        return [line for line in lines if value(line[0], along) != value(line[-1], along)]

    def table(self, records: Sequence[Record]) -> Table:
        """Return the table of our points, then of the figure's; a point of the figure that was run here is one row."""
        ours = self.points(records)
        axis = self.at or self.shown[-1:]
        in_size = lambda one, field: one.parameters if field is MODEL else str(value(one, field)).zfill(9)
        order = lambda one: tuple(in_size(one, field) for field in (*self.line, *axis))
        there = {one.run for one in ours}
        bases = {values(one, self.group): one for one in ours if one.is_baseline and one.printed}
        absent = [
            replace(one, printed=self._printed_over(one, bases.get(values(one, self.group))))
            for run, one in self.printed.items()
            if run not in there
        ]
        counted = any(not math.isnan(rate_with_recomputation(one).mean) for one in ours)
        shown = (
            MODEL, RANKS, *self.shown, FLOP_RATE, RELATIVE, COUNTED, PRINTED_RATE, PRINTED_RELATIVE, BUBBLE,
            columns.PREDICTED_BUBBLE, *self.more, RUNS, MARK,
        )  # fmt: skip
        notes = [*self._notes(), *([COUNTED_ALIKE] if counted else []), *self.notes]
        line, at = self._text("line", self.line), self._text("at", axis)
        title = f"{self.title}{about(records)}"
        return tabulate(self.name, title, shown, [*sorted(ours, key=order), *absent], notes, line=line, at=at)

    def _text(self, key: str, names: Iterable[Column]) -> Column:
        of_one = lambda one, name: one.model if name is MODEL else f"{name.header} {value(one, name)}"
        return Column(key=key, header=key, of=lambda one: ", ".join(of_one(one, name) for name in names))

    def _notes(self) -> list[str]:
        where = f"{self.where}, read off the plot," if self.where.startswith("figure") else self.where
        return [
            "Rates: ours counts model FLOPs (palm_12), the operations that training needs. Published: the paper's "
            f"{where} on {self.hardware}; it counts the recomputed forward pass (equation 3), so these two are not to "
            f"be compared. Relative: to {self.relative_to}, ours and published in model FLOPs.",
            f"{BUBBLE_NOTE} Sent: the busiest rank's bytes in a step.",
        ]

    def direction(self, text: str, check: Check, about: Part | None = None, published: str = "") -> Claim:
        """Return a claim on the direction of the figure's finding."""
        return Claim(text, self.where, check, published, kind="direction", about=about)

    def quantitative(self, text: str, about: Part | None = None) -> Claim:
        """Return the claim that the points have the figure's relative speeds, within POINTS."""
        return Claim(text, self.where, self.near_published, kind="quantitative", about=about, tolerance=POINTS)

    def near_published(self, records: Sequence[Record]) -> Evidence | None:
        """Check that the points have the figure's relative speeds, within POINTS; baselines are not counted."""
        found = (one for group in self.groups(records) for one in group if one.printed)
        pairs = [(one.relative, one.printed["relative"]) for one in found if not one.is_baseline]
        return within_points(pairs, POINTS, "points")

    def rates_near(self, within: float) -> Check:
        """Return a check that the rates, recomputation counted, are the figure's within a share of them.

        A claim with this check names its hardware.
        """

        def check(records: Sequence[Record]) -> Evidence | None:
            known = [one for one in self.points(records) if one.printed]
            pairs = [(rate_with_recomputation(one), one.printed["published_rate"]) for one in known]
            return within_share(pairs, within, "points", digits=1)

        return check

    def ordered(self, along: Column, *, falls: bool = True) -> Check:
        """Return a check that speed falls, or rises, with a field in every group, at every step."""
        steps = lambda line: [(a, b) if falls else (b, a) for a, b in pairwise(line)]
        margins = lambda line: [larger(a, b, flop_rate) for a, b in steps(line)]
        return judged(lambda records: self.lines(records, along), margins, "steps", along)

    def faster(self, along: Column) -> Check:
        """Return a check that every point is faster than its baseline, the one with the least value of a field."""

        def check(records: Sequence[Record]) -> Evidence | None:
            found = self._gains(records, along)
            one = lambda gains: ", ".join(f"{gain - 1:+.0%} ({along.key} {at})" for at, gain in gains.items())
            numbers = "; ".join(f"batch {batch}: {one(gains)}" for batch, gains in sorted(found.items()))
            return tally([gain - 1 for gains in found.values() for gain in gains.values()], "points", numbers)

        return check

    def gain_shrinks(self, along: Column, what: str) -> Check:
        """Return a check that what a point gains over its baseline is smaller at the largest batch than at the least.

        Args:
            along: field that points of a group differ in.
            what: its values, as `numbers of chunks`.
        """

        def check(records: Sequence[Record]) -> Evidence | None:
            found = self._gains(records, along)
            if len(found) < 2:
                return None
            first, last = found[min(found)], found[max(found)]
            both = sorted(set(first) & set(last))
            numbers = [
                f"{along.key} {v}: {first[v] - 1:+.0%} at batch {min(found)}, {last[v] - 1:+.0%} at {max(found)}"
                for v in both
            ]
            margins = [all_hold([first[v] - 1, first[v] / last[v] - 1]) for v in both]
            return tally(margins, what, "; ".join(numbers))

        return check

    def _gains(self, records: Sequence[Record], along: Column) -> dict[int, dict[Any, Estimate]]:
        """Return the relative speed by the value of a field, by global batch; without the baselines."""
        lines = [line for line in self.lines(records, along) if line[0].is_baseline]
        return {line[0].run.train.global_batch: {value(one, along): one.relative for one in line[1:]} for line in lines}

    def ends(self, along: Column) -> Check:
        """Return a check that in every group the smallest value of a field is fastest, and the largest slowest."""
        fastest = lambda line: largest(line[0], line[1:], flop_rate)
        slowest = lambda line: all_hold([larger(one, line[-1], flop_rate) for one in line[:-1]])
        lines = lambda records: [sorted(line, key=lambda one: value(one, along)) for line in self.groups(records)]
        return judged(lines, lambda line: [all_hold([fastest(line), slowest(line)])], "batches", along)

    def inner_is_fastest(self, along: Column) -> Check:
        """Return a check that in no group the smallest or the largest value of a field is fastest."""
        lines = lambda records: [line for line in self.lines(records, along) if len(line) > 2]
        best = lambda line: max(line[1:-1], key=lambda one: one.relative.mean)
        return judged(lines, lambda line: [largest(best(line), (line[0], line[-1]), flop_rate)], "batches", along)

    def fastest(self, along: Column, best: Any, *shown: Column) -> Check:
        """Return a check that of the paper's own points those with this value of a field are fastest in every group."""
        of = lambda line, *, are_best: [one for one in line if (value(one, along) == best) is are_best]
        lines = lambda records: [
            line for line in self.groups(records, printed=True) if of(line, are_best=True) and of(line, are_best=False)
        ]
        first = lambda line: max(of(line, are_best=True), key=lambda one: one.relative.mean)
        margin = lambda line: largest(first(line), of(line, are_best=False), flop_rate)
        return judged(lines, lambda line: [margin(line)], "batches", along, *shown)

    def in_print(self, *along: Column) -> str:
        """Return the figure's relative speeds as text, in the format of `in_words`."""
        of_print = lambda one: replace(one, relative=replace(one.relative, mean=one.printed["relative"]))
        groups = by_key((values(one, self.group), of_print(one)) for one in self.printed.values())
        lines = [sorted(group, key=lambda one: values(one, along)) for _, group in sorted(groups.items())]
        return "; ".join(in_words(line, *along) for line in lines)


def judged(
    lines: Callable[[Sequence[Record]], Sequence[Sequence[Point]]],
    margins: Callable[[Sequence[Point]], Sequence[Estimate]],
    what: str,
    *along: Column,
) -> Check:
    """Return a check of lines of points, with their relative speeds as text.

    Args:
        margins: function of a line that returns by how much each of its comparisons holds.
        what: plural name of the comparisons.
        along: fields of a point that the text names.
    """

    def check(records: Sequence[Record]) -> Evidence | None:
        found = lines(records)
        text = "; ".join(in_words(line, *along) for line in found)
        return tally([margin for line in found for margin in margins(line)], what, text)

    return check


def in_words(line: Sequence[Point], *along: Column) -> str:
    """Return the relative speeds of a group as text: `batch 8: 100% (pp 1), 86% (pp 2)`."""
    where = (" ".join(f"{column.key} {value(one, column)}" for column in along) for one in line)
    numbers = (f"{one.relative.mean:.0%} ({at})" for one, at in zip(line, where, strict=True))
    return f"batch {line[0].run.train.global_batch}: {', '.join(numbers)}"


def relative_to(
    found: Sequence[Point],
    is_first: Callable[[Point], bool],
    measure: Measure,
    place: Callable[[Point], Any] = lambda one: (one.run.engine, one.device),
) -> list[Point]:
    """Return the points relative to the first of their place that `is_first`; NaN where there is none."""
    first = {place(one): one for one in reversed(found) if is_first(one)}
    return [one.against(first.get(place(one)), measure) for one in found]
