"""Accuracies of answers to the questions of an exam: by size, from pretrained weights or not, against guessing."""

import math
from collections.abc import Sequence

from harness.experiment.checks import rises
from harness.experiment.claims import Evidence, less, means, tally
from harness.records.measures import size_name
from harness.records.record import Record
from harness.records.statistics import Estimate
from impl.data.config import OPTIONS, SYNTHETIC

GUESSING = 1 / OPTIONS
ERRORS = 3
"""Standard errors by which an accuracy must exceed guessing to show that a model has learned something."""
TEST = "RACE test"


def accuracy(record: Record, name: str = TEST) -> float:
    return next((last.accuracy for last in record.last_evaluations if last.name == name), math.nan)


def accuracies(records: Sequence[Record], name: str = TEST, *, pretrained: bool = True) -> dict[float, Estimate]:
    """Return mean accuracy over seeds by number of parameters, from small to large."""
    ours = (record for record in records if (record.run.start is not None) is pretrained)
    return dict(sorted(means((record.parameters, accuracy(record, name)) for record in ours).items()))


def said(found: dict[float, Estimate]) -> str:
    return ", ".join(f"{value:.1%} ({size_name(round(size))})" for size, value in found.items())


def rises_with_size(records: Sequence[Record]) -> Evidence | None:
    found = accuracies(records)
    return rises(list(found.values()), "steps in size", said(found))


def on_race(records: Sequence[Record]) -> list[Record]:
    """Return runs on RACE's own questions: the difficulty of other questions is our own choice."""
    return [record for record in records if record.run.data.race not in (None, SYNTHETIC)]


def both(a: dict[float, Estimate], b: dict[float, Estimate]) -> list[tuple[Estimate, Estimate, str]]:
    """Return the two accuracies of each model that has both, with the size of the model."""
    return [(a[size], b[size], size_name(round(size))) for size in sorted(a.keys() & b.keys())]


def by_school(records: Sequence[Record]) -> list[tuple[Estimate, Estimate, str]]:
    return both(*(accuracies(on_race(records), f"{TEST} {level}") for level in ("middle", "high")))


def by_start(records: Sequence[Record]) -> list[tuple[Estimate, Estimate, str]]:
    return both(accuracies(records), accuracies(records, pretrained=False))


def is_larger(ours: Estimate, theirs: Estimate, _: str) -> bool | Estimate:
    return less(theirs, ours)


def beats_guessing(records: Sequence[Record]) -> Evidence | None:
    found = accuracies(records)
    asked = [last.total for record in records for last in record.last_evaluations if last.name == TEST and last.total]
    if not asked:
        return None
    least = GUESSING + ERRORS * math.sqrt(GUESSING * (1 - GUESSING) / min(asked))
    return tally([less(least, value) for value in found.values()], "models", f"{said(found)}; needed {least:.1%}")
