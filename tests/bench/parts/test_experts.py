"""Forward and backward of a layer of experts beside an MLP by which a token is multiplied as often, and DeepSpeed's."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn

from impl.model.config import ModelConfig
from impl.model.experts import Experts
from impl.model.layers import MLP
from impl.tensor_parallel.group import TensorParallel

MODEL = ModelConfig(num_layers=6, hidden_size=512, num_heads=8, seq_len=256, vocab_size=8192, biases=False, mlp="relu")
ONE = replace(MODEL, experts=8)
TWO = replace(MODEL, experts=16, experts_per_token=2, expert_size=MODEL.mlp_inner // 2)
DROPPING = replace(ONE, expert_capacity=1.0)
"""DeepSpeed's limit is over all tokens of a rank, ours over each sequence."""
SEQUENCES = 4


class Plain(nn.Module):
    """An MLP as DeepSpeed takes an expert."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(MODEL.hidden_size, inner, bias=False)
        self.down = nn.Linear(inner, MODEL.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def of_deepspeed(config: ModelConfig, dropping: bool) -> tuple[nn.Module, Callable[[Any, Tensor], Tensor]]:
    deepspeed = pytest.importorskip("deepspeed")
    from deepspeed.moe.layer import MoE

    deepspeed.init_distributed("gloo", dist_init_required=False)
    how = {"k": config.experts_per_token, "drop_tokens": dropping, "use_rts": False, "min_capacity": 0}
    layer = MoE(MODEL.hidden_size, Plain(config.expert_inner), config.experts, **how)
    layer.set_deepspeed_parallelism()
    return layer, lambda moe, x: moe(x)[0]


WAYS: dict[str, Callable[[TensorParallel], tuple[nn.Module, Callable[[Any, Tensor], Tensor]]]] = {
    "mlp": lambda tp: (MLP(MODEL, tp), lambda mlp, x: mlp(x)),
    "one expert": lambda tp: (Experts(ONE, tp), lambda experts, x: experts(x, MODEL.seq_len)),
    "one expert, dropping": lambda tp: (Experts(DROPPING, tp), lambda experts, x: experts(x, MODEL.seq_len)),
    "two half experts": lambda tp: (Experts(TWO, tp), lambda experts, x: experts(x, MODEL.seq_len)),
    "deepspeed, one expert": lambda _: of_deepspeed(ONE, dropping=False),
    "deepspeed, one expert, dropping": lambda _: of_deepspeed(ONE, dropping=True),
    "deepspeed, two half experts": lambda _: of_deepspeed(TWO, dropping=False),
}


@pytest.mark.parametrize("way", WAYS)
def test_experts(way: str, alone: TensorParallel, benchmark: BenchmarkFixture) -> None:
    module, call = WAYS[way](alone)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.02, generator=random)
    shape = SEQUENCES * MODEL.seq_len, MODEL.hidden_size
    x, upstream = torch.randn(*shape, generator=random).requires_grad_(), torch.randn(*shape, generator=random)

    def forward_and_backward() -> None:
        for parameter in module.parameters():
            parameter.grad = None
        call(module, x).backward(upstream)

    benchmark.pedantic(forward_and_backward, rounds=12, warmup_rounds=2)
    assert x.grad is not None
    assert x.grad.isfinite().all()
