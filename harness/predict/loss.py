"""Forecast of a run's final loss, by a scaling law that is fitted to finished runs before the run begins."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np

from harness.analysis.placement_laws import points_of
from harness.analysis.scaling_law import CONSTANTS, Fitted, Observation, can_fit, fitted
from harness.experiment.forecasts import TAILS
from harness.experiment.placements import CLOSE
from harness.records.parts import HELD_OUT, LossForecast
from harness.records.record import Record
from impl.run import Run


@dataclass(frozen=True, kw_only=True)
class Coming:
    """Run that has not begun, with what its model and its data are known to be."""

    run: Run
    parameters: int
    """Parameters of its model."""
    vocabulary: int
    """Rows of its token embedding."""
    data_sha256: str
    """Hash of its token folder."""

    def is_like(self, record: Record) -> bool:
        """Return True if a finished run may share a law with it: only size, training and layout may differ.

        Family, norm placement, context, vocabulary, data, held-out sequences and the rate's decay are the same.
        """
        data, vocabulary = record.resolved.data, record.resolved.vocab_size
        is_data = data is not None and data.sha256 == self.data_sha256
        return is_data and vocabulary == self.vocabulary and family_of(record.run) == family_of(self.run)


def family_of(run: Run) -> tuple[object, ...]:
    """Return the fields that runs of one law share, besides their data and vocabulary."""
    model, evaluation = run.model, run.evaluation
    return model.family, model.norm_placement, run.train.decay, model.seq_len, evaluation.sequences, evaluation.overlap


def loss_forecast(coming: Coming, finished: Iterable[Record]) -> LossForecast | str | None:
    """Return the forecast of the loss that a run ends with; the reason, if a law can be fitted and gives none.

    Args:
        finished: records of the run's experiment and tier; those that failed or diverged are left out.

    Returns:
        None if too few of them are like the run for a law.
    """
    points = tuple(sorted(_points(coming, finished)))
    if not can_fit(points):
        return None
    law = fitted(points)
    none = f"no forecast of the loss ({coming.run.model.family}, {coming.run.model.norm_placement})"
    if law.off > CLOSE:
        return f"{none}: {_runs(points)} finished runs are {law.off:.1%} off their law, over {CLOSE:.0%}"
    low, nats, high = interval(law, coming.parameters, coming.run.train.steps * coming.run.tokens_per_step)
    if not all(map(math.isfinite, (low, nats, high))):
        return f"{none}: no model size has a second finished run, so that the law's scatter is unknown"
    return LossForecast(nats, low, high, _runs(points), law.off, datetime.now(UTC).isoformat(timespec="seconds"))


def interval(law: Fitted, parameters: float, tokens: float) -> tuple[float, float, float]:
    """Return a new run's loss by a law, between the ends of the interval that should hold nine of ten such runs.

    Two independent doubts are added as squares, in logarithms of the loss, to each side. The law's own: from its loss
    to the quantile of TAILS of the laws of resampled runs. The run's: Student's quantile times the standard deviation
    of the losses around the law, whose degrees of freedom are the runs less the law's constants, at least 1, as the
    points of a run are not independent. Whether the law holds as far as that is not in the interval.
    """
    from scipy.special import stdtrit  # the import takes a third of a second

    loss = float(law.law.loss(parameters, tokens))
    resampled = np.quantile(np.asarray(law.resampled.loss(parameters, tokens), float), TAILS)
    runs = _runs(law.points)
    spare = max(runs - CONSTANTS, 1)
    own = float(stdtrit(spare, TAILS[1])) * law.off * math.sqrt(runs / spare)
    below, above = (max(side * math.log(float(end) / loss), 0.0) for side, end in zip((-1, 1), resampled, strict=True))
    return loss * math.exp(-math.hypot(below, own)), loss, loss * math.exp(math.hypot(above, own))


def _points(coming: Coming, finished: Iterable[Record]) -> Iterable[Observation]:
    """Yield the points of the law that runs like this one give."""
    for one in finished:
        if one.status == "ok" and not one.has_diverged and coming.is_like(one):
            for (name, _), course in one.courses.items():
                if name == HELD_OUT:
                    yield from (point for point in points_of(one, course) if point.parameters > 0 and point.loss > 0)


def _runs(points: Sequence[Observation]) -> int:
    return len({point.run for point in points})
