"""A point that starts from the last checkpoint of another one, which keeps it."""

from dataclasses import replace
from pathlib import Path

from harness import cli
from harness.store import Store
from impl.data.config import DataConfig
from impl.evaluation_config import EvaluationConfig
from impl.model.config import ModelConfig
from impl.recipe import Recipe
from impl.run import Run
from tests.harness.small_runs import sweep, write_tokens
from tests.impl.data.race_files import write_race


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
    record = store.read(answering.id)
    assert record is not None
    assert (record["status"], record["reason"]) == (
        "invalid",
        f"start {pretraining.id}: that run has not ended; when it has, the same command goes on here",
    )

    told = sweep(store, [pretraining, answering])
    assert told.ends == [(pretraining.id, "ok"), (answering.id, "ok")]
    record = store.read(answering.id)
    assert record is not None
    assert [one["kind"] for one in record["evaluations"]] == ["choice"] * 4
    assert record["resolved"]["head_positions"] == 0
    assert [path.name for path in store.checkpoints(pretraining.id).glob("step-*")] == ["step-00000003"]
    assert not store.checkpoints(answering.id).exists()

    store.forget_checkpoints(pretraining.id)
    again = replace(answering, seed=1)
    sweep(store, [again])
    record = store.read(again.id)
    assert record is not None
    assert "the checkpoint of that run is gone" in record["reason"]


def test_train_says_what_it_cannot_start_from_or_keep(tmp_path: Path, capsys) -> None:
    for options, says in (
        (["--start", str(tmp_path / "none")], f"start {tmp_path / 'none'}: no checkpoint in"),
        (["--keep-end"], "--keep-end: needs --out"),
        (["--data.race", str(tmp_path)], "valid: model.family bert"),
        (["--model.family", "bert", "--data.race", str(tmp_path)], "no train/middle|high/*.txt"),
    ):
        assert cli.main(["train", *options]) == 2
        said = capsys.readouterr().err
        assert says in said
        assert said.count("\n") == 1
