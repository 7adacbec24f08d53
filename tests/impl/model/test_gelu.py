"""Our GELU is PyTorch's tanh form, result and gradient, whatever the size and precision."""

import pytest
import torch
import torch.nn.functional as F

from impl.model.config import GELU_CHUNK
from impl.model.gelu import gelu

WITHIN = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.mark.parametrize("dtype", WITHIN)
@pytest.mark.parametrize("size", [1, GELU_CHUNK, 2 * GELU_CHUNK + 3])
def test_result_and_gradient_are_pytorchs(size: int, dtype: torch.dtype) -> None:
    x = torch.linspace(-12, 12, size).to(dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    ours, theirs = gelu(x), F.gelu(exact, approximate="tanh")
    ours.sum().backward()
    theirs.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(ours.double(), theirs, rtol=WITHIN[dtype], atol=WITHIN[dtype])
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=2 * WITHIN[dtype], atol=2 * WITHIN[dtype])


@pytest.mark.parametrize("dtype", WITHIN)
def test_what_requires_no_gradient_is_left_as_it_is(dtype: torch.dtype) -> None:
    x = torch.linspace(-3, 3, 50).to(dtype)
    before = x.clone()
    gelu(x)
    assert torch.equal(x, before)
