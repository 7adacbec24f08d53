"""Initial weights drawn slice by slice are those of whole parameters."""

from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor

from impl.model import initialise
from impl.model.config import ModelConfig
from impl.model.initialise import InitialWeights, build_structure
from impl.pipeline.stage import split
from impl.seeding import derive
from impl.tensor_parallel.group import TensorParallel

CONFIG = ModelConfig(family="bert", num_layers=2, hidden_size=12, num_heads=4, seq_len=17)
VOCAB, SEED = 305, 3
RESIDUAL = ("attention.projection.weight", "mlp.down.weight")


class Group(NamedTuple):
    """As much of a process group as a model's shapes depend on."""

    index: int
    of: int

    def rank(self) -> int:
        return self.index

    def size(self) -> int:
        return self.of


def of_rank(index: int, of: int) -> InitialWeights:
    tp = TensorParallel(cast(Any, Group(index, of)), sequence_parallel=False, overlap=True)
    model = build_structure(CONFIG, VOCAB, torch.bfloat16, tp, split(CONFIG, VOCAB, 1))
    assert all(p.is_meta for p in model.parameters())
    return InitialWeights(model, CONFIG, SEED, tp)


def drawn_whole(of: InitialWeights, name: str) -> Tensor:
    """This rank's part, flattened, of a parameter that is drawn in one call."""
    shape, shard = of.shapes[name], of.shards.get(name)
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    std = CONFIG.init_std / (2 * CONFIG.num_layers) ** 0.5 if name.endswith(RESIDUAL) else CONFIG.init_std
    generator = torch.Generator().manual_seed(derive(SEED, "init", name))
    whole = torch.empty(shard.whole_shape(shape) if shard else shape).normal_(0.0, std, generator=generator)
    return (shard.take(whole, of.part) if shard else whole).flatten()


@pytest.mark.parametrize("elements", [1, 400, 2**15])
@pytest.mark.parametrize("of", [1, 2, 4])
def test_slices_are_the_bits_of_the_whole(of: int, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initialise, "SLICE", elements)
    most = 0
    for index in range(of):
        initial = of_rank(index, of)
        for name, shape in initial.shapes.items():
            whole, size = drawn_whole(initial, name), shape.numel()
            third = size // 3
            for start, stop in ((0, size), (third, size), (third, third + 1), (0, size - third), (size - 1, size)):
                slices = [*initial(name, start, stop)]
                most = max(most, len(slices))
                assert torch.equal(torch.cat(slices), whole[start:stop]), (name, start, stop)
    assert (most > 2) is (elements < 2**15)  # the padding of a vocabulary is a slice of its own
