"""What a rank asks of the device that it computes on: copies, clock, memory, and who carries its collectives.

`Device` is a processor and `Cuda` a GPU. Nothing else asks for the type of a device, but kernels: which one computes
something on which device is decided where it is called, next to the reason.
"""

import os
import time
from resource import RUSAGE_SELF, getrusage
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from impl.errors import InputError


class Device:
    """A processor: an operation has ended when it returns, and all memory is the host's."""

    backend = "gloo"
    activities = (ProfilerActivity.CPU,)
    memory_kind = "peak RSS"
    queues_transfers = False
    """Transfers of a group run one after another."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @staticmethod
    def of(device: torch.device) -> "Device":
        return KINDS[device.type](device)

    @classmethod
    def of_rank(cls, local_rank: int) -> "Device":
        """Return the device of a rank that has this number on its host."""
        return cls(torch.device("cpu"))

    def enter(self) -> torch.device | None:
        """Let this process compute here; return the device that its process groups are bound to, if any."""

    def hardware(self) -> Any:
        """Return the driver's description, with `name`, `total_memory` and `multi_processor_count`; None: no driver."""

    def put(self, x: Tensor, into: Tensor | None = None) -> Tensor:
        """Return the host's tensor on the device, for operations that follow; without `into` it may be itself."""
        return x if into is None else into.copy_(x)

    def fetch(self, x: Tensor, into: Tensor | None = None) -> Tensor:
        """Return the device's tensor in host memory, where it is after `wait`; without `into` it may be itself."""
        return x if into is None else into.copy_(x)

    def host_like(self, x: Tensor) -> Tensor:
        """Return host memory that `fetch` can copy into."""
        return torch.empty_like(x)

    def wait(self) -> None:
        """Wait until all that was begun here has ended."""

    def mark(self) -> Any:
        """Return the moment when all that was begun before has ended."""
        return time.perf_counter()

    def clock(self, mark: Any) -> float:
        """Return the host's clock at a mark that has just been made, after waiting for it."""
        return mark

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two marks, after waiting for the second."""
        return end - begin

    def reset_peak(self) -> None:
        """Let `peak_bytes` begin here, which a process's cannot."""

    def peak_bytes(self) -> int:
        """Return the most memory that was in use at once."""
        return getrusage(RUSAGE_SELF).ru_maxrss * 1024


class Cuda(Device):
    """A GPU, to which the host queues operations without waiting for them.

    A rank's operations and copies are in one stream, which runs them in order: a copy follows what it reads, and
    precedes what is queued later. Collectives have streams of their own, for which `impl.collectives.Pending.wait` lets
    this one wait. Copies go from and to page-locked memory, which PyTorch does not reuse before they have ended.
    """

    backend = "nccl"
    activities = (ProfilerActivity.CPU, ProfilerActivity.CUDA)
    memory_kind = "CUDA allocator peak"
    queues_transfers = True

    @classmethod
    def of_rank(cls, local_rank: int) -> "Device":
        """Return the GPU of a rank, which sees all of its job on the host, or only its own if the scheduler binds it.

        Raises:
            InputError: PyTorch sees none.
        """
        if not (count := torch.cuda.device_count()):
            listed = os.environ.get("CUDA_VISIBLE_DEVICES")
            raise InputError(f"PyTorch {torch.__version__} sees no GPU here (CUDA_VISIBLE_DEVICES={listed!r})")
        return cls(torch.device("cuda", local_rank % count))

    def enter(self) -> torch.device | None:
        torch.cuda.set_device(self.device)
        return self.device

    def hardware(self) -> Any:
        return torch.cuda.get_device_properties(self.device)

    def put(self, x: Tensor, into: Tensor | None = None) -> Tensor:
        if into is None:
            return x.pin_memory().to(self.device, non_blocking=True)
        return into.copy_(x.to(into.dtype).pin_memory(), non_blocking=True)

    def fetch(self, x: Tensor, into: Tensor | None = None) -> Tensor:
        return (self.host_like(x) if into is None else into).copy_(x, non_blocking=True)

    def host_like(self, x: Tensor) -> Tensor:
        return torch.empty_like(x, device="cpu", pin_memory=True)

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def clock(self, mark: Any) -> float:
        mark.synchronize()
        return time.perf_counter()

    def seconds(self, begin: Any, end: Any) -> float:
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)


KINDS: dict[str, type[Device]] = {"cpu": Device, "cuda": Cuda}
