"""What a rank writes into its record."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.rank import worker
from harness.rank.instruments import Measured
from tests.harness.made_up_orders import made_up


class Memory:
    """A CUDA allocator's counters."""

    def __init__(self) -> None:
        self.peak = 0

    def use(self, size: int) -> None:
        """Take this much and give it back."""
        self.peak = max(self.peak, size)

    def reset(self) -> None:
        self.peak = 0


def test_the_recorded_peak_on_a_gpu_is_trainings_and_not_start_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, trainer = Memory(), SimpleNamespace(next_token=None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: memory.peak)
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
