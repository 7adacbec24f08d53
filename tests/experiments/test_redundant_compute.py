"""Duplicate or communicate: both ways side by side, the third by formula, and verdicts that turn."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from experiments.ours import redundant_compute as experiment
from harness.experiment.loading import load
from harness.experiment.pairs import step_seconds
from harness.predict.systems import load_system
from harness.records.parts import Environment
from harness.records.record import Record
from impl.run import Run
from tests.experiments.as_printed import ABSENT, NO, YES, thrice, verdicts
from tests.harness.made_up_records import record_of

SELENE = load_system("selene_2022")
Seconds = Callable[[Run], float]


def simulated(seconds: Seconds) -> list[Record]:
    """The paper tier, as if it had been predicted for A100s; ranks like the first are left out."""
    made = []
    for run in load("redundant_compute").runs["paper"]:
        full = record_of(run, seconds=seconds(run), tier="paper")
        environment = Environment(system=SELENE.name, device="cuda", device_name=SELENE.hardware, backend="nccl")
        made.append(replace(full, source="simulated", environment=environment, ranks=full.ranks[:1]))
    return made


def here(seconds: Seconds) -> list[Record]:
    runs = [run for run in load("redundant_compute").runs["small"] if run.repeat == 0]
    return [record_of(run, seconds=seconds(run), tier="small") for run in runs]


def judged(records: list[Record]) -> list[str]:
    return verdicts(experiment.EXPERIMENT, records)


def saving(share: float, by_rank: float = 0.0, step: float = 0.01) -> Seconds:
    """What splitting saves of a step, and how much more for every rank."""

    def seconds(run: Run) -> float:
        saved = share + by_rank * (run.plan.tp - 8)
        return step * (1 - saved) if run.plan.sequence_parallel else step

    return seconds


def test_ways_are_paired_and_the_third_is_slower_by_its_gathers() -> None:
    found = experiment.compared(simulated(saving(0.031)))
    assert len(found) == 14
    assert [cell.relative.mean for cell in found] == pytest.approx([0.969] * 14)
    added = lambda cell: experiment.gathered(cell) - cell.of(True).mean(step_seconds)
    assert all(added(cell) > 0 for cell in found)
    wide = {cell.run.plan.tp: added(cell) for cell in found if cell.parameters == found[-1].parameters}
    assert wide[16] > 1.5 * wide[8]  # two nodes
    published = [experiment.published_ratio(cell) for cell in found]
    assert [one for one in published if one == one] == [pytest.approx(19.0 / 19.6)]
    on_cpu = experiment.compared(thrice(here(saving(0.1))))
    assert [cell.n for cell in on_cpu] == [3, 3, 3]
    assert all(math.isnan(experiment.gathered_ratio(cell)) for cell in on_cpu)


def test_the_table_says_what_is_simulated() -> None:
    table = experiment.table(simulated(saving(0.031)))
    assert any("Simulated for selene_2022" in note for note in table.notes)
    assert len(experiment.table(here(saving(0.1))).frame) == 3


def test_verdicts_turn() -> None:
    assert judged(simulated(saving(0.031, 0.001))) == [YES] * 4
    assert judged(simulated(saving(0.1, step=1.0)))[:2] == [NO, NO]
    assert judged(simulated(saving(-0.03)))[1:3] == [NO, NO]
    assert judged(simulated(saving(0.031, -0.001)))[3] == NO
    assert judged(here(saving(0.1))) == [ABSENT, ABSENT, YES, ABSENT]
    assert judged(here(saving(-0.1))) == [ABSENT, ABSENT, NO, ABSENT]
