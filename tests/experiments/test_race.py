"""RACE: runs that depend on each other, the table beside the published one, and verdicts that turn."""

from dataclasses import replace

import pytest

from experiments.megatron2019 import race
from harness.analysis import render
from harness.experiment.experiment import TIERS
from harness.experiment.loading import load
from harness.records.parts import Evaluation
from harness.records.record import Record
from harness.report.results import all_tables
from impl.run import Run
from tests.experiments.as_printed import judged
from tests.harness.made_up_records import record_of

RISES, SCHOOLS, PRETRAINING, GUESSING, PUBLISHED = range(5)


def answered(run: Run, middle: float, high: float, tier: str) -> Record:
    """A record of a run that answered these shares of 400 questions each."""
    short = replace(run, train=replace(run.train, steps=20))  # a record at the paper's scale has millions
    made = replace(record_of(short, tier=tier), run=run, id=run.id)
    if run.data.race is None:
        return made
    right = {"RACE test middle": round(400 * middle), "RACE test high": round(400 * high)}
    total = {"RACE test": sum(right.values()), **right}
    asked = Evaluation("", "choice", 9, nats=1.0, tokens=400, total=400, key={"data": "ab"})
    made.evaluations = [replace(asked, name=name, correct=correct) for name, correct in total.items()]
    made.evaluations[0].total = 800
    return made


def records(tier: str, shares: list[tuple[float, float]], initial: float = 0.3) -> list[Record]:
    """Of every run of a tier: shares by size, from small to large, of models that start from pretrained weights."""
    runs = load("megatron2019/race").runs[tier]  # pyright: ignore[reportArgumentType]
    models = list(dict.fromkeys(run.model for run in runs))
    by_model = dict(zip(models, shares, strict=True))
    return [answered(run, *(by_model[run.model] if run.start else (initial, initial)), tier=tier) for run in runs]


def verdicts(made: list[Record]) -> list[str]:
    return judged(load("megatron2019/race").claims, made)


@pytest.mark.parametrize("tier", TIERS)
def test_every_run_starts_from_one_before_it(tier: str) -> None:
    runs: list[Run] = load("megatron2019/race").runs[tier]  # pyright: ignore[reportArgumentType]
    kept: set[str] = set()
    for run in runs:
        assert (run.data.race is None) is run.keep_end
        assert run.start is None or run.start in kept
        kept |= {run.id} if run.keep_end else set()


def test_batches_and_rates_are_table_6s() -> None:
    runs = [run for run in load("megatron2019/race").runs["paper"] if run.start]
    rows = {name: race.published("megatron2019", f"race_finetune_{name}") for name in ("batch", "lr")}
    for name, size in zip(race.PAPER_SIZES, dict.fromkeys(run.model for run in runs), strict=True):
        [recipe] = {run.train for run in runs if run.model == size}
        assert [rows["batch"].set_index("model")["value"][name]] == [recipe.global_batch / 4]
        assert [rows["lr"].set_index("model")["value"][name]] == [recipe.lr]


def test_made_up_questions_turn_the_verdicts_that_they_can_tell() -> None:
    good = verdicts(records("small", [(0.4, 0.4), (0.5, 0.5), (0.6, 0.6)]))
    assert [good[i] for i in (RISES, PRETRAINING, GUESSING)] == ["reproduced"] * 3
    assert [good[i] for i in (SCHOOLS, PUBLISHED)] == ["not run here"] * 2
    bad = verdicts(records("small", [(0.6, 0.6), (0.5, 0.5), (0.4, 0.4)], initial=0.7))
    assert [bad[i] for i in (RISES, PRETRAINING, GUESSING)] == ["not reproduced"] * 2 + ["reproduced"]
    guessed = verdicts(records("small", [(0.25, 0.25)] * 3))
    assert guessed[GUESSING] == "not reproduced"
    half = verdicts(records("small", [(0.4, 0.4), (0.6, 0.6), (0.5, 0.5)]))
    assert half[RISES] == "partly"


def test_races_own_questions_turn_the_others() -> None:
    published = [(0.869, 0.791), (0.904, 0.842), (0.918, 0.872)]  # of as many questions: 83.0, 87.3 and 89.5% of both
    good = verdicts(records("paper", published))
    assert [good[i] for i in (RISES, SCHOOLS, GUESSING, PUBLISHED)] == ["reproduced"] * 4
    assert good[PRETRAINING] == "not run here"
    worse = verdicts(records("paper", [(b - 0.05, a - 0.05) for a, b in published]))
    assert [worse[i] for i in (SCHOOLS, PUBLISHED)] == ["not reproduced"] * 2


def test_the_table_has_ours_and_the_papers() -> None:
    made = records("small", [(0.4, 0.3), (0.5, 0.4), (0.6, 0.5)])
    table = race.table(made)
    assert list(table.frame["whose"]) == ["ours"] * 6 + ["published"] * 3
    assert list(table.frame["both"])[-3:] == pytest.approx([0.83, 0.873, 0.895])
    assert list(table.frame["both"][:6]) == pytest.approx([0.3, 0.35, 0.3, 0.45, 0.3, 0.55])
    text = render.markdown(table)
    assert "89.5" in text
    assert {one.name for one in all_tables(made, table=race.table)} >= {"race", "accuracy_race_test"}


def test_seeds_are_one_point() -> None:
    table = race.table(records("small", [(0.4, 0.3), (0.5, 0.4), (0.6, 0.5)]))
    assert list(table.frame["n"][:6]) == [3] * 6
    runs = [run for run in load("megatron2019/race").runs["small"] if run.start]
    assert len({replace(run, seed=0) for run in runs}) == 3
