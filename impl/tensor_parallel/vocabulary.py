"""The token embedding split over the vocabulary, the output head tied to it, and losses over split logits."""

from typing import Any, cast

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from impl.collectives import all_gather
from impl.model.config import padded_vocabulary
from impl.tensor_parallel.conjugates import Pair
from impl.tensor_parallel.cross_entropy import Tokens, split_nats
from impl.tensor_parallel.group import TensorParallel
from impl.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, parallel_linear
from impl.tensor_parallel.shards import Shard
from impl.tensor_parallel.weight_gradients import WeightGradients


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
        """Scores of this rank's rows, padding included, for all tokens.

        Shapes: [n, h] (where `before` gathers: [n / t, h]) -> [n, V / t]. Communication: that of `before`.
        """
        return parallel_linear(x, self.weight, bias, self.tp, before=before, can_wait=False)

    def nats(self, logits: Tensor, targets: Tensor) -> Tensor:
        """-log p(target) of every token, in nats, at least in fp32; its backward pass overwrites the logits.

        Shapes: this rank's [n, V / t], [n] -> [n]. Communication: one all-gather of two numbers per token and rank.
        """
        return split_nats(logits, targets, self.tokens, self.tp.group)

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
