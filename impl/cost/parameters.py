"""Parameter counts of a model, part by part."""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from impl.errors import InputError
from impl.model.config import ModelConfig, padded_vocabulary
from impl.pipeline.stage import Stage
from impl.zero.partition import OUTPUT, TIED

TOKEN_TYPES = 2
"""BERT's segments A and B."""
ELEMENT_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
"""Bytes of an element of a weight and of an activation."""
OPERAND_BYTES = ELEMENT_BYTES | {"fp8": 1}
"""Bytes of an element that a layer's matrix product takes."""
MASTER_BYTES = {"fp64": 8, "fp32": 4, "bf16": 4, "fp16": 4, "fp8": 4}
"""Bytes of an element of a master weight and of a moment."""

INDEX_BYTES = 8
"""Bytes of a token, a position or another index of rows."""


def count_parameters(config: ModelConfig, vocab_size: int | None = None) -> int:
    """Return the exact number of a model's parameters, without the vocabulary's padding.

    An output head's matrix that is the token embedding's is counted once, and so are weights that all layers share.
    Norms included, a GPT's layer has 12 h^2 + 13 h: QKV 3 h^2 + 3 h, projection h^2 + h, MLP 8 h^2 + 5 h, norms 4 h.

    Args:
        vocab_size: rows of the token embedding, where the configuration leaves them to the data.

    Source: PTD-P (2104.04473), equation 2, which leaves out the final LayerNorm's 2 h; BERT: Devlin et al. 2019.
    """
    vocab = resolve_vocab(config, vocab_size)
    padded, of_rows = padded_vocabulary(vocab, 1), (TIED, OUTPUT, "token_bias")
    named = named_parameters(config, vocab, 1)
    return sum(p.size // padded * vocab if p.name in of_rows else p.size for p in named)


class Parameter(NamedTuple):
    """Parameter, or part of one, on one rank."""

    name: str
    shape: tuple[int, ...]
    is_split: bool
    """True if tensor-parallel ranks of other heads have other parts of it; else all have the same."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def named_parameters(
    config: ModelConfig, vocab_size: int | None, tp: int, stages: Sequence[Stage] | None = None, ep: int = 1, y: int = 1
) -> list[Parameter]:
    """Return the parameters of each of `tp` tensor-parallel ranks, in the model's order; vocabulary padded.

    Args:
        stages: the pipeline stages that the rank owns; None: all of a model in one.
        ep: ranks that share experts, of which the first's are named; the others have as many.
        y: ranks that divide the hidden features, where `tp` divide all else.

    Source: Megatron-LM 2019, section 3.
    """
    whole = (Stage(range(config.num_layers), is_first=True, is_last=True),)
    return list(_named(config, resolve_vocab(config, vocab_size), tp, tuple(stages or whole), ep, y))


@lru_cache(maxsize=64)  # memory, traffic and time of one rank ask for the same many times
def _named(
    config: ModelConfig, vocab_size: int, tp: int, stages: tuple[Stage, ...], ep: int, y: int
) -> tuple[Parameter, ...]:
    first, last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    h, bert = config.hidden_size // y, config.family == "bert"
    rows = padded_vocabulary(vocab_size, tp) // tp
    named = [Parameter("token_bias", (rows,), True)] if bert and last else []
    if first or (last and config.tied):
        named += [Parameter(TIED, (rows, h), True)]
    if first:
        named += [Parameter("trunk.positions.weight", (config.seq_len, h), False)] * (config.positions == "learned")
        named += [Parameter("trunk.token_types.weight", (TOKEN_TYPES, h), False)] * bert
        named += _norm(config, "trunk.embedding_norm", h) * config.norms.embedding
    for i in (i for stage in stages for i in config.own(stage.layers)):
        has_experts = config.has_experts(i)
        named += _layer(config, f"trunk.layers.{i}", tp, y, has_mlp=not has_experts)
        named += _experts(config, f"trunk.layers.{i}.mlp", tp, ep) if has_experts else ()
    if last:
        named += _norm(config, "trunk.final_norm", h) * config.norms.final
        named += [Parameter(OUTPUT, (rows, h), True)] * (not config.tied)
    if bert and last:
        named += _linear("token_dense", h, h) + _layer_norm("token_norm", h)
        named += _linear("pooler", h, h) + _linear("next_sentence", h, 2)
    return tuple(named)


def _experts(config: ModelConfig, name: str, tp: int, ep: int) -> Iterator[Parameter]:
    h, shared = config.hidden_size, config.shared_expert_size
    yield Parameter(f"{name}.router.weight", (config.experts, h), False)
    if config.balance_bias:
        yield Parameter(f"{name}.router.bias", (config.experts,), False)
    own = {f"experts.{e}": config.expert_inner for e in range(config.experts // ep)}
    own |= {"shared": shared} if shared else {}
    for which, inner in own.items():
        yield Parameter(f"{name}.{which}.up.weight", (sum(config.outputs_of(inner)) // tp, h), True)
        yield Parameter(f"{name}.{which}.down.weight", (h, inner // tp), True)


def _layer(config: ModelConfig, name: str, tp: int, y: int, *, has_mlp: bool) -> Iterator[Parameter]:
    h = config.hidden_size // y
    norms = {"attention": config.norms.attention, "mlp": config.norms.mlp}
    for block, of_block in norms.items():
        for place in ("input", "output", "sum"):
            if getattr(of_block, place):
                yield from _norm(config, f"{name}.{block}_norms.{place}", h)
    blocks = (
        ("attention", "qkv", sum(config.qkv_sizes), "projection", config.hidden_size),
        ("mlp", "up", sum(config.mlp_outputs), "down", config.mlp_inner),
    )
    for block, columns, outputs, rows, inputs in blocks[: 1 + has_mlp]:
        both = [
            Parameter(f"{name}.{block}.{columns}.weight", (outputs // tp, h), True),
            Parameter(f"{name}.{block}.{columns}.bias", (outputs // tp,), True),
            Parameter(f"{name}.{block}.{rows}.weight", (h, inputs // tp), True),
            Parameter(f"{name}.{block}.{rows}.bias", (h,), False),
        ]
        yield from both if config.biases else both[::2]
        if norms[block].inner:
            of_parts = _norm(config, f"{name}.{block}.inner", inputs // tp)
            yield from (one._replace(is_split=not one.name.endswith("alpha")) for one in of_parts)
        for which in norms[block].heads:
            yield from _norm(config, f"{name}.{block}.norms.{which}", config.head_size, bias=False)


def _norm(config: ModelConfig, name: str, size: int, *, bias: bool = True) -> list[Parameter]:
    parts = _layer_norm(name, size)[: 1 + (bias and config.norm != "rmsnorm")]
    return [*parts, Parameter(f"{name}.alpha", (1,), False)] if config.norm == "dyt" else parts


def _layer_norm(name: str, size: int) -> list[Parameter]:
    return [Parameter(f"{name}.weight", (size,), False), Parameter(f"{name}.bias", (size,), False)]


def _linear(name: str, inputs: int, outputs: int) -> list[Parameter]:
    return [Parameter(f"{name}.weight", (outputs, inputs), False), Parameter(f"{name}.bias", (outputs,), False)]


def resolve_vocab(config: ModelConfig, vocab_size: int | None) -> int:
    """Return the model's vocabulary size: the configuration's, or the data's where that is None.

    Raises:
        InputError: neither is given, or they differ.
    """
    if config.vocab_size is None:
        if vocab_size is None:
            raise InputError("model.vocab_size is None and no vocabulary was given; valid: the tokenizer's size")
        return vocab_size
    if vocab_size not in (None, config.vocab_size):
        raise InputError(f"model.vocab_size {config.vocab_size} is not the data's {vocab_size}; valid: that, or None")
    return config.vocab_size
