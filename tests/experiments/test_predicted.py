"""Predicted steps beside measured ones: pairs of them, their errors, and their order."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from experiments.ours.predicted import compared, name, off
from harness.calibrate.runs import runs_to_train
from harness.experiment.claims_table import claims_table
from harness.experiment.loading import load
from harness.records.record import Record
from impl.run import Run
from tests.harness.made_up_records import record_of

NAME = "ours/predicted"
Seconds = Callable[[Run], float]


def by_size(run: Run) -> float:
    """Seconds that tell all points apart."""
    return 1e-6 * run.tokens_per_step * run.model.num_layers * run.model.hidden_size / 256


def simulated(run: Run, seconds: float) -> Record:
    full = record_of(run, seconds=seconds, tier="small")
    environment = replace(full.environment, system="here")
    return replace(full, source="simulated", environment=environment, steps=full.steps[:1])


def records(predicted: Seconds) -> list[Record]:
    runs = load(NAME).runs["small"]
    ran = [record_of(run, seconds=by_size(run) * (1 + 0.01 * run.repeat), tier="small") for run in runs]
    return [*ran, *(simulated(run, predicted(run)) for run in runs)]


def verdicts(predicted: Seconds) -> list[str]:
    shown = claims_table(load(NAME).claims, records(predicted)).frame
    assert set(shown["verdict"]) == {"not run here"}  # measured ones alone say nothing
    return list(shown["verdict, simulated on here"])


def test_points_are_paired_and_repeats_combined() -> None:
    found = compared(records(lambda run: 1.1 * by_size(run)))
    assert [one.n for one in found] == [3] * 12
    assert [off(one) for one in found] == pytest.approx([1.1 / 1.01 - 1] * 12)
    assert len({name(one.run) for one in found}) == 12


def test_verdicts_turn() -> None:
    assert verdicts(lambda run: 1.08 * by_size(run)) == ["reproduced", "reproduced"]
    assert verdicts(lambda run: 1.2 * by_size(run)) == ["not reproduced", "reproduced"]
    assert verdicts(lambda run: (1.3 if run.plan.tp > 1 else 1.03) * by_size(run))[0] == "cannot tell here"
    assert verdicts(lambda run: 0.1 / by_size(run)) == ["not reproduced", "not reproduced"]


def test_the_table_says_how_far_off() -> None:
    table = load(NAME).table
    assert table is not None
    shown = table(records(lambda run: 1.02 * by_size(run)))
    assert len(shown.frame) == 12
    assert "12 points: 1.0% ± 0.0% off on average" in " ".join(shown.notes)


def test_runs_are_no_calibration_s() -> None:
    models = {run.model for run in runs_to_train(2, "cpu", ["fp32"], 1).values()}
    assert not any(run.model in models for run in load(NAME).runs["small"])
