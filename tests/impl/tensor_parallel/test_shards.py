"""Parts of parameters: joined they are the whole, and every degree starts from the serial model's weights."""

import math
from typing import NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from impl.model.build import build_model
from impl.model.config import ModelConfig
from impl.tensor_parallel.group import Part, TensorParallel
from impl.tensor_parallel.shards import Shard, shards_of


class Split(NamedTuple):
    """A whole parameter, and how many ranks it is split over."""

    whole: Tensor
    shard: Shard
    ranks: int

    @property
    def parts(self) -> list[Tensor]:
        return [self.shard.take(self.whole, Part(rank, self.ranks)) for rank in range(self.ranks)]


@st.composite
def splits(draw: st.DrawFn) -> Split:
    ranks, widths = draw(st.integers(1, 8)), draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    blocks, padded = tuple(ranks * width for width in widths), ranks * sum(widths)
    padding = draw(st.integers(0, padded - 1)) if len(blocks) == 1 else 0
    others = draw(st.lists(st.integers(1, 3), max_size=2))
    dim = draw(st.integers(0, len(others)))
    shape = [*others[:dim], padded - padding, *others[dim:]]
    whole = 1.0 + torch.arange(math.prod(shape)).view(shape)  # no element is zero, as padding is
    return Split(whole, Shard(dim, padded - padding, blocks if len(blocks) > 1 else (), padding), ranks)


@given(splits())
def test_parts_are_of_one_size_and_join_to_the_whole(split: Split) -> None:
    assert torch.equal(split.shard.join(split.parts), split.whole)
    shapes = {tuple(part.shape) for part in split.parts}
    assert len(shapes) == 1
    assert split.shard.whole_shape(shapes.pop()) == list(split.whole.shape)
    elements = torch.cat([part.flatten() for part in split.parts])
    assert torch.equal(elements[elements != 0].sort().values, split.whole.flatten())
    assert (elements == 0).sum() * split.shard.size == split.shard.padding * split.whole.numel()


@given(splits(), st.data())
def test_runs_say_where_a_parts_indices_are_in_the_whole(split: Split, data: st.DataObject) -> None:
    shard = split.shard
    for rank, part in enumerate(split.parts):
        stop = data.draw(st.integers(0, part.shape[shard.dim]))
        start = data.draw(st.integers(0, stop))
        expected = part.narrow(shard.dim, start, stop - start)
        found = [
            (split.whole.narrow(shard.dim, there, count), part.narrow(shard.dim, at, count))
            for at, there, count in shard.runs(start, stop, Part(rank, split.ranks))
        ]
        assert all(torch.equal(whole, own) for whole, own in found)
        assert sum(own.numel() for _, own in found) == (expected != 0).sum()


def test_every_block_is_split_by_itself() -> None:
    whole = torch.arange(12)  # queries 0-3, keys 4-7, values 8-11
    assert Shard(0, 12, (4, 4, 4)).take(whole, Part(1, 2)).tolist() == [2, 3, 6, 7, 10, 11]
    assert Shard(0, 12, (8, 2, 2)).take(whole, Part(1, 2)).tolist() == [4, 5, 6, 7, 9, 11]  # fewer of the latter two
    assert Shard(0, 12).take(whole, Part(1, 2)).tolist() == [6, 7, 8, 9, 10, 11]


def test_padding_is_behind_the_last_part() -> None:
    shard = Shard(0, 5, padding=3)
    assert [shard.take(torch.ones(5), Part(rank, 4)).tolist() for rank in range(4)] == [[1, 1], [1, 1], [1, 0], [0, 0]]


def test_shards_have_their_parameters_names(serial: TensorParallel) -> None:
    config = ModelConfig(family="bert", num_layers=2, hidden_size=8, num_heads=2)
    model = build_model(config, 300, 0, torch.float32, serial)
    shards = shards_of(model)
    assert shards.keys() <= dict(model.named_parameters()).keys()
    split = ["attention.qkv.weight", "attention.qkv.bias", "attention.projection.weight"]
    split += ["mlp.up.weight", "mlp.up.bias", "mlp.down.weight"]
    layers = {f"trunk.layers.{i}.{name}" for i in range(2) for name in split}
    assert shards.keys() == layers | {"trunk.tokens.weight", "token_bias"}
    assert not shards_of(nn.Linear(2, 2))
