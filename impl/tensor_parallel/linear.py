"""Linear layers whose matrix is split over ranks, by columns or by rows."""

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import Tensor, nn

from impl.tensor_parallel.conjugates import F_SEQUENCE, NOTHING, Pair
from impl.tensor_parallel.group import TensorParallel
from impl.tensor_parallel.shards import Shard
from impl.untraced import untraced


class ColumnParallelLinear(nn.Module):
    """y = x A^T + b, with A split by its output features (Megatron-LM 2019, section 3: columns of the paper's A).

    Shapes: [n, in] (sequence parallel: [n / t, in]) -> [n, out / t].
    Communication: f before it, forward and backward.
    """

    def __init__(self, inputs: int, blocks: tuple[int, ...], tp: TensorParallel, *, bias: bool = True) -> None:
        """Make the layer without values.

        Args:
            blocks: sizes of the blocks of output features, each of which is split over the ranks.
        """
        super().__init__()
        self.tp, outputs = tp, sum(blocks)
        self.weight = nn.Parameter(torch.empty(outputs // tp.degree, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs // tp.degree)) if bias else None
        self.shards = {name: Shard(0, outputs, blocks) for name, _ in self.named_parameters()}

    def forward(self, x: Tensor) -> Tensor:
        if self.tp.is_plain:
            return functional.linear(x, self.weight, self.bias)
        return parallel_linear(x, self.weight, self.bias, self.tp, before=self.tp.f)


class RowParallelLinear(nn.Module):
    """y = x A^T + b, with A split by its input features, which fit the outputs of a column-parallel layer.

    Shapes: [n, in / t] -> [n, out] (sequence parallel: [n / t, out]).
    Communication: g behind it, forward and backward. The bias is whole on every rank.
    """

    def __init__(self, inputs: int, outputs: int, tp: TensorParallel, *, bias: bool = True) -> None:
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(outputs, inputs // tp.degree))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        self.shards = {"weight": Shard(1, inputs)}

    def forward(self, x: Tensor) -> Tensor:
        if self.tp.is_plain:
            return functional.linear(x, self.weight, self.bias)
        return parallel_linear(x, self.weight, self.bias, self.tp, after=self.tp.g)


@untraced  # collectives are not traced
def with_shared_heads(qkv: Tensor, queries: int, group: dist.ProcessGroup) -> Tensor:
    """Return a rank's queries, and the whole key and value that the group's ranks share and projected in equal parts.

    The gradient of a key or value is summed over the group's queries, and divided into the same parts. No weight has a
    copy, so that none has to be kept equal. Megatron-core gathers activations too, there of all heads at once.

    Shapes: [n, queries + 2 d / c] -> [n, queries + 2 d], of c ranks and head size d.
    Communication: an all-gather of keys and values, backward a reduce-scatter.
    """
    own, kv = qkv.tensor_split([queries], 1)
    parts = F_SEQUENCE(kv.contiguous(), group).view(group.size(), len(kv), 2, -1)
    return torch.cat([own, parts.permute(1, 2, 0, 3).reshape(len(kv), -1)], 1)


@untraced  # collectives that are started and awaited are not traced
def parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tp: TensorParallel,
    *,
    before: Pair = NOTHING,
    after: Pair = NOTHING,
    can_wait: bool = True,
) -> Tensor:
    """Return after(before(x) A^T + b) over this rank's part of A; where the parts are summed, b is added once.

    Communication: that of the pairs. If `before` gathers x, the backward pass gathers it again rather than keep it
    (Korthikanti et al. 2022, section 4.2.2). If `tp.overlap`, that runs while the input gradient is computed, and the
    input gradient's reduction while the weight gradient is.

    Args:
        can_wait: the weight gradient may be put off.
    """
    return cast(Tensor, _Linear.apply(x, weight, bias, tp, before, after, can_wait))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tp: TensorParallel,
        before: Pair,
        after: Pair,
        can_wait: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tp, ctx.pairs, ctx.parameter, ctx.can_wait = tp, (before, after), weight, can_wait
        here = bias if after is NOTHING or tp.part.index == 0 else None
        whole = before.forward(x, tp.group).wait()
        return after.forward(functional.linear(whole, weight, here), tp.group).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        tp, (before, after), added = ctx.tp, ctx.pairs, ctx.tp.weight_gradients
        bias_grad = grad.sum(0) if ctx.needs_input_grad[2] else None
        if added is not None and added.owed is not None and ctx.can_wait:
            grad = after.backward(grad.contiguous(), tp.group).wait()
            parameter = ctx.parameter  # the context itself would keep the graph
            add = lambda: added.sums.add_product(parameter, grad, before.forward(x, tp.group).wait())
            added.owed.append(torch.no_grad()(add))
            return before.backward(grad @ weight, tp.group).wait(), None, bias_grad, None, None, None, None
        whole = before.forward(x, tp.group)
        grad = after.backward(grad.contiguous(), tp.group).wait()
        x_grad = before.backward(grad @ weight, tp.group)
        for pending in () if tp.overlap else (whole, x_grad):
            pending.wait()
        if added is not None:
            weight_grad = added.sums.add_product(ctx.parameter, grad, whole.wait())
        else:
            weight_grad = grad.t() @ whole.wait()
        return x_grad.wait(), weight_grad, bias_grad, None, None, None, None
