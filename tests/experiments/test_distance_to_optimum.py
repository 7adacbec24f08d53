"""Schedules beside the lower bound: what its table has, and verdicts that turn."""

from typing import Any

import pytest

from experiments.ours.distance_to_optimum import own_bound
from harness.experiment.loading import load
from harness.records.record import Record
from impl.pipeline.schedule import Op
from impl.pipeline.schedules import build
from impl.pipeline.simulate import Cost, simulate, uniform
from tests.experiments.as_printed import ABSENT, NO, YES, verdicts
from tests.harness.made_up_records import record_of, with_pipeline

EXPERIMENT = load("ours/distance_to_optimum")
UNEVEN = (1, 1, 4), (4, 4, 1)
"""Of each stage's forward pass, input gradient and weight gradient: with these ZB-H1 is 5% over the bound."""


def smoke(late: float = 0.0, cores: int = 64) -> list[Record]:
    return [with_pipeline(record_of(run, cores=cores), late=late) for run in EXPERIMENT.runs["smoke"]]


def with_times(name: str, cost: Cost) -> Record:
    [run] = [run for run in EXPERIMENT.runs["smoke"] if run.plan.schedule == name]
    made = with_pipeline(record_of(run, cores=64))
    rows: list[Any] = simulate(build(name, 2, run.microbatches, run.plan.chunks), cost).as_rows()
    for rank, row in zip(made.ranks, rows, strict=True):
        rank.timeline = row
    return made


def test_every_schedule_is_beside_its_bound() -> None:
    assert EXPERIMENT.table
    found = EXPERIMENT.table(smoke()).frame.set_index("schedule")
    assert found.loc["one_f_one_b", ["step_at_equal", "bound_at_equal"]].tolist() == [15, 13]
    for column in ("over_at_equal", "simulated_over", "measured_over"):
        over = found[column].to_dict()
        assert all(value > -1e-9 for value in over.values())
        assert [over[name] for name in ("zb_h1", "zb_h2", "zbv", "dualpipe_v")] == pytest.approx([0] * 4)
        assert [over["one_f_one_b"], over["v_min"]] == pytest.approx([2 / 13, 1 / 12.5])


def test_a_backward_pass_may_be_shorter_than_its_parts() -> None:
    seconds = {Op.F: 1, Op.B: 1, Op.I: 1, Op.W: 1}
    shorter = with_times("dualpipe_v", lambda action: seconds[action.op])
    assert 0 <= shorter.predicted_pipeline_seconds / own_bound(shorter) - 1 < 0.3


def test_verdicts_turn() -> None:
    assert verdicts(EXPERIMENT, smoke()) == [YES, YES]
    assert verdicts(EXPERIMENT, smoke(cores=1)) == [ABSENT, ABSENT]
    assert verdicts(EXPERIMENT, smoke(late=-3e-4))[0] == NO  # passes overlap on a rank
    assert verdicts(EXPERIMENT, [with_times("zb_h1", uniform())]) == [YES, YES]
    uneven = lambda action: UNEVEN[action.stage]["FIW".index(action.op)]
    assert verdicts(EXPERIMENT, [with_times("zb_h1", uneven)]) == [YES, NO]
