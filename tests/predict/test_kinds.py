"""Kinds of plans: which a system was not calibrated on, and which it misses on published steps."""

import dataclasses

from harness.predict.kinds import errors_by_kind, kind_doubts
from harness.predict.simulation import Done
from harness.predict.systems import load_system
from impl.run import Run, with_fields

RUN = with_fields(
    Run(), {"precision": "fp16", "plan.dp": 2, "plan.recompute": "full", "train.global_batch": 2, "train.microbatch": 1}
)
THREE = ("zero_stage", "3")


def test_published_steps_of_zero_3_are_missed_by_the_constants_of_other_software() -> None:
    errors = errors_by_kind(load_system("selene"))
    assert len(errors[THREE]) == 6
    assert all(-0.8 < off < -0.3 for off in errors[THREE])
    assert all(abs(off) < 0.25 for off in errors["zero_stage", "0"])
    own = errors_by_kind(load_system("selene_deepspeed"))
    assert len(own[THREE]) == 4  # two of six were fitted
    assert all(abs(off) < 0.15 for off in own[THREE])
    assert errors_by_kind(load_system("h200")) == {}, "no step on it is published here"
    fitted_to_all = errors_by_kind(load_system("dgx_h100"))
    assert fitted_to_all[THREE], "only other software's steps are left"


def test_a_kind_is_doubtful_if_it_was_not_fitted_or_is_missed_badly() -> None:
    system, three = load_system("selene"), with_fields(RUN, {"plan.zero_stage": 3})
    assert kind_doubts(Done(RUN), system, {}) == []
    assert kind_doubts(Done(three), system, {}) == ["zero_stage 3 is not calibrated"]
    [said] = kind_doubts(Done(three), system, {THREE: [-0.5, -0.25]})
    assert said == "zero_stage 3 is not calibrated, and 2 measured steps with it are predicted 25% to 50% too fast"
    [one] = kind_doubts(Done(three), system, {THREE: [-0.5]})
    assert one == "zero_stage 3 is not calibrated, and 1 measured step with it is predicted 50% too fast"
    [missed] = kind_doubts(Done(RUN), system, {("recompute", "full"): [-0.1, 0.3]})
    assert (
        missed
        == "recompute full is calibrated, and 2 measured steps with it are predicted 10% too fast to 30% too slow"
    )
    assert kind_doubts(Done(RUN), system, {("recompute", "full"): [-0.1, 0.1]}) == []


def test_without_a_calibration_every_kind_is_doubtful() -> None:
    assert kind_doubts(Done(RUN), dataclasses.replace(load_system("selene"), calibration=None), {})
