"""GELU in its tanh form (Megatron-LM 2019, section 3), which on CPUs keeps its derivative for the backward pass."""

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from impl.model.config import GELU_CHUNK

SCALE, CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715


def gelu(x: Tensor) -> Tensor:
    """Return x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2; x may be overwritten if it requires a gradient.

    That is x s(z) with the logistic s and z = sqrt(8/pi) (x + 0.044715 x^3). With s(z) at hand, few operations more
    give the derivative, s(z) (1 + x z' (1 - s(z))): on a CPU it takes x's place, and the backward pass multiplies.
    """
    if x.device.type != "cpu" or x.dtype == torch.float64 or torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    return cast(Tensor, _Gelu.apply(x))


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        buffers, needs_grad = torch.empty(3, min(GELU_CHUNK, x.numel())), ctx.needs_input_grad[0]
        for place, result in zip(x.view(-1).split(GELU_CHUNK), out.view(-1).split(GELU_CHUNK), strict=True):
            a, s, z = buffers[:, : len(place)]
            a = place if x.dtype == a.dtype else a.copy_(place)
            torch.mul(a, a, out=s)
            torch.addcmul(a, a, s, value=CUBIC, out=z)
            torch.mul(z, SCALE, out=s).sigmoid_()
            if needs_grad:
                z.sub_(a, alpha=2 / 3)  # x z' / (3 SCALE)
            if a is place:
                torch.mul(a, s, out=result)
            else:
                result.copy_(a.mul_(s))
            if needs_grad:
                z.addcmul_(z, s, value=-1)
                place.copy_(s.addcmul_(s, z, value=3 * SCALE))
        ctx.save_for_backward(x)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (derivative,) = ctx.saved_tensors
        return grads[0] * derivative
