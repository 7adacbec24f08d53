"""Who owns what: everything once, whatever the sizes and the number of ranks."""

import math
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from impl.chunks import rectangles
from impl.cost.parameters import named_parameters
from impl.model.config import ModelConfig
from impl.model.norm_placement import PLACEMENTS
from impl.plan import Plan
from impl.zero.partition import ALIGNMENT, divisions, lay_out, owners, units_of_block

SIZES = st.lists(st.integers(1, 500), min_size=1, max_size=12)


@given(SIZES, st.integers(1, 16), st.integers(1, 2000))
def test_every_element_has_one_owner_and_slices_are_equal(sizes: list[int], ranks: int, elements: int) -> None:
    named = [(str(i), size) for i, size in enumerate(sizes)]
    buckets = lay_out(named, ranks, elements, 1)
    assert [(slot.name, slot.size) for bucket in buckets for slot in bucket.slots] == named
    owned: dict[str, list[tuple[int, int]]] = {}
    for bucket in buckets:
        assert bucket.size == ranks * bucket.slice_size
        assert bucket.size - sum(slot.size for slot in bucket.slots) < (len(bucket.slots) + ranks) * ALIGNMENT
        assert sum(slot.size for slot in bucket.slots[:-1]) < elements, "a bucket goes on after it is full"
        for rank in range(ranks):
            own = bucket.own(rank)
            assert own.stop - own.start == bucket.slice_size
            for piece in bucket.pieces(rank):
                assert own.start <= piece.at < piece.at + piece.stop - piece.start <= own.stop
                assert (piece.at - own.start) % ALIGNMENT == piece.start % ALIGNMENT == 0
                owned.setdefault(piece.name, []).append((piece.start, piece.stop))
    for name, size in named:
        ends = sorted(owned[name])
        assert [start for start, _ in ends] == [0, *(stop for _, stop in ends[:-1])], "a gap or an overlap"
        assert ends[-1][1] == size


@given(st.lists(st.integers(1, 9), min_size=1, max_size=2), st.data())
def test_rectangles_are_the_elements_in_order(shape: list[int], data: st.DataObject) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start + 1, size))
    whole = np.arange(size).reshape(shape)
    boxes = list(rectangles(shape, start, stop))
    taken = [whole[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))].ravel() for box in boxes]
    assert np.concatenate(taken).tolist() == list(range(start, stop))
    assert len(boxes) <= 3


@given(
    st.sampled_from(["gpt", "bert"]),
    st.sampled_from(list(PLACEMENTS)),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.integers(0, 3),
    st.booleans(),
)
def test_divisions_have_every_parameter_once(
    family: Any, norms: str, tp: int, sequence_parallel: bool, stage: Any, is_tied: bool
) -> None:
    config = ModelConfig(family=family, norm_placement=norms, num_layers=3, hidden_size=16, num_heads=2)
    named = [(p.name, p.is_split) for p in named_parameters(config, 100, tp)]
    plan = Plan(dp=2, tp=tp, sequence_parallel=sequence_parallel, zero_stage=stage)
    found = divisions(named, plan, is_tied=is_tied)
    assert sorted(name for names in found.values() for name in names) == sorted(name for name, _ in named)
    units = {unit for unit, _ in found}
    blocks = ["embedding", "embedding_norm", "head", *(f"layers.{i}" for i in range(3))]
    assert (
        units == {""} if stage < 3 else units <= {unit for block in blocks for unit in units_of_block(block, tied=True)}
    )
    for (_, kind), names in found.items():
        assert owners(kind, plan) == (4 if kind == "partial" and tp == 2 else 2)
        assert all(dict(named)[name] for name in names) or kind != "split"
