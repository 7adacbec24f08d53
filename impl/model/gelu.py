"""GELU in its tanh form (Megatron-LM 2019, section 3), whose forward pass takes a fast tanh on CPUs."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from impl.model.config import GELU_CHUNK

SCALE, CUBIC = math.sqrt(2 / math.pi), 0.044715


def gelu(x: Tensor) -> Tensor:
    """x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2, elementwise.

    PyTorch's own kernel takes up to twice the time on a CPU, where its tanh is not the vector library's.
    """
    if x.device.type != "cpu" or x.dtype == torch.float64 or torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    out = _Gelu.apply(x)
    assert isinstance(out, Tensor)
    return out


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        out = torch.empty_like(x)
        is_small = x.element_size() < 4
        buffers = torch.empty(2, min(GELU_CHUNK, x.numel())) if is_small else None
        for place, result in zip(x.view(-1).split(GELU_CHUNK), out.view(-1).split(GELU_CHUNK), strict=True):
            a, b = (place, result) if buffers is None else buffers[:, : len(place)]
            if is_small:
                a.copy_(place)
            torch.mul(a, a, out=b)
            b.mul_(SCALE * CUBIC).add_(SCALE).mul_(a).tanh_()
            torch.addcmul(a, a, b, out=b).mul_(0.5)
            result.copy_(b)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.ops.aten.gelu_backward(grads[0], x, approximate="tanh")
