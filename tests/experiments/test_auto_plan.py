"""Plans by hand and by search: what was found is a plan of those, and verdicts turn."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from experiments.ours import auto_plan as experiment
from harness.experiment.claims import claims_table
from harness.experiment.experiment import load
from harness.predict.simulation import predicted
from harness.predict.systems import load_system
from harness.records.parts import Environment, Step
from harness.records.record import Record, point
from impl.run import Run
from tests.experiments.as_printed import ABSENT, NO, PARTLY, YES, bare
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


def verdicts(seconds: Seconds) -> list[str]:
    shown = claims_table(load("auto_plan").claims, simulated(seconds)).frame
    return list(shown[next(name for name in shown if name.startswith("verdict"))])


def by_way(hand: float, same: float, best: float) -> Seconds:
    seconds = dict(zip(experiment.WAYS, (hand, same, best), strict=True))
    return lambda _, way: seconds[way]


def test_verdicts_turn() -> None:
    assert verdicts(by_way(10, 9.5, 8)) == [ABSENT, YES, PARTLY]  # the simulator that searched is no judge of the first
    assert verdicts(by_way(10, 8, 7))[1] == NO
    seconds = {point(hand.way("by hand")): 10.0 for hand in experiment.CPUS}
    for found, expected in ((8.0, YES), (11.0, NO)):
        ran = [record_of(run, seconds=seconds.get(point(run), found)) for run in experiment.runs(experiment.CPUS)]
        assert claims_table(load("auto_plan").claims, ran).frame["verdict"].tolist()[0] == expected
    assert claims_table(load("auto_plan").claims, []).frame["verdict"].tolist() == [ABSENT] * 3


def test_plans_within_nodes_bear_the_third_claim_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = lambda hand: {
        way: plan | {"tp": 8, "dp": 2 * plan.get("dp", 1)} if plan.get("tp") == 16 else plan
        for way, plan in hand.plans.items()
    }
    changed = [hand if "ZeRO" in hand.name else hand._replace(plans=plans(hand)) for hand in experiment.HANDS]
    monkeypatch.setattr(experiment, "HANDS", changed)
    assert verdicts(by_way(10, 9.5, 8))[2] == YES


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
    seconds = {way: predicted(run, system).seconds for way in experiment.WAYS if (run := hand.way(way))}
    assert seconds["all knobs"] <= seconds["same knobs"] <= 1.001 * seconds["by hand"]


def test_a_search_finds_what_is_said_to_be_found() -> None:
    hand = experiment.CPUS[0]
    assert hand.searched("same knobs") == hand.plans["same knobs"]


def test_plans_in_words() -> None:
    hand = experiment.HANDS[0]
    assert experiment.in_words(hand.way("by hand")) == "tp 8, dp 64, microbatch 8, full recomputation"
