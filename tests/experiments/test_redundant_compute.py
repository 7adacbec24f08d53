"""Duplicate or communicate: both ways side by side, the third by formula, and verdicts that turn."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from experiments.ours import redundant_compute as experiment
from harness.experiment.claims import claims_table
from harness.experiment.experiment import load
from harness.predict.systems import load_system
from harness.records.measures import frame
from harness.records.record import Environment, Record
from impl.run import Run
from tests.experiments.as_printed import ABSENT, NO, YES
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
    runs = load("redundant_compute").runs["small"]
    return [record_of(run, seconds=seconds(run), tier="small") for run in runs]


def verdicts(records: list[Record]) -> list[str]:
    shown = claims_table(load("redundant_compute").claims, records).frame
    return list(shown[next(name for name in shown if name.startswith("verdict"))])


def saving(share: float, by_rank: float = 0.0, step: float = 0.01) -> Seconds:
    """What splitting saves of a step, and how much more for every rank."""

    def seconds(run: Run) -> float:
        saved = share + by_rank * (run.plan.tp - 8)
        return step * (1 - saved) if run.plan.sequence_parallel else step

    return seconds


def test_ways_are_paired_and_the_third_is_slower_by_its_gathers() -> None:
    found = experiment.compared(frame(simulated(saving(0.031))).to_dict("records"))
    assert len(found) == 14
    assert all(row["ratio"] == pytest.approx(0.969) for row in found)
    assert all(row["gathered"] > row["split"] for row in found)
    wide = [row for row in found if row["parameters"] == max(one["parameters"] for one in found)]
    added = {row["ranks"]: row["gathered"] - row["split"] for row in wide}
    assert added[16] > 1.5 * added[8]  # two nodes
    assert [row["published"] for row in found if row["published"] == row["published"]] == [pytest.approx(19.0 / 19.6)]
    on_cpu = experiment.compared(frame(here(saving(0.1))).to_dict("records"))
    assert [row["n"] for row in on_cpu] == [3, 3, 3]
    assert all(row["gathered"] != row["gathered"] for row in on_cpu)


def test_the_table_says_what_is_simulated() -> None:
    table = experiment.table(simulated(saving(0.031)))
    assert any("Simulated for selene_2022" in note for note in table.notes)
    assert len(experiment.table(here(saving(0.1))).frame) == 3
    assert experiment.table([]).frame.empty


def test_verdicts_turn() -> None:
    assert verdicts(simulated(saving(0.031, 0.001))) == [YES] * 4
    assert verdicts(simulated(saving(0.1, step=1.0)))[:2] == [NO, NO]
    assert verdicts(simulated(saving(-0.03)))[1:3] == [NO, NO]
    assert verdicts(simulated(saving(0.031, -0.001)))[3] == NO
    assert verdicts(here(saving(0.1))) == [ABSENT, ABSENT, YES, ABSENT]
    assert verdicts(here(saving(-0.1))) == [ABSENT, ABSENT, NO, ABSENT]


def test_runs_are_valid() -> None:
    runs = load("redundant_compute").runs
    assert [run.why_invalid() for tier in runs.values() for run in tier if run.why_invalid()] == []
    assert {run.plan.tp for run in runs["smoke"] + runs["small"]} == {2}
