"""Parameter counts against the papers' formula and their printed counts."""

import dataclasses
from decimal import Decimal
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from impl.cost.parameters import count_parameters, named_parameters, resolve_vocab
from impl.errors import InputError
from impl.model.config import ModelConfig, NormKind
from impl.model.initialise import build_structure
from impl.model.norm_placement import PLACEMENTS
from impl.model.sizes import SIZES, named
from impl.pipeline.stage import split
from impl.tensor_parallel.group import TensorParallel
from impl.tensor_parallel.shards import shards_of
from tests.impl.blocks import BLOCKS
from tests.impl.model.test_initialise import Group

# printed counts that the shape does not give, with what it gives and why
DIFFERENT = {
    "gpt-355m": ("356M", "the print is of the unpadded vocabulary of 50,257: 354.8M; section 5.1 pads it to 51,200"),
    "gpt-175b": ("174.6B", "GPT-3's table 2.1 is rounded to 175.0; PTD-P's table 2 prints this shape as 174.6B"),
    "llama-2-70b": ("69B", "the name is rounded to tens: 69.0B"),
    **dict.fromkeys(("llama-3.1-70b", "llama-70b"), ("71B", "the name is rounded to tens: 70.6B")),
    **dict.fromkeys(("llama-3.1-405b", "llama-405b"), ("406B", "the name is rounded down: 405.85B")),
    "nemotron-15b": ("16B", "the paper counts 12.5 and, of both embeddings, 3.2 billion: 15.7B"),
    "nemotron-340b": ("341B", "the paper counts 331.6 and, of both embeddings, 9.4 billion: 341.0B"),
}
SCALE = {"M": 10**6, "B": 10**9, "T": 10**12}

shapes = st.builds(
    lambda layers, heads, width, s, vocab: ModelConfig(
        num_layers=layers, hidden_size=heads * width, num_heads=heads, seq_len=s, vocab_size=vocab
    ),
    *(st.integers(1, 200), st.integers(1, 128), st.integers(1, 200), st.integers(2, 4096), st.integers(2, 10**6)),
)


def as_printed(count: int, printed: str) -> str:
    """The count in the unit and to the decimals of `printed`."""
    exponent = Decimal(printed[:-1]).as_tuple().exponent
    assert isinstance(exponent, int)
    return f"{(Decimal(count) / SCALE[printed[-1]]):.{-exponent}f}{printed[-1]}"


@given(shapes)
def test_gpt_is_ptdp_equation_2_and_the_final_layernorm(config: ModelConfig):
    layers, h, s, vocab = config.num_layers, config.hidden_size, config.seq_len, config.vocab_size
    assert vocab is not None
    # 12 L h^2 (1 + 13/12h + (V + s)/12Lh), multiplied out
    equation_2 = 12 * layers * h**2 + 13 * layers * h + (vocab + s) * h
    assert count_parameters(config) == equation_2 + 2 * h


@pytest.mark.parametrize("name", [name for name, size in SIZES.items() if size.published])
def test_published_counts_to_the_printed_precision(name: str):
    size = SIZES[name]
    printed = size.published
    assert printed is not None
    expected, _reason = DIFFERENT.get(name, (printed, ""))
    assert as_printed(count_parameters(size.config), printed) == expected


def test_other_prints_are_of_other_vocabularies():
    for name, vocab_size, printed in (("gpt-355m", 50257, "355M"), ("gpt-175b", 51200, "174.6B")):
        config = dataclasses.replace(SIZES[name].config, vocab_size=vocab_size)
        assert as_printed(count_parameters(config), printed) == printed


KINDS: tuple[NormKind, ...] = ("layernorm", "rmsnorm", "dyt")
CONFIGS = BLOCKS | {
    f"{family}, {placement}": dataclasses.replace(
        named(f"{family}-8m"), norm_placement=placement, norm=KINDS[i % 3], num_heads=8
    )
    for i, placement in enumerate(PLACEMENTS)
    for family in ("gpt", "bert")
}
SHARED = {f"{name}, shared": dataclasses.replace(CONFIGS[name], shared_layers=True) for name in [*CONFIGS][::3]}


@pytest.mark.parametrize("name", CONFIGS | SHARED)
def test_the_list_is_the_models_in_its_order_and_the_count_its_sum(name: str):
    config = (CONFIGS | SHARED)[name]
    stages = split(config, 300, 1 if config.shared_layers else 3)
    for tp in (1, 2, 4):
        group: Any = Group(tp - 1, tp)
        parts = (stages[:1], stages[1:2], stages[2:], stages[::2])
        for owned in (stages, *(parts if len(stages) > 1 else ())):
            layout = TensorParallel(group, sequence_parallel=False, overlap=True)
            built = build_structure(config, 300, torch.float32, layout, owned)
            shards = shards_of(built)
            theirs = [(name, tuple(p.shape), name in shards) for name, p in built.named_parameters()]
            ours = named_parameters(config, 300, tp, owned)
            assert ours == theirs
    without_padding = dataclasses.replace(config, vocab_size=384)
    assert count_parameters(without_padding) == sum(p.size for p in named_parameters(without_padding, None, 1))


def test_vocabulary_comes_from_the_configuration_or_the_data():
    assert resolve_vocab(ModelConfig(vocab_size=300), None) == 300
    assert resolve_vocab(ModelConfig(), 300) == 300
    assert resolve_vocab(ModelConfig(vocab_size=300), 300) == 300
    with pytest.raises(InputError, match=r"vocab_size is None"):
        count_parameters(ModelConfig())
    with pytest.raises(InputError, match=r"300 is not the data's 301"):
        count_parameters(ModelConfig(vocab_size=300), 301)
