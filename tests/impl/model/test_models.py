"""GPT and BERT: what they see, initial weights, masks of dropout, and where norms stand."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from impl.model.bert import BERT
from impl.model.build import build_model
from impl.model.config import ModelConfig
from impl.model.dropout import DropoutKey
from impl.model.gpt import GPT
from impl.model.layers import Attention
from impl.model.norm_placement import PLACEMENTS
from impl.pipeline.stage import Stage
from impl.tensor_parallel.group import TensorParallel
from tests.impl.model.through import through

CONFIG = ModelConfig(num_layers=2, hidden_size=32, num_heads=4, seq_len=16)
VOCAB = 50

Build = Callable[..., GPT | BERT]


@pytest.fixture(scope="module")
def build(serial: TensorParallel) -> Build:
    """A serial model of a configuration."""
    return lambda config: build_model(config, VOCAB, 0, torch.float64, serial)


def trunk_output(
    model: GPT | BERT, tokens: Tensor, types: Tensor | None = None, key: DropoutKey | None = None
) -> Tensor:
    """What the one stage of a serial model makes of tokens."""
    every = Stage(range(len(model.trunk.layers)), is_first=True, is_last=True)
    return through(model.trunk, every, None, (tokens, types), tokens.shape[1], key)


def logits(model: GPT | BERT, tokens: Tensor, key: DropoutKey | None = None) -> Tensor:
    assert isinstance(model, GPT)
    return model.logits(trunk_output(model, tokens, key=key))


@pytest.mark.parametrize("norm", PLACEMENTS)
def test_gpt_sees_no_later_token(norm: str, build: Build) -> None:
    model = build(replace(CONFIG, norm_placement=norm))
    tokens = torch.arange(16)[None]
    changed = tokens.clone()
    changed[0, 9] = 40
    before, after = logits(model, tokens), logits(model, changed)
    assert torch.equal(before[:9], after[:9])
    assert not torch.allclose(before[9:], after[9:])


def test_bert_sees_both_sides(build: Build) -> None:
    model = build(replace(CONFIG, family="bert"))
    assert isinstance(model, BERT)
    tokens, types, positions = torch.arange(16)[None], torch.zeros(1, 16, dtype=torch.long), torch.tensor([[4]])
    for place in (0, 15):
        changed = tokens.clone()
        changed[0, place] = 40
        before, after = (model.heads(trunk_output(model, x, types), positions)[0] for x in (tokens, changed))
        assert not torch.allclose(before, after)


def test_dropout_is_a_function_of_its_key(build: Build) -> None:
    model = build(replace(CONFIG, dropout=0.3))
    tokens = torch.arange(16)[None]
    first = logits(model, tokens, DropoutKey(0, 0, 0))
    assert torch.equal(first, logits(model, tokens, DropoutKey(0, 0, 0)))
    for other in (DropoutKey(1, 0, 0), DropoutKey(0, 1, 0), DropoutKey(0, 0, 1)):
        assert not torch.equal(first, logits(model, tokens, other))
    model.eval()
    assert torch.equal(logits(model, tokens), logits(model, tokens))
    model.train()
    with pytest.raises(TypeError, match="needs a key"):
        logits(model, tokens)


def test_explicit_attention_equals_the_fused_kernel(build: Build) -> None:
    model, dropping = build(CONFIG), build(replace(CONFIG, dropout=1e-12))
    tokens = torch.arange(16)[None]
    assert torch.allclose(logits(model, tokens), logits(dropping, tokens, DropoutKey(0, 0, 0)), rtol=1e-9)


def test_a_pass_makes_one_generator_at_most(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many masks there are: on a GPU the host makes one in the time of several kernels."""
    model, made = build(replace(CONFIG, dropout=0.1)), []
    right = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device: (made.append(device), right(device))[1])
    logits(model, torch.arange(16)[None], DropoutKey(0, 0, 0))
    assert len(made) <= 1


def test_scores_of_fp16_overflow_no_earlier_than_they_have_to(serial: TensorParallel) -> None:
    """With dropout too, whose scores are a product: of queries that are scaled before it."""
    config = replace(CONFIG, hidden_size=512, num_heads=2, dropout=0.1)
    attention = Attention(config, serial, "attention", causal=True)
    qkv = torch.full((16, 3 * 512), 20.0, dtype=torch.float16)  # products of 102,400, scores of 6,400
    core = attention._whole_core(qkv, 16, 2, 2, DropoutKey(0, 0, 0))
    assert core.isfinite().all()


def test_attention_is_torchs(serial: TensorParallel) -> None:
    """An outside oracle for the order of queries, keys, values and heads: nn.MultiheadAttention has it too."""
    config = ModelConfig(num_layers=1, hidden_size=12, num_heads=4, seq_len=6)
    ours = Attention(config, serial, "here", causal=True).double()
    theirs = nn.MultiheadAttention(12, 4, dtype=torch.float64)
    random = torch.Generator().manual_seed(0)
    pairs = [(theirs.in_proj_weight, ours.qkv.weight), (theirs.in_proj_bias, ours.qkv.bias)]
    pairs += [(theirs.out_proj.weight, ours.projection.weight), (theirs.out_proj.bias, ours.projection.bias)]
    for their, our in pairs:
        our.data.normal_(generator=random)
        their.data.copy_(our.data)
    x = torch.randn(6, 12, dtype=torch.float64, generator=random)
    expected, _ = theirs(x, x, x, attn_mask=~torch.ones(6, 6, dtype=torch.bool).tril())
    torch.testing.assert_close(ours(x, 6, None), expected, rtol=1e-12, atol=1e-12)


def test_post_layernorm_ends_normalised_and_pre_starts_raw(build: Build) -> None:
    post, pre = build(replace(CONFIG, norm_placement="post")), build(CONFIG)
    tokens = torch.arange(16)[None]
    block_input = {}
    for name, model in (("post", post), ("pre", pre)):
        model.trunk.layers["0"].register_forward_pre_hook(lambda _, x, name=name: block_input.__setitem__(name, x[0]))
        out = model.trunk.final_norm(trunk_output(model, tokens))
        assert torch.allclose(out.std(-1, unbiased=False), torch.ones(16, dtype=torch.float64), rtol=0.02)
    assert torch.allclose(block_input["post"].std(-1, unbiased=False), torch.ones(16, dtype=torch.float64), rtol=0.02)
    assert block_input["pre"].std() < 0.1
