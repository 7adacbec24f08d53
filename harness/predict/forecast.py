"""Forecast of a run's step, made before the run begins and kept in its record."""

from dataclasses import asdict
from datetime import UTC, datetime

from harness.predict.interval import interval
from harness.predict.simulation import given_by, predicted_seconds, simulated
from harness.records.labels import FIELDS
from harness.records.parts import Forecast
from harness.records.store import Document
from impl.errors import InputError
from impl.run import Run
from impl.simulator.system import System


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
