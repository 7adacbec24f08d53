"""Training is killed around its saves, again and again, and goes on from the last checkpoint each time."""

import os
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from harness.experiment.experiment import Point
from harness.launch.flags import Saving
from harness.rank.instruments import Measured
from harness.rank.journal import Journal
from harness.records.attempts import Attempts
from harness.records.environment import CODE, git_state
from harness.records.parts import Git
from harness.records.store import Store
from impl.checkpoint import Checkpoints
from impl.evaluation_config import EvaluationConfig
from impl.plan import Plan
from impl.run import Run
from impl.train import Trainer
from tests.harness.calls import refused
from tests.harness.fake_site import FakeSite
from tests.harness.saving import build, promised, train_and_save
from tests.harness.small_runs import ENDLESS, Told, kept, kill_all, small, sweep
from tests.ranks import CONTEXT

SECONDS_TO_LIVE = 0.15
"""At most, after the first save of a process: some saves."""


# Kills ---------------------------------------------------------------------------------------------------------------


def kill_amid_saves(run: Run, folder: Path, chance: random.Random) -> None:
    with tempfile.TemporaryDirectory() as meeting:
        started = promised(folder)
        arguments = lambda rank: (run, folder, rank, f"file://{meeting}/rendezvous")
        ranks = [
            CONTEXT.Process(target=train_and_save, args=arguments(rank), daemon=True)
            for rank in range(run.plan.world_size)
        ]
        for process in ranks:
            process.start()
        try:
            end = time.monotonic() + 60
            while promised(folder) == started:
                assert time.monotonic() < end
                assert all(process.is_alive() for process in ranks)
                time.sleep(0.001)
            time.sleep(chance.uniform(0, SECONDS_TO_LIVE))
        finally:
            chance.shuffle(ranks)
            for process in ranks:
                process.kill()
                time.sleep(chance.choice([0.0, 0.01]))
            for process in ranks:
                process.join()


def state(one: Trainer) -> list[torch.Tensor]:
    return [tensor for own in one.optimizer.owned() for tensor in own.tensors.values()]


@pytest.mark.parametrize(("plan", "kills"), [(Plan(), 8), (Plan(dp=2, zero_stage=2), 4)])
def test_a_training_that_is_killed_has_its_last_checkpoint_whole(
    plan: Plan, kills: int, tokens: Path, tmp_path: Path, one_rank: dist.ProcessGroup
) -> None:
    alone = replace(small(tokens, steps=ENDLESS, decay="constant"), precision="fp64")
    run, uninterrupted, after = replace(alone, plan=plan), build(alone), build(alone)
    chance, behind, left = random.Random(kills), 0, 0
    for _ in range(kills):
        kill_amid_saves(run, tmp_path, chance)
        folder = tmp_path / "checkpoints"
        left += any(path.suffix for path in folder.iterdir())
        loaded = Checkpoints(folder, after, one_rank).load()
        assert loaded is not None
        assert not loaded.warnings
        assert loaded.step >= promised(tmp_path)
        assert after.optimizer.updates == loaded.step
        for i in range(behind, loaded.step):
            uninterrupted.step(i)
        behind = loaded.step
        for tensor, expected in zip(state(after), state(uninterrupted), strict=True):
            torch.testing.assert_close(tensor, expected, rtol=1e-8, atol=1e-10)
    assert left, "no save was ever interrupted"


# The harness ---------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.launch.sweep.POLL_SECONDS", 0.02)
    monkeypatch.setattr("harness.launch.follow.LOOK_SECONDS", 0.0)


@pytest.mark.usefixtures("forked_ranks")
def test_a_point_whose_rank_is_killed_goes_on_from_its_last_checkpoint(
    tokens: Path, store: Store, one_rank: dist.ProcessGroup
) -> None:
    steps = 200
    run = replace(small(tokens, dp=2, steps=steps), evaluation=EvaluationConfig(sequences=4, every=25))
    finished = lambda: [path for path in Attempts(store).checkpoints(run.id).glob("step-*") if not path.suffix]

    def kill(_: Point) -> None:
        if len(finished()) == 2:
            kill_all(store.folder, "harness.rank.worker")

    saving = Saving(checkpoint_every=20)
    told = sweep(store, [run], told=Told(on_look=kill), saving=saving, retries=0)
    assert told.ends == [(run.id, "failed")]
    assert not told.messages
    assert finished()
    told = sweep(store, [run], saving=saving)
    record = kept(store, run)
    assert record.status == "ok", record.reason
    [step] = record.times.resumed_at
    assert step >= 20
    assert step % 20 == 0
    assert [message.split(": ")[1] for message in told.messages] == [f"goes on from step {step} of {steps}"]
    assert [line.step for line in record.steps] == list(range(steps))
    assert [line.step for line in record.evaluations] == list(range(25, steps + 1, 25))
    one = build(replace(run, plan=Plan()))
    assert [line.loss for line in record.steps] == pytest.approx(
        [one.step(i).loss.item() for i in range(steps)], rel=1e-5
    )
    of_ranks = [sum((line.seconds or [])[rank] for line in record.steps) for rank in range(2)]
    assert record.times.training_seconds == pytest.approx(max(of_ranks))  # of both tries
    assert (record.times.total_seconds or 0) >= max(of_ranks)
    assert not (record.environment.git or Git()).before
    assert not Attempts(store).checkpoints(run.id).exists()


@pytest.mark.usefixtures("forked_ranks")
def test_what_the_last_try_cannot_measure_is_that_of_an_earlier_one(tokens: Path, store: Store) -> None:
    one = small(tokens, steps=8)
    run = replace(
        one, model=replace(one.model, num_layers=2), plan=Plan(pp=2), evaluation=EvaluationConfig(sequences=0)
    )
    at_the_end = lambda: (Attempts(store).checkpoints(run.id) / "step-00000008").exists()

    def kill(_: Point) -> None:
        if at_the_end():
            kill_all(store.folder, "harness.rank.worker")

    saving = Saving(checkpoint_every=4)
    assert sweep(store, [run], told=Told(on_look=kill), saving=saving, retries=0).ends == [(run.id, "failed")]
    path = Attempts(store).checkpoints(run.id) / "rank-0.json"
    measured, here = Journal(path).read() or Measured(), git_state(CODE) or {}
    assert measured.code == [here | {"step": 0}]
    Journal(path).add(replace(measured, code=[{"commit": "a" * 40, "dirty": True, "step": 0}]))
    told = sweep(store, [run], saving=saving)
    assert "one known code: commit aaaaaaaaaaaa with changes and from step 8 " in told.messages[0]
    record = kept(store, run)
    assert record.environment.git == Git(**here, step=8, before=[Git(commit="a" * 40, dirty=True)])
    assert (record.status, record.times.resumed_at) == ("ok", [8])
    assert all(rank.memory and rank.timeline and rank.peak_memory_bytes for rank in record.ranks)


@pytest.mark.parametrize("outcome", ["ok", "failed"])
@pytest.mark.parametrize("keep", [False, True])
def test_checkpoints_stay_until_a_record_is_finished_or_as_long_as_is_wanted(
    tokens: Path, store: Store, outcome: str, keep: bool
) -> None:
    run = small(tokens)
    folder = Attempts(store).checkpoints(run.id) / "step-00000001"
    folder.mkdir(parents=True)
    sweep(store, [run], site=FakeSite({run.id: outcome}), saving=Saving(1, keep))
    assert folder.exists() == (keep or outcome == "failed")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--checkpoint-every", "-1", "--out", "x"], "must be a number of steps"),
        (["--checkpoint-every", "5"], "needs --out"),
        (["--keep-checkpoints", "--out", "x"], "none are written"),
    ],
)
def test_checkpoints_that_make_no_sense_are_refused(
    arguments: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert why in refused("train", *arguments)
    assert not os.listdir(tmp_path)
