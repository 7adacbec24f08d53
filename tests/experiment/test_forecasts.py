"""Scores of forecasts: coverage of their intervals and pinball loss."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from harness.experiment.forecasts import forecasts_table, scored
from harness.predict.interval import interval
from harness.predict.simulation import predicted_seconds, simulated
from harness.predict.systems import load_system
from harness.records.labels import FIELDS
from harness.records.parts import Forecast
from harness.records.record import Record
from harness.records.store import Store
from impl.plan import Plan
from tests.harness.calls import call, refused
from tests.harness.made_up_records import record
from tests.harness.small_runs import kept, small, sweep, write_tokens

CORES = "results/ours/predicted/two_cores.yaml"


def forecast(seconds: float, low: float, high: float, **changes: object) -> Record:
    """A record whose steps take 0.1 s, with a forecast."""
    made = Forecast("made_up", seconds, low, high, "2026-11-24T09:00:00+00:00")
    return replace(record(seconds=0.1, **changes), forecast=made)  # type: ignore[arg-type]


def test_coverage_counts_runs_inside_and_pinball_loss_falls_with_better_ends() -> None:
    found = scored("made_up", [forecast(0.1, 0.08, 0.12), forecast(0.05, 0.04, 0.06), record()])
    assert found is not None
    assert (len(found.pairs), found.coverage) == (2, 0.5)
    assert found.ratio == pytest.approx((1 + 2) / 2)
    near, far = (scored("", [forecast(0.1, low, 0.2)]) for low in (0.09, 0.01))
    assert near is not None
    assert far is not None
    assert near.pinball < far.pinball
    exact = scored("", [forecast(0.1, 0.1, 0.1)])
    assert exact is not None
    assert math.isclose(exact.pinball, 0.0, abs_tol=1e-12)
    assert len(forecasts_table([near, far]).frame) == 3


def test_runs_without_forecast_are_not_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert scored("made_up", [record()]) is None
    monkeypatch.chdir(tmp_path)
    assert "no record has a forecast" in refused("claims", "quickstart", "--calibration", "--out", tmp_path)
    assert call("claims", "--help").status == 0


def test_a_run_keeps_the_forecast_that_was_made_before_it_began(tmp_path: Path) -> None:
    store, system = Store(tmp_path, "made_up", "smoke"), load_system(CORES)
    run = small(write_tokens(tmp_path / "tokens"), dp=2)
    other = replace(run, engine="torch", plan=Plan(dp=1))  # is not simulated
    sweep(store, [run, other], forecast=system)
    found = kept(store, run)
    assert found.forecast is not None
    asked = simulated(run, FIELDS, system)
    seconds = predicted_seconds(asked.done, system)
    assert (found.forecast.seconds, found.forecast.low) == (seconds, interval(system, asked, seconds).low)
    assert found.forecast.made <= (found.times.started or "")
    assert kept(store, other).forecast is None


def test_a_forecast_for_other_devices_is_refused() -> None:
    assert "predicts steps on cuda, these runs are on cpu" in refused(
        "run", "quickstart", "--forecast", "selene", "--device", "cpu"
    )
    assert "system 'selen' does not exist" in refused("run", "quickstart", "--forecast", "selen")
