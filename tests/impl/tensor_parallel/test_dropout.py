"""Dropout masks: a split activation has its part of serial training's mask, a replicated one the same on every rank."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from impl.model.dropout import MASK_BLOCKS, Dropout, DropoutKey
from impl.tensor_parallel.group import WHOLE, Part

KEY = DropoutKey(3, 0, 0)
RATE = 0.4


def mask(shape: tuple[int, ...], part: Part = WHOLE, key: DropoutKey = KEY, place: str = "here") -> Tensor:
    """What dropout makes of ones: zeros, and ones scaled up."""
    return Dropout(RATE, place, part)(torch.ones(shape, dtype=torch.float64), key)


@given(
    per_rank=st.integers(1, 20),
    ranks=st.integers(1, 5),
    others=st.sampled_from([(), (1,), (7,), (2, 3, 3)]),  # [n, h] split over tokens, [a, b, s, s] over heads
)
def test_a_ranks_mask_is_its_part_of_the_serial_mask(per_rank: int, ranks: int, others: tuple[int, ...]) -> None:
    whole = mask((per_rank * ranks, *others))
    parts = [mask((per_rank, *others), Part(rank, ranks)) for rank in range(ranks)]
    assert torch.equal(torch.cat(parts), whole)


def test_a_mask_keeps_the_mean_at_its_rate() -> None:
    drawn = mask((400, 250))
    assert set(drawn.unique().tolist()) == {0.0, 1.0 / (1.0 - RATE)}
    assert (drawn == 0).double().mean().item() == pytest.approx(RATE, abs=0.01)
    assert drawn.mean().item() == pytest.approx(1.0, abs=0.01)
    blocks = drawn.chunk(MASK_BLOCKS)
    assert all(not torch.equal(a, b) for i, a in enumerate(blocks) for b in blocks[:i])


@given(ranks=st.integers(1, 4), data=st.data())
def test_a_mask_is_a_function_of_its_key_and_place(ranks: int, data: st.DataObject) -> None:
    part = Part(data.draw(st.integers(0, ranks - 1)), ranks)
    draw = lambda key, place="here": mask((16, 8), part, key, place)
    first = draw(KEY)
    torch.rand(3)  # the state of torch's own generator plays no part
    assert torch.equal(first, draw(KEY)), "recomputation draws another mask"
    for field in KEY._fields:
        other = KEY._replace(**{field: getattr(KEY, field) + 1})
        assert not torch.equal(first, draw(other)), field
    assert not torch.equal(first, draw(KEY, "there"))
