"""Frontier's scaling: what is predicted with the recipe's own microbatch, and what the fitted one gives."""

from pathlib import Path

import pytest

from harness.predict import accuracy
from harness.predict.published_scaling import FITTED, MICROBATCH, STUDIES, frontier, run_of


def test_predictions_use_the_recipes_own_microbatch() -> None:
    assert {run_of(study, kind, study.few).train.microbatch for study in STUDIES for kind in ("weak", "strong")} == {1}
    assert {kind for kind, size in MICROBATCH.items() if size != 1} == set(FITTED)


def test_weak_scaling_is_within_3_points_and_strong_is_not() -> None:
    weak, strong = frontier(["weak"]), frontier(["strong"])
    assert [one.published for one in (*weak, *strong)] == [100, 100, 89, 87]
    assert all(abs(one.predicted - one.published) <= 3 for one in weak)
    assert all(one.predicted - one.published > 5 for one in strong)


def test_a_microbatch_picked_to_match_is_within_3_points_and_called_fitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_system = [case for case in accuracy.CASES if case.system in ("selene", "selene_deepspeed")]
    monkeypatch.setattr(accuracy, "CASES", of_system)
    fitted = frontier(FITTED)
    assert len(fitted) == 2
    assert all(abs(one.predicted - one.published) <= 3 for one in fitted)
    table = accuracy.other_table(tmp_path)
    [fits] = [row for row in table.frame.to_dict("records") if "said not to fit" in row["what"]]
    assert (fits["what"].split()[1], fits["met"], fits["n"]) == ("0", "yes", 110)
    assert any("Said not to fit: none." in note for note in table.notes)
    [row] = [row for row in table.frame.to_dict("records") if "strong scaling" in row["what"]]
    predicted = [abs(one.predicted - one.published) for one in frontier()]
    assert row["mape"] == pytest.approx(sum(predicted) / len(predicted))
    assert row["met"] == "no"
    assert any("picked to match" in note and "90.7%" in note for note in table.notes)
