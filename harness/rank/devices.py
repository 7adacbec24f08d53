"""GPUs that this process and its ranks may use."""

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

DeviceKind = Literal["cpu", "cuda"]

DEV = Path("/dev")
NODES = ("nvidia[0-9]*", "dxg", "kfd")
"""Device files of NVIDIA's driver, of GPUs under WSL, and of AMD's driver."""
CUDA, HIP, ROCR = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"


def visible_gpus() -> tuple[str, ...]:
    """Return the GPUs that PyTorch sees, named as in CUDA_VISIBLE_DEVICES: indices, UUIDs or MIG instances."""
    if not any(path for pattern in NODES for path in DEV.glob(pattern)):
        return ()  # without importing PyTorch, which takes seconds
    return _visible(*map(os.environ.get, (CUDA, HIP, ROCR)))


@cache  # counting loads the driver's library each time; it depends on all three variables
def _visible(cuda: str | None, hip: str | None, _rocr: str | None) -> tuple[str, ...]:
    import torch

    count = torch.cuda.device_count()
    listed = hip if torch.version.hip and hip is not None else cuda
    names = map(str, range(count)) if listed is None else map(str.strip, listed.split(","))
    return tuple(names)[:count]


def gpu_count() -> int:
    """Return the number of GPUs that ranks on this machine may use."""
    return len(visible_gpus())


def restricted_to(gpus: Sequence[str]) -> dict[str, str]:
    """Return environment variables by which a process sees these GPUs and no others."""
    return {name: ",".join(gpus) for name in (CUDA, HIP) if name == CUDA or name in os.environ}
