"""What a rank writes into its record."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.calibrate.rank import Calibrating
from harness.rank import rendezvous, resume, worker
from harness.rank.failure import Failure
from harness.rank.instruments import Measured
from harness.rank.journal import Journal
from harness.rank.json_files import read_as
from harness.rank.results import RESUMED, Resumption
from harness.records import environment
from harness.records.environment import device_environment
from harness.records.parse import of_document
from harness.records.parts import Git
from harness.records.store import with_digest
from impl.precision import LossScale
from impl.recipe import Recipe
from impl.train import Step
from tests.fake_cuda import Driver
from tests.harness.made_up_orders import made_up
from tests.harness.made_up_records import document, record


def test_the_recorded_peak_on_a_gpu_is_trainings_and_not_start_ups(
    monkeypatch: pytest.MonkeyPatch, cuda: Driver
) -> None:
    doing = lambda what, result=None: lambda *_, **__: (cuda.calls.append(what), result)[1]
    monkeypatch.setattr(worker, "dist", SimpleNamespace(barrier=lambda: None, destroy_process_group=lambda: None))
    monkeypatch.setattr(worker, "gc", SimpleNamespace(collect=lambda: None, freeze=lambda: None))
    monkeypatch.setattr(worker.TokenFolder, "open", lambda folder: None)
    monkeypatch.setattr(worker, "make", doing("make", SimpleNamespace(next_token=None)))
    monkeypatch.setattr(worker, "gemm_rate", doing("measure", {}))
    one: Any = object.__new__(worker.Worker)
    one.device = torch.device("cpu")
    one.heart = SimpleNamespace(enter=lambda *_, **__: None)
    one.orders, one.measured = made_up(), Measured()
    one.device, one.mesh, one.hashes, one.local_rank = torch.device("cpu"), None, None, 0
    one.run = SimpleNamespace(train=SimpleNamespace(steps=1))
    one._load_start, one._resume = doing("load"), doing("resume")
    one._train, one._evaluate = doing("train", ("ok", None)), doing("evaluate")
    recorded: list[dict[str, Any]] = []
    one._write = lambda _, measured, *__: recorded.append(measured)
    assert one.run_to_end()
    assert cuda.calls == ["make", "measure", "load", "resume", "reset peak", "train", "evaluate", "peak"]
    assert recorded[0].pop("host").keys() >= {"local_rank", "own", "busy", "stolen"}
    assert recorded == [{"peak_memory_bytes": 50, "memory_kind": "CUDA allocator peak"}]


def training(folder: Path, steps: int) -> Any:
    """A worker that could train so many steps."""
    one: Any = object.__new__(worker.Worker)
    one.device = torch.device("cpu")
    one.attempt, one.rank, one.hashes = folder, 0, None
    one.measured = Measured(seconds={"training": 0.0})
    one.heart, one.watch = SimpleNamespace(enter=lambda *_: None), SimpleNamespace(reset=lambda: None)
    one.run = SimpleNamespace(evaluation=SimpleNamespace(every=0), train=SimpleNamespace(steps=steps))
    return one


def test_a_steps_seconds_end_when_the_device_has_finished(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    order: list[str] = []
    value = SimpleNamespace(item=lambda: (order.append("wait"), 1.0)[1])
    step = SimpleNamespace(loss=value, grad_norm=value, lr=0.1, is_skipped=False)
    clock = lambda: (order.append("clock"), 1.0 * len(order))[1]
    monkeypatch.setattr(worker, "time", SimpleNamespace(perf_counter=clock))
    trainer = SimpleNamespace(step=lambda *_: (order.append("step"), step)[1])
    assert training(tmp_path, 2)._train(trainer, None, None) == ("ok", None)
    assert order == ["clock", "step", "wait", "wait", "clock"] * 2


def test_a_run_ends_whose_gradients_overflow_at_any_loss_scale(tmp_path: Path) -> None:
    trainer: Any = object.__new__(worker.Trainer)
    trainer.loss_scale, one = LossScale(Recipe(initial_loss_scale=2.0), "fp16"), torch.ones(())
    skipped = Step(one, one, 0.1, is_skipped=True)
    trainer.step = lambda *_: (trainer.loss_scale.update(overflowed=True), skipped)[1]
    ended = ("nan", "fp16 gradients overflow at any loss scale down to 1, at step 1")
    assert training(tmp_path, 9)._train(trainer, None, None) == ended


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker meets no other ranks."""
    mesh = SimpleNamespace(get_group=lambda axis: SimpleNamespace(group_name=axis, size=lambda: 1))
    monkeypatch.setattr(worker, "join", lambda *_: (torch.device("cpu"), None))
    monkeypatch.setattr(worker, "build_mesh", lambda *_: mesh)
    monkeypatch.setattr(worker, "Stopwatch", lambda *_: None)


def written(one: worker.Worker) -> Any:
    """The code in the result that a worker writes."""
    trainer: Any = SimpleNamespace(settings=dict, vocab_size=8)
    one._write(trainer, {}, "ok", None)
    return json.loads((one.attempt / "rank-0.json").read_text())["device"].get("git")


@pytest.mark.usefixtures("alone")
def test_a_record_has_the_code_that_ranks_imported_and_not_that_of_the_orders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A job may wait for days; where the ranks' code has no commit, the one of the orders stays."""
    made_up().write(tmp_path)
    for here in ({"commit": "later", "dirty": False, "diff_sha256": None}, None):
        monkeypatch.setattr(worker, "git_state", lambda _, here=here: here)
        assert written(worker.Worker(tmp_path, 0, 0, 1, "")) == here


HERE: dict[str, Any] = {"commit": "b" * 40, "dirty": False, "diff_sha256": None}
OTHER = {"commit": "a" * 40, "dirty": True, "diff_sha256": "c" * 64, "step": 0}
CHANGED = HERE | {"dirty": True, "diff_sha256": "c" * 64, "step": 0}
CODES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "the same": ([HERE | {"step": 0}], {}, ""),
    "other": ([OTHER], {"step": 2, "before": [OTHER]}, "aaaaaaaaaaaa with changes and from step 2 bbbbbbbbbbbb"),
    "changed": ([CHANGED], {"step": 2, "before": [CHANGED]}, "bbbbbbbbbbbb with changes and from step 2 bbbbbbbbbbbb"),
    "the same since step 1": (
        [OTHER, HERE | {"step": 1}],
        {"step": 1, "before": [OTHER]},
        "aaaaaaaaaaaa with changes and from step 1 bbbbbbbbbbbb",
    ),
    "the same, other after the checkpoint": ([HERE | {"step": 0}, OTHER | {"step": 2}], {}, ""),
    "not known": ([{"step": 0}], {"step": 2, "before": [{"step": 0}]}, "unknown and from step 2 bbbbbbbbbbbb"),
    "of an earlier version's journal": (
        None, {"step": 2, "before": [{"step": 0}]}, "unknown and from step 2 bbbbbbbbbbbb",
    ),
}  # fmt: skip
"""Code of the steps before in a journal; with it, what a record adds to the code that goes on at step 2; a warning."""


@pytest.mark.parametrize("code", CODES)
@pytest.mark.usefixtures("alone")
def test_a_record_has_the_code_of_the_steps_before_an_interruption(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str
) -> None:
    earlier, added, warning = CODES[code]
    entry = asdict(Measured(steps=[{"step": 0}, {"step": 1}], seconds={"training": 1.0}, code=earlier))
    if earlier is None:
        del entry["code"]
    (tmp_path / "journal").write_text(with_digest(json.dumps(entry)))
    read = Journal(tmp_path / "journal").read()
    assert read is not None
    before = replace(read.until(2), resumed=[2])
    monkeypatch.setattr(resume, "Continuation", lambda *_: SimpleNamespace(resume=lambda: (before, [])))
    monkeypatch.setattr(worker, "git_state", lambda _: HERE)
    made_up(checkpoint_every=2).write(tmp_path)
    one = worker.Worker(tmp_path, 0, 0, 1, "")
    one._resume(object.__new__(worker.Trainer))
    assert written(one) == HERE | added
    warnings = [f"not all steps are of one known code: commit {warning}"] if warning else []
    assert read_as(Resumption, tmp_path / RESUMED) == Resumption(warnings, [2], HERE | added)
    parsed = of_document(document(record()) | {"environment": {"git": HERE | added}})
    assert parsed.environment.git == Git(**HERE | added)


@pytest.mark.parametrize(
    ("last", "cause"), [("Cuda failure 2 'out of memory'", "oom"), ("Duplicate GPU detected : rank 1", "launch")]
)
def test_a_device_that_is_full_where_ranks_meet_is_told_from_ranks_that_do_not_meet(
    last: str, cause: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"NCCL error in: a.cpp:93, NCCL version 2.28\nncclInvalidUsage: Wrong.\nLast error:\n{last}")

    made_up().write(tmp_path)
    monkeypatch.setattr(rendezvous.dist, "init_process_group", refuse)
    assert worker.main(tmp_path, 0, 0, 1, f"file://{tmp_path}/rendezvous") == 1
    failure = Failure.of_rank(tmp_path, 0)
    assert failure is not None
    why = f"RuntimeError: NCCL error in: a.cpp:93, NCCL version 2.28: {last}"
    assert (failure.cause, failure.reason) == (cause, f"rank 0: RendezvousError: {why}")


@pytest.mark.usefixtures("cuda", "one_rank")
def test_a_record_and_a_calibration_name_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 27, 3))
    found = device_environment(torch.device("cpu"))
    assert (found["device_name"], found["backend"], found["nccl"]) == ("A GPU", "nccl", "2.27.3")
    assert "cuda" in found
    monkeypatch.setattr(environment, "DRIVERS", (str(tmp_path / "nvidia"), str(tmp_path / "amdgpu")))
    assert device_environment(torch.device("cpu"))["driver"] is None
    (tmp_path / "amdgpu").write_text("6.12.12\n")
    monkeypatch.setattr("torch.version.hip", "7.0.51831")
    found = device_environment(torch.device("cpu"))
    assert (found["hip"], found["driver"], "cuda" in found) == ("7.0.51831", "6.12.12", False)
    (tmp_path / "nvidia").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC version:  gcc 12.3.0 \n"
    )
    assert device_environment(torch.device("cpu"))["driver"] == "570.86.15"
    found = Calibrating(torch.device("cpu"), ["fp32"], 1).found
    assert (found.hardware, found.kind, found.memory_bytes, found.processors) == ("A GPU", "cuda", 2**36, 100)
