"""Fused attention in bf16 has the gradients of attention by its definition, as far as bf16 tells them."""

import math

import pytest
import torch
from torch import Tensor

from impl.model.config import LONGEST_PRODUCTS, PRODUCT_ROWS
from impl.model.fused_attention import attend, by_heads


def by_definition(qkv: Tensor, seq_len: int, heads: int, causal: bool) -> Tensor:
    q, k, v = by_heads(qkv, seq_len, heads, heads)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores + torch.full((seq_len, seq_len), -math.inf, dtype=scores.dtype).triu(1)
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(len(qkv), -1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("sequences", "seq_len", "heads"),
    [(2, 2, 1), (3, 40, 4), (2, PRODUCT_ROWS + 9, 2), (1, LONGEST_PRODUCTS, 2), (1, LONGEST_PRODUCTS + 8, 2)],
)
def test_result_and_gradient_are_those_of_the_definition(
    sequences: int, seq_len: int, heads: int, causal: bool
) -> None:
    random = torch.Generator().manual_seed(seq_len)
    qkv = (2 * torch.randn(sequences * seq_len, 3 * heads * 16, generator=random)).bfloat16()
    grad = torch.randn(sequences * seq_len, heads * 16, generator=random).bfloat16()
    ours, exact = qkv.clone().requires_grad_(), qkv.double().requires_grad_()
    found, expected = attend(ours, seq_len, heads, heads, causal=causal), by_definition(exact, seq_len, heads, causal)
    (gradient,) = torch.autograd.grad(found, ours, grad)
    (expected_gradient,) = torch.autograd.grad(expected, exact, grad.double())
    assert torch.equal(ours, qkv), "what is kept was written to"
    assert (found.double() - expected).norm() < 0.01 * expected.norm()
    assert (gradient.double() - expected_gradient).norm() < 0.02 * expected_gradient.norm()
