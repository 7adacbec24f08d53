"""The tracker counts what lives, when most of it does, and what for."""

import torch
from torch import nn

from impl.instruments import tracked

CPU = torch.device("cpu")
KB = 250
"""Elements of a kilobyte in fp32."""


def test_the_fullest_moment_by_category() -> None:
    weight = nn.Parameter(torch.ones(KB))
    weight.grad = torch.zeros(KB)
    held = {"parameters": [weight], "gradients": [weight.grad]}
    x = torch.ones(4, KB)  # not told, and there before
    with tracked(held, CPU) as found:
        a = (x * weight).tanh()  # the product is freed, tanh's result is kept
        b = a.detach().exp()
        assert a.sum() < b.sum()
        del b
        torch.empty(0)
    # kept: x and tanh's result; for both sums and what they say there are nine bytes
    assert found.parts(held) == {"parameters": 1000, "gradients": 1000, "activations": 8000, "rest": 4009}
    assert found.peak == 14_009


def test_what_was_freed_is_not_there_any_more() -> None:
    with tracked({}, CPU) as found:
        for _ in range(10):
            torch.ones(KB)
        view = torch.ones(4, KB).t()[:, 1:]
        del view
        torch.ones(KB)
    assert found.peak == 4000
    assert found.parts({}) == {"activations": 0, "rest": 4000}


def test_a_backward_pass_frees_what_was_kept() -> None:
    weight = nn.Parameter(torch.ones(KB))
    held = {"parameters": [weight]}
    with tracked(held, CPU) as found:
        for _ in range(3):
            weight.exp().exp().exp().sum().backward()
            weight.grad = None
    # three results are kept when the last one's gradient is there, made of the sum's, which takes four bytes
    assert found.parts(held)["activations"] == 3000
    assert found.peak < 6000


def test_a_graph_that_has_no_backward_pass_is_freed() -> None:
    weight = nn.Parameter(torch.ones(KB))
    with tracked({"parameters": [weight]}, CPU) as found:
        out = weight.exp().exp().softmax(0)  # results that their own operations keep
        assert found.kept == 3000
        del out
    assert found.alive == 0


def test_memory_that_is_given_back_and_taken_again() -> None:
    buffer = torch.empty(KB)
    storage = buffer.untyped_storage()
    held = {"buffers": [buffer]}
    storage.resize_(0)
    with tracked(held, CPU) as found:
        torch.ones(2 * KB)
        storage.resize_(1000)
        torch.ones(KB)
        storage.resize_(0)
        torch.ones(KB)
    assert found.peak == 2000
    assert sum(found.parts(held).values()) == 2000
    with tracked(held, CPU) as found:
        storage.resize_(1000)
        both = torch.ones(2 * KB), torch.ones(KB)
        storage.resize_(0)
        torch.ones(KB)
    assert found.parts(held) == {"buffers": 1000, "activations": 0, "rest": 3000}
    del both


def test_a_buffer_that_was_made_meanwhile_can_be_told_afterwards() -> None:
    with tracked({}, CPU) as found:
        buffer = torch.empty(KB)
        torch.ones(KB)
    assert found.parts({"buffers": [buffer[3:]]}) == {"buffers": 1000, "activations": 0, "rest": 1000}
