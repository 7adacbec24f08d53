"""What a rank writes into its record."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.calibrate.rank import Calibrating
from harness.rank import worker
from harness.rank.instruments import Measured
from harness.records.environment import device_environment
from impl.precision import LossScale
from impl.recipe import Recipe
from tests.harness.made_up_orders import made_up


class Memory:
    """A CUDA allocator's counters."""

    def __init__(self) -> None:
        self.peak = 0

    def use(self, size: int) -> None:
        """Take this much and give it back."""
        self.peak = max(self.peak, size)

    def reset(self, _: torch.device) -> None:
        self.peak = 0


def test_the_recorded_peak_on_a_gpu_is_trainings_and_not_start_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, trainer = Memory(), SimpleNamespace(next_token=None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: memory.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", memory.reset)
    monkeypatch.setattr(worker, "dist", SimpleNamespace(barrier=lambda: None, destroy_process_group=lambda: None))
    monkeypatch.setattr(worker, "gc", SimpleNamespace(collect=lambda: None, freeze=lambda: None))
    monkeypatch.setattr(worker.TokenFolder, "open", lambda folder: None)
    monkeypatch.setattr(worker, "make", lambda *_: (memory.use(800), trainer)[1])
    monkeypatch.setattr(worker, "gemm_rate", lambda *_: memory.use(700) or {})

    one: Any = object.__new__(worker.Worker)
    one.heart = SimpleNamespace(enter=lambda *_, **__: None)
    one.orders, one.measured = made_up(), Measured()
    one.device, one.mesh = torch.device("cuda"), None
    one.run = SimpleNamespace(train=SimpleNamespace(steps=1))
    one._load_start = lambda _: memory.use(900)
    one._resume = lambda _: memory.use(600)
    one._train = lambda *_: (memory.use(50), ("ok", None))[1]
    one._evaluate = lambda *_, **__: memory.use(40)
    recorded: list[dict[str, Any]] = []
    one._write = lambda _, measured, *__: recorded.append(measured)

    assert one.run_to_end()
    assert recorded == [{"peak_memory_bytes": 50, "memory_kind": "CUDA allocator peak"}]


def test_a_steps_seconds_end_when_the_device_has_finished(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    order: list[str] = []
    value = SimpleNamespace(item=lambda: (order.append("wait"), 1.0)[1])
    step = SimpleNamespace(loss=value, grad_norm=value, lr=0.1, is_skipped=False)
    clock = lambda: (order.append("clock"), 1.0 * len(order))[1]
    monkeypatch.setattr(worker, "time", SimpleNamespace(perf_counter=clock))
    one: Any = object.__new__(worker.Worker)
    one.attempt, one.rank, one.measured = tmp_path, 0, Measured(seconds={"training": 0.0})
    one.heart, one.watch = SimpleNamespace(enter=lambda *_: None), SimpleNamespace(reset=lambda: None)
    one.run = SimpleNamespace(evaluation=SimpleNamespace(every=0), train=SimpleNamespace(steps=2))
    trainer: Any = SimpleNamespace(step=lambda *_: (order.append("step"), step)[1])
    assert one._train(trainer, None, None) == ("ok", None)
    assert order == ["clock", "step", "wait", "wait", "clock"] * 2
    trainer = object.__new__(worker.Trainer)
    trainer.loss_scale = LossScale(Recipe(initial_loss_scale=2.0), "fp16")
    trainer.step = lambda *_: (trainer.loss_scale.update(overflowed=True), SimpleNamespace(**vars(step) | skipped))[1]
    one.measured = Measured(seconds={"training": 0.0})
    one.run.train.steps, skipped = 9, {"is_skipped": True}
    assert one._train(trainer, None, None) == ("nan", "fp16 gradients overflow at any loss scale down to 1, at step 1")


@pytest.mark.usefixtures("cuda", "one_rank")
def test_a_record_and_a_calibration_name_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    found = device_environment(torch.device("cpu"))
    assert (found["device_name"], found["backend"], found["nccl"]) == ("A GPU", "nccl", "2.27.3")
    found = Calibrating(torch.device("cpu"), ["fp32"], 1).found
    assert (found.hardware, found.kind, found.memory_bytes, found.processors) == ("A GPU", "cuda", 2**36, 100)
