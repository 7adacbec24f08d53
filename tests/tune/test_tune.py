"""The verb `tune`: all plans of a small model on a few devices, and what it says about them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from harness.predict.systems import load_system
from harness.tune import measured, search
from harness.tune.search import best_by_value, front, importance, judged, judged_until, ranked, searched, study_of
from impl.errors import InputError
from impl.model.config import ModelConfig
from impl.recipe import Recipe
from impl.run import Run
from impl.simulator.plans import KNOBS, Plans, every
from tests.harness.calls import call, document, refused

MODEL = ModelConfig(num_layers=4, hidden_size=32, num_heads=4, seq_len=8, vocab_size=100)
BASE = Run(model=MODEL, train=Recipe(global_batch=4, microbatch=1))
SMALL = ("--model", "gpt-1.2b", "--gpus", "4", "--global-batch", "8", "--system", "selene")
FEW = (*SMALL, "--fix", "zero_stage=0,1", "schedule=one_f_one_b", "recompute=full", "--top", "4")


pytestmark = pytest.mark.usefixtures("errors_found_once")


def told(*arguments: str | Path) -> Any:
    answer = call("tune", *arguments, "--json")
    assert answer.status == 0, answer.errors
    return document(answer.output)


def seconds_of(plans: Plans) -> np.ndarray:
    """Made up: more tensor-parallel ranks are slower, larger microbatches are faster, all else does not matter."""
    return plans["tp"] + 1 / plans["microbatch"]


@pytest.fixture
def plans() -> Plans:
    return every(MODEL, 4, 4)


def test_the_best_plans_what_they_trade_and_what_matters() -> None:
    found = told(*FEW)
    assert (found["system"], found["gpus"], found["global_batch"]) == ("selene", 4, 8)
    assert found["fitting"] <= found["plans"]
    best = found["best"]
    assert len(best) == 4
    assert [plan["seconds"] for plan in best] == sorted(plan["seconds"] for plan in best)
    for plan in best:
        assert plan["tp"] * plan["pp"] * plan["dp"] == 4
        assert (plan["schedule"], plan["recompute"], plan["zero_stage"] in (0, 1)) == ("one_f_one_b", "full", True)
        assert plan["seconds"] == pytest.approx(plan["closed_form_seconds"], rel=0.06)
        assert 0 < plan["bytes"] <= found["memory_limit_bytes"]
    sizes = [plan["bytes"] for plan in found["pareto"]]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(found["importance"].values()) == pytest.approx(1)
    assert set(found["best_by_value"]["zero_stage"]) == {"0", "1"}
    assert found["agreement"]["mean"] < 0.06


def test_plans_beyond_the_calibration_are_marked_with_what_it_lacks() -> None:
    fixed = (*SMALL, "--top", "4", "--fix", "tp=2", "dp=2", "zero_stage=0,3", "recompute=full")
    best = told(*fixed)["best"]
    for plan in best:
        doubts = {text.removeprefix("extrapolates: ").partition(",")[0] for text in plan["warnings"]}
        assert ("zero_stage 3" in doubts) == (plan["zero_stage"] == 3)
        assert ("sequence_parallel true" in doubts) == plan["sequence_parallel"]
        assert not any(text.startswith(("recompute", "precision", "tp_over_nodes")) for text in doubts)
    threes = [str(i) for i, plan in enumerate(best, 1) if plan["zero_stage"] == 3]
    assert 0 < len(threes) < 4
    text = call("tune", *fixed).output
    assert "4 x NVIDIA A100-SXM4-80GB (selene" in text
    assert all(title in text for title in ("fastest", "faster or smaller than all others", "what matters most"))
    assert f"zero_stage 3 (plan{'s' * (len(threes) > 1)} {', '.join(threes)})" in text.partition("faster or")[0]
    assert "warning: * selene was not calibrated on " in text
    assert "extrapolates:" not in text


def test_the_fastest_plan_of_a_kind_without_doubt_comes_after_one_in_doubt() -> None:
    shape = ("--model", "ptdp-7.5b", "--gpus", "64", "--global-batch", "256", "--system", "selene", "--top", "2")
    plain = ("recompute=full", "sequence_parallel=false", "offload_optimizer=false", "offload_activations=false")
    few = (*shape, "--fix", *plain, "microbatch=1,2", "zero_stage=0,3")
    found = told(*few)
    best, [first, *_] = found["best"][0], found["trusted"]
    assert best["zero_stage"] == 3
    assert "measured steps with it are predicted 33% to 68% too fast" in best["doubts"][0]
    assert (first["zero_stage"], first["doubts"]) == (0, [])
    text = call("tune", *few).output
    assert "warning: the fastest plan is of a kind that selene is in doubt about: zero_stage 3 is not" in text
    assert f"the fastest of a kind without such doubt takes {first['seconds']:.4g} s, " in text
    assert text.index("fastest of calibrated kinds") < text.index("faster or smaller than all others")
    only = (*shape, "--fix", *plain, "microbatch=1", "zero_stage=3")
    assert "no plan that fits is of a kind without such doubt" in call("tune", *only).output


WITHIN = (
    *("--model", "ptdp-1.7b", "--gpus", "32", "--global-batch", "512", "--system", "selene", "--top", "1", "--fix"),
    *("recompute=full", "zero_stage=0", "tp=1", "pp=1", "sequence_parallel=false", "microbatch=16"),
    *("offload_optimizer=false", "offload_activations=false"),
)
UNCALIBRATED = "warning: * system h100 is not calibrated: its constants are priors (all plans)\n"


@pytest.mark.parametrize(
    ("arguments", "mark", "warnings"), [((*FEW[:-2], "--top", "2", "--system", "h100"), "1*", 2), (WITHIN, "1", 0)]
)
def test_only_plans_beyond_a_calibration_have_a_mark(arguments: tuple[str, ...], mark: str, warnings: int) -> None:
    text = call("tune", *arguments).output
    assert f"│ {mark} │" in text
    assert text.count(UNCALIBRATED) == text.count("warning: *") == warnings
    assert ("in doubt about" in text) == bool(warnings)


def test_a_plan_that_is_found_is_predicted_to_take_as_long_by_predict() -> None:
    cluster = (*FEW[:-2], "--top", "1", "--system", "a100_cluster")
    plan = told(*cluster)["best"][0]
    words = [f"--train.microbatch={plan['microbatch']}", "--train.global-batch=8", "--precision=bf16"]
    for knob in KNOBS:
        if knob != "microbatch":
            name, value = knob.replace("_", "-"), plan[knob]
            words += [f"--plan.{'no-' * (value is False)}{name}", *([str(value)] if type(value) is not bool else [])]
    answer = call("predict", "--model", "gpt-1.2b", *words, "--system", "a100_cluster", "--json")
    found = document(answer.output)
    assert (found["seconds"], found["assumed"]) == (plan["seconds"], {"plan.bucket_bytes": 2**34})
    assert max(rank["bytes"]["total"] for rank in found["memory"]) == plan["bytes"]


def test_a_schedule_in_less_memory_fits_where_the_closed_forms_do_not() -> None:
    pipe = (*SMALL, "--fix", "pp=4", "microbatch=1", "recompute=none", "scatter_gather=true")
    found = told(*pipe, "--device-memory", "10GiB")
    fast = {plan["schedule"]: plan for plan in found["best"]}
    assert fast["v_half"]["bytes"] <= 10 * 2**30
    assert [row["schedule"] for row in found["failed"] if row["schedule"] == "zb_h2"]
    assert "v_half" not in {plan["schedule"] for plan in told(*pipe, "schedule=gpipe")["best"]}
    [only] = [plan for plan in told(*pipe, "schedule=gpipe", "--others", "zbv")["best"] if plan["schedule"] != "gpipe"]
    run = ("--plan.pp", "4", "--plan.schedule", "zbv", "--plan.chunks", "2", "--train.global-batch", "8")
    run += ("--train.microbatch", "1", "--precision", "bf16", "--system", "selene")
    answer = call("predict", "--model", "gpt-1.2b", *run, "--json")
    assert document(answer.output)["seconds"] == only["seconds"]


def test_grids_of_tensor_parallel_ranks_are_judged_if_asked_for() -> None:
    few = (*SMALL, "--fix", "tp=4", "zero_stage=0", "recompute=none", "schedule=one_f_one_b")
    assert not any("tp3" in plan for plan in told(*few)["best"])
    grids = {tuple(plan["tp3"]): plan for plan in told(*few, "--grids", "--top", "40")["best"] if "tp3" in plan}
    assert grids.keys() == {(2, 2, 1), (1, 4, 1)}
    plan = grids[2, 2, 1]
    run = ("--plan.tp", "4", "--plan.tp3", "2", "2", "1", f"--train.microbatch={plan['microbatch']}")
    run += ("--train.global-batch", "8", "--precision", "bf16", "--system", "selene")
    answer = call("predict", "--model", "gpt-1.2b", *run, "--json")
    assert document(answer.output)["seconds"] == plan["seconds"]
    assert "tp3 (2, 2, 1)" in call("tune", *few, "--grids", "--top", "40").output


def test_no_order_of_the_passes_is_shorter_than_the_bound() -> None:
    pipe = (*SMALL, "--fix", "pp=4", "microbatch=2", "schedule=one_f_one_b,gpipe", "recompute=none")
    order = told(*pipe, "--top", "2", "--search", "20")["order"]
    assert order["bound"] <= order["found"] < order["seconds"]
    assert order["schedule"].startswith(("rows:", "v-rows:"))
    assert "no order of its passes in its memory takes less than" in call("tune", *pipe, "--top", "1").output
    assert told(*SMALL, "--fix", "pp=1", "--top", "1")["order"] is None
    large = ("--model", "gpt-1.2b", "--gpus", "4", "--global-batch", "2048", "--system", "selene", "--top", "1")
    few = ("--fix", "pp=4", "microbatch=1", "schedule=one_f_one_b", "--search", "1")
    assert "its table is too large to search" in call("tune", *large, *few).output


def test_what_is_kept_of_a_system_is_not_taken_for_another_of_its_name(tmp_path: Path) -> None:
    one, slower = load_system("selene"), tmp_path / "selene.yaml"
    half = {name: replace(peak, value=peak.value / 2) for name, peak in one.device.peak_flops.items()}
    slower.write_text(yaml.safe_dump(replace(one, device=replace(one.device, peak_flops=half)).as_dict()))
    trials = ("--out", tmp_path, "--trials", "2")
    first = told(*FEW, *trials)["trials"]
    again = told(*[slower if word == "selene" else word for word in FEW], *trials)["trials"]
    assert again[0]["seconds"] > 1.2 * first[0]["seconds"]


def test_trials_begin_with_what_the_knobs_can_say_and_keep_to_what_is_fixed() -> None:
    fixed = (*SMALL, "--fix", "dp=2", "pp=2", "--others", "v_half", "--device-memory", "6GiB")
    trials = told(*fixed, "--trials", "30")["trials"]
    assert {trial["dp"] for trial in trials} == {2}
    assert any("reason" in trial and "seconds" in trial for trial in trials), "none is too large"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*SMALL, "--fix", "cp=2", "cp_attention=ring"), "--fix 'cp_attention=ring' leaves no plan; valid: ulysses"),
        (("--gpus", "4", "--system", "selene"), "tune needs --model"),
        ((*SMALL, "--fix", "colour=red"), "--fix 'colour=red': must be KNOB=VALUE"),
        ((*SMALL, "--fix", "tp=3"), "--fix 'tp=3' leaves no plan; valid: 1, 2, 4"),
        ((*SMALL, "--device-memory", "1GB"), "plans fits"),
        ((*SMALL, "--device-memory", "120GiB"), "--device-memory 120GiB: a device of selene has 80 GiB"),
        ((*SMALL, "--measure", "2"), "--measure needs --out"),
        ((*SMALL, "--out", "plans"), "--out: is of what is tried and measured; valid with --trials or --measure"),
        ((*SMALL, "--trials", "-1"), "must be 0 or more"),
        (
            (*SMALL, "--others", "gpipe"),
            "--others 'gpipe' is none of those; valid: eager_one_f_one_b, zb_h2, zbv, v_half",
        ),
        (("--model", "gpt-1.2b", "--gpus", "41", "--system", "selene"), "no plan puts 1536 sequences"),
        (("--model", "gpt-1.2b", "--gpus", "0", "--system", "selene"), "--gpus 0: must be more than 0"),
        (("--model", "gpt-1.2b", "--gpus", "4", "--system", "selenium"), "system 'selenium' does not exist"),
    ],
)
def test_what_is_off_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    assert message in refused("tune", *arguments)


def test_ranked_plans_differ_in_shape_and_the_plainest_is_meant(plans: Plans) -> None:
    seconds = seconds_of(plans)
    chosen = ranked(plans, seconds, 6)
    assert len({tuple(plans.row(i)[knob] for knob in search.SHAPE) for i in chosen}) == 6
    assert seconds[chosen].tolist() == sorted(seconds[chosen])
    assert plans.oddity[chosen[0]] == min(plans.oddity[seconds == seconds.min()])


def test_no_plan_is_faster_and_smaller_than_one_on_the_front(plans: Plans) -> None:
    generator = np.random.default_rng(0)
    seconds, sizes = 1 + generator.random(len(plans)), 1 + 9 * generator.random(len(plans))
    chosen = front(seconds, sizes, plans.oddity)
    assert chosen[0] == np.argmin(seconds)
    assert not any(((seconds < seconds[i]) & (sizes < sizes[i])).any() for i in chosen)


def test_what_matters_is_what_seconds_depend_on(plans: Plans) -> None:
    shares = importance(plans, seconds_of(plans))
    assert list(shares)[:2] == ["tp", "microbatch"]
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["offload_optimizer"] < 0.01
    assert set(importance(plans, np.ones(len(plans))).values()) == {0.0}
    by_value = best_by_value(plans, seconds_of(plans))
    assert by_value["tp"] == {"1": 1.25, "2": 2.25, "4": 4.25}
    assert by_value["sequence_parallel"] == {"False": 1.25, "True": 2.25}


def with_tp(plans: Plans, *degrees: int) -> list[dict[str, Any]]:
    """Return a plan of each tensor-parallel degree."""
    return [plans.row(int(np.flatnonzero(plans["tp"] == tp)[0])) for tp in degrees]


def test_an_impossible_plan_has_the_reason(plans: Plans) -> None:
    def judge(run: Run) -> dict[str, Any]:
        if run.plan.tp == 4:
            raise InputError("too many")
        return {"seconds": float(run.plan.tp)}

    found = judged(with_tp(plans, 1, 4), BASE, judge)
    assert [one.get("reason") for one in found] == [None, "too many"]


def test_optuna_searches_goes_on_and_keeps_failures(tmp_path: Path, plans: Plans) -> None:
    def judge(run: Run) -> dict[str, Any]:
        return {"reason": "oom: too large"} if run.plan.tp == 4 else {"seconds": float(run.plan.tp)}

    study = lambda: study_of("test", tmp_path / "kept" / "trials.optuna")
    search_on = lambda trials: searched(study(), plans, with_tp(plans, 4, 2), BASE, judge, trials)
    found = search_on(4)
    assert [one.get("reason") for one in found][:2] == ["oom: too large", None]
    again = search_on(6)
    assert len(again) == 6
    assert again[:4] == found
    assert all(one["tp"] * one["cp"] * one["pp"] * one["dp"] == 4 for one in again)


def fake_machine(runs: Sequence[Run], **_: object) -> list[dict[str, Any]]:
    """Says of runs what they took, as `run_here` does, without running them."""
    return [{"reason": "oom: no room"} if run.plan.tp == 4 else {"seconds": 3.0 * run.plan.tp} for run in runs]


def test_predicted_order_against_measured(plans: Plans, capsys: pytest.CaptureFixture[str]) -> None:
    def rows(*seconds: float) -> list[dict[str, Any]]:
        return [row | {"seconds": one} for row, one in zip(with_tp(plans, 1, 2, 4), seconds, strict=True)]

    found = measured.compared(rows(3.0, 5.0, 1.0), BASE, fake_machine)
    assert len({one["point"] for one in found["runs"]}) == 3
    assert (found["kendall_tau"], found["mape"]) == (1.0, pytest.approx(1 / 12))
    assert [one.get("reason") for one in found["runs"]] == [None, None, "oom: no room"]
    measured.print_compared(found)
    assert "Kendall's tau 1.00" in capsys.readouterr().out
    assert measured.compared(rows(5.0, 3.0, 1.0), BASE, fake_machine)["kendall_tau"] == -1.0


def test_the_best_plans_and_optunas_are_run_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.tune.tune.run_here", fake_machine)
    best = told(*FEW, "--out", tmp_path, "--measure", "3")
    assert [one["id"] for one in best["measured"]["runs"]] == [plan["id"] for plan in best["best"][:3]]
    assert "trials" not in best
    found = told(*FEW, "--out", tmp_path, "--measure", "2", "--trials", "4")
    assert len(found["trials"]) == len(found["measured"]["runs"]) == 4
    assert {plan["id"] for plan in best["best"][:2]} <= {trial["id"] for trial in found["trials"]}
    for trial in found["trials"]:
        assert trial.get("reason") == "oom: no room" if trial["tp"] == 4 else trial["seconds"] == 3 * trial["tp"]
    assert call("tune", *FEW, "--out", tmp_path, "--trials", "4").output.count("Optuna: 4 plans, ") == 1


@pytest.mark.parametrize(("fitting", "tried"), [(0, 6), (2, 6), (5, 4), (9, 0)])
def test_further_plans_are_judged_until_enough_fit(fitting: int, tried: int) -> None:
    """Of nine the last `fitting` ones fit; the first three were judged before."""
    fails = lambda number: {"reason": "too large"} if number < 9 - fitting else {"seconds": 1.0}
    judge = lambda rows: [row | fails(row["number"]) for row in rows]
    rows = [{"number": number} for number in range(9)]
    found = judged_until(judge, rows[3:], 2, judge(rows[:3]))
    assert [row["number"] for row in found] == list(range(3, 9))[:tried]
