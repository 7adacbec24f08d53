"""Sums of squares that are exact enough to clip by."""

from collections.abc import Sequence

import torch
from torch import Tensor


def squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of squares of each tensor, at least in fp32. Shapes: n tensors -> [n].

    PyTorch's norm adds them up one after another on a CPU: in fp32 it is off by up to 1e-4, in fp64 it takes ten times
    as long as a dot product, which adds up in parts.
    """
    first = tensors[0]
    if first.device.type == "cpu" and first.element_size() >= 4:
        flat = [tensor.reshape(-1) for tensor in tensors]
        return torch.stack([torch.dot(x, x) for x in flat])
    narrow = torch.float64 if first.dtype == torch.float64 else torch.float32
    wide = torch.float64 if first.device.type == "cpu" else narrow
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=wide)).square().to(narrow)
