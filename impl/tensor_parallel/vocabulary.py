"""The token embedding split over the vocabulary, the output head tied to it, and losses over split logits."""

from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import Tensor, nn

from impl.collectives import all_gather
from impl.model.config import LOSS_CHUNK, padded_vocabulary
from impl.tensor_parallel.conjugates import Pair
from impl.tensor_parallel.group import TensorParallel
from impl.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, parallel_linear
from impl.tensor_parallel.shards import Shard
from impl.tensor_parallel.weight_gradients import WeightGradients


class Tokens(NamedTuple):
    """The tokens that a rank's rows of the vocabulary stand for; rows behind them are padding."""

    first: int
    count: int


class VocabParallelEmbedding(nn.Module):
    """A row for every token, split over the ranks, and the output head with the same matrix.

    The vocabulary is padded to a multiple of 128 t (Megatron-LM 2019, section 4.2). Padding is never looked up and
    takes no part in a loss, so it stays zero.

    Shapes: weight [V / t, h] with V padded; tokens [n] -> [n, h] (sequence parallel: [n / t, h]).
    Communication: g behind the look-up.
    """

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        padded = padded_vocabulary(vocab_size, tp.degree)
        rows = padded // tp.degree
        first = tp.part.index * rows
        self.tokens = Tokens(first, min(max(vocab_size - first, 0), rows))
        self.weight = nn.Parameter(torch.empty(rows, hidden_size))
        self.shard = Shard(0, vocab_size, padding=padded - vocab_size)
        self.shards = {"weight": self.shard}

    def forward(self, tokens: Tensor) -> Tensor:
        if self.tp.degree == 1:
            return self._look_up(tokens)
        local = tokens - self.tokens.first
        elsewhere = (local < 0) | (local >= self.tokens.count)
        found = self._look_up(local.masked_fill(elsewhere, 0))
        return self.tp.g(found.masked_fill(elsewhere[:, None], 0.0), self.tp.group)

    def _look_up(self, tokens: Tensor) -> Tensor:
        if self.tp.weight_gradients is None:
            return functional.embedding(tokens, self.weight)
        return cast(Tensor, _LookUp.apply(self.weight, tokens, self.tp.weight_gradients))

    def logits(self, x: Tensor, before: Pair, bias: Tensor | None = None) -> Tensor:
        """Return scores of this rank's rows, padding included, for all tokens.

        Shapes: [n, h] (where `before` gathers: [n / t, h]) -> [n, V / t]. Communication: that of `before`.
        """
        return parallel_linear(x, self.weight, bias, self.tp, before=before, can_wait=False)

    def nats(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return -log p(target) of every token, in nats, at least in fp32; overwrites logits that require a gradient.

        log p = target's logit - log sum exp(logits). Each rank takes the logarithm over its own tokens, stably, and the
        ranks exchange that and the target's logit only (cf. Megatron-LM 2019, section 3). The exponentials take the
        logits' place, and become the gradient there.

        Shapes: this rank's [n, V / t], [n] -> [n].
        Communication: one all-gather of two numbers per token and rank; none in the backward pass.
        """
        return cast(Tensor, _SplitNats.apply(logits, targets, self.tokens, self.tp.group))

    def is_likeliest(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return True where no token scores higher than the target, nor as high under a lower number.

        Shapes: this rank's [n, V / t], [n] -> bool [n].
        Communication: one all-gather of two float64 numbers per token and rank.
        """
        first, count = self.tokens
        own = logits[:, :count] if count else logits[:, :1].fill_(-torch.inf)  # nothing but padding: no best token
        best, token = own.max(1)
        pairs = torch.stack([best.double(), (token + first).double()])
        scores, tokens = all_gather(pairs[None], self.tp.group).unbind(1)
        return tokens.gather(0, scores.argmax(0)[None])[0] == targets


def added_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights whose gradients layers accumulate themselves if `TensorParallel.weight_gradients` is set."""
    layers = model.modules()
    return [
        m.weight for m in layers if isinstance(m, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding)
    ]


class _LookUp(torch.autograd.Function):
    """Embedding look-up whose gradient is added to the rows used, without a tensor of the whole matrix."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor, added: WeightGradients) -> Tensor:
        ctx.parameter, ctx.added = weight, added
        ctx.save_for_backward(tokens)
        return functional.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.added.sums.add_rows(ctx.parameter, *ctx.saved_tensors, grads[0])
        return None, None, None


class _SplitNats(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, tokens: Tokens, group: dist.ProcessGroup) -> Tensor:
        local = targets - tokens.first
        is_here = (local >= 0) & (local < tokens.count)
        local = local.where(is_here, 0)
        wide = logits.dtype if logits.element_size() >= 4 else torch.float32
        own = torch.full((2, len(logits)), -torch.inf, dtype=wide, device=logits.device)
        largest = torch.zeros(len(logits), 1, dtype=wide, device=logits.device)
        own[1] = logits.gather(1, local[:, None])[:, 0].where(is_here, 0.0)
        for rows in _chunks(logits) if tokens.count else ():
            part = logits[rows, : tokens.count]
            exponentials = part.to(wide, copy=not ctx.needs_input_grad[0])
            torch.amax(exponentials, 1, keepdim=True, out=largest[rows])
            exponentials.sub_(largest[rows]).exp_()
            torch.sum(exponentials, 1, out=own[0, rows])
            if ctx.needs_input_grad[0]:
                part.copy_(exponentials)
            del exponentials  # before the next chunk is made
        if tokens.count:
            own[0].log_().add_(largest[:, 0])
        log_sums, scores = all_gather(own[None], group).view(-1, *own.shape).unbind(1)
        log_sum = torch.logsumexp(log_sums, 0)
        ctx.save_for_backward(logits, torch.exp(largest[:, 0] - log_sum), local, is_here)
        ctx.count = tokens.count
        return log_sum - scores.sum(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        exponentials, scale, local, is_here = ctx.saved_tensors
        (grad,) = grads
        scale = (scale * grad)[:, None]
        at_target = (-grad * is_here)[:, None]
        for rows in _chunks(exponentials) if ctx.count else ():
            part = exponentials[rows, : ctx.count]
            part.copy_(part.to(scale.dtype).mul_(scale[rows]).scatter_add_(1, local[rows, None], at_target[rows]))
        exponentials[:, ctx.count :] = 0.0
        return exponentials, None, None, None


def _chunks(logits: Tensor) -> list[slice]:
    """Rows to treat together."""
    n, width = logits.shape
    step = max(1, LOSS_CHUNK[logits.device.type] // width)
    return [slice(start, start + step) for start in range(0, n, step)]
