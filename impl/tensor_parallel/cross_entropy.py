"""Cross-entropy over logits that are split by vocabulary: no rank ever has a token's logits whole."""

from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from impl.collectives import all_gather
from impl.model.config import LOSS_CHUNK


class Tokens(NamedTuple):
    """The tokens that a rank's rows of the vocabulary stand for; rows behind them are padding."""

    first: int
    count: int


def split_nats(logits: Tensor, targets: Tensor, tokens: Tokens, group: dist.ProcessGroup) -> Tensor:
    """Return -log p(target) of every position, in nats, at least in fp32.

    The logits are overwritten if they require a gradient.

    log p = target's logit - log sum exp(logits). Each rank takes the logarithm over its own tokens, stably, and the
    ranks exchange that and the target's logit only (cf. Megatron-LM 2019, section 3). The exponentials take the
    logits' place, and become the gradient there.

    Shapes: this rank's [n, V / t], [n] -> [n].
    Communication: one all-gather of two numbers per position and rank; none in the backward pass.
    """
    return cast(Tensor, _SplitNats.apply(logits, targets, tokens, group))


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
            wide = part.to(scale.dtype).mul_(scale[rows])
            part.copy_(wide.scatter_add_(1, local[rows, None], at_target[rows]))
        exponentials[:, ctx.count :] = 0.0
        return exponentials, None, None, None


def _chunks(logits: Tensor) -> list[slice]:
    """Rows to treat together."""
    n, width = logits.shape
    step = max(1, LOSS_CHUNK[logits.device.type] // width)
    return [slice(start, start + step) for start in range(0, n, step)]
