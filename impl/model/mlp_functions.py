"""The functions between an MLP's two products; a gated one has two of the first product's outputs as inputs."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as functional
from torch import Tensor

from impl.model.config import MLPKind
from impl.model.gelu import gelu


def squared_relu(x: Tensor) -> Tensor:
    """Return max(x, 0)^2 (So et al. 2021, 2109.08668)."""
    return functional.relu(x).square()


def swiglu(x: Tensor) -> Tensor:
    """Return g s(g) u with the logistic s (Shazeer 2020, 2002.05202); keeps its input alone.

    Shapes: [n, 2 f], g before u -> [n, f].
    """
    if torch.compiler.is_compiling():
        gate, up = x.chunk(2, -1)
        return functional.silu(gate) * up
    return cast(Tensor, _SwiGLU.apply(x))


FUNCTIONS: dict[MLPKind, Callable[[Tensor], Tensor]] = {
    **{"gelu": gelu, "gelu_erf": functional.gelu},
    **{"relu": functional.relu, "squared_relu": squared_relu, "swiglu": swiglu},
}


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        out = torch.empty_like(x)
        of_gate, of_up = out.chunk(2, -1)
        s = torch.sigmoid(gate)
        torch.mul(gate, s, out=of_up)
        torch.mul(s, 1 + gate - of_up, out=of_gate)  # s (1 + g (1 - s))
        of_gate.mul_(up).mul_(grads[0])
        of_up.mul_(grads[0])
        return out
