"""Forward and backward of a layer and its parts, and of the output head's loss."""

from collections.abc import Callable

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from impl.model.config import ModelConfig
from impl.model.layers import MLP, Attention, Layer
from impl.run import Precision
from impl.tensor_parallel.group import TensorParallel
from impl.tensor_parallel.vocabulary import VocabParallelEmbedding
from impl.train import WEIGHTS

MODEL = ModelConfig(num_layers=6, hidden_size=512, num_heads=8, seq_len=256, vocab_size=8192)
SEQUENCES = 4
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")

PARTS: dict[str, Callable[[TensorParallel], tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]]] = {
    "layer": lambda tp: (Layer(MODEL, tp, 0, causal=True), lambda layer, x: layer(x, MODEL.seq_len, None)),
    "attention": lambda tp: (
        Attention(MODEL, tp, "attention", causal=True),
        lambda attention, x: attention(x, MODEL.seq_len, None),
    ),
    "mlp": lambda tp: (MLP(MODEL, tp), lambda mlp, x: mlp(x)),
}
"""How each is made, and called."""


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("part", PARTS)
def test_forward_and_backward(
    part: str, precision: Precision, alone: TensorParallel, benchmark: BenchmarkFixture
) -> None:
    module, call = PARTS[part](alone)
    module.to(WEIGHTS[precision])
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.02, generator=random)
    shape = SEQUENCES * MODEL.seq_len, MODEL.hidden_size
    x = torch.randn(*shape, generator=random).to(WEIGHTS[precision]).requires_grad_()
    upstream = torch.randn(*shape, generator=random).to(WEIGHTS[precision])

    def forward_and_backward() -> None:
        for parameter in module.parameters():
            parameter.grad = None
        call(module, x).backward(upstream)

    benchmark.pedantic(forward_and_backward, rounds=12, warmup_rounds=2)
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_cross_entropy(precision: Precision, mesh: DeviceMesh, benchmark: BenchmarkFixture) -> None:
    random = torch.Generator().manual_seed(0)
    tokens, vocab_size = SEQUENCES * MODEL.seq_len, MODEL.vocab_size
    assert vocab_size is not None
    logits = torch.randn(tokens, vocab_size, generator=random).to(WEIGHTS[precision])
    targets = torch.randint(vocab_size, (tokens,), generator=random)
    new = lambda: ((logits.clone().requires_grad_(),), {})  # the backward pass overwrites them
    tp = TensorParallel(mesh.get_group("tp"), sequence_parallel=False, overlap=True)
    vocabulary = VocabParallelEmbedding(vocab_size, 1, tp)

    def forward_and_backward(logits: Tensor) -> Tensor:
        return torch.autograd.grad(vocabulary.nats(logits, targets).mean(), logits)[0]

    assert benchmark.pedantic(forward_and_backward, setup=new, rounds=20, warmup_rounds=2).shape == logits.shape
