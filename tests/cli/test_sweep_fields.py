"""Option --sweep: every point with every combination of values."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cli import sweep_fields
from harness.cli.sweep_fields import swept
from harness.cli.which import Which
from impl.errors import InputError
from impl.recipe import Recipe
from impl.run import Run, non_defaults, with_fields

RUNS = [Run(), Run(train=Recipe(steps=7))]
VALUES = {
    "plan.tp": {"1": 1, "2": 2},
    "plan.zero_stage": {"0": 0, "3": 3},
    "plan.recompute": {"none": "none", "full": "full"},
    "model.norm_placement": {"pre": "pre", "sandwich": "sandwich"},
    "model.vocab_size": {"none": None, "512": 512},
    "model.biases": {"true": True, "False": False},
    "train.lr": {"1e-3": 1e-3, "2": 2.0},
    "train.steps": {"5": 5, "1e1": 10},
    "seed": {"0": 0, "1": 1, "2": 2},
}


@given(st.lists(st.sampled_from(sorted(VALUES)), unique=True, max_size=4))
def test_every_run_has_every_combination_of_values_once(names: list[str]) -> None:
    found = swept(RUNS, [f"{name}={','.join(VALUES[name])}" for name in names])
    combinations = [dict(zip(names, each, strict=True)) for each in product(*(VALUES[name].values() for name in names))]
    expected = [with_fields(run, fields).id for run in RUNS for fields in combinations]
    assert [run.id for run in found] == list(dict.fromkeys(expected))


def test_other_fields_stay_and_equal_runs_come_once() -> None:
    assert [non_defaults(run) for run in swept(RUNS, ["train.steps=7,9"])] == [
        {"train": {"steps": 7}},
        {"train": {"steps": 9}},
    ]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["plan.tq=1"], r"--sweep 'plan.tq': a run has no such field; valid: FIELD=A,B, such as plan.tp"),
        (["plan=1"], r"--sweep 'plan': a run has no such field"),
        (["plan.tp"], r"--sweep plan.tp=: Input should be a valid integer"),
        (["plan.tp=2,x"], r"--sweep plan.tp=x: Input should be a valid integer"),
        (["plan.zero_stage=4"], r"--sweep plan.zero_stage=4: Input should be 0, 1, 2 or 3"),
        (["seed=1", "seed=2"], r"--sweep seed is given twice; valid: all its values in one word, seed=A,B"),
    ],
)
def test_what_is_no_field_or_no_value_is_refused(words: list[str], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        swept(RUNS, words)


def test_no_more_points_than_a_store_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_fields, "MOST_POINTS", 11)
    assert len(swept(RUNS, ["seed=0,1,2,3,4"])) == 10
    with pytest.raises(InputError, match="--sweep makes 12 points; valid: at most 11"):
        swept(RUNS, ["seed=0,1,2", "plan.tp=1,2"])


def test_another_command_gets_the_same_points() -> None:
    which = Which("quickstart", sweep=("seed=0,1", "model.norm_placement=pre,post"))
    assert which.words() == ["--sweep", "seed=0,1", "model.norm_placement=pre,post"]
    usual = [point.run for point in Which("quickstart").chosen("smoke").points]
    assert [point.run for point in which.chosen("smoke").points] == swept(usual, which.sweep)
