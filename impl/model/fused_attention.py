"""Attention that keeps no probabilities: PyTorch's fused kernel, with a faster backward pass for bf16 on CPUs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from impl.model.config import LONGEST_PRODUCTS, PRODUCT_ROWS


def attend(qkv: Tensor, seq_len: int, heads: int, *, causal: bool) -> Tensor:
    """softmax(q k^T / sqrt(d)) v of every head; `causal` hides later keys.

    Shapes: [b s, 3 a d], queries of all heads before keys and values -> [b s, a d].
    """
    by_products = qkv.dtype == torch.bfloat16 and qkv.device.type == "cpu" and seq_len <= LONGEST_PRODUCTS
    if by_products and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        out = _Attend.apply(qkv, seq_len, heads, causal)
        assert isinstance(out, Tensor)
        return out
    return _attend(qkv, seq_len, heads, causal)


def by_heads(qkv: Tensor, seq_len: int, heads: int) -> Tensor:
    """Queries, keys and values. Shapes: [b s, 3 a d] -> [3, b, a, s, d], the same memory."""
    return qkv.view(-1, seq_len, 3, heads, qkv.shape[1] // (3 * heads)).permute(2, 0, 3, 1, 4)


def _attend(qkv: Tensor, seq_len: int, heads: int, causal: bool) -> Tensor:
    q, k, v = by_heads(qkv, seq_len, heads)
    context = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return context.transpose(1, 2).reshape(len(qkv), -1)


class _Attend(torch.autograd.Function):
    """The kernel forward, batched matrix products backward: in bf16 these run at the rate of the matrix units."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, seq_len: int, heads: int, causal: bool) -> Tensor:
        ctx.save_for_backward(qkv)
        ctx.shape = (seq_len, heads, causal)
        return _attend(qkv, seq_len, heads, causal)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (qkv,), (seq_len, heads, causal) = ctx.saved_tensors, ctx.shape
        out = torch.empty_like(qkv)
        parts, out_parts = by_heads(qkv, seq_len, heads), by_heads(out, seq_len, heads)
        grad = grads[0].view(-1, seq_len, heads, parts.shape[-1]).transpose(1, 2)
        later = qkv.new_full((min(PRODUCT_ROWS, seq_len),) * 2, -torch.inf).triu(1) if causal else None
        for sequence in range(len(grad)):
            q, k, v = parts[:, sequence].contiguous()
            found = _backward(q, k, v, grad[sequence].contiguous(), later)
            for place, part in zip(out_parts[:, sequence], found, strict=True):
                place.copy_(part)
        return out, None, None, None


def _backward(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, later: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of one sequence's queries, keys and values; `later` hides keys, as a mask of one block's rows.

    Shapes: [a, s, d] each.
    """
    scale, length = q.shape[-1] ** -0.5, q.shape[1]
    q = q * scale
    q_grad, k_grad, v_grad = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for first in range(0, length, PRODUCT_ROWS):
        rows = slice(first, min(first + PRODUCT_ROWS, length))
        seen, size = slice(0, length if later is None else rows.stop), rows.stop - first
        scores = q[:, rows] @ k[:, seen].transpose(1, 2)
        if later is not None:
            scores[:, :, rows] += later[:size, :size]
        p = torch.softmax(scores, -1, out=scores)
        v_grad[:, seen] += p.transpose(1, 2) @ grad[:, rows]
        scores_grad = torch._softmax_backward_data(grad[:, rows] @ v[:, seen].transpose(1, 2), p, -1, p.dtype)
        q_grad[:, rows] = scores_grad @ k[:, seen]
        k_grad[:, seen] += scores_grad.transpose(1, 2) @ q[:, rows]
    return q_grad.mul_(scale), k_grad, v_grad
