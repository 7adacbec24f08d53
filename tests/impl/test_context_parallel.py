"""What ranks that share sequences have, and how parts of attention add up."""

from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from impl import context_parallel
from impl.context_parallel import (
    ContextParallel,
    attention,
    attention_by_products,
    attention_grad,
    attention_grad_by_products,
    has_flash,
)  # fmt: skip
from impl.plan import Plan
from impl.tensor_parallel.group import Part
from tests.impl.model.test_initialise import Group


@given(st.integers(1, 4), st.sampled_from((1, 2, 4)), st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_ranks_have_every_row_of_every_sequence_once(
    cp: int, parts: int, sequences: int, tokens: int, is_ring: bool
) -> None:
    plan = Plan(cp=cp, cp_attention="ring" if is_ring or cp == 1 else "ulysses")
    seq_len = plan.cp_chunks * parts * tokens
    ranks = [ContextParallel.of(plan, cast(Any, Group(rank, cp)), seq_len) for rank in range(cp)]
    places = [one.places(seq_len // cp) for one in ranks]
    assert sorted(torch.cat(places).tolist()) == list(range(seq_len))
    every = []
    for one, own in zip(ranks, places, strict=True):
        rows = [
            row
            for index in range(parts)
            for some in one.rows(Part(index, parts)).rows(sequences * seq_len // cp // parts)
            for row in some
        ]
        assert rows == [sequence * seq_len + place for sequence in range(sequences) for place in own.tolist()]
        every += rows
    assert sorted(every) == list(range(sequences * seq_len))


@pytest.mark.parametrize(("causal", "groups"), product((False, True), (1, 2, 4)))
def test_the_kernels_and_matrix_products_give_autograds_gradients(causal: bool, groups: int) -> None:
    torch.manual_seed(0)
    random = lambda heads: torch.randn(2, heads, 6, 8, dtype=torch.float64)
    q, k, v, grad = (random(heads).requires_grad_() for heads in (4, groups, groups, 4))
    scores = q @ k.repeat_interleave(4 // groups, 1).transpose(2, 3) * 8**-0.5
    scores = scores + torch.full((6, 6), -torch.inf, dtype=torch.float64).triu(1) if causal else scores
    out = scores.softmax(-1) @ v.repeat_interleave(4 // groups, 1)
    expected = torch.autograd.grad(out, (q, k, v), grad)
    q, k, v, grad = (x.detach() for x in (q, k, v, grad))
    for forward, backward in ((attention, attention_grad), (attention_by_products, attention_grad_by_products)):
        found, logs = forward(q, k, v, causal=causal)
        torch.testing.assert_close(found, out.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(logs, scores.detach().logsumexp(-1), rtol=1e-12, atol=1e-12)
        gradients: tuple[Tensor, ...] = backward(grad, q, k, v, found, logs, causal=causal)
        for one, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("has_kernel", [True, False])
def test_a_gpu_without_the_fused_kernel_multiplies_matrices(has_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(context_parallel, "SDPAParams", lambda *how: how)
    monkeypatch.setattr(context_parallel, "can_use_flash_attention", lambda how: (asked.append(how), has_kernel)[1])
    gpu = {"device": torch.device("cuda"), "is_cuda": True, "element_size": lambda: 2}
    q: Any = SimpleNamespace(shape=(1, 2, 16, 64), **gpu)
    assert has_flash(q) == has_kernel
    assert asked == [(q, q, q, None, 0.0, False, False)]
    assert not has_flash(cast(Any, SimpleNamespace(shape=(1, 2, 16, 60), **gpu)))
    assert has_flash(torch.empty(1, 2, 16, 64, dtype=torch.bfloat16, device="meta")), "what a ghost is to do"
