"""Plans by hand and by search: what was found is a plan of those, and verdicts turn."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from experiments.ours import auto_plan as experiment
from harness.predict.simulation import given_by, predicted
from harness.predict.simulation import simulated as simulated_run
from harness.predict.systems import load_system
from harness.records.parts import Environment
from harness.records.record import Record, point
from harness.records.steps import Step
from impl.run import Run
from tests.experiments.as_printed import ABSENT, NO, PARTLY, YES, bare, verdicts
from tests.harness.made_up_records import record_of

Seconds = Callable[[experiment.Hand, experiment.Way], float]


def simulated_on(system: str, run: Run, seconds: float) -> Record:
    device = load_system(system).hardware
    environment = Environment(system=system, device="cuda", device_name=device, backend="nccl")
    full = bare(run, tier="paper")
    return replace(full, source="simulated", environment=environment, steps=[Step(seconds=[seconds])])


def simulated(seconds: Seconds) -> list[Record]:
    """Every recipe's ways on its own system."""
    made = {}
    for hand in experiment.HANDS:
        for way in reversed(experiment.WAYS):
            full = simulated_on(hand.system, hand.way(way), seconds(hand, way))
            made[full.id] = full
    return list(made.values())


def by_way(hand: float, same: float, best: float) -> Seconds:
    seconds = dict(zip(experiment.WAYS, (hand, same, best), strict=True))
    return lambda _, way: seconds[way]


@pytest.mark.parametrize(("found", "expected"), [(8.0, [YES, NO]), (9.5, [YES, YES]), (11.0, [NO, YES])])
def test_verdicts_on_measured_plans(found: float, expected: list[str]) -> None:
    by_hand = {point(hand.way("by hand")) for hand in experiment.CPUS}
    ran = [record_of(run, seconds=10.0 if run in by_hand else found) for run in experiment.runs(experiment.CPUS)]
    assert verdicts(experiment.EXPERIMENT, ran) == [*expected, ABSENT]


def test_simulation_judges_where_layers_are_shared_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator that searched is no judge of what it found."""
    assert verdicts(experiment.EXPERIMENT, simulated(by_way(10, 9.5, 8))) == [ABSENT, ABSENT, PARTLY]
    plans = lambda hand: {
        way: plan | {"tp": 8, "dp": 2 * plan.get("dp", 1)} if plan.get("tp") == 16 else plan
        for way, plan in hand.plans.items()
    }
    changed = [hand if "ZeRO" in hand.name else hand._replace(plans=plans(hand)) for hand in experiment.HANDS]
    monkeypatch.setattr(experiment, "HANDS", changed)
    assert verdicts(experiment.EXPERIMENT, simulated(by_way(10, 9.5, 8)))[2] == YES


def test_the_table_has_every_recipe_in_all_ways() -> None:
    table = experiment.table(simulated(by_way(10, 9.5, 8)))
    assert set(table.frame["recipe"]) == {hand.name for hand in experiment.HANDS}
    of_one = table.frame[table.frame["recipe"] == experiment.HANDS[2].name]
    assert list(of_one["way"]) == list(experiment.WAYS)
    assert of_one["speedup"].tolist() == pytest.approx([1, 10 / 9.5, 1.25])
    assert "interleaved 2" in next(iter(of_one["plan"]))


@pytest.mark.parametrize("hand", [*experiment.HANDS, *experiment.CPUS], ids=lambda hand: hand.name)
def test_what_was_found_is_a_plan_for_as_many_devices_with_the_knobs(hand: experiment.Hand) -> None:
    for way in experiment.WAYS[1:]:
        run = hand.way(way)
        assert run.plan.world_size == hand.way("by hand").plan.world_size
    for knob in (text.partition("=") for text in hand.knobs):
        same = hand.way("same knobs")
        value = same.train.microbatch if knob[0] == "microbatch" else getattr(same.plan, knob[0])
        assert str(value).lower() in knob[2].split(","), knob


def test_a_found_plan_is_faster_than_the_hand_made_by_events() -> None:
    hand = experiment.HANDS[5]
    system = load_system(hand.system)
    done = lambda run: simulated_run(run, given_by(run, (), system), system).done
    seconds = {way: predicted(done(hand.way(way)), system).seconds for way in experiment.WAYS}
    assert seconds["all knobs"] <= seconds["same knobs"] <= 1.001 * seconds["by hand"]


def test_a_search_finds_what_is_said_to_be_found() -> None:
    hand = experiment.CPUS[0]
    assert hand.searched("same knobs") == hand.plans["same knobs"]
