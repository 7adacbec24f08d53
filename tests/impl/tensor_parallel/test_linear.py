"""Column- and row-parallel layers against torch's DTensor layers, and the attention's heads against serial slices."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from impl.model.config import ModelConfig
from impl.model.layers import Attention
from impl.tensor_parallel.group import TensorParallel
from impl.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from impl.tensor_parallel.shards import Shard, shards_of
from tests.ranks import run_ranks

TOKENS, HIDDEN, INNER = 12, 6, 20


class Passed(NamedTuple):
    """What one forward and backward pass gave on one rank; whole tensors from DTensor, parts from ours."""

    out: np.ndarray
    input_grad: np.ndarray
    grads: dict[str, np.ndarray]


class Block(nn.Module):
    """LayerNorm, then an MLP of two layers."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), up, down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(self.norm(x)), approximate="tanh"))


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def whole_block() -> Block:
    block = Block(nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)).double()
    for seed, parameter in enumerate(block.parameters()):
        parameter.data.copy_(random(*parameter.shape, seed=seed))
    return block


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def own_block(tp: TensorParallel) -> Block:
    """This rank's part of the same weights, in our layers."""
    block = Block(ColumnParallelLinear(HIDDEN, INNER, tp), RowParallelLinear(INNER, HIDDEN, tp)).double()
    shards = shards_of(block)
    for (name, parameter), whole in zip(block.named_parameters(), whole_block().parameters(), strict=True):
        parameter.data.copy_(shards[name].take(whole.data, tp.part) if name in shards else whole.data)
    return block


def passed(block: nn.Module, x: Tensor, upstream: Tensor, whole: Callable[[Tensor], Tensor] = lambda t: t) -> Passed:
    x = x.clone().requires_grad_()
    out = block(x)
    out.backward(upstream)
    assert x.grad is not None
    grads = {name: whole(p.grad).numpy() for name, p in block.named_parameters() if p.grad is not None}
    return Passed(whole(out.detach()).numpy(), whole(x.grad).numpy(), grads)


def of_dtensor(sequence_parallel: bool) -> Passed:
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tokens = Shard(0)
    split = {
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=tokens),
        "down": RowwiseParallel(output_layouts=tokens),
    }
    replicated = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    block = parallelize_module(whole_block(), mesh, split if sequence_parallel else replicated)
    parts = dist.get_world_size() if sequence_parallel else 1
    own = lambda seed: random(TOKENS, HIDDEN, seed=seed).chunk(parts)[dist.get_rank() % parts]

    def whole(t: Tensor) -> Tensor:
        if not isinstance(t, DTensor) and sequence_parallel:
            t = DTensor.from_local(t, mesh, [tokens])
        return t.full_tensor() if isinstance(t, DTensor) else t

    return passed(block, own(10), own(11), whole)


def both(sequence_parallel: bool) -> tuple[Passed, Passed, Passed, dict[str, Shard]]:
    """DTensor's, ours with and ours without overlap."""
    tp = TensorParallel(world(), sequence_parallel, overlap=True)
    own = lambda seed: random(TOKENS, HIDDEN, seed=seed).chunk(tp.tokens.of)[tp.tokens.index]
    block = own_block(tp)
    during = passed(block, own(10), own(11))
    after = passed(own_block(replace(tp, overlap=False)), own(10), own(11))
    return of_dtensor(sequence_parallel), during, after, shards_of(block)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_an_mlp_is_that_of_dtensor(ranks: int, sequence_parallel: bool) -> None:
    answers = run_ranks(ranks, both, sequence_parallel)
    ours, shards = [answer[1] for answer in answers], answers[0][3]
    whole = lambda parts: np.concatenate(parts) if sequence_parallel else parts[0]
    equal = lambda a, b, what: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12, err_msg=what)
    for theirs, mine, _, _ in answers:
        equal(whole([each.out for each in ours]), theirs.out, "output")
        equal(whole([each.input_grad for each in ours]), theirs.input_grad, "input gradient")
        assert mine.grads.keys() == theirs.grads.keys()
    for name, expected in answers[0][0].grads.items():
        parts = [each.grads[name] for each in ours]
        if name in shards:
            equal(shards[name].join([torch.from_numpy(part) for part in parts]), expected, name)
        elif sequence_parallel:  # each rank met its own tokens only
            equal(np.sum(parts, 0), expected, name)
        else:
            for part in parts:
                equal(part, expected, name)


def assert_same_bits(a: Passed, b: Passed) -> None:
    np.testing.assert_array_equal(a.out, b.out)
    np.testing.assert_array_equal(a.input_grad, b.input_grad)
    assert a.grads.keys() == b.grads.keys()
    for name, grad in a.grads.items():
        np.testing.assert_array_equal(grad, b.grads[name], err_msg=name)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_overlap_changes_no_bit(ranks: int, sequence_parallel: bool) -> None:
    for _, during, after, _ in run_ranks(ranks, both, sequence_parallel):
        assert_same_bits(during, after)


def test_over_one_rank_the_layers_are_torchs(serial: TensorParallel) -> None:
    x, upstream = random(TOKENS, HIDDEN, seed=10), random(TOKENS, HIDDEN, seed=11)
    assert_same_bits(passed(own_block(serial), x, upstream), passed(whole_block(), x, upstream))


HEADS, HEAD_SIZE = 4, 3
CONFIG = ModelConfig(num_layers=1, hidden_size=HEADS * HEAD_SIZE, num_heads=HEADS, seq_len=6)


def attention(tp: TensorParallel) -> Attention:
    """This rank's heads of one attention, biases drawn too."""
    layer = Attention(CONFIG, tp, "here", causal=True).double()
    shards = shards_of(layer)
    for seed, (name, parameter) in enumerate(layer.named_parameters()):
        shard = shards.get(name)
        whole = random(*(shard.whole_shape(parameter.shape) if shard else parameter.shape), seed=seed)
        parameter.data.copy_(shard.take(whole, tp.part) if shard else whole)
    return layer


def passed_heads(tp: TensorParallel) -> list[np.ndarray]:
    """Weights, biases and outputs of this rank's heads, each [3, heads, ...], and the attention's output."""
    layer, x = attention(tp), random(12, CONFIG.hidden_size, seed=20)
    shape, qkv = (3, HEADS // tp.degree, HEAD_SIZE), layer.qkv
    weight, bias, out = (t.detach().reshape(*shape, -1) for t in (qkv.weight, qkv.bias, qkv(x).t()))
    return [t.numpy() for t in (weight, bias, out, layer(x, CONFIG.seq_len, None).detach())]


def passed_own_heads() -> list[np.ndarray]:
    return passed_heads(TensorParallel(world(), sequence_parallel=False, overlap=True))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_has_a_slice_of_the_serial_layers_heads(ranks: int, serial: TensorParallel) -> None:
    width = HEADS // ranks
    *expected, out = passed_heads(serial)
    for rank, (*found, rank_out) in enumerate(run_ranks(ranks, passed_own_heads)):
        heads = slice(rank * width, (rank + 1) * width)
        for own, whole in zip(found, expected, strict=True):
            np.testing.assert_allclose(own, whole[:, heads], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(rank_out, out, rtol=1e-12, atol=1e-12)


def test_serial_attention_is_torchs(serial: TensorParallel) -> None:
    """An outside oracle for the order of queries, keys, values and heads: nn.MultiheadAttention has it too."""
    ours, x = attention(serial), random(CONFIG.seq_len, CONFIG.hidden_size, seed=20)
    theirs = nn.MultiheadAttention(CONFIG.hidden_size, HEADS, dtype=torch.float64)
    pairs = [(theirs.in_proj_weight, ours.qkv.weight), (theirs.in_proj_bias, ours.qkv.bias)]
    pairs += [(theirs.out_proj.weight, ours.projection.weight), (theirs.out_proj.bias, ours.projection.bias)]
    for their, our in pairs:
        their.data.copy_(our.data)
    later = ~torch.ones(CONFIG.seq_len, CONFIG.seq_len, dtype=torch.bool).tril()
    expected, _ = theirs(x, x, x, attn_mask=later)
    torch.testing.assert_close(ours(x, CONFIG.seq_len, None), expected, rtol=1e-12, atol=1e-12)
