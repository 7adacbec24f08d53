"""Loss on held-out texts by model size and tokens of training, each size at its own best learning rate."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from harness.analysis.columns import MODEL, of_run
from harness.analysis.points import Measure, Point, points
from harness.analysis.render import Column, Table
from harness.analysis.tables import RUNS
from harness.analysis.tabulate import tabulate
from harness.experiment.by_size import with_size
from harness.experiment.claims import Check, Evidence, tally
from harness.figures.style import mark, panels
from harness.records.measures import about, size_name
from harness.records.parts import HELD_OUT, Evaluation
from harness.records.record import Record
from harness.records.statistics import Estimate, slope
from impl.grouping import by_key

BOOKS, WIKITEXT, LAMBADA = "books.test.txt", "wikitext2.test.txt", "lambada"
PER_TOKEN: Callable[[Evaluation], float] = lambda last: last.per("tokens")
PER_WORD: Callable[[Evaluation], float] = lambda last: last.per("words")
BITS: Callable[[Evaluation], float] = lambda last: last.bits_per_byte
ON_THE_WAY = (HELD_OUT, PER_TOKEN, "validation text", "nats a token")
MEASURED = (
    (BOOKS, PER_TOKEN, "held-out books", "nats a token"),
    (WIKITEXT, BITS, "WikiText-2", "bits a byte"),
    (LAMBADA, PER_WORD, "LAMBADA's last words", "nats a word"),
)
"""Name of each held-out text, its measure, what it is called, and the measure's unit."""


def last(name: str, of: Callable[[Evaluation], float]) -> Measure:
    """Return a measure of a record: of its last evaluation of a text; infinite if the run diverged."""

    def measure(record: Record) -> float:
        found = [of(one) for one in record.last_evaluations if one.name == name]
        return math.inf if record.has_diverged else found[0] if found else math.nan

    return measure


def tokens(record: Record) -> int:
    """Return the tokens that a run trains on."""
    return record.run.train.steps * record.run.tokens_per_step


def at_best_rate(records: Sequence[Record]) -> list[Record]:
    """Return the runs of each size at the rate with the lowest validation loss, that of the fewest tokens and seed 0.

    The validation text is not one of those that results are measured on.
    """
    valid, best = last(HELD_OUT, PER_TOKEN), {}
    known = [one for one in records if not math.isnan(valid(one))]
    for one in sorted(known, key=lambda one: (tokens(one), one.run.seed, valid(one))):
        best.setdefault(one.parameters, one.run.train.lr)
    return [one for one in known if one.run.train.lr == best[one.parameters]]


def by_tokens(records: Sequence[Record]) -> dict[int, list[Record]]:
    """Return the runs at their sizes' best rates by tokens of training, the fewest first."""
    return by_key((tokens(one), one) for one in sorted(at_best_rate(records), key=tokens))


def falls(name: str, of: Callable[[Evaluation], float], unit: str) -> Check:
    """Return a check that a loss falls with size after the most tokens; None until both arms have run in full."""

    def check(records: Sequence[Record]) -> Evidence | None:
        arms = by_tokens(records)
        if not _are_whole(arms, records):
            return None
        return with_size(of, name, unit)(arms[max(arms)])

    return check


def _are_whole(arms: dict[int, list[Record]], records: Sequence[Record]) -> bool:
    """Return True if the arm with the most tokens has every size: no claim is judged by a part of it."""
    return len(arms) > 1 and {one.parameters for one in records} == {one.parameters for one in arms[max(arms)]}


def _slope(records: Iterable[Record]) -> Estimate:
    """Return the exponent of loss on held-out books over parameters."""
    measure = last(BOOKS, PER_TOKEN)
    values = [(one.parameters, measure(one)) for one in records]
    return slope([(math.log(size), math.log(value)) for size, value in values if math.isfinite(value)])


def falls_faster_with_more_tokens(records: Sequence[Record]) -> Evidence | None:
    """Judge whether loss falls faster with size after the most tokens than after the fewest."""
    arms = by_tokens(records)
    if not _are_whole(arms, records):
        return None
    few, many = (_slope(arms[pick(arms)]) for pick in (min, max))
    if math.isnan(few.mean) or math.isnan(many.mean):
        return None
    numbers = (
        f"exponent {one:.3f} after {size_name(count)}"
        for one, count in zip((few, many), (min(arms), max(arms)), strict=True)
    )
    return tally([few - many], "", "; ".join(numbers))


def largest_is_worse(records: Sequence[Record]) -> Evidence | None:
    """Judge whether the largest model is worse on held-out books than another after the fewest tokens."""
    arms, measure = by_tokens(records), last(BOOKS, PER_TOKEN)
    found = sorted(points(arms[min(arms)], measure), key=lambda one: one.parameters) if arms else []
    if len(found) < 2:
        return None
    *others, largest = (one.estimate(measure) for one in found)
    best = min(others, key=lambda one: one.mean)
    return tally([largest - best], "", f"{largest:.3f} ({found[-1].model}), best other {best:.3f} nats a token")


def table(records: Sequence[Record]) -> Table:
    """Tabulate losses on held-out texts by size and tokens of training."""
    measures = [(last(name, of), header, unit) for name, of, header, unit in (ON_THE_WAY, *MEASURED)]
    columns = (
        MODEL, Column(key="trained", header="tokens", of=lambda one: size_name(tokens(one.records[0])), text=True),
        of_run("lr", "lr", lambda run: f"{run.train.lr:g}"),
        *(
            Column(key=f"loss_{i}", header=header, unit=unit, si=unit, of=lambda one, measure=m: one.estimate(measure))
            for i, (m, header, unit) in enumerate(measures)
        ),
        RUNS,
    )  # fmt: skip
    found = [one for own in by_tokens(records).values() for one in points(own, measures[0][0])]
    note = (
        "Each size at the rate with the lowest validation loss after the fewest tokens (seed 0), which other books "
        "than the held-out ones give. ± is the half-width of the 95% t-interval over n seeds."
    )
    title = f"Loss by model size and tokens{about(records)}"
    return tabulate("loss_by_size", title, columns, found, (note,), is_timed=False)


def figure(records: Sequence[Record]) -> Any:
    """Draw each loss against parameters: a panel a text, a line for each number of tokens, a dot a run."""
    arms = by_tokens(records)
    if not any(len({one.parameters for one in own}) > 1 for own in arms.values()):
        return None
    texts = {one.name for record in records for one in record.evaluations}
    shown = [one for one in (ON_THE_WAY, *MEASURED) if one[0] in texts]
    made, axes = panels(len(shown))
    for ax, (name, of, header, unit) in zip(axes, shown, strict=True):
        measure = last(name, of)
        for i, (count, own) in enumerate(arms.items()):
            _line(ax, points(own, measure), measure, {"label": f"{size_name(count)} tokens"} | mark(i))
        ax.set(title=header, xlabel="parameters", ylabel=unit, xscale="log")
        sizes = sorted({one.parameters for own in arms.values() for one in own})
        ax.set_xticks(sizes, [size_name(round(size)) for size in sizes])
        ax.minorticks_off()
        ax.legend()
    made.suptitle(f"Loss by model size, with 95% intervals over seeds{about(records)}")
    return made


def _line(ax: Any, found: Sequence[Point], measure: Measure, style: dict[str, Any]) -> None:
    """Draw the means with their intervals, and each run."""
    found = sorted((one for one in found if math.isfinite(one.mean(measure))), key=lambda one: one.parameters)
    means = [one.estimate(measure) for one in found]
    sizes = [one.parameters for one in found]
    ax.errorbar(sizes, [one.mean for one in means], yerr=[one.half_width or 0 for one in means], capsize=3, **style)
    runs = [(one.parameters, measure(record)) for one in found for record in one.records]
    if runs:
        ax.plot(*zip(*runs, strict=True), ".", color=style["color"], alpha=0.5, markersize=4)
