"""CUDA without a GPU: records what `impl.device.Cuda` asks of the driver, and copies as late as a GPU may.

Tensors stay in the host's memory, and what is computed is computed at once. A copy to page-locked memory has not been
there before something waits for it, memory that is read meanwhile holds NaN, and a copy from memory that is written
before it has ended fails.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import impl.device
from impl.device import Cuda

READS = {torch.Tensor.item, torch.Tensor.cpu, torch.Tensor.tolist}
"""Functions that wait for the device, to look at a value."""


class Event:
    """A moment of the stream; what is between two of them took a millisecond for every earlier event.

    As a driver does, it gives the milliseconds in fp32.
    """

    def __init__(self, driver: "Driver") -> None:
        self.driver, self.place = driver, -1

    def record(self, stream: Any) -> None:
        assert stream is self.driver.stream
        self.driver.events += 1
        self.place = self.driver.events
        self.driver.calls.append("record")

    def synchronize(self) -> None:
        self.driver.wait("event")

    def elapsed_time(self, end: "Event") -> float:
        if max(self.place, end.place) > self.driver.passed:
            raise RuntimeError("device not ready")
        return ctypes.c_float(end.place - self.place).value


class Driver(TorchFunctionMode):
    """What a GPU's driver is asked for, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.events = self.passed = 0
        self.stream = SimpleNamespace(synchronize=lambda: self.wait("stream"))
        self._locked: dict[int, Tensor] = {}
        self._queue: list[tuple[Tensor, Tensor | int]] = []
        """Page-locked memory with what will be copied to it, or the version of it that is copied from it."""

    @property
    def waits(self) -> int:
        """How often the host waited for the device."""
        return sum(call.startswith("wait") for call in self.calls)

    def wait(self, what: str) -> None:
        self.calls.append(f"wait for {what}")
        self.passed = self.events
        self._run()

    def _run(self) -> None:
        for memory, copied in self._queue:
            if isinstance(copied, Tensor):
                memory.copy_(copied)
            else:
                assert memory._version == copied, "memory was written before the copy from it had ended"
        self._queue = []

    def _is_locked(self, x: Tensor) -> bool:
        return x.untyped_storage()._cdata in self._locked

    def _lock(self, x: Tensor) -> Tensor:
        self._locked[x.untyped_storage()._cdata] = x
        return x

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.pop("pin_memory", False):
            self.calls.append("lock")
            return self._lock(func(*args, **kwargs))
        if func is torch.Tensor.pin_memory:
            self.calls.append("lock")
            return args[0] if self._is_locked(args[0]) else self._lock(args[0].clone())
        if kwargs.pop("non_blocking", False):
            return self._copy(func, args)
        if func in READS:
            self.wait(func.__name__)
        return func(*args, **kwargs)

    def _copy(self, func: Any, args: tuple[Any, ...]) -> Tensor:
        """Begin `x.to(device)` or `into.copy_(x)`."""
        x, into = (args[0], None) if func is torch.Tensor.to else (args[1], args[0])
        if into is not None and self._is_locked(into):
            self.calls.append("fetch")
            copied = x.clone()
            self._queue.append((into.fill_(torch.nan), copied))
            return into
        assert self._is_locked(x), "the host waits for copies of memory that is not page-locked"
        self.calls.append("put")
        there = torch.empty_like(x) if into is None else into
        # the copies before this one have ended when it begins
        is_there = lambda memory: memory.data_ptr() == x.data_ptr()
        before = [copied for memory, copied in self._queue if is_there(memory) and isinstance(copied, Tensor)]
        there.copy_(before[-1] if before else x)
        self._queue += [] if before else [(x, x._version)]
        return there


@contextmanager
def fake_cuda(patch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """Tensors in the host's memory are on a GPU, as far as this process asks `impl.device.Device`."""
    driver = Driver()
    noted = lambda name, result=None: lambda *_: (driver.calls.append(name), result)[1]
    hardware = SimpleNamespace(name="A GPU", total_memory=2**36, multi_processor_count=100)
    for name, function in {
        "Event": lambda enable_timing: Event(driver),
        "current_stream": lambda _: driver.stream,
        "set_device": noted("set device"),
        "reset_peak_memory_stats": noted("reset peak"),
        "max_memory_allocated": noted("peak", 50),
        "get_device_properties": noted("properties", hardware),
    }.items():
        patch.setattr(torch.cuda, name, function)
    patch.setitem(impl.device.KINDS, "cpu", Cuda)
    patch.setattr(torch.autograd, "has_torch_function", lambda _: False)  # which would put the mode aside
    with driver:
        yield driver
