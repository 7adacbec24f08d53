"""Pairs of repeats: what belongs to one cell, what a ratio is of, and what is left out of it."""

import math

import pytest

from harness.analysis.points import Point
from harness.experiment.checks import at_most
from harness.experiment.claims import verdict
from harness.experiment.pairs import Cell, cells, step_seconds, with_interval
from harness.records.record import Record
from harness.records.statistics import UNKNOWN, Estimate, estimate
from tests.harness.made_up_records import record


def found(*records: Record) -> list[Cell]:
    return cells(records, "engine", choice=lambda run: run.engine)


def test_ratios_are_of_equal_repeats() -> None:
    slow_day = {0: 0.1, 1: 0.3, 2: 0.2}
    ours = [record(seconds=0.8 * seconds, repeat=repeat) for repeat, seconds in slow_day.items()]
    theirs = [record(seconds=seconds, repeat=repeat, engine="torch") for repeat, seconds in slow_day.items()]
    (cell,) = found(*theirs[::-1], *ours, record(seconds=9.0, repeat=3))
    ratio = cell.ratio("native", "torch")
    assert (ratio.mean, ratio.n) == (pytest.approx(0.8), 3)
    assert ratio.half_width == pytest.approx(0.0, abs=1e-9)
    assert cell.of("torch").mean(step_seconds) == pytest.approx(0.2)
    one_pair = found(ours[0], theirs[0])[0].ratio("native", "torch")
    assert (one_pair.half_width, one_pair.n) == (None, 1)


def test_what_has_no_pair_or_shares_cores_has_no_ratio() -> None:
    (alone,) = found(record(repeat=0), record(repeat=1, engine="torch"))
    (crowded,) = found(record(cores=1, plan__dp=2), record(cores=1, plan__dp=2, engine="torch"))
    assert crowded.is_oversubscribed
    for cell in (alone, crowded):
        assert math.isnan(cell.ratio("native", "torch").mean)
    assert math.isnan(alone.of("deepspeed").mean(step_seconds))


def test_cells_keep_devices_and_configurations_apart_and_say_who_could_not() -> None:
    invalid = record(status="invalid", reason="no", engine="deepspeed")
    apart = found(record(), record(device_name="another"), record(precision="bf16"), invalid)
    why_not = {(cell.run.precision, cell.device): cell.why_not for cell in apart}
    could_not = {"deepspeed": "invalid"}
    assert why_not == {("fp32", "AMD EPYC"): could_not, ("fp32", "another"): could_not, ("bf16", "AMD EPYC"): {}}
    assert found(invalid) == []


def test_losses_are_compared_step_by_step_in_every_repeat() -> None:
    (cell,) = found(*(record(repeat=repeat, engine=engine) for repeat in (0, 1) for engine in ("native", "torch")))
    assert cell.loss_difference("native", "torch") == 0
    assert math.isnan(cell.loss_difference("native", "deepspeed"))
    for loss, difference in ((1.1, 0.1), (math.nan, math.inf)):
        ours, theirs = record(repeat=1), record(repeat=1, engine="torch")
        ours.steps.losses[3], theirs.steps.losses[3] = 1.0, loss
        (cell,) = found(record(), record(engine="torch"), ours, theirs)
        assert cell.loss_difference("native", "torch") == pytest.approx(difference)


def test_an_interval_can_reach_the_limit_and_a_single_pair_has_none() -> None:
    def said(ratio: Estimate) -> str:
        return verdict(at_most([Point(record().run, relative=ratio)], 1.0, "points", lambda one: ""))

    assert said(estimate([0.9, 0.91, 0.9])) == "reproduced"
    assert said(estimate([0.98, 1.04])) == said(Estimate(1.01, None, 1)) == "cannot tell here"
    assert said(estimate([1.04, 1.05, 1.06])) == "not reproduced"
    assert said(UNKNOWN) == "not run here"
    assert (with_interval(Estimate(0.8712, 0.0234, 3)), with_interval(Estimate(0.8712, None, 1))) == (
        "0.871 ± 0.023",
        "0.871",
    )
