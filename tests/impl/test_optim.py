"""Learning-rate schedule, AdamW on master weights, and gradient buckets on one rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from impl.optim import MasterAdamW, learning_rate
from impl.recipe import Recipe
from impl.zero.gradients import Gradients, Reduced


@given(st.integers(1, 50), st.integers(0, 50), st.sampled_from(["cosine", "linear", "constant"]))
def test_learning_rate_rises_then_falls_within_its_limits(steps: int, warmup: int, decay: Any) -> None:
    recipe = Recipe(steps=steps, warmup_steps=warmup, decay=decay, lr=1.0, min_lr=0.1)
    rates = [learning_rate(recipe, i) for i in range(steps)]
    assert all(0.0 < rate <= 1.0 for rate in rates)
    rising, falling = rates[:warmup], rates[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert all(rate >= 0.1 - 1e-12 for rate in falling)
    if warmup < steps:
        assert falling[0] == pytest.approx(1.0)


def test_cosine_is_half_way_in_the_middle() -> None:
    assert learning_rate(Recipe(steps=100, warmup_steps=0, lr=1.0), 50) == pytest.approx(0.5)


def model(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)).to(dtype)


def gradients_of(net: nn.Module, group: dist.ProcessGroup, dtype: torch.dtype, bucket_bytes: int = 100) -> Gradients:
    whole = Reduced(list(net.parameters()), group, is_split=False)
    return Gradients([whole], group, dtype=dtype, bucket_bytes=bucket_bytes, overlap=True)


def test_fp32_is_torch_adamw_without_decay_of_biases_and_norms(one_rank: dist.ProcessGroup) -> None:
    recipe = Recipe(lr=1e-2, weight_decay=0.1)
    ours, theirs = model(torch.float32), model(torch.float32)
    gradients = gradients_of(ours, one_rank, torch.float32)
    optimizer = MasterAdamW(dict(ours.named_parameters()), gradients.of, recipe)
    decayed = [p for p in theirs.parameters() if p.dim() > 1]
    kept = [p for p in theirs.parameters() if p.dim() == 1]
    reference = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": kept, "weight_decay": 0.0}], 1e-2
    )
    for i in range(5):
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(i))
        gradients.zero()
        with gradients.last_backward():
            ours(x).square().sum().backward()
        optimizer.step(1e-2)
        reference.zero_grad()
        theirs(x).square().sum().backward()
        reference.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_bf16_weights_follow_fp32_masters(one_rank: dist.ProcessGroup) -> None:
    """Updates far below bf16's resolution add up in the masters until the rounded weight moves."""
    net = model(torch.bfloat16)
    gradients = gradients_of(net, one_rank, torch.float32)
    optimizer = MasterAdamW(dict(net.named_parameters()), gradients.of, Recipe(weight_decay=0.0))
    before = net[0].weight.detach().clone()
    for i in range(40):
        gradients.zero()
        with gradients.last_backward():
            net(torch.ones(3, 8, dtype=torch.bfloat16)).sum().backward()
        optimizer.step(1e-5)
        if i == 0:
            assert (net[0].weight == before).float().mean() > 0.9
    moved = (net[0].weight - before).abs().max().item()
    assert 1e-4 < moved < 2e-3
    assert net[0].weight.dtype == torch.bfloat16
    assert all(m.dtype == torch.float32 for _, m in optimizer.rounded)


def test_bf16_microbatches_accumulate_in_fp32(one_rank: dist.ProcessGroup) -> None:
    net: Any = nn.Linear(1, 1, bias=False).bfloat16()
    gradients = gradients_of(net, one_rank, torch.float32)
    parts = [256.0] + [0.5] * 64  # bf16 has 8 bits: 256 + 0.5 is 256 there
    for part in parts[:-1]:
        (net(torch.full((1, 1), part, dtype=torch.bfloat16))).sum().backward()
    with gradients.last_backward():
        (net(torch.full((1, 1), parts[-1], dtype=torch.bfloat16))).sum().backward()
    assert gradients.of[net.weight].item() == pytest.approx(sum(parts))


@given(bucket_bytes=st.integers(1, 2000))
def test_buckets_hold_every_gradient_once(bucket_bytes: int, one_rank: dist.ProcessGroup) -> None:
    net = model(torch.float32)
    gradients = gradients_of(net, one_rank, torch.float32, bucket_bytes)
    assert sum(b.flat.numel() for b in gradients.buckets) == sum(p.numel() for p in net.parameters())
    assert [p for b in gradients.buckets for p in b.parameters] == list(net.parameters())[::-1]
    with gradients.last_backward():
        net(torch.ones(2, 8)).sum().backward()
    reference = model(torch.float32)
    reference(torch.ones(2, 8)).sum().backward()
    for p, q in zip(net.parameters(), reference.parameters(), strict=True):
        assert q.grad is not None
        torch.testing.assert_close(gradients.of[p], q.grad)
    norm = torch.cat([q.grad.flatten() for q in reference.parameters() if q.grad is not None]).norm()
    assert gradients.clip(0.5).item() == pytest.approx(norm.item(), rel=1e-5)
    assert gradients.clip(0.0).item() == pytest.approx(0.5, rel=1e-4)


def test_a_parameter_without_gradient_is_an_error(one_rank: dist.ProcessGroup) -> None:
    net = model(torch.float32)
    gradients = gradients_of(net, one_rank, torch.float32)
    with pytest.raises(RuntimeError, match="took no part"), gradients.last_backward():
        net[0](torch.ones(2, 8)).sum().backward()


@given(bucket_bytes=st.integers(1, 2000), is_split=st.lists(st.booleans(), min_size=6, max_size=6))
def test_a_bucket_holds_parameters_of_one_kind(
    bucket_bytes: int, is_split: list[bool], one_rank: dist.ProcessGroup
) -> None:
    net = model(torch.float32)
    kind_of = dict(zip(net.parameters(), is_split, strict=True))
    kinds = [Reduced([p for p, its in kind_of.items() if its is kind], one_rank, kind) for kind in (True, False)]
    gradients = Gradients(kinds, one_rank, dtype=torch.float32, bucket_bytes=bucket_bytes, overlap=True)
    assert all(kind_of[p] is bucket.is_split for bucket in gradients.buckets for p in bucket.parameters)
    assert {p for bucket in gradients.buckets for p in bucket.parameters} == set(kind_of)
    with gradients.last_backward():
        net(torch.ones(2, 8)).sum().backward()
    norm = torch.cat([gradients.of[p].flatten() for p in kind_of]).norm().item()
    assert gradients.clip(0.0).item() == pytest.approx(norm, rel=1e-5)
