"""Learning-rate schedule, AdamW on master weights, and gradient buckets on one rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from impl.optim import MasterAdamW, Rate, Share, learning_rate
from impl.recipe import Recipe
from impl.zero.buckets import ReductionGroup, divide
from impl.zero.gradients import Gradients
from impl.zero.partition import Piece


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


def test_a_change_of_fixed_size_is_the_sign_of_any_gradient() -> None:
    weights, gradient = torch.zeros(5), torch.tensor([1e-27, -1e-24, 3.0, 0.0, -1e-12])
    share = Share(weights, gradient, {Piece("a", 0, 5, 0): slice(0, 5)}, True)
    rates, how = {"a": Rate(1.0, 0.0, fixed=0.001)}, {"offload": None, "publish": lambda _: None}
    MasterAdamW([share], rates, Recipe(), dtype=torch.float32, **how).step(0.1)
    assert weights.tolist() == pytest.approx([-0.001, 0.001, -0.001, 0.0, 0.001])


def test_changes_of_fixed_size_that_bf16_would_lose_add_up() -> None:
    """As of experts' bias: below 1 numbers of bf16 are 0.004 apart, and 0.001 taken from 1 would leave 1."""
    weights, gradient = torch.ones(1, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16)
    share = Share(weights, gradient, {Piece("a", 0, 1, 0): slice(0, 1)}, True)
    rates, how = {"a": Rate(1.0, 0.0, fixed=0.001)}, {"offload": None, "publish": lambda _: None}
    one = MasterAdamW([share], rates, Recipe(), dtype=torch.float32, **how)
    for _ in range(10):
        one.step(0.1)
    assert one.masters[0].item() == pytest.approx(0.99)
    assert weights.item() == pytest.approx(0.99, abs=2**-9)


def model(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)).to(dtype)


def gradients_of(
    groups: list[ReductionGroup], dtype: torch.dtype = torch.float32, bucket_bytes: int = 100, **options: Any
) -> Gradients:
    values = {name: p.detach().flatten() for one in groups for name, p in one.named.items()}
    initial = lambda name, start, stop: [values[name][start:stop]]
    where = {"device": torch.device("cpu"), "initial": initial}
    buckets = divide(groups, stage=0, dtype=dtype, bucket_bytes=bucket_bytes, kept=dtype, **where)
    return Gradients(buckets, groups[0].group, **{"overlap": True, **options})


def whole(net: nn.Module, group: dist.ProcessGroup) -> list[ReductionGroup]:
    return [ReductionGroup(dict(reversed(list(net.named_parameters()))), group)]


def optimizer_of(net: nn.Module, gradients: Gradients, recipe: Recipe) -> MasterAdamW:
    return MasterAdamW(
        [Share(b.own_weights, b.gradient, b.places(), True) for b in gradients.buckets],
        {name: Rate(1.0, recipe.weight_decay if p.dim() > 1 else 0.0) for name, p in net.named_parameters()},
        recipe,
        dtype=torch.float32,
        offload=None,
        publish=lambda _: None,
    )


def test_fp32_is_torch_adamw_without_decay_of_biases_and_norms(one_rank: dist.ProcessGroup) -> None:
    recipe = Recipe(lr=1e-2, weight_decay=0.1)
    ours, theirs = model(torch.float32), model(torch.float32)
    gradients = gradients_of(whole(ours, one_rank))
    optimizer = optimizer_of(ours, gradients, recipe)
    decayed = [p for p in theirs.parameters() if p.dim() > 1]
    kept = [p for p in theirs.parameters() if p.dim() == 1]
    reference = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": kept, "weight_decay": 0.0}], 1e-2
    )
    for i in range(5):
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(i))
        with gradients.accumulated(1):
            ours(x).square().sum().backward()
        optimizer.step(1e-2)
        reference.zero_grad()
        theirs(x).square().sum().backward()
        reference.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_the_loss_scale_is_taken_from_gradients_in_the_masters_type(one_rank: dist.ProcessGroup) -> None:
    """In fp16 a gradient of 1e-8 is 0: the scaled one must not be divided before it is fp32."""
    net = model(torch.float16)
    gradients = gradients_of(whole(net, one_rank), torch.float16)
    optimizer = optimizer_of(net, gradients, Recipe(weight_decay=0.0))
    scale, small = 2.0**16, 1e-8
    for bucket in gradients.buckets:
        bucket.gradient.fill_(scale * small)
    optimizer.step(1e-3, torch.tensor(1 / scale))
    for share, moments in zip(optimizer.shares, optimizer.moments, strict=True):
        assert share.gradient.dtype == torch.float16
        mean = moments[0] / (1 - optimizer.recipe.beta1)
        for place in share.pieces.values():
            torch.testing.assert_close(mean[place], torch.full_like(mean[place], small), rtol=1e-3, atol=0.0)


def test_bf16_weights_follow_fp32_masters(one_rank: dist.ProcessGroup) -> None:
    """Updates far below bf16's resolution add up in the masters until the rounded weight moves."""
    net = model(torch.bfloat16)
    gradients = gradients_of(whole(net, one_rank))
    optimizer = optimizer_of(net, gradients, Recipe(weight_decay=0.0))
    before = net[0].weight.detach().clone()
    for i in range(40):
        with gradients.accumulated(1):
            net(torch.ones(3, 8, dtype=torch.bfloat16)).sum().backward()
        optimizer.step(1e-5)
        if i == 0:
            assert (net[0].weight == before).float().mean() > 0.9
    moved = (net[0].weight - before).abs().max().item()
    assert 1e-4 < moved < 2e-3
    assert net[0].weight.dtype == torch.bfloat16
    assert all(master.dtype == torch.float32 for master in optimizer.masters)


def test_bf16_microbatches_accumulate_in_fp32(one_rank: dist.ProcessGroup) -> None:
    net: Any = nn.Linear(1, 1, bias=False).bfloat16()
    gradients = gradients_of(whole(net, one_rank))
    parts = [256.0] + [0.5] * 64  # bf16 has 8 bits: 256 + 0.5 is 256 there
    for _ in range(2):  # the second step forgets the first
        with gradients.accumulated(len(parts)):
            for part in parts:
                (net(torch.full((1, 1), part, dtype=torch.bfloat16))).sum().backward()
        assert gradients.of[net.weight].item() == sum(parts)
        assert net.weight.grad is None, "a second copy is kept"


@given(bucket_bytes=st.integers(1, 2000))
def test_buckets_hold_every_gradient_once(bucket_bytes: int, one_rank: dist.ProcessGroup) -> None:
    net = model(torch.float32)
    gradients = gradients_of(whole(net, one_rank), bucket_bytes=bucket_bytes)
    assert [p for b in gradients.buckets for p in b.parameters] == list(net.parameters())[::-1]
    with gradients.accumulated(1):
        net(torch.ones(2, 8)).sum().backward()
    reference = model(torch.float32)
    reference(torch.ones(2, 8)).sum().backward()
    for p, q in zip(net.parameters(), reference.parameters(), strict=True):
        assert q.grad is not None
        torch.testing.assert_close(gradients.of[p], q.grad)
    norm = torch.cat([q.grad.flatten() for q in reference.parameters() if q.grad is not None]).norm()
    assert gradients.norm().item() == pytest.approx(norm.item(), rel=1e-5)


def take(gradients: Gradients, microbatches: int, *parts: Callable[[], object]) -> None:
    """A step of these parts."""
    with gradients.accumulated(microbatches):
        for part in parts:
            part()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("bucket_bytes", [100, 100_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_with_a_gradient_too_few_or_too_many_is_an_error(
    dtype: torch.dtype, bucket_bytes: int, overlap: bool, one_rank: dist.ProcessGroup
) -> None:
    net = model(dtype)
    gradients = gradients_of(whole(net, one_rank), bucket_bytes=bucket_bytes, overlap=overlap)
    x = torch.ones(2, 8, dtype=dtype)
    with pytest.raises(RuntimeError, match="took no part"), gradients.accumulated(1):
        net[0](x).sum().backward()
    backward = lambda: net(x).sum().backward()
    for microbatches, passes in ((2, 1), (1, 2), (1, 0)):
        with pytest.raises(RuntimeError, match="took no part"):
            take(gradients, microbatches, *[backward] * passes)
    take(gradients, 2, backward, backward)  # and the next step is well


@pytest.mark.parametrize(
    ("dtype", "sums"), [(torch.float64,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)]
)
def test_products_and_rows_add_up_to_what_autograd_would(
    dtype: torch.dtype, sums: torch.dtype, one_rank: dist.ProcessGroup
) -> None:
    net: Any = nn.Embedding(6, 4).to(dtype)
    groups = whole(net, one_rank)
    gradients = gradients_of(groups, sums, arrivals={net.weight: 2}, added=[net.weight])
    grads, inputs, of_rows = (torch.arange(n, dtype=dtype).view(5, -1).sin() for n in (30, 20, 20))
    rows = torch.tensor([0, 5, 5, 2, 5])
    one = grads.t() @ inputs
    dense = torch.zeros(6, 4, dtype=torch.float64).index_add(0, rows, of_rows.double())
    for _ in range(2):  # what an earlier step left is forgotten
        with gradients.accumulated(3):
            for i in range(3):
                gradients.add_product(net.weight, grads * 2**i, inputs)
                gradients.add_rows(net.weight, rows, of_rows * 2**i)
        exact: dict[str, Any] = {} if dtype is torch.float64 else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(gradients.of[net.weight].double(), 7 * (one.double() + dense), **exact)
    assert net.weight.grad is None
    with pytest.raises(RuntimeError, match="took no part"), gradients.accumulated(1):
        gradients.add_rows(net.weight, rows, of_rows)
