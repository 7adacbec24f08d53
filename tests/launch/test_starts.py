"""A point that starts from the last checkpoint of another one, which keeps it."""

from dataclasses import replace
from pathlib import Path

import pytest

from harness.cli import main
from harness.records.attempts import Attempts
from harness.records.store import Store
from impl.data.config import DataConfig
from impl.evaluation_config import EvaluationConfig
from impl.model.config import ModelConfig
from impl.recipe import Recipe
from impl.run import Run
from tests.harness.fake_site import FakeSite
from tests.harness.small_runs import kept, small, sweep, write_tokens
from tests.impl.data.race_files import write_race


@pytest.mark.usefixtures("forked_ranks")
def test_fine_tuning_waits_for_pretraining_and_starts_from_its_end(tmp_path: Path) -> None:
    data, race = write_tokens(tmp_path / "tokens"), write_race(tmp_path / "race")
    pretraining = Run(
        model=ModelConfig(family="bert", num_layers=1, hidden_size=16, num_heads=1, seq_len=16),
        train=Recipe(steps=3, global_batch=4, microbatch=4, warmup_steps=0),
        data=DataConfig(dataset=str(data)),
        evaluation=EvaluationConfig(sequences=4),
        keep_end=True,
    )
    answering = replace(
        pretraining, data=replace(pretraining.data, race=str(race)), start=pretraining.id, keep_end=False
    )
    store = Store(tmp_path / "results", "race", "smoke")

    sweep(store, [answering])
    record = kept(store, answering)
    assert (record.status, record.reason) == (
        "invalid",
        f"start {pretraining.id}: that run has not ended; when it has come to its end, the same command goes on here",
    )

    told = sweep(store, [pretraining, answering])
    assert told.ends == [(pretraining.id, "ok"), (answering.id, "ok")]
    record = kept(store, answering)
    assert [one.kind for one in record.evaluations] == ["choice"] * 4
    assert record.resolved.head_positions == 0
    assert [path.name for path in Attempts(store).checkpoints(pretraining.id).glob("step-*")] == ["step-00000003"]
    assert not Attempts(store).checkpoints(answering.id).exists()

    Attempts(store).forget_checkpoints(pretraining.id)
    again = replace(answering, seed=1)
    sweep(store, [again])
    assert "the checkpoint of that run is gone" in str(kept(store, again).reason)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("harness.launch.sweep.POLL_SECONDS", 0.02)
    monkeypatch.setattr("harness.launch.sweep.SCHEDULER_SECONDS", 0.0)


@pytest.mark.parametrize("on", ["local", "slurm"])
def test_points_side_by_side_wait_for_what_they_start_from(tmp_path: Path, on: str) -> None:
    store, (first, after, other) = started_from(tmp_path)
    of_first = Attempts(store).checkpoints(first.id)
    (of_first / "step-00000003").mkdir(parents=True)  # of which its run may not have come to the end
    site = FakeSite(looks=3, on=on)
    sweep(store, [after, first, other], site=site, jobs=3)
    assert site.submitted == [first.id, other.id, after.id]
    assert {record.status for record in store.records()} == {"ok"}


def test_who_leaves_the_jobs_alone_waits_for_none(tmp_path: Path) -> None:
    store, (first, after, other) = started_from(tmp_path)
    site = FakeSite(on="slurm")
    sweep(store, [first, after, other], site=site, detach=True)
    assert site.submitted == [first.id, other.id]
    assert [(record.id, record.status) for record in store.records()] == [(after.id, "invalid")]
    (Attempts(store).checkpoints(first.id) / "step-00000003").mkdir(parents=True)
    sweep(store, [first, after, other], site=site, detach=True)
    assert site.submitted == [first.id, other.id, after.id]


def started_from(folder: Path) -> tuple[Store, tuple[Run, Run, Run]]:
    """A run, one that starts from its end, and one that has nothing to do with them."""
    data = write_tokens(folder / "tokens")
    first = replace(small(data), keep_end=True)
    return Store(folder / "results", "race", "smoke"), (
        first,
        replace(small(data), start=first.id),
        small(data, seed=1),
    )


def test_what_starts_from_a_run_that_failed_says_so(tmp_path: Path) -> None:
    store, (first, after, _) = started_from(tmp_path)
    told = sweep(store, [first, after], site=FakeSite({first.id: "error"}))
    assert told.ends == [(first.id, "failed"), (after.id, "invalid")]
    assert "that run ended as failed;" in str(kept(store, after).reason)


def test_train_says_what_it_cannot_start_from_or_keep(tmp_path: Path, capsys) -> None:
    for options, says in (
        (["--start", str(tmp_path / "none")], f"start {tmp_path / 'none'}: no checkpoint in"),
        (["--keep-end"], "--keep-end: needs --out"),
        (["--data.race", str(tmp_path)], "valid: model.family bert"),
        (["--model.family", "bert", "--data.race", str(tmp_path)], "no train/middle|high/*.txt"),
    ):
        assert main.main(["train", *options]) == 2
        said = capsys.readouterr().err
        assert says in said
        assert said.count("\n") == 1
