"""Memory of Llama models under fully sharded data parallelism with tensor and pipeline parallelism, as in torchtitan.

This project trains GPTs only; Llama is here since its memory was published for many layouts. Letters: n tokens of a
microbatch, h hidden size, f hidden size of the MLP, t tensor-parallel ranks. Weights have 16 bits; master weights,
gradients and two moments are fp32; norms, residuals and tensors between pipeline stages are split over the tokens.
"""

from dataclasses import dataclass
from typing import Literal

from impl.pipeline.schedule import HELD
from impl.pipeline.schedules import build

Recompute = Literal["operators", "full"]
RESERVED = 1.06
"""Bytes reserved by PyTorch's allocator over bytes in use at once; assumed."""
W, MASTER = 2, 4
"""Bytes of an element of a weight or activation, and of fp32."""


@dataclass(frozen=True)
class Llama:
    """Llama model: grouped queries, gated MLP, an untied output matrix."""

    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    vocab: int = 128256

    @property
    def kv(self) -> int:
        return self.hidden * self.kv_heads // self.heads

    @property
    def layer_parameters(self) -> int:
        h = self.hidden
        return 2 * h * h + 2 * h * self.kv + 3 * h * self.mlp + 2 * h

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + 2 * self.vocab * self.hidden + self.hidden


LLAMAS = {
    "llama-3.1-8b": Llama(32, 4096, 14336, 32, 8),
    "llama-3.1-70b": Llama(80, 8192, 28672, 64, 8),
    "llama-3.1-405b": Llama(126, 16384, 53248, 128, 8),
}
"""Source: Llama 3 (2407.21783), table 3."""


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


def peak_bytes(model: Llama, layout: Layout) -> float:
    """Return the bytes that the fullest rank's allocator has reserved in a step."""
    return RESERVED * max(_rank_bytes(model, layout, rank) for rank in range(layout.pp))


def _rank_bytes(model: Llama, layout: Layout, rank: int) -> float:
    stages = [chunk * layout.pp + rank for chunk in range(layout.chunks)]
    count = layout.pp * layout.chunks
    each, over = divmod(model.layers, count)
    layers = [each + (1 <= stage <= over) for stage in stages]  # the first stage has the embedding instead
    ends = (0 in stages) + (count - 1 in stages)
    root = ends * model.vocab * model.hidden / layout.tp
    own = sum(layers) * model.layer_parameters / layout.tp + root
    n = layout.seq_len * layout.microbatch
    handed = W * n * model.hidden / layout.tp
    kept, moved = 0.0, 0.0
    for stage, number, held in zip(stages, layers, _in_flight(layout, rank, stages), strict=True):
        kept += held * number * _layer_kept(model, layout)
        if layout.pp > 1:  # what arrives has a place for every microbatch, outputs stay until their backward pass
            arrives = (stage > 0) + (stage < count - 1)
            moved += (arrives * layout.microbatches + held) * handed
    loss = _loss(model, layout) if count - 1 in stages else 0.0
    states = 3 * MASTER * own / layout.dp
    return states + kept + moved + _whole(model, layout, own, root) + max(loss, _layer_at_work(model, layout))


def _in_flight(layout: Layout, rank: int, stages: list[int]) -> list[int]:
    """Return the microbatches of each stage that are kept when the rank keeps most."""
    name = "interleaved" if layout.chunks > 1 else "one_f_one_b"
    held, most = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
    for op, stage, _ in build(name, layout.pp, layout.microbatches, layout.chunks).rows[rank]:
        held[stage] += HELD.get(op, 0)
        most = dict(held) if sum(held.values()) > sum(most.values()) else most
    return [most[stage] for stage in stages]


def _whole(model: Llama, layout: Layout, own: float, root: float) -> float:
    """Return the bytes of parameters and gradients that are whole while layers compute.

    A pipeline keeps all weights gathered, and sums all gradients in fp32, until its last microbatch; otherwise two
    layers' weights are gathered, and the matrices of the ends from the first layer to the last.
    """
    if layout.pp > 1:
        return (W + MASTER) * own
    return W * (root + 2 * model.layer_parameters / layout.tp)


def _layer_kept(model: Llama, layout: Layout) -> float:
    """Return the bytes that a layer keeps of a microbatch: its input, and results of operators if these are recomputed.

    Kept operators are every second product (queries, values, the gate, the MLP's result), and attention's result with
    its statistics.
    """
    n = layout.seq_len * layout.microbatch
    kept = W * n * model.hidden
    if layout.recompute == "operators":
        kept += W * n * (3 * model.hidden + model.kv + model.mlp) + MASTER * n * model.heads
    return kept / layout.tp


def _layer_at_work(model: Llama, layout: Layout) -> float:
    """Return the bytes of a recomputed layer during its MLP's backward pass: kept tensors, gradients and weights."""
    n, t = layout.seq_len * layout.microbatch, layout.tp
    gathered, part, wide = W * n * model.hidden, W * n * model.hidden / t, W * n * model.mlp / t
    gathers = 2 * gathered if t > 1 else 0.0  # the inputs of attention and of the MLP
    kept = gathers + 8 * part + 2 * W * n * model.kv / t + 4 * wide
    gradients = (3 if t > 1 else 2) * gathered + 3 * wide
    weights = 2 * W * model.layer_parameters / t  # gradients, and weights converted for the products
    return kept + gradients + weights


def _loss(model: Llama, layout: Layout) -> float:
    """Return the bytes of the logits and of the output's input during the loss.

    Logits are in 16 bits (which stay reserved), in fp32 normalised, and their gradient before and after that; one more
    copy where they are split.
    """
    n, is_split = layout.seq_len * layout.microbatch, layout.tp > 1
    logits = n * model.vocab / layout.tp
    norm = (2 * MASTER + W) * n * model.hidden / layout.tp
    return (W + (3 + is_split) * MASTER) * logits + norm + is_split * W * n * model.hidden
