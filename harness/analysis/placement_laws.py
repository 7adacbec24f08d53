"""Scaling laws of norm placements: trained models at their end, fitted laws, and what these give for larger models."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import pandas as pd

from harness.analysis.render import Column, Table, shown, texts
from harness.analysis.scaling_law import Fitted, Observation, can_fit, difference, fitted, in_words
from harness.records.measures import about, in_order, model_names, shape, size_name
from harness.records.parts import Evaluation
from harness.records.record import Record
from harness.records.statistics import estimate
from impl.model.norm_placement import PLACEMENTS

BASELINE = "pre"
"""Placement that the others are compared with."""
FITTED_FROM = 0.2
"""Share of the steps that come before the first validation that is fitted: earlier the law does not hold."""
TIMES, TOKENS_PER_PARAMETER = (10, 100, 1000), 20
"""Extrapolation sizes as multiples of the largest model's parameters, and tokens a parameter (Hoffmann et al.)."""
SURE = 0.95
"""Share of the draws that have to agree."""


def validated(records: Sequence[Record], norm: str) -> list[tuple[Record, list[Evaluation]]]:
    """Return the runs of a placement that ended well, each with its validations."""
    own = [one for one in in_order(records) if one.run.model.norm_placement == norm]
    good = [one for one in own if one.status == "ok" and not one.has_diverged]
    return [(one, course) for one in good for (_, kind), course in one.courses.items() if kind == "causal"]


def points_of(run: Record, course: Sequence[Evaluation]) -> list[Observation]:
    """Return the points of the law that a run gives: its validations from FITTED_FROM of its steps on.

    If its learning rate decays, only the last: the earlier ones are not what a run of that length ends with.
    """
    start = FITTED_FROM * course[-1].step if run.run.train.decay == "constant" else course[-1].step
    counted = [one for one in course if one.step >= start]
    return [
        Observation(run.parameters, float(one.step * run.run.tokens_per_step), one.per("tokens"), run.id)
        for one in counted
    ]


def fits(records: Sequence[Record]) -> dict[str, Fitted]:
    """Return the law of every norm placement that has enough models, from FITTED_FROM of their steps on."""
    found: dict[str, Fitted] = {}
    for seed, norm in enumerate(dict.fromkeys((*PLACEMENTS, *(one.run.model.norm_placement for one in records)))):
        points = tuple(point for run, course in validated(records, norm) for point in points_of(run, course))
        if can_fit(points):
            found[norm] = _fitted(tuple(sorted(points)), seed)
    return found


@cache
def _fitted(points: tuple[Observation, ...], seed: int) -> Fitted:
    """Return the law of one placement's points, fitted once; the seed keeps placements' draws independent."""
    return fitted(points, seed=seed)


class End(NamedTuple):
    """Runs of one model after their last step."""

    parameters: float
    tokens: float
    losses: list[float]
    """Loss of each seed."""


def ends(records: Sequence[Record], norm: str) -> dict[str, End]:
    """Return every model of this placement at its end, by name, the smallest first."""
    names = model_names(records)
    found: dict[str, End] = {}
    for run, course in validated(records, norm):
        tokens = float(course[-1].step * run.run.tokens_per_step)
        end = found.setdefault(names[shape(run.run)], End(run.parameters, tokens, []))
        end.losses.append(math.log(course[-1].token_perplexity))
    return dict(sorted(found.items(), key=lambda item: item[1].parameters))


def targets(laws: dict[str, Fitted]) -> list[tuple[float, float]]:
    """Return parameters and tokens that the laws are extrapolated to."""
    largest = max(point.parameters for one in laws.values() for point in one.points)
    return [(times * largest, times * largest * TOKENS_PER_PARAMETER) for times in TIMES]


NATS: dict[str, Any] = {"unit": "nats", "si": "nats"}
SHOWN = (
    *texts(norm="norm", model="parameters"),
    Column(key="tokens", header="tokens", digits=2),
    Column(key="loss", header="loss, measured", interval="loss_half_width", **NATS),
    Column(key="law", header="loss, by the law", **NATS),
    Column(key="low", header="from", **NATS),
    Column(key="high", header="to", **NATS),
    Column(key="over", header=f"over {BASELINE}, by the law", digits=3, **NATS),
    Column(key="over_low", header=f"over {BASELINE}, from", digits=3, **NATS),
    Column(key="over_high", header=f"over {BASELINE}, to", digits=3, **NATS),
    Column(key="above", header=f"draws above {BASELINE}", unit="%", si="fraction", scale=0.01, digits=3),
    Column(key="n", header="n"),
)


def table(records: Sequence[Record]) -> Table:
    """Tabulate losses of trained and of larger models, measured and by each placement's law, with its certainty."""
    title, laws = f"Loss by size, data and norm placement{about(records)}", fits(records)
    if not laws:
        return Table("layernorm_scaling_law", title, (), pd.DataFrame())
    found = []
    for norm in laws:
        for end in ends(records, norm).values():
            mean = estimate(end.losses)
            ran = {"loss": mean.mean, "loss_half_width": mean.half_width, "n": mean.n}
            found.append(_row(norm, laws, end.parameters, end.tokens) | ran)
        found += [_row(norm, laws, *target) for target in targets(laws)]
    made = pd.DataFrame(found).astype({"loss": float, "loss_half_width": float})
    notes = (
        "Loss: nats per token of held-out text. n: seeds; ± is the half-width of their 95% t-interval. Rows without n "
        f"are extrapolations, to {TOKENS_PER_PARAMETER} tokens a parameter.",
        *(f"{norm}: {in_words(one)}" for norm, one in laws.items()),
        f"From, to: {SURE:.0%} of {len(next(iter(laws.values())).resampled.E)} fits to runs drawn anew, of every size "
        "with replacement. They say how the seeds scatter, not whether the law holds that far.",
    )
    return Table("layernorm_scaling_law", title, shown(SHOWN, made), made, notes)


def _row(norm: str, laws: dict[str, Fitted], parameters: float, tokens: float) -> dict[str, Any]:
    one = laws[norm]
    low, high = one.interval(lambda law: law.loss(parameters, tokens))
    known = {"norm": norm, "model": size_name(round(parameters)), "tokens": tokens}
    known |= {"law": one.law.loss(parameters, tokens), "low": low, "high": high}
    if norm == BASELINE or BASELINE not in laws:
        return known
    over = difference(one, laws[BASELINE], parameters, tokens)
    return known | {"over": over.mean, "over_low": over.low, "over_high": over.high, "above": over.above}
