"""Dropout masks: a split activation has its part of serial training's mask, a replicated one the same on every rank."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from impl.model.config import ModelConfig
from impl.model.initialise import build_model
from impl.model.layers import MASK_BLOCKS, Dropout, DropoutKey
from impl.pipeline.stage import split
from impl.tensor_parallel.group import WHOLE, Part, TensorParallel
from tests.impl.model.through import through
from tests.ranks import run_ranks

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


@pytest.mark.parametrize("shape", [(24, 64), (6, 2, 16, 16)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_and_blocks_draw_different_masks(shape: tuple[int, ...], ranks: int) -> None:
    parts = mask(shape).chunk(ranks)
    assert all(not torch.equal(a, b) for i, a in enumerate(parts) for b in parts[:i])
    blocks = mask((4 * MASK_BLOCKS, 64)).chunk(MASK_BLOCKS)
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


CONFIG = ModelConfig(num_layers=1, hidden_size=24, num_heads=12, seq_len=12, dropout=RATE)


class Drawn(NamedTuple):
    """Masks of one forward pass by the name of the module that drew them, and what the model made of them."""

    masks: dict[str, np.ndarray]
    out: np.ndarray


def draw_all(tp: TensorParallel, key: DropoutKey) -> Drawn:
    model = build_model(CONFIG, 300, 0, torch.float64, tp)
    masks: dict[str, np.ndarray] = {}
    for name, module in model.named_modules():
        if isinstance(module, Dropout):
            note = lambda _, given, out, name=name: masks.__setitem__(name, (out == 0).numpy())
            module.register_forward_hook(note)
    tokens = torch.arange(24).view(2, 12)
    (stage,) = split(CONFIG, 300, 1)
    out = tp.gather(through(model.trunk, stage, None, (tokens, None), 12, key), tp.group)
    return Drawn(masks, out.detach().numpy())


def draw_twice(sequence_parallel: bool) -> tuple[Drawn, Drawn]:
    assert dist.group.WORLD is not None
    tp = TensorParallel(dist.group.WORLD, sequence_parallel, overlap=True)
    return draw_all(tp, KEY), draw_all(tp, KEY)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_models_masks_are_split_where_its_activations_are(
    ranks: int, sequence_parallel: bool, serial: TensorParallel
) -> None:
    expected = draw_all(serial, KEY)
    heads = "trunk.layers.0.attention.dropout"
    tokens = {"trunk.embedding_dropout", "trunk.layers.0.attention_dropout", "trunk.layers.0.mlp_dropout"}
    assert expected.masks.keys() == {heads, *tokens}
    causal = np.tri(CONFIG.seq_len, dtype=bool)  # later tokens have probability zero in any case
    answers = run_ranks(ranks, draw_twice, sequence_parallel)
    for name in tokens | {heads}:
        found = [first.masks[name] for first, _ in answers]
        if name == heads:
            np.testing.assert_array_equal(np.concatenate(found)[..., causal], expected.masks[name][..., causal])
        elif sequence_parallel:
            np.testing.assert_array_equal(np.concatenate(found), expected.masks[name])
        else:
            for each in found:
                np.testing.assert_array_equal(each, expected.masks[name])
    for first, again in answers:
        np.testing.assert_array_equal(first.out, again.out)
        np.testing.assert_allclose(first.out, expected.out, rtol=1e-10, atol=1e-12)
