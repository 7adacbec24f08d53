"""The functions that a norm may be, over the last dim of its input; `ModelConfig.norm` names one of them."""

from typing import Any, cast

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from impl.collectives import all_gather, all_reduce_sum
from impl.model.config import ModelConfig
from impl.tensor_parallel.group import TensorParallel
from impl.tensor_parallel.shards import Shard
from impl.untraced import untraced

ALPHA = 0.5
"""Initial factor inside DyT's tanh: Zhu et al. 2025 (2503.10622), section 4."""


def norm(config: ModelConfig, size: int, *, exists: bool = True, bias: bool = True) -> nn.Module:
    """Return a model's norm over `size` features, or the identity where none exists; an RMSNorm never has a bias."""
    if not exists:
        return nn.Identity()
    if config.norm == "rmsnorm":
        return RMSNorm(size, config.norm_epsilon)
    return nn.LayerNorm(size, config.norm_epsilon, bias=bias) if config.norm == "layernorm" else DyT(size, bias=bias)


class RMSNorm(nn.Module):
    """y = w x / sqrt(mean(x^2) + eps) (Zhang and Sennrich 2019, 1910.07467).

    On CPUs computed here: PyTorch's own is made of several operations there, each of which keeps its input.
    """

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.empty(size)), epsilon

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return functional.rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        return cast(Tensor, _Normalise.apply(x, self.weight, None, self.epsilon, None))


class DyT(nn.Module):
    """y = w tanh(a x) + b, of each element alone: dynamic tanh (Zhu et al. 2025, 2503.10622)."""

    def __init__(self, size: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if bias else None
        self.alpha = nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.alpha * x) * self.weight
        return y if self.bias is None else y + self.bias


class SplitNorm(nn.Module):
    """A norm over features of which every tensor-parallel rank has a part.

    Shapes: [n, size / t] -> [n, size / t].
    Communication: the mean and the variance of every token's part, gathered; backward the sum of as many numbers. Of
    an RMSNorm one number each, of DyT none.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, config: ModelConfig, size: int, tp: TensorParallel) -> None:
        super().__init__()
        self.kind, self.epsilon, self.tp = config.norm, config.norm_epsilon, tp
        own = norm(config, size // tp.degree)
        for name, parameter in own.named_parameters():
            self.register_parameter(name, parameter)
        self.shards = {name: Shard(0, size) for name, _ in own.named_parameters() if name != "alpha"}

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "dyt":
            return DyT.forward(cast(DyT, self), x)
        bias = self.bias if self.kind == "layernorm" else None
        if self.tp.degree == 1 and bias is not None:
            return functional.layer_norm(x, self.weight.shape, self.weight, bias, self.epsilon)
        return _over_ranks(x, self.weight, bias, self.epsilon, self.tp)


@untraced  # collectives are not traced
def _over_ranks(x: Tensor, weight: Tensor, bias: Any, epsilon: float, tp: TensorParallel) -> Tensor:
    return cast(Tensor, _Normalise.apply(x, weight, bias, epsilon, tp.group))


class _Normalise(torch.autograd.Function):
    """LayerNorm if there is a bias, else RMSNorm, over the features of all ranks of a group; None: of this rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, group: Any) -> Tensor:
        wide = widened(x)
        mean = None if bias is None else wide.mean(-1, keepdim=True)
        statistics = (wide if mean is None else wide - mean).square().mean(-1, keepdim=True)
        statistics = statistics if mean is None else torch.cat([mean, statistics], -1)
        if group is not None:
            parts = all_gather(statistics, group).view(group.size(), *statistics.shape)
            statistics = parts.mean(0)
            if mean is not None:  # the variance of the parts' means is part of the whole's
                statistics[..., 1] += parts[..., 0].var(0, correction=0)
                mean = statistics[..., :1].contiguous()
        rate = (statistics[..., -1:] + epsilon).rsqrt()
        ctx.save_for_backward(x, weight, rate, mean)
        ctx.group = group
        out = (wide * rate if mean is None else (wide - mean).mul_(rate)).mul_(weight)
        return (out if bias is None else out.add_(bias)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rate, mean = ctx.saved_tensors
        grad, wide = widened(grads[0]), widened(x)
        normal = wide * rate if mean is None else (wide - mean).mul_(rate)
        del wide
        of_weight = (grad * normal).flatten(0, -2).sum(0).to(weight.dtype)
        of_bias = None if mean is None else grad.flatten(0, -2).sum(0).to(weight.dtype)
        grad = grad * weight
        sums = (grad * normal).mean(-1, keepdim=True)
        if mean is not None:
            sums = torch.cat([sums, grad.mean(-1, keepdim=True)], -1)
        if ctx.group is not None:
            sums = all_reduce_sum(sums, ctx.group) / ctx.group.size()
        grad = grad.sub_(normal.mul_(sums[..., :1]))
        if mean is not None:
            grad -= sums[..., 1:]
        return grad.mul_(rate).to(x.dtype), of_weight, of_bias, None, None


def widened(x: Tensor) -> Tensor:
    """Return the tensor in fp32, or in its own type if that is larger."""
    return x if x.element_size() >= 4 else x.float()
