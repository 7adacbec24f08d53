"""Attention that keeps no probabilities: PyTorch's fused kernel, with a faster backward pass for bf16 on CPUs."""

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from impl.model.config import LONGEST_PRODUCTS, PRODUCT_ROWS


def attend(qkv: Tensor, seq_len: int, heads: int, groups: int, *, causal: bool) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v of every head; `causal` hides later keys.

    Shapes: [b s, (a + 2 g) d], queries of all a heads before keys and values of g -> [b s, a d].
    """
    is_on_cpu = qkv.dtype == torch.bfloat16 and qkv.device.type == "cpu"
    by_products = is_on_cpu and seq_len <= LONGEST_PRODUCTS and heads == groups
    if by_products and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return cast(Tensor, _Attend.apply(qkv, seq_len, heads, causal))
    return _attend(qkv, seq_len, heads, groups, causal)


def by_heads(qkv: Tensor, seq_len: int, heads: int, groups: int) -> tuple[Tensor, ...]:
    """Return views of queries, keys and values. Shapes: [b s, (a + 2 g) d] -> [b, a, s, d], two of [b, g, s, d]."""
    every = heads + 2 * groups
    by_token = qkv.view(-1, seq_len, every, qkv.shape[1] // every)
    # divided first: so the three gradients are put together where they belong, else they are copied once more
    return tuple(part.transpose(1, 2) for part in by_token.split((heads, groups, groups), 2))


def _attend(qkv: Tensor, seq_len: int, heads: int, groups: int, causal: bool) -> Tensor:
    q, k, v = by_heads(qkv, seq_len, heads, groups)
    context = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != groups)
    return context.transpose(1, 2).reshape(len(qkv), -1)


class _Attend(torch.autograd.Function):
    """Fused kernel forward, batched matrix products backward: in bf16 these run at the rate of the matrix units."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, seq_len: int, heads: int, causal: bool) -> Tensor:
        ctx.save_for_backward(qkv)
        ctx.shape = (seq_len, heads, causal)
        return _attend(qkv, seq_len, heads, heads, causal)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (qkv,), (seq_len, heads, causal) = ctx.saved_tensors, ctx.shape
        out = torch.empty_like(qkv)
        parts, out_parts = by_heads(qkv, seq_len, heads, heads), by_heads(out, seq_len, heads, heads)
        grad = grads[0].view(-1, seq_len, heads, parts[0].shape[-1]).transpose(1, 2)
        later = qkv.new_full((seq_len, seq_len), -torch.inf).triu(1) if causal else None
        working = qkv.new_empty(2, heads * min(PRODUCT_ROWS, seq_len) * seq_len)
        for sequence in range(len(grad)):
            q, k, v = (part[sequence].contiguous() for part in parts)
            q_grad, k_grad, v_grad = (part[sequence] for part in out_parts)
            _backward(q, k, v, grad[sequence].contiguous(), later, working, q_grad, k_grad, v_grad)
        return out, None, None, None


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    later: Tensor | None,
    working: Tensor,
    q_grad: Tensor,
    k_grad: Tensor,
    v_grad: Tensor,
) -> None:
    """Compute the gradients of one sequence's queries, which are overwritten, keys and values.

    Shapes: [a, s, d] each; later, of -inf where a query does not see a key, [s, s]; working [2, a r s], with r rows of
    probabilities and of their gradients at a time.
    """
    scale, length = q.shape[-1] ** -0.5, q.shape[1]
    q.mul_(scale)
    starts = range(0, length, PRODUCT_ROWS)
    for first in reversed(starts):  # the last rows see all keys, also if causal
        rows = slice(first, min(first + PRODUCT_ROWS, length))
        seen = slice(0, length if later is None else rows.stop)
        shape = (len(q), rows.stop - first, seen.stop)
        p, p_grad = working[:, : math.prod(shape)].view(2, *shape)
        if later is None:
            torch.bmm(q[:, rows], k.transpose(1, 2), out=p)
        else:
            torch.baddbmm(later[rows, seen].expand(shape), q[:, rows], k[:, seen].transpose(1, 2), out=p)
        torch.softmax(p, -1, out=p)
        torch.bmm(grad[:, rows], v[:, seen].transpose(1, 2), out=p_grad)
        scores_grad = torch._softmax_backward_data(p_grad, p, -1, p.dtype, grad_input=p_grad)
        torch.bmm(scores_grad, k[:, seen], out=q_grad[:, rows])
        for total, a, b in ((v_grad, p, grad), (k_grad, scores_grad, q)):
            if first == starts[-1]:
                torch.bmm(a.transpose(1, 2), b[:, rows], out=total)
            else:
                total[:, seen].baddbmm_(a.transpose(1, 2), b[:, rows])
    q_grad.mul_(scale)
