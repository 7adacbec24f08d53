"""The verb `claims`: verdicts over tiers, of what was measured and of what was simulated, and how many there are."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from harness.analysis.points import points
from harness.experiment.claims import (
    Check,
    Claim,
    Evidence,
    evidence,
    holds,
    idealised,
    in_full,
    less,
    near,
    tally,
    verdict,
)  # fmt: skip
from harness.experiment.experiment import Experiment, Tier
from harness.experiment.loading import load
from harness.experiment.verdicts import by_kind, counts, headline_table, in_words, judged, records_of, verdicts_table
from harness.records.parts import Prediction
from harness.records.record import Record
from harness.records.statistics import Estimate, estimate, repeats_to_decide
from harness.records.statistics import simulated as simulated_value
from harness.records.store import SIMULATED, Store
from tests.experiments.as_printed import ABSENT, NO, OPEN, YES, thrice
from tests.harness import made_up_records
from tests.harness.calls import call, document, refused
from tests.harness.made_up_records import changed, record, record_of

NAME = "ours/data_parallel_scaling"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def fast(least: float) -> Check:
    """A check that every successful run has this rate."""
    of = lambda records: [record.tokens_per_second for record in records if record.status == "ok"]
    return lambda records: tally([rate >= least for rate in of(records)], "runs", f"at least {least:g}")


def simulated(
    full: Record, system: str = "selene", device: str = "NVIDIA A100-SXM4-80GB", seconds: float = 0.1
) -> Record:
    """The record as one that was predicted."""
    place = {"system": system, "stack": "any", "device": "cuda", "device_name": device, "backend": "nccl"}
    return changed(full, source=SIMULATED, environment=place, steps=[{"step": 0, "seconds": [seconds]}])


def claimed(*claims: Claim) -> Experiment:
    return replace(load(NAME), claims=claims)


FAST = Claim(text="runs are fast", source="our own", check=fast(1.0))


def test_a_claim_of_points_is_partly_reproduced_from_the_half_on() -> None:
    def said(*held: bool) -> str:
        return in_full(tally(held, "points"))

    assert said(True, True) == "reproduced"
    assert (said(True, False), said(True, True, False)) == ("partly (1 of 2)", "partly (2 of 3)")
    assert said(True, False, False) == said(False) == "not reproduced"
    assert said() == "not run here"
    found = tally([True, False], "pairs", "at most 3% off")
    assert found is not None
    assert found.numbers == "1 of 2 pairs; at most 3% off"


@given(held=st.integers(0, 5), fails=st.integers(0, 5), open_=st.integers(0, 5))
def test_a_verdict_stands_whatever_the_open_points_are(held: int, fails: int, open_: int) -> None:
    if held + fails + open_ == 0:
        return
    said = verdict(Evidence(held, fails, open_, ""))
    outcomes = {verdict(Evidence(held + more, fails + open_ - more, 0, "")) for more in range(open_ + 1)}
    assert said == (outcomes.pop() if len(outcomes) == 1 else "cannot tell here")


def test_a_point_is_decided_by_its_interval_and_repeats_that_would_decide_are_said() -> None:
    sure, open_, single = Estimate(0.2, 0.1, 3), Estimate(0.2, 0.5, 3), Estimate(0.2, None, 1)
    assert verdict(tally([sure])) == "reproduced"
    assert verdict(tally([sure.scaled(-1)])) == "not reproduced"
    assert in_full(tally([open_])) == "cannot tell here (13 repeats would)"
    assert in_full(tally([single])) == in_full(tally([open_, single])) == "cannot tell here"
    assert tally([Estimate(math.nan, None, 0)]) is None
    assert (verdict(tally([near(1.0, 1.0, 0.0)])), verdict(tally([less(1.0, 1.0)]))) == ("reproduced", "not reproduced")
    assert holds(near(estimate([1.0, 1.1, 1.2]), 1.0, 0.05)) is None


@pytest.mark.parametrize("faster", [1.0, 1.05, 1.5])
def test_margins_of_measured_means_are_those_of_welchs_test(faster: float) -> None:
    """The one-sided test of scipy at 2.5% and the interval of a difference decide alike."""
    ours, theirs = [faster * one for one in (1.0, 1.03, 0.98)], [1.01, 0.97, 1.0, 1.02]
    test: Any = stats.ttest_ind(ours, theirs, equal_var=False, alternative="greater")
    margin = estimate(ours) - estimate(theirs)
    assert (verdict(tally([margin])) == "reproduced") == (test.pvalue < 0.025)


def test_a_noisy_mean_over_an_exact_limit_is_decided_by_students_test() -> None:
    """Accuracies of three seeds: 51 ± 34% are above 29.6%, but not beyond their interval."""
    seeds = [0.3525, 0.576, 0.605]
    margin = less(0.296, estimate(seeds))
    test: Any = stats.ttest_1samp(seeds, 0.296)
    assert test.pvalue == pytest.approx(0.114, abs=0.001)
    assert holds(margin) is None
    assert isinstance(margin, Estimate)
    assert (margin.n, margin.mean) == (3, pytest.approx(1 - 0.296 / (sum(seeds) / 3)))


def test_repeats_that_would_decide_do_so_nine_times_of_ten() -> None:
    margin = estimate([0.0, 0.1, 0.2, 0.1, 0.0, 0.2, -0.1, 0.3])
    needed = repeats_to_decide(margin)
    assert needed is not None
    deviation = (margin.standard_error or 0.0) * math.sqrt(margin.n)
    drawn = stats.norm.rvs(margin.mean, deviation, (2000, needed), random_state=0)
    test: Any = stats.ttest_1samp(drawn, 0.0, axis=1)
    share = (test.pvalue < 0.05).mean()
    assert share == pytest.approx(0.9, abs=0.03)


def test_points_that_fail_beyond_their_interval_are_said_where_others_are_open() -> None:
    fails, held, simulated_one = Estimate(-0.2, 0.1, 3), Estimate(0.2, 0.1, 3), Estimate(0.2, 0.3, 1, math.inf)
    assert in_full(tally([fails, simulated_one])) == "cannot tell here (1 of 2 fails)"
    assert in_full(tally([fails, Estimate(0.2, 0.5, 3)])) == "cannot tell here (1 of 2 fails; 13 repeats would)"
    assert in_full(tally([fails, fails, held, *[simulated_one] * 2])) == "cannot tell here (2 of 5 fail)"
    assert in_full(tally([fails, fails, fails, simulated_one])) == "not reproduced"


def test_what_two_simulated_runs_have_in_common_cancels_in_their_ratio() -> None:
    one, other = simulated_value(2.0, {"shared": 0.2, "own": 0.01}), simulated_value(1.0, {"shared": 0.2, "its": 0.01})
    assert one.half_width == pytest.approx(1.645 * 2.0 * math.hypot(0.2, 0.01))
    assert (one / other).half_width == pytest.approx(1.645 * 2.0 * math.hypot(0.01, 0.01))
    assert (one - other).half_width == pytest.approx(1.645 * math.hypot(0.2, 0.02, 0.01))


def test_a_simulated_steps_interval_is_its_records_and_two_steps_share_only_their_causes() -> None:
    one, other = simulated(record()), simulated(record(train__steps=9))
    for simulated_one in (one, other):
        seconds = simulated_one.timed_seconds[0]
        kept = {"seconds": seconds, "low": seconds / 1.2, "high": seconds * 1.2, "slopes": {"link": 0.06}}
        simulated_one.prediction = Prediction(**kept, own_sd=0.02)
    step = lambda found: found.step_seconds
    first, second = (points([each], step)[0].estimate(step) for each in (one, other))
    assert first.half_width == pytest.approx(first.mean * math.log(1.2), rel=1e-3)
    own = math.sqrt((math.log(1.2) / 1.645) ** 2 - 0.06**2)
    ratio = first / second
    assert ratio.half_width == pytest.approx(1.645 * ratio.mean * own * math.sqrt(2), rel=1e-3)
    one.prediction = Prediction(slopes={"link": 0.06}, own_sd=0.02)  # an interval that is not known
    assert points([one], step)[0].estimate(step).half_width == pytest.approx(
        1.645 * first.mean * math.hypot(0.06, 0.02), rel=1e-3
    )


def test_runs_that_constants_were_fitted_to_are_no_evidence() -> None:
    fitted, other = simulated(record()), simulated(record(train__steps=9))
    fitted.prediction = Prediction(fitted="gpt-1.7b")
    found = evidence((FAST,), [fitted, other])["selene"]
    assert [one and (one.holds, one.numbers) for one in found] == [(1, "1 of 1 runs; at least 1")]


def test_an_idealised_machine_has_other_seconds_and_measures() -> None:
    one = simulated(record())
    one.prediction = Prediction(without={"network": 0.05}, bubble=0.3)
    assert one.tokens_per_second > 0
    (ideal,) = idealised([one], "network")
    assert ideal.tokens_per_second == pytest.approx(2 * one.tokens_per_second)
    assert idealised([one], "bubble") == []


def test_absolute_numbers_are_judged_on_their_hardware_only() -> None:
    claim = Claim(text="140 TFLOP/s", source="table 1", check=fast(1.0), hardware="A100")
    on = lambda name: evidence((claim,), [record(device="cuda", device_name=name)])[""]
    assert on("Intel(R) Xeon(R) Processor") == [None]
    assert [one and one.holds for one in on("NVIDIA A100-SXM4-80GB")] == [1]
    found = evidence((claim, FAST), [record(), simulated(record(train__steps=9))])
    assert [one is not None for one in found[""]] == [False, True]
    assert [one is not None for one in found["selene"]] == [True, True]
    assert evidence((claim,), [record(status="failed", reason="no")])[""] == [None]


def test_the_largest_tier_that_can_tell_is_judged_measured_and_simulated_apart() -> None:
    one = [record(tier="smoke"), record(tier="small", seconds=1e6), simulated(record(tier="paper"))]
    found = judged(claimed(FAST), one)
    assert [(each.tier, each.systems, each.verdict) for each in found] == [
        ("small", "", "not reproduced"),
        ("paper", "selene", "reproduced"),
    ]
    assert [each.runs for each in found] == ["small, measured", "paper, simulated for selene"]
    only_smoke = lambda records: fast(1.0)([one for one in records if one.tier == "smoke"])
    found = judged(claimed(replace(FAST, check=only_smoke)), one)
    assert [(each.tier, each.verdict) for each in found] == [("smoke", "reproduced")]
    assert [(each.tier, each.verdict) for each in judged(claimed(FAST), [])] == [(None, "not run here")]


def test_systems_that_share_runs_have_verdicts_of_their_own() -> None:
    found = judged(claimed(FAST), [simulated(record()), simulated(record(), "h100", "NVIDIA H100")])
    assert sorted(each.systems for each in found) == ["h100", "selene"]
    other = [simulated(record()), simulated(record(train__steps=9), "selene_deepspeed")]
    assert [each.systems for each in judged(claimed(FAST), other)] == ["selene, selene_deepspeed"]


def test_verdicts_are_counted_by_kind() -> None:
    slow = replace(FAST, text="runs are faster still", check=fast(1e9))
    never = replace(FAST, text="runs are on GPUs", hardware="H100")
    found = judged(claimed(FAST, slow, never), [record(), simulated(record())])
    said = counts(found)
    assert said["claims"] == 3
    none = dict.fromkeys(("partly", "cannot tell here"), 0)
    assert said["measured"] == said["simulated"] == {"reproduced": 1, "not reproduced": 1} | none
    assert [(kind, runs, of["reproduced"]) for kind, runs, of in by_kind(found)] == [
        ("own question", "measured", 1), ("own question", "simulated", 1)
    ]  # fmt: skip
    assert said["not run here"] == 1
    assert in_words(said) == (
        "3 claims; measured: 1 reproduced, 1 not reproduced; simulated: 1 reproduced, 1 not reproduced; not run here: 1"
    )
    table = verdicts_table(NAME, found)
    assert len(table.frame) == 5
    assert table.cells[-1][3:] == ["–", "not run here", "–", "–"]


def test_a_claim_simulated_for_several_systems_counts_once() -> None:
    fast_there = simulated(record(), "h100", "NVIDIA H100")
    slow_there = simulated(record(), seconds=1e9)
    found = judged(claimed(FAST), [simulated(record()), fast_there])
    assert len(found) == 2
    assert counts(found)["simulated"]["reproduced"] == 1
    found = judged(claimed(FAST), [slow_there, fast_there])
    assert [one.verdict for one in found] == ["reproduced", "not reproduced"]
    assert (counts(found)["simulated"]["reproduced"], counts(found)["simulated"]["partly"]) == (0, 1)


def test_the_headline_has_what_is_published_simulated_and_measured() -> None:
    printed = replace(FAST, text="printed", published="1 token/s")
    found = judged(claimed(FAST, printed), [record(), simulated(record(tier="paper"))])
    table = headline_table(NAME, found)
    assert [c.header for c in table.columns] == [
        "headline", "published", "simulated (paper, selene)", "measured (smoke)"
    ]  # fmt: skip
    assert table.cells == [["printed", "1 token/s", "1 of 1 runs; at least 1", "1 of 1 runs; at least 1"]]
    own = headline_table(NAME, judged(claimed(FAST), [record()]))
    assert own.cells == [["runs are fast", "–", "–", "1 of 1 runs; at least 1"]]
    assert headline_table(NAME, []).frame.empty


def scaled(weak: float, overlapped: float) -> list[Record]:
    """The smoke tier of data parallelism, three times: what two ranks take, of one, and of that when they overlap."""
    made = []
    for run in load(NAME).runs["smoke"]:
        dp, per_rank = run.plan.dp, run.train.global_batch / run.plan.dp
        slower = 1.0 if dp == 1 else weak if per_rank == 8 else 1.2
        slower *= overlapped if dp > 1 and run.plan.overlap_grad_reduce else 1.0
        made += [record_of(replace(run, repeat=i), seconds=0.1 * per_rank / 8 * slower) for i in range(3)]
    return made


@pytest.mark.parametrize(
    ("weak", "overlapped", "expected"),
    [(1.05, 0.95, [YES, YES, ABSENT]), (1.4, 0.95, [NO, YES, ABSENT]), (1.05, 1.1, [YES, NO, ABSENT])],
)
def test_claims_of_data_parallelism_turn(weak: float, overlapped: float, expected: list[str]) -> None:
    found = scaled(weak, overlapped)
    assert [one.verdict for one in judged(load(NAME), found)] == expected
    assert {one.verdict for one in judged(load(NAME), [one for one in found if not one.run.repeat])} == {OPEN, ABSENT}


@pytest.mark.parametrize(("efficiency", "expected"), [(0.97, YES), (0.8, NO), (1.0, NO)])  # 1: a network of no time
def test_a_published_efficiency_is_judged_on_both_sides(efficiency: float, expected: str) -> None:
    runs = [run for run in load(NAME).runs["paper"] if run.repeat == 0 and run.plan.overlap_grad_reduce]
    runs = [run for run in runs if (run.plan.dp, run.train.global_batch) in ((1, 64), (64, 4096))]
    made = [record_of(run, seconds=1 / efficiency if run.plan.dp > 1 else 1.0, device="cuda") for run in runs]
    assert judged(load(NAME), thrice(made))[2].verdict == expected


def put(out: Path, full: Record, name: str = NAME, tier: Tier = "smoke") -> None:
    place = {"experiment": name, "tier": tier}
    Store(out, name, tier, full.environment.system).write(made_up_records.document(full) | place)


def test_the_verb_tells_all_a_papers_or_one_experiments_claims(tmp_path: Path) -> None:
    for full in scaled(1.05, 0.95):
        put(tmp_path, full)
    told = call("claims", "data_parallel_scaling", "--out", tmp_path)
    assert told.status == 0
    assert "smoke, measured" in told.output
    assert "\n3 claims; measured: 2 reproduced; not run here: 1\n" in told.output
    found = document(call("claims", "data_parallel_scaling", "--out", tmp_path, "--json").output)
    assert found["counts"]["measured"]["reproduced"] == 2
    [of_one] = found["experiments"]
    assert of_one["id"] == NAME
    first = of_one["claims"][0]["verdicts"]
    assert [(one["tier"], one["source"], one["verdict"]) for one in first] == [("smoke", "measured", "reproduced")]
    assert of_one["claims"][2]["verdicts"][0]["verdict"] == "not run here"
    assert "not run here: 3" in call("claims", NAME, "--tier", "small", "--out", tmp_path).output
    papers = document(call("claims", "megatron2019", "--out", tmp_path, "--json").output)
    assert len(papers["experiments"]) > 3
    assert all(one["id"].startswith("megatron2019/") for one in papers["experiments"])
    assert papers["counts"]["claims"] == papers["counts"]["not run here"] > 10


def test_what_is_no_experiment_is_refused() -> None:
    assert "'megatron2018' is not an experiment" in refused("claims", "megatron2018")
    assert "'zerob' names several experiments; valid: a file NAME.py, or zerobubble2024/memory, zerobubble2024/thr" in (
        refused("claims", "zerob")
    )


def test_records_that_are_not_tracked_are_left_out(tmp_path: Path) -> None:
    put(tmp_path, record())
    put(tmp_path, simulated(record()))
    experiment = load(NAME)
    assert len(records_of(experiment, tmp_path)) == 2
    assert records_of(experiment, tmp_path, tracked=set()) == []
