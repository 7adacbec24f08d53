"""Map of stable training: made-up losses give its rates back, and verdicts turn."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

from experiments.ours import stability_map as experiment
from harness.analysis.stability import MARGIN, UNIGRAM, arms, loss_or_inf, table
from harness.experiment.loading import load
from harness.figures.placements import of_stability
from harness.records.record import Record
from impl.run import Run
from tests.experiments.as_printed import ABSENT, NO, OPEN, YES, judged
from tests.harness.made_up_records import record_of

LIMIT = UNIGRAM["data/books-byte"] - MARGIN
Loss = Callable[[Run], float]


@cache
def bare(experiment: str) -> dict[Run, Record]:
    """Return a record of each run with its first step and its last one."""
    made = {run: record_of(run, tier="small") for run in load(experiment).runs["small"]}
    for run, one in made.items():
        one.steps = one.steps[:: run.train.steps - 1]
    return made


def records(loss: Loss, experiment: str = "stability_map") -> list[Record]:
    """Return records of the small tier with these losses on held-out text, a little apart for every seed."""
    made = []
    for run, of_run in bare(experiment).items():
        full = copy.copy(of_run)
        value = 1000 * (loss(run) + 0.001 * run.seed)
        last = replace(full.evaluations[-1], tokens=1000, nats=None if math.isnan(value) else value)
        full.evaluations = [last]
        made.append(full)
    return made


def as_expected(run: Run) -> float:
    """Return losses that are best at 3e-3; post diverges from a rate on that falls with depth and a short warm-up."""
    norm, deep, long = run.model.norm_placement, run.model.num_layers >= 12, run.train.warmup_steps == 80
    most = 3e-2 if norm != "post" or not deep else 1e-2 if long else 1e-3
    distance = abs(math.log(run.train.lr / 3e-3))
    return 4.0 if run.train.lr > most else 2.0 + 0.1 * distance + {"pre": 0.0, "post": 0.2, "sandwich": 0.1}[norm]


def verdicts(loss: Loss) -> list[str]:
    return judged(experiment.EXPERIMENT.claims, records(loss))


def test_verdicts_turn() -> None:
    assert verdicts(as_expected) == [YES] * 6
    alike = verdicts(lambda run: 2.0 + abs(math.log(run.train.lr / 3e-3)))
    assert alike == [NO, OPEN, NO, NO, YES, OPEN]
    swapped = {"pre": "post", "post": "pre", "sandwich": "sandwich"}
    turned = lambda run: replace(run, model=replace(run.model, norm_placement=swapped[run.model.norm_placement]))
    assert verdicts(lambda run: as_expected(turned(run)))[:2] == [NO, NO]
    breaks = lambda run: run.model.norm_placement == "sandwich" and run.train.lr > 1e-3
    assert verdicts(lambda run: 4.0 if breaks(run) else as_expected(run))[4:] == [NO, YES]


def test_rates_are_those_of_the_map() -> None:
    by_place = {(one.norm, one.layers, one.warmup): one for one in arms(records(as_expected))}
    assert len(by_place) == 24
    assert by_place["post", 24, 8].stable_rate == 1e-3
    assert by_place["post", 24, 80].stable_rate == 1e-2
    assert by_place["pre", 24, 8].stable_rate == 3e-2
    assert by_place["post", 24, 8].best_rate == 1e-3
    assert by_place["pre", 2, 8].best_rate == 3e-3


def test_one_seed_of_three_makes_a_rate_unstable_and_a_gap_ends_the_stable_rates() -> None:
    broken = lambda run: 4.0 if (run.train.lr, run.seed) == (1e-3, 1) else as_expected(run)
    found = arms(records(broken))
    assert {one.stable_rate for one in found} == {3e-4}
    shown = table(records(broken))
    assert set(shown.frame["loss_0.001"]) == {"1 of 3 diverged"}
    assert of_stability(records(broken)) is not None


def test_where_every_rate_diverges_nothing_is_best_or_stable() -> None:
    shown = table([one for one in records(lambda _: 4.0) if one.run.model.norm_placement == "post"]).frame
    assert set(shown["best"]) == set(shown["stable"]) == {"none"}
    assert set(shown["best_rate"]) == {None}


def test_a_run_diverged_that_learnt_no_more_than_frequencies() -> None:
    at = lambda loss: loss_or_inf(records(lambda _: loss)[0])
    assert at(LIMIT - 0.01) < math.inf
    assert at(LIMIT + 0.01) == at(math.nan) == math.inf


def test_an_arm_without_all_rates_is_left_out() -> None:
    some = [one for one in records(as_expected) if one.run.train.lr != 3e-2 or one.run.model.norm_placement == "pre"]
    assert {one.norm for one in arms(some)} == {"pre"}
    assert judged(experiment.EXPERIMENT.claims, some)[0] == ABSENT


def test_nothing_is_judged_before_three_seeds_have_run() -> None:
    some = [one for one in records(as_expected) if one.run.seed < 2 or one.run.model.num_layers < 24]
    assert set(judged(experiment.EXPERIMENT.claims, some)) == {ABSENT}
