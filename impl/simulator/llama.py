"""Memory of Llama models under fully sharded data parallelism with tensor and pipeline parallelism, as in torchtitan.

Its engine keeps and gathers other tensors than ours, and its memory was published for many layouts. Letters: n tokens
of a microbatch, h hidden size, f features of the MLP, t tensor-parallel ranks. Weights have 16 bits; master weights,
gradients and two moments are fp32; norms, residuals and tensors between pipeline stages are split over the tokens.
"""

from dataclasses import dataclass
from typing import Literal

from impl.model.config import ModelConfig
from impl.pipeline.schedule import HELD
from impl.pipeline.schedules import build

Recompute = Literal["operators", "full"]
RESERVED = 1.06
"""Bytes reserved by PyTorch's allocator over bytes in use at once; assumed."""
W, MASTER = 2, 4
"""Bytes of an element of a weight or activation, and of fp32."""


@dataclass(frozen=True)
class Layout:
    """Layout of a run: `microbatch` sequences at a time through `chunks` stages on each of pp ranks."""

    dp: int
    tp: int
    pp: int
    chunks: int
    seq_len: int
    microbatch: int
    microbatches: int
    recompute: Recompute


def peak_bytes(model: ModelConfig, layout: Layout) -> float:
    """Return the bytes that the fullest rank's allocator has reserved in a step."""
    return RESERVED * max(_rank_bytes(model, layout, rank) for rank in range(layout.pp))


def _rank_bytes(model: ModelConfig, layout: Layout, rank: int) -> float:
    stages = [chunk * layout.pp + rank for chunk in range(layout.chunks)]
    count = layout.pp * layout.chunks
    each, over = divmod(model.num_layers, count)
    layers = [each + (1 <= stage <= over) for stage in stages]  # the first stage has the embedding instead
    ends = (0 in stages) + (count - 1 in stages)
    root = ends * (model.vocab_size or 0) * model.hidden_size / layout.tp
    own = sum(layers) * _layer_parameters(model) / layout.tp + root
    n = layout.seq_len * layout.microbatch
    handed = W * n * model.hidden_size / layout.tp
    kept, moved = 0.0, 0.0
    for stage, number, held in zip(stages, layers, _in_flight(layout, rank, stages), strict=True):
        kept += held * number * _layer_kept(model, layout)
        if layout.pp > 1:  # what arrives has a place for every microbatch, outputs stay until their backward pass
            arrives = (stage > 0) + (stage < count - 1)
            moved += (arrives * layout.microbatches + held) * handed
    loss = _loss(model, layout) if count - 1 in stages else 0.0
    states = 3 * MASTER * own / layout.dp
    return states + kept + moved + _whole(model, layout, own, root) + max(loss, _layer_at_work(model, layout))


def _layer_parameters(model: ModelConfig) -> int:
    return model.layer_weights + 2 * model.hidden_size  # and the two norms


def _in_flight(layout: Layout, rank: int, stages: list[int]) -> list[int]:
    """Return the microbatches of each stage that are kept when the rank keeps most."""
    name = "interleaved" if layout.chunks > 1 else "one_f_one_b"
    held, most = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
    for op, stage, _ in build(name, layout.pp, layout.microbatches, layout.chunks).rows[rank]:
        held[stage] += HELD.get(op, 0)
        most = dict(held) if sum(held.values()) > sum(most.values()) else most
    return [most[stage] for stage in stages]


def _whole(model: ModelConfig, layout: Layout, own: float, root: float) -> float:
    """Return the bytes of parameters and gradients that are whole while layers compute.

    A pipeline keeps all weights gathered, and sums all gradients in fp32, until its last microbatch; otherwise two
    layers' weights are gathered, and the matrices of the ends from the first layer to the last.
    """
    if layout.pp > 1:
        return (W + MASTER) * own
    return W * (root + 2 * _layer_parameters(model) / layout.tp)


def _layer_kept(model: ModelConfig, layout: Layout) -> float:
    """Return the bytes that a layer keeps of a microbatch: its input, and results of operators if these are recomputed.

    Kept operators are every second product (queries, values, the gate, the MLP's result), and attention's result with
    its statistics.
    """
    n = layout.seq_len * layout.microbatch
    kept = W * n * model.hidden_size
    if layout.recompute == "operators":
        kept += W * n * (3 * model.hidden_size + model.qkv_sizes[1] + model.mlp_inner) + MASTER * n * model.num_heads
    return kept / layout.tp


def _layer_at_work(model: ModelConfig, layout: Layout) -> float:
    """Return the bytes of a recomputed layer during its MLP's backward pass: kept tensors, gradients and weights."""
    n, t = layout.seq_len * layout.microbatch, layout.tp
    gathered, part, wide = W * n * model.hidden_size, W * n * model.hidden_size / t, W * n * model.mlp_inner / t
    gathers = 2 * gathered if t > 1 else 0.0  # the inputs of attention and of the MLP
    kept = gathers + 8 * part + 2 * W * n * model.qkv_sizes[1] / t + 4 * wide
    gradients = (3 if t > 1 else 2) * gathered + 3 * wide
    weights = 2 * W * _layer_parameters(model) / t  # gradients, and weights converted for the products
    return kept + gradients + weights


def _loss(model: ModelConfig, layout: Layout) -> float:
    """Return the bytes of the logits and of the output's input during the loss.

    Logits are in 16 bits (which stay reserved), in fp32 normalised, and their gradient before and after that; one more
    copy where they are split.
    """
    n, is_split = layout.seq_len * layout.microbatch, layout.tp > 1
    logits = n * (model.vocab_size or 0) / layout.tp
    norm = (2 * MASTER + W) * n * model.hidden_size / layout.tp
    return (W + (3 + is_split) * MASTER) * logits + norm + is_split * W * n * model.hidden_size
