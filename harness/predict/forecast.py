"""Forecasts of a run, made before it begins and kept in its record: seconds of a step, and the loss at its end."""

from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime

from harness.predict.interval import interval
from harness.predict.simulation import given_by, predicted_seconds, simulated
from harness.records.labels import FIELDS
from harness.records.parts import Forecast
from harness.records.record import Record
from harness.records.store import FINISHED, Document, Store
from impl.cost.parameters import count_parameters
from impl.data.tokens import TokenFolder
from impl.errors import InputError
from impl.run import Run
from impl.simulator.system import System


class Forecasts:
    """Forecasts of the runs of one experiment and tier, each from what is known when it is asked for.

    Args:
        store: store of their records, whose finished runs a law of the loss is fitted to.
        system: system for which steps are predicted; None for no forecasts at all.
        say: function that shows a line.
    """

    def __init__(self, store: Store, system: System | None, say: Callable[[str], None]) -> None:
        self.store, self.system, self.say = store, system, say
        self._finished: dict[str, Record] = {}
        """Finished records that have been read, by id."""
        self._said = set[tuple[object, ...]]()
        """Families of runs for which a reason for no forecast has been shown; it would be another after every run."""

    def of(self, run: Run, data: TokenFolder) -> tuple[Document | None, Document | None]:
        """Return the forecasts of a valid run's step and of its final loss, each None if it cannot be made."""
        if self.system is None:
            return None, None
        return forecast_of(run, self.system), self._loss(run, data)

    def _loss(self, run: Run, data: TokenFolder) -> Document | None:
        """Return the forecast of the final loss; None if no law gives one, with a line if the runs reject the law."""
        from harness.predict.loss import Coming, family_of, loss_forecast  # only sweeps with forecasts pay for it

        for path in self.store.recorded.glob("*.json"):
            if path.stem not in self._finished and (record := self.store.read(path.stem)):
                self._finished |= {record.id: record} if record.status in FINISHED else {}
        vocabulary = run.model.vocabulary(data.manifest.vocab_size)
        parameters = count_parameters(run.model, vocabulary)
        coming = Coming(run=run, parameters=parameters, vocabulary=vocabulary, data_sha256=data.sha256)
        found = loss_forecast(coming, (self._finished[name] for name in sorted(self._finished)))
        if isinstance(found, str):
            if (family := family_of(run)) not in self._said:
                self.say(found)
            self._said.add(family)
            return None
        return found and asdict(found)


def forecast_of(run: Run, system: System) -> Document | None:
    """Return the forecast of a valid run as its record keeps it; None if such a run is not simulated."""
    try:
        asked = simulated(run, given_by(run, FIELDS, system), system)
        seconds = predicted_seconds(asked.done, system)
    except InputError:
        return None
    within = interval(system, asked, seconds)
    made = datetime.now(UTC).isoformat(timespec="seconds")
    return asdict(Forecast(system.name, seconds, within.low, within.high, made))
