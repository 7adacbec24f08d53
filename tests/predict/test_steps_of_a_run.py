"""Quantiles of a run's steps: of logs, of uneven experts, and of devices of unlike speed against every device drawn."""

from typing import Any

import numpy as np
import pytest

from harness.predict.simulation import Done, predicted
from harness.predict.steps_of_a_run import as_logged, with_unlike_devices
from harness.predict.systems import load_system
from tests.harness.calls import call, document, refused
from tests.impl.simulator.made_up import SYSTEM, run_of

RUN = ("predict", "--model", "gpt-1.2b", "--system", "dgx_h100", "--plan.pp", "2", "--train.microbatch", "1")


@pytest.mark.parametrize("shape", [{"tp": 2, "pp": 4}, {"tp": 2, "pp": 2, "dp": 4}, {"dp": 8}], ids=str)
def test_pooled_replicas_are_as_slow_as_every_replica_carried_out(shape: dict[str, Any]) -> None:
    run, spread, chance = Done(run_of(**shape)), 0.05, np.random.default_rng(0)
    alone = predicted(run, SYSTEM).seconds
    steps = []
    for _ in range(150):
        speeds = np.exp(spread * chance.standard_normal((run.plan.dp, run.plan.pp, run.plan.tp))).max(axis=2)
        steps.append(max(predicted(run, SYSTEM, dict(enumerate(of))).seconds for of in speeds.tolist()))
    every, pooled = np.quantile(steps, (0.1, 0.5, 0.9)), with_unlike_devices(run, SYSTEM, spread)
    # quantiles of so few draws are off by a tenth of the spread; pooled, no replica fills faster than the slowest
    assert np.abs(np.array(pooled) - every).max() < 0.25 * spread * alone
    assert list(pooled) == sorted(pooled)
    assert with_unlike_devices(run, SYSTEM, 2 * spread).p50 > pooled.p50


def test_a_log_gives_its_own_shares_where_it_was_written_and_others_between() -> None:
    system = load_system("dgx_h100")
    few, many = (as_logged(system, log.gpus, log.p50) for log in system.step_logs)
    assert [few, many] == [pytest.approx((log.p10, log.p50, log.p90)) for log in system.step_logs]
    between, fewer = as_logged(system, 2048, 1.0), as_logged(system, 8, 1.0)
    assert few is not None
    assert many is not None
    assert between is not None
    assert fewer is not None
    assert few.p90 / few.p50 < between.p90 < many.p90 / many.p50
    assert fewer.p90 == pytest.approx(few.p90 / few.p50)
    assert as_logged(load_system("selene"), 512, 1.0) is None


def test_both_are_predicted_where_they_are_known_or_asked_for() -> None:
    found = document(call(*RUN, "--spread", "0.01", "--json").output)
    assert found["steps_as_logged"]["p50"] == found["seconds"] < found["steps_of_unlike_devices"]["p90"]
    text = call(*RUN, "--spread", "0.01").output
    assert "steps as logged" in text
    assert "(p90)" in text
    assert "steps_of_unlike_devices" not in document(call(*RUN, "--json").output)
    for spread in ("-0.1", "1", "nan"):
        assert f"--spread {float(spread)}; valid: a number above 0 and below 1" in refused(*RUN, "--spread", spread)


def test_uneven_experts_are_as_measured_or_as_of_even_choices() -> None:
    run = ("predict", "--model", "mixtral-8x7b", "--system", "dgx_h100", "--plan.dp", "8", "--plan.ep", "8")
    run += ("--train.global-batch", "64", "--train.microbatch", "1")
    plain, measured = document(call(*run, "--json").output), ("--imbalance", "1.1", "1.2", "1.7")
    of = plain["steps_of_uneven_experts"]
    assert of["p50"] == pytest.approx(plain["seconds"])
    assert of["p10"] < of["p50"] < of["p90"] < 1.001 * of["p10"]
    found, one = (document(call(*run, *more, "--json").output) for more in (measured, ("--imbalance", "1.2")))
    of = found["steps_of_uneven_experts"]
    assert plain["seconds"] < of["p10"] < of["p50"] == one["seconds"] == found["seconds"] < of["p90"]
    assert "steps of uneven experts" in call(*run, *measured).output
    assert "steps_of_uneven_experts" not in one
    for wrong in (("0.9",), ("9",), ("1.3", "1.2", "1.4"), ("1.1", "1.2"), ("nan",)):
        assert "valid: one number, or p10, p50 and p90 that do not fall" in refused(*run, "--imbalance", *wrong)
    assert "valid with plan.ep above 1" in refused(*RUN, "--imbalance", "1.2")
