"""Mixture of experts: a layer's MLP replaced by many, of which every token meets a few; for runs with `model.experts`.

n tokens of a microbatch, hidden size h, E experts over r ranks of expert parallelism, of which a token meets k. With
tensor parallelism all ranks route all tokens, each computes its part of every product, and the gradients of what they
do alike are summed as those of parts are.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import ceil
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from impl.collectives import all_reduce_sum
from impl.expert_parallel import Way, go, numbers
from impl.model.config import ModelConfig
from impl.model.layers import MLP
from impl.model.norms import widened
from impl.recompute import WHOLE as ITSELF
from impl.recompute import Kept
from impl.tensor_parallel.conjugates import Pair
from impl.tensor_parallel.group import WHOLE, Part, TensorParallel
from impl.untraced import untraced

LOAD = 2.0**-50
"""Factor of the tokens that an expert has too many, as the gradient of its bias: it changes no norm of gradients."""


class Routing(NamedTuple):
    """Routing of n tokens with k choices each: the choices that are carried out, in the order of the experts."""

    order: Tensor
    """Index of a choice, token by token: the i-th token's are i k to (i + 1) k. Shapes: [m]."""
    counts: Tensor
    """Choices of each expert that are carried out. Shapes: [E]."""
    weights: Tensor
    """Factor of an expert's output. Shapes: [n, k]."""


class Experts(nn.Module):
    """y = sum of p_e e(x) over the experts e of a token, and a shared expert's output where there is one.

    Source: Shazeer et al. 2017 (1701.06538); prototypes: M6-T (2105.15082).
    Shapes: [n, h] -> [n, h] (sequence parallel: [n / t, h]).
    Communication: f before it and g behind it; between these each rank's rows go to their experts and back, twice
    forward and twice backward over the ranks that share experts, and their numbers once forward.
    """

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.router = Router(config, tp)
        self.group = tp.experts.group if tp.experts else None
        index, of = Part(self.group.rank(), self.group.size()) if self.group else WHOLE
        own = range(config.experts * index // of, config.experts * (index + 1) // of)
        self.experts = nn.ModuleDict({str(e): MLP(config, tp, config.expert_inner) for e in own})
        shared = config.shared_expert_size
        self.shared = MLP(config, tp, shared) if shared else None

    @untraced  # what goes where depends on values
    def forward(self, x: Tensor, seq_len: int) -> Tensor:
        whole = self._around(x, self.tp.f)
        out = self._routed(whole, self.router(whole, seq_len))
        if self.shared is not None:
            out = out + _through(whole, [len(whole)], [self.shared], self.tp)
        return self._around(out, self.tp.g)

    def _around(self, x: Tensor, pair: Pair) -> Tensor:
        return x if self.tp.degree == 1 else pair(x, self.tp.group)

    def _routed(self, x: Tensor, routing: Routing) -> Tensor:
        choices = routing.weights.shape[1]
        rows = cast(Tensor, _Scatter.apply(x, routing.order, choices))
        experts = cast(Sequence[MLP], list(self.experts.values()))
        if self.group is None:
            # the router keeps x: in the backward pass rows are taken of it once more
            whole = x.detach()
            again = Kept(lambda _: whole, lambda kept: kept.index_select(0, routing.order // choices))
            rows = _through(rows, numbers(routing.counts, len(rows)), experts, self.tp, again)
        else:
            way = Way.to_experts(routing.counts, len(rows), self.group)
            rows = _through(go(rows, way, is_return=False), way.counts, experts, self.tp)
            rows = go(rows, way, is_return=True)
        return cast(Tensor, _Gather.apply(rows, routing.weights, routing.order))


class Router(nn.Module):
    """Choice of each token's experts by softmax(W x) over those of a prototype, in fp32 at least.

    Of several experts of a prototype the probabilities are divided by their sum (GShard, Lepikhin et al. 2020,
    2006.16668), of one it is taken as it is (Switch Transformer, Fedus et al. 2021, 2101.03961). What an expert takes,
    and the loss of balance, depend on each sequence alone, so that no layout and no microbatch changes them. The loss
    of a sequence is E times the sum over experts of the share of choices that they got and their mean probability
    (Fedus et al., equation 4; DeepSeek-V3, 2412.19437, section 2.1.2, by sequence), the mean of the prototypes'.

    The bias is added where experts are chosen, not in their weights, and moves by a fixed amount a step, down for
    experts that got more than the mean of the global batch, up for others (Wang et al. 2024, 2408.15664): for this its
    gradient is their excess, summed as every gradient is.

    Shapes: [n, h] -> `Routing`.
    """

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.config, self.tp = config, tp
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(config.experts)) if config.balance_bias else None

    def forward(self, x: Tensor, seq_len: int) -> Routing:
        config, n = self.config, len(x)
        of_prototype = config.experts // config.expert_prototypes
        logits = cast(Tensor, _Logits.apply(x, self.weight)).view(n, -1, of_prototype)
        probabilities = logits.softmax(-1)
        wanted = probabilities.detach()
        if self.bias is not None:
            wanted = wanted + self.bias.detach().view(-1, of_prototype)
        chosen = wanted.topk(config.experts_per_token, -1).indices  # [n, prototypes, k of each]
        first = torch.arange(0, config.experts, of_prototype, device=x.device)
        choices = (chosen + first[:, None]).flatten()
        sequences, per_token = n // seq_len, config.choices
        sequence = torch.arange(n * per_token, device=x.device) // (seq_len * per_token)
        by = torch.bincount(choices * sequences + sequence, minlength=config.experts * sequences)
        if torch.is_grad_enabled():
            probabilities = self._balanced(probabilities, by.view(-1, sequences), seq_len)
        order = choices.argsort(stable=True)
        if config.expert_capacity is not None:
            most = ceil(min(config.expert_capacity * seq_len * per_token / config.experts, seq_len))
            before = (by.cumsum(0) - by).repeat_interleave(by, output_size=len(order))
            order, by = within(order, torch.arange(len(order), device=x.device) - before < most), by.clamp(max=most)
        weights = probabilities.gather(-1, chosen)
        if config.experts_per_token > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routing(order, by.view(-1, sequences).sum(1), weights.flatten(1))

    def _balanced(self, probabilities: Tensor, by: Tensor, seq_len: int) -> Tensor:
        """Return the probabilities, whose gradient will have that of the loss of balance, and the bias's in its place.

        Shapes: [n, prototypes, experts of each], [experts, b] -> as the first.
        """
        config, tp = self.config, self.tp
        if self.bias is not None:
            excess = by.sum(1) * config.experts - len(probabilities) * config.choices
            excess = excess * (LOAD if tp.part.index == 0 else 0.0)  # of tokens that all ranks of tp have
            probabilities = cast(Tensor, _WithGradient.apply(probabilities, self.bias, excess.to(self.bias.dtype)))
        if config.balance_loss and tp.experts is not None:
            ranks = 1
            if tp.context is not None:
                by, ranks = all_reduce_sum(by.clone(), tp.context.group), tp.context.group.size()
            # E / prototypes times the share of choices, and the means over prototypes and tokens
            factor = config.balance_loss * config.experts / config.expert_prototypes**2 / len(probabilities)
            factor *= tp.experts.loss_share / tp.degree / (seq_len * ranks * config.experts_per_token)
            added = (by.t().to(probabilities.dtype) * factor).view(-1, 1, *probabilities.shape[1:])
            probabilities = cast(Tensor, _Balance.apply(probabilities, added))
        return probabilities


class _Scatter(torch.autograd.Function):
    """Rows of tokens in the order of choices. Shapes: [n, h], [m] -> [m, h]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.shape = len(x), choices, x.shape[1]
        return x.index_select(0, order // choices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return _summed(_by_token(grads[0], order, ctx.shape)), None, None


class _Gather(torch.autograd.Function):
    """Sum of each token's rows, each times its weight. Shapes: [m, h], [n, k], [m] -> [n, h]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order)
        return _summed(_by_token(rows, order, (*weights.shape, rows.shape[1])).mul_(weights[..., None]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights, order = ctx.saved_tensors
        grad = grads[0].index_select(0, order // weights.shape[1])
        of_weights = torch.zeros_like(weights).view(-1)
        of_weights[order] = (rows * grad).sum(-1, dtype=weights.dtype)
        return grad.mul_(weights.view(-1)[order, None]), of_weights.view_as(weights), None


def _by_token(rows: Tensor, order: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the rows of each token's choices, 0 where a choice was left out. Shapes: [m, h], [m] -> [n, k, h]."""
    make = rows.new_empty if len(rows) == shape[0] * shape[1] else rows.new_zeros
    return make(shape[0] * shape[1], shape[2]).index_copy_(0, order, rows).view(*shape)


def _summed(by_token: Tensor) -> Tensor:
    return by_token.squeeze(1) if by_token.shape[1] == 1 else by_token.sum(1)


class _Logits(torch.autograd.Function):
    """x W^T in fp32 at least; keeps x in its own type. Shapes: [n, h], [E, h] -> [n, E]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return widened(x) @ widened(weight).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return (grads[0] @ widened(weight)).to(x.dtype), (grads[0].t() @ widened(x)).to(weight.dtype)


class _WithGradient(torch.autograd.Function):
    """x as it is; a parameter gets the gradient that is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], ctx.saved_tensors[0], None


class _Balance(torch.autograd.Function):
    """x as it is, whose gradient has one of each sequence added. Shapes: [b s, ...], [b, 1, ...] -> [b s, ...]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, added: Tensor) -> Tensor:
        ctx.save_for_backward(added)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (added,) = ctx.saved_tensors
        return (grads[0].unflatten(0, (len(added), -1)) + added).flatten(0, 1), None


def _through(
    x: Tensor, counts: Sequence[int], experts: Sequence[MLP], tp: TensorParallel, kept: Kept = ITSELF
) -> Tensor:
    """Return the experts' outputs of rows that are sorted by expert. Shapes: [m, h] -> [m, h], a part of the sum."""
    inner = experts[0].function(_Products.apply(x, counts, tp, kept, *(expert.up.weight for expert in experts)))
    return cast(Tensor, _Products.apply(inner, counts, tp, ITSELF, *(expert.down.weight for expert in experts)))


class _Products(torch.autograd.Function):
    """x_e W_e^T of the rows of each expert. Shapes: [m, in], [out, in] each -> [m, out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Sequence[int], tp: TensorParallel, kept: Kept, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(kept.pack(x), *weights)
        ctx.counts, ctx.tp, ctx.kept, ctx.parameters = counts, tp, kept, weights
        return _each(x, counts, weights, transposed=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        packed, *weights = ctx.saved_tensors
        added, kept, grad, each = ctx.tp.weight_gradients, ctx.kept, grads[0].contiguous(), _slices(ctx.counts)
        x_grad = _each(grad, ctx.counts, weights, transposed=False)
        if added is None:
            x = kept.unpack(packed)
            return x_grad, None, None, None, *(grad[rows].t() @ x[rows] for rows in each)
        parameters = ctx.parameters  # the context itself would keep the graph

        @torch.no_grad()
        def add() -> None:
            x = kept.unpack(packed)
            for parameter, rows in zip(parameters, each, strict=True):
                added.sums.add_product(parameter, grad[rows], x[rows])

        add() if added.owed is None else added.owed.append(add)
        return x_grad, None, None, None, *(None for _ in weights)


def _each(x: Tensor, counts: Sequence[int], weights: Sequence[Tensor], *, transposed: bool) -> Tensor:
    """Return the product of each expert's rows and its matrix. Shapes: [m, in], [in, out] each -> [m, out]."""
    if len(weights) > 1 and len(x) and is_grouped(x, weights[0]):
        whole = torch.stack([*weights])
        ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=x.device)
        return functional.grouped_mm(x, whole.transpose(1, 2) if transposed else whole, offs=ends)
    matrices = [weight.t() if transposed else weight for weight in weights]
    out = x.new_empty(len(x), matrices[0].shape[1])
    for matrix, rows in zip(matrices, _slices(counts), strict=True):
        torch.mm(x[rows], matrix, out=out[rows])
    return out


def is_grouped(x: Tensor, weight: Tensor) -> bool:
    """Return True where one kernel of PyTorch multiplies the rows of all experts: on GPUs, in bf16.

    It wants rows of a multiple of 16 bytes. On CPUs a product after the other takes less time.
    """
    return x.is_cuda and x.dtype == torch.bfloat16 and not any(size % 8 for size in weight.shape)


def within(order: Tensor, is_taken: Tensor) -> Tensor:
    """Return the choices that experts take."""
    return order[is_taken]


def _slices(counts: Sequence[int]) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise(accumulate(counts, initial=0))]
