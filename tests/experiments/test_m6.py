"""Experiments of M6-T and M6-10T: made-up losses and times give verdicts both ways."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from experiments.m6_2021 import prototyping, pseudo_to_real
from experiments.m6_2021.pseudo_to_real import BOTH, HALF, PSEUDO, REAL, loss_after, losses_at_equal_time
from harness.records.record import Record
from impl.run import Run
from tests.experiments.as_printed import NO, YES, judged, timed
from tests.experiments.test_stability import bare, records

LOSSES = {"dense": 2.1, "top-1": 2.0, "top-1, unbalanced": 2.01, "top-2": 1.9, "2 top-1": 1.9}
LIMITED = {"top-1, limited": 2.0, "2 top-1, limited": 1.95}


def prototyping_verdicts(losses: dict[str, float], seconds: dict[str, float]) -> list[str]:
    of = lambda run: losses.get(prototyping.way(run), 2.0)
    made = [timed(one, seconds.get(prototyping.way(one.run), 1.0)) for one in records(of, "m6_2021/prototyping")]
    return judged(prototyping.EXPERIMENT.claims, made)


def test_verdicts_on_prototypes_turn() -> None:
    assert prototyping_verdicts(LOSSES | LIMITED, {"2 top-1": 0.9}) == [YES] * 6
    other = {"dense": 1.9, "top-2": 2.05, "2 top-1": 2.2, "top-1, unbalanced": 2.1, "2 top-1, limited": 2.05}
    assert prototyping_verdicts(other, {"2 top-1": 1.1}) == [NO] * 6


def test_ways_are_told_apart() -> None:
    runs = prototyping.EXPERIMENT.runs["small"]
    assert len({prototyping.way(run) for run in runs}) == 12
    rows = {run.model.choices * run.model.expert_capacity for run in runs if run.model.expert_capacity}
    assert rows == {1.0}, "limited experts take as many tokens in all"


def pseudo(loss: Callable[[str, int], float], seconds: dict[str, float]) -> list[Record]:
    """Records with a loss of each way after each step, a little apart for every seed."""
    made = []
    for run, one in bare("m6_2021/pseudo_to_real").items():
        way, last = pseudo_to_real.way(run), run.train.steps
        at = lambda step, way=way, one=one: replace(
            one.evaluations[-1], step=step, tokens=1000, nats=1000 * (loss(way, step) + 0.001 * one.run.seed)
        )
        changed = replace(one, evaluations=[at(step) for step in range(50, last + 1, 50)])
        made.append(timed(changed, seconds.get(way, 1.0)))
    return made


def falling(ahead: float) -> Callable[[str, int], float]:
    """Losses that fall with the steps; those of delinked models are so much lower."""
    steps_before = {BOTH: 400}
    return lambda way, step: (
        4.0 - (step + steps_before.get(way, 0)) / 400 - ahead * (way == BOTH) + (way == PSEUDO) * 0.5
    )


def test_verdicts_on_shared_layers_turn() -> None:
    verdicts = lambda made: judged(pseudo_to_real.EXPERIMENT.claims, made)
    fast = {HALF: 0.5, PSEUDO: 0.5}
    assert verdicts(pseudo(falling(0.1), fast)) == [YES] * 4
    assert verdicts(pseudo(falling(-0.1), fast))[1:3] == [YES, NO], "ahead only after as much time"
    assert verdicts(pseudo(falling(-1.0), {HALF: 2.0, PSEUDO: 2.0})) == [NO] * 4


def test_its_table_has_a_row_for_each_way_and_not_for_each_seed() -> None:
    assert pseudo_to_real.EXPERIMENT.table is not None
    rows = pseudo_to_real.EXPERIMENT.table(pseudo(falling(0.1), {})).frame
    assert sorted(rows["way"]) == sorted([REAL, PSEUDO, HALF, BOTH])
    assert list(rows["n"]) == [3] * 4


def test_losses_at_equal_time_lie_between_evaluations() -> None:
    """Half of 800 steps in half the time, and 400 more, are 600 steps of a real model, whose loss is 4 - 600 / 400."""
    found = losses_at_equal_time(pseudo(falling(0.0), {HALF: 0.5}))
    assert [found[REAL][at] for at in sorted(found[REAL])] == pytest.approx([2.5, 2.501, 2.502])
    real = next(one for one in pseudo(falling(0.0), {}) if pseudo_to_real.way(one.run) == REAL)
    assert loss_after(real, 75) == pytest.approx(4 - 75 / 400)
    assert loss_after(real, 10_000) == pytest.approx(2.0)
    assert loss_after(real, 10) != loss_after(real, 10), "nothing was evaluated before"


def test_each_delinked_run_begins_with_the_first_half_of_its_seed() -> None:
    runs: dict[str, Run] = {run.id: run for run in pseudo_to_real.EXPERIMENT.runs["small"]}
    started = [run for run in runs.values() if run.start]
    assert len(started) == 3
    for run in started:
        first = runs[run.start or ""]
        assert (first.seed, first.model.shared_layers, first.keep_end) == (run.seed, True, True)
        assert first.problems() == run.problems() == []
