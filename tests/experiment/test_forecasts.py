"""Scores of forecasts: coverage of their intervals and pinball loss."""

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from harness.analysis.scaling_law import Law
from harness.experiment.forecasts import LOSS, STEP, Scored, forecasts_table, scored
from harness.predict.forecast import Forecasts
from harness.predict.interval import interval
from harness.predict.simulation import predicted_seconds, simulated
from harness.predict.systems import load_system
from harness.records.labels import FIELDS
from harness.records.parts import Forecast, LossForecast
from harness.records.record import Record
from harness.records.store import Store
from impl.cost.parameters import count_parameters
from impl.data.tokens import TokenFolder
from impl.plan import Plan
from tests.harness.calls import call, refused
from tests.harness.fake_site import FakeSite
from tests.harness.made_up_records import changed, document, record, record_of
from tests.harness.small_runs import kept, small, sweep

CORES = "results/ours/predicted/two_cores.yaml"


def forecast(seconds: float, low: float, high: float, **changes: object) -> Record:
    """A record whose steps take 0.1 s, with a forecast."""
    made = Forecast("made_up", seconds, low, high, "2026-11-24T09:00:00+00:00")
    return replace(record(seconds=0.1, **changes), forecast=made)  # type: ignore[arg-type]


def of_losses(*nats: tuple[float, float, float, float]) -> list[Record]:
    """Records that end with a loss, each with its forecast: low, middle, high, measured."""
    made = [(LossForecast(middle, low, high, 9, 0.01, "2026-11-24"), end) for low, middle, high, end in nats]
    return [replace(record(nats=end), loss_forecast=one) for one, end in made]


def only(found: list[Scored]) -> Scored:
    [one] = found
    return one


def test_coverage_counts_runs_inside_and_pinball_loss_falls_with_better_ends() -> None:
    found = only(scored("made_up", [forecast(0.1, 0.08, 0.12), forecast(0.05, 0.04, 0.06), record()]))
    assert (found.quantity, len(found.runs), found.coverage) == (STEP, 2, 0.5)
    assert found.ratio == pytest.approx((1 + 2) / 2)
    near, far = (only(scored("", [forecast(0.1, low, 0.2)])) for low in (0.09, 0.01))
    assert near.pinball < far.pinball
    exact = only(scored("", [forecast(0.1, 0.1, 0.1)]))
    assert math.isclose(exact.pinball, 0.0, abs_tol=1e-12)
    assert len(forecasts_table([near, far]).frame) == 3


def test_losses_are_scored_beside_steps() -> None:
    records = of_losses((2.0, 2.1, 2.3, 2.2), (2.0, 2.1, 2.3, 2.4), (2.0, 2.2, 2.3, 2.1))
    steps, losses = scored("made_up", [*records, forecast(0.1, 0.08, 0.12)])
    assert (steps.quantity, losses.quantity, len(losses.runs)) == (STEP, LOSS, 3)
    assert losses.coverage == pytest.approx(2 / 3)
    assert losses.ratio == pytest.approx(2.2 / 2.1)
    ends = [math.log(end / tail) for end in (2.2, 2.4, 2.1) for tail in (2.0, 2.3)]
    weights = [0.05 if tail < 2.1 else 0.95 for _ in range(3) for tail in (2.0, 2.3)]
    expected = [weight * off if off > 0 else (weight - 1) * off for weight, off in zip(weights, ends, strict=True)]
    assert losses.pinball == pytest.approx(math.fsum(expected) / 6)
    table = forecasts_table([steps, losses, losses._replace(experiment="other")])
    assert list(table.frame["quantity"]) == [STEP, LOSS, LOSS, LOSS]
    assert list(table.frame["experiment"]) == ["made_up", "made_up", "other", "all"]
    diverged = replace(records[0], status="nan")
    assert scored("made_up", [diverged]) == []


def test_runs_without_forecast_are_not_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert scored("made_up", [record()]) == []
    monkeypatch.chdir(tmp_path)
    assert "no record has a forecast" in refused("claims", "quickstart", "--calibration", "--out", tmp_path)
    assert call("claims", "--help").status == 0


def test_a_run_keeps_the_forecast_that_was_made_before_it_began(store: Store, tokens: Path) -> None:
    run, system = small(tokens, dp=2), load_system(CORES)
    other = replace(run, engine="torch", plan=Plan(dp=1))  # is not simulated
    sweep(store, [run, other], site=FakeSite(), forecast=system)
    found = kept(store, run)
    assert found.forecast is not None
    asked = simulated(run, FIELDS, system)
    seconds = predicted_seconds(asked.done, system)
    assert (found.forecast.seconds, found.forecast.low) == (seconds, interval(system, asked, seconds).low)
    assert found.loss_forecast is None  # no finished run is like it
    assert kept(store, other).forecast is None


def keep_family(store: Store, tokens: Path, off: float, first: int = 0) -> None:
    """Write finished records of three sizes and three lengths, two seeds each, around a law by a share."""
    data = TokenFolder.open(tokens)
    law = Law(1.2, 9.0, 9.0, 0.3, 0.35)
    for hidden, steps, seed in product((16, 32, 64), (4, 8, 16), (first, first + 1)):
        like = small(tokens, steps=steps, seed=seed)
        run = replace(like, model=replace(like.model, hidden_size=hidden))
        vocabulary = run.model.vocabulary(data.manifest.vocab_size)
        parameters = count_parameters(run.model, vocabulary)
        loss = law.loss(parameters, steps * run.tokens_per_step) * (1 + off * (seed - first - 0.5) * (hidden - 30) / 10)
        made = record_of(run, nats=loss)
        resolved = document(made)["resolved"] | {"data": {"sha256": data.sha256}, "vocab_size": vocabulary}
        resolved |= {"parameters": parameters}
        store.write(document(changed(made, experiment=store.experiment, resolved=resolved)))


def test_a_run_keeps_the_loss_that_a_law_gives_before_it_begins(tmp_path: Path, tokens: Path) -> None:
    store, system = Store(tmp_path, "quickstart", "smoke"), load_system(CORES)
    keep_family(store, tokens, 0.002)
    run = small(tokens, steps=5)
    told = sweep(store, [run], forecast=system)
    found = kept(store, run)
    assert found.loss_forecast is not None
    assert found.loss_forecast.low < found.loss_forecast.nats < found.loss_forecast.high
    assert found.forecast is not None
    assert found.forecast.made <= found.loss_forecast.made <= (found.times.started or "")
    assert not [text for text in told.messages if "no forecast" in text]
    said = call("claims", "quickstart", "--calibration", "--out", tmp_path, "--json")
    rows = json.loads(said.output)["rows"]
    assert [(row["quantity"], row["runs"]) for row in rows] == [(STEP, 1), (LOSS, 1)]
    assert rows[1]["ratio"] == pytest.approx(found.last_evaluations[0].per("tokens") / found.loss_forecast.nats)


def test_a_rejected_law_is_said_once(store: Store, tokens: Path) -> None:
    lines: list[str] = []
    forecasts = Forecasts(store, load_system(CORES), lines.append)
    for i, seed in enumerate((5, 6)):
        keep_family(store, tokens, 0.2, first=2 * i)  # two more runs of each kind, and another reason each time
        step, loss = forecasts.of(small(tokens, steps=5, seed=seed), TokenFolder.open(tokens))
        assert step is not None
        assert loss is None
    [line] = lines
    assert "(gpt, pre): 18 finished runs are" in line
    assert Forecasts(store, None, lines.append).of(small(tokens), TokenFolder.open(tokens)) == (None, None)


def test_a_forecast_for_other_devices_is_refused() -> None:
    assert "predicts steps on cuda, these runs are on cpu" in refused(
        "run", "quickstart", "--forecast", "selene", "--device", "cpu"
    )
    assert "system 'selen' does not exist" in refused("run", "quickstart", "--forecast", "selen")
