"""Parameters of a model, part by part."""

from collections.abc import Sequence
from dataclasses import dataclass

from impl.errors import InputError
from impl.model.config import ModelConfig, padded_vocabulary
from impl.pipeline.stage import Stage

TOKEN_TYPES = 2
"""BERT's segments A and B."""


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameters by part. The output head's matrix is the token embedding's, counted once, under `embedding`."""

    embedding: int
    positions: int
    token_types: int
    layers: int
    """Attention and MLP weights and biases of all layers."""
    norms: int
    """Gains and biases of all LayerNorms but the MLM head's."""
    heads: int
    """BERT's MLM transform, pooler and next-sentence classifier."""

    @property
    def total(self) -> int:
        return self.embedding + self.positions + self.token_types + self.layers + self.norms + self.heads


def count_parameters(config: ModelConfig, vocab_size: int | None = None) -> ParameterCount:
    """Exact parameter count of a model.

    A layer has 12 h^2 + 9 h without its norms: QKV 3 h^2 + 3 h, projection h^2 + h, MLP 8 h^2 + 5 h.

    Args:
        vocab_size: rows of the token embedding, where the configuration leaves them to the data.
    Source: PTD-P (2104.04473), equation 2, which leaves out the final LayerNorm's 2 h; BERT: Devlin et al. 2019.
    """
    layers, h, vocab = config.num_layers, config.hidden_size, resolve_vocab(config, vocab_size)
    norms = 2 * layers * config.norms.norms_per_block + config.norms.embedding + config.norms.final
    bert = config.family == "bert"
    return ParameterCount(
        embedding=vocab * h,
        positions=config.seq_len * h,
        token_types=TOKEN_TYPES * h if bert else 0,
        layers=layers * (12 * h * h + 9 * h),
        norms=norms * 2 * h,
        heads=_bert_heads(h, vocab) if bert else 0,
    )


def _bert_heads(h: int, vocab: int) -> int:
    mlm = h * h + h + 2 * h + vocab
    pooler = h * h + h
    next_sentence = 2 * h + 2
    return mlm + pooler + next_sentence


@dataclass(frozen=True, kw_only=True)
class RankParameters:
    """Parameters that one rank holds, by part; those of a tied embedding on both of its ends."""

    embedding: int
    """Split over tensor-parallel ranks, and so are the next two; padding of the vocabulary included."""
    output_bias: int
    """BERT's, of every token's score."""
    layers: int
    """Matrices of the layers, biases of the column-parallel ones."""
    positions: int
    """Whole, and so is all that follows; token types included."""
    row_biases: int
    norms: int
    heads: int
    """BERT's MLM transform, pooler and next-sentence classifier."""

    @property
    def split(self) -> int:
        """Falls as 1/t."""
        return self.embedding + self.output_bias + self.layers

    @property
    def whole(self) -> int:
        """The same on every tensor-parallel rank."""
        return self.positions + self.row_biases + self.norms + self.heads


def rank_parameters(
    config: ModelConfig, vocab_size: int | None, tp: int, stages: Sequence[Stage] | None = None
) -> RankParameters:
    """What each of `tp` tensor-parallel ranks holds: matrices are split, norms, positions and row biases are not.

    Args:
        stages: the pipeline stages that the rank owns; None: all of a model in one.
    Source: Megatron-LM 2019, section 3.
    """
    vocab, h, bert = resolve_vocab(config, vocab_size), config.hidden_size, config.family == "bert"
    whole = count_parameters(config, vocab_size)
    stages = stages or (Stage(range(config.num_layers), is_first=True, is_last=True),)
    first, last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    layers = sum(len(stage.layers) for stage in stages)
    rows = padded_vocabulary(vocab, tp) // tp
    norms = 2 * layers * config.norms.norms_per_block + first * config.norms.embedding + last * config.norms.final
    return RankParameters(
        embedding=rows * h * (first or last),
        output_bias=rows * (bert and last),
        layers=layers * (12 * h * h + 7 * h) // tp,
        positions=(whole.positions + whole.token_types) * first,
        row_biases=2 * h * layers,
        norms=norms * 2 * h,
        heads=(whole.heads - vocab) * (bert and last),
    )


def resolve_vocab(config: ModelConfig, vocab_size: int | None) -> int:
    """The model's vocabulary size: the configuration's, or the data's where that is None.

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
