"""Sums of squares that are exact enough to clip by."""

from collections.abc import Sequence

import torch
from torch import Tensor

PART = 2**17
"""Elements of one dot product. Some processors' BLAS adds up one after another too: 10 million squares in fp32 are off
by 2.5e-4, and in parts of this size by less than 1e-6."""


def squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of each tensor, at least in fp32. Shapes: n tensors -> [n].

    PyTorch's norm adds them up one after another on a CPU: in fp32 it is off by up to 1e-4, in fp64 it takes ten times
    as long as dot products of parts.
    """
    first = tensors[0]
    if first.device.type == "cpu" and first.element_size() >= 4:
        parts = [tensor.reshape(-1).split(PART) for tensor in tensors]
        return torch.stack([torch.stack([torch.dot(x, x) for x in of_one]).sum() for of_one in parts])
    narrow = torch.float64 if first.dtype == torch.float64 else torch.float32
    wide = torch.float64 if first.device.type == "cpu" else narrow
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=wide)).square().to(narrow)
