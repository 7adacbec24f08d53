"""Activation recomputation: only inputs are kept, and the backward pass computes the rest again."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from impl.collectives import all_gather, own_start

if TYPE_CHECKING:
    from impl.device import Device

Function = Callable[..., Tensor]


class Kept(NamedTuple):
    """Storage of an input until the backward pass: `unpack` inverts `pack`."""

    pack: Callable[[Tensor], Tensor]
    unpack: Callable[[Tensor], Tensor]


WHOLE = Kept(lambda x: x, lambda x: x)


def kept_by(group: dist.ProcessGroup, *, partition: bool, offload: "Device | None") -> Kept:
    """Return the storage of a recomputed layer's input.

    Communication: if partitioned, one all-gather of the input's bytes in the backward pass.

    Source: ZeRO (1910.02054), section 6.1.

    Args:
        partition: keep a copy of this rank's part of what every rank of the group has (P_a). Shapes: [t n, ...] is kept
            as [n, ...].
        offload: copy it from this device to host memory (P_a+cpu), queued behind the device's other work, which the
            host does not wait for; on a CPU it stays where it is.
    """

    def pack(x: Tensor) -> Tensor:
        x = own_start(x, group).wait().clone() if partition else x
        return offload.fetch(x) if offload else x

    def unpack(packed: Tensor) -> Tensor:
        x = offload.put(packed) if offload else packed
        return all_gather(x, group) if partition else x

    return Kept(pack, unpack)


def recompute(function: Function, *inputs: Tensor, kept: Kept = WHOLE) -> Tensor:
    """Return function(*inputs), keeping only the inputs: the backward pass calls it again.

    Parameters inside get their gradients as usual, and hooks run. The function must return the same for the same
    inputs; without gradients it is just called.

    Source: Chen et al. 2016 (1604.06174); Korthikanti et al. 2022 (2205.05198), section 5.
    Communication: the function's own, again in the backward pass, and that of `kept`.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    # an operation whose inputs need no gradient has no backward pass, though parameters inside may need one
    anchor = torch.empty(0, requires_grad=True)
    return cast(Tensor, _Recompute.apply(anchor, function, kept, *inputs))


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, function: Function, kept: Kept, *inputs: Tensor) -> Tensor:
        ctx.function, ctx.kept = function, kept
        ctx.save_for_backward(*map(kept.pack, inputs))
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        needed = ctx.needs_input_grad[3:]
        inputs = [
            ctx.kept.unpack(packed).detach().requires_grad_(needs)
            for packed, needs in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad():
            out = ctx.function(*inputs)
        if out.requires_grad:
            begin = torch.autograd.graph.get_gradient_edge(out)
            del out  # only the way back is needed
            torch.autograd.backward(begin, grad)
        return None, None, None, *(x.grad for x in inputs)
