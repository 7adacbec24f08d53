"""Plans by hand and by search: what was found is a plan of those, and verdicts turn."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from experiments.ours import auto_plan as experiment
from harness.experiment.claims import claims_table
from harness.experiment.experiment import load
from harness.predict.simulation import predicted, vocabulary_of
from harness.predict.systems import load_system
from harness.records.record import Environment, Record, Step, point
from impl.plan import Plan
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
    narrow = {
        key: plan | {"tp": 8, "dp": plan.get("dp", 1) * 2} if plan.get("tp") == 16 and "ZeRO" not in key[0] else plan
        for key, plan in experiment.FOUND.items()
    }
    experiment.meant_by.cache_clear()
    monkeypatch.setattr(experiment, "FOUND", narrow)
    try:
        assert verdicts(by_way(10, 9.5, 8))[2] == YES
    finally:
        experiment.meant_by.cache_clear()


def test_the_table_has_every_recipe_in_all_ways() -> None:
    table = experiment.table(simulated(by_way(10, 9.5, 8)))
    assert set(table.frame["recipe"]) == {hand.name for hand in experiment.HANDS}
    of_one = table.frame[table.frame["recipe"] == experiment.HANDS[2].name]
    assert list(of_one["way"]) == list(experiment.WAYS)
    assert of_one["speedup"].tolist() == pytest.approx([1, 10 / 9.5, 1.25])
    assert "interleaved 2" in next(iter(of_one["plan"]))
    assert experiment.table([]).frame.empty


@pytest.mark.parametrize("hand", [*experiment.HANDS, *experiment.CPUS], ids=lambda hand: hand.name)
def test_what_was_found_is_a_valid_plan_for_as_many_devices(hand: experiment.Hand) -> None:
    for way in experiment.WAYS[1:]:
        run = hand.way(way)
        assert (hand.name, way) in experiment.FOUND
        assert run.why_invalid() is None
        assert run.plan.world_size == hand.plan.world_size
    for knob in (text.partition("=") for text in hand.knobs):
        same = hand.way("same knobs")
        value = same.train.microbatch if knob[0] == "microbatch" else getattr(same.plan, knob[0])
        assert str(value).lower() in knob[2].split(","), knob


def test_a_found_plan_is_faster_than_the_hand_made_by_events() -> None:
    hand = experiment.HANDS[5]
    system = load_system(hand.system)
    seconds = {
        way: predicted(run, vocabulary_of(run), system).seconds for way in experiment.WAYS if (run := hand.way(way))
    }
    assert seconds["all knobs"] <= seconds["same knobs"] <= 1.001 * seconds["by hand"]


def test_a_search_finds_what_is_said_to_be_found() -> None:
    hand = experiment.CPUS[0]
    assert hand.searched("same knobs") == experiment.FOUND[hand.name, "same knobs"]


def test_points_are_told_by_recipe_and_way() -> None:
    hand = experiment.HANDS[0]
    assert (hand, "by hand") in experiment.meant_by()[point(hand.way("by hand"))]
    assert experiment.in_words(hand.run(Plan(tp=8, dp=64, recompute="full"), 8)) == (
        "tp 8, dp 64, microbatch 8, full recomputation"
    )
