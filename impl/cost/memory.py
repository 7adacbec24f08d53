"""Bytes that a rank holds: weights, gradients and optimizer states, and what a layer keeps for the backward pass."""

from collections.abc import Sequence
from typing import NamedTuple

from impl.cost.parameters import rank_parameters
from impl.model.config import ModelConfig
from impl.pipeline.stage import Stage

ELEMENT_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2}
"""Of a weight and of an activation."""
MASTER_BYTES = {"fp64": 8, "fp32": 4, "bf16": 4}
"""Of a master weight, of a moment and of an accumulated gradient."""


class StateBytes(NamedTuple):
    """Weights, gradients, master weights and moments of one rank."""

    split: int
    """Of parameters split over tensor-parallel ranks, padding included: these fall as 1/t."""
    whole: int
    """Of parameters that every tensor-parallel rank has."""


def state_bytes(
    config: ModelConfig, vocab_size: int, *, tp: int, precision: str, stages: Sequence[Stage] | None = None
) -> StateBytes:
    """Bytes of weight, gradient, master weight where there is one, and two moments, of a rank's parameters.

    Args:
        stages: the pipeline stages that the rank owns; None: all of a model in one.
    """
    element, master = ELEMENT_BYTES[precision], MASTER_BYTES[precision]
    each = element + 3 * master + (master if element < master else 0)
    rank = rank_parameters(config, vocab_size, tp, stages)
    return StateBytes(rank.split * each, rank.whole * each)


def activation_bytes_per_layer(
    config: ModelConfig, microbatch: int, *, tp: int, sequence_parallel: bool, element_size: int = 2
) -> float:
    """Bytes that one layer with dropout keeps of a microbatch: sbh (10 + 24/t + 5as/ht), or 34/t for the first two.

    In 16-bit activations with masks of a byte; attention is not fused, as dropout with reproducible masks needs. Norms
    are two a layer in the source; here they are counted. Means and deviations of norms are left out, as in the source.

    Source: Korthikanti et al. 2022, equations 2 and 4, table 2.
    """
    b, s, h, e = microbatch, config.seq_len, config.hidden_size, element_size
    norms = 2 * config.norms.norms_per_block
    tokens = e * norms + 2 * e + 2  # inputs of norms and of the column-parallel layers, two dropout masks
    features = 3 * e + e + 4 * e + 4 * e  # q, k and v, context, both sides of the GELU
    scores = (2 * e + 1) * config.num_heads * s / h  # probabilities before and after dropout, its mask
    return s * b * h * (tokens / (tp if sequence_parallel else 1) + (features + scores) / tp)
