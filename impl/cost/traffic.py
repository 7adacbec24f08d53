"""What ranks send each other in one training step, by formula: calls and bytes of every kind of collective."""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from impl.cost.memory import ELEMENT_BYTES, MASTER_BYTES
from impl.cost.parameters import rank_parameters
from impl.run import Run

Op = Literal["all_reduce", "all_gather", "reduce_scatter"]

LAYER: dict[bool, dict[Op, int]] = {
    False: {"all_reduce": 4},
    # f forward, again for the weight gradient, and g backward are gathers; g forward and f backward are scatters
    True: {"all_gather": 6, "reduce_scatter": 4},
}
"""Collectives of a layer's two blocks, forward and backward, without and with sequence parallelism; each moves the
activations [b s, h] of a microbatch (Megatron-LM 2019, figure 4; Korthikanti et al. 2022, section 4.2.2)."""
EMBEDDING: dict[bool, dict[Op, int]] = {False: {"all_reduce": 1}, True: {"all_gather": 1, "reduce_scatter": 1}}
GPT_HEAD: dict[bool, dict[Op, int]] = {False: {"all_reduce": 1}, True: {"all_gather": 2, "reduce_scatter": 1}}
BERT_HEADS: dict[bool, dict[Op, int]] = {False: {}, True: {"all_gather": 1}}
"""BERT's heads work on whole activations; the masked positions' input gradient is reduced besides."""


@dataclass(frozen=True)
class Count:
    """Collectives of one kind; bytes are those of the whole tensor: what is summed, or what all parts make together."""

    calls: int = 0
    bytes: int = 0

    def __add__(self, other: "Count") -> "Count":
        return Count(self.calls + other.calls, self.bytes + other.bytes)

    def __mul__(self, times: int) -> "Count":
        return Count(self.calls * times, self.bytes * times)


def tensor_parallel_traffic(run: Run, head_positions: int) -> dict[Op, Count]:
    """What one rank takes part in over its tensor-parallel group in a step; empty at degree 1.

    Args:
        head_positions: positions of a sequence that the output head scores: all of GPT's, the masked ones of BERT's.
    """
    model, plan = run.model, run.plan
    if plan.tp == 1:
        return {}
    split, element = plan.sequence_parallel, ELEMENT_BYTES[run.precision]
    per_token = model.hidden_size * element
    calls: Counter[Op] = Counter({op: model.num_layers * n for op, n in LAYER[split].items()})
    calls.update(EMBEDDING[split])
    calls.update((GPT_HEAD if model.family == "gpt" else BERT_HEADS)[split])
    activations = run.train.microbatch * model.seq_len * per_token
    counts: dict[Op, Count] = {op: Count(n, n * activations) for op, n in calls.items()}
    scored = run.train.microbatch * head_positions
    loss = Count(1, plan.tp * 2 * scored * max(element, 4))
    counts["all_gather"] = counts.get("all_gather", Count()) + loss
    if model.family == "bert":
        counts["all_reduce"] = counts.get("all_reduce", Count()) + Count(1, scored * per_token)
    counts = {op: count * run.microbatches for op, count in counts.items()}
    counts["all_reduce"] = counts.get("all_reduce", Count()) + Count(1, MASTER_BYTES[run.precision])  # gradient norm
    return counts


def gradient_bytes(run: Run, vocab_size: int) -> dict[str, int]:
    """Bytes of gradients that one rank takes part in summing in a step, by axes of the mesh; 0 are left out.

    With sequence parallelism what every rank has whole but met only its tokens is summed over both axes.
    """
    plan, rank = run.plan, rank_parameters(run.model, vocab_size, run.plan.tp)
    over_tokens = rank.whole - rank.heads if plan.sequence_parallel and plan.tp > 1 else 0
    elements = {"dp": (rank.split + rank.whole - over_tokens) * (plan.dp > 1)}
    joint = "dp_tp" if plan.dp > 1 else "tp"
    elements[joint] = elements.get(joint, 0) + over_tokens
    return {axes: n * MASTER_BYTES[run.precision] for axes, n in elements.items() if n}
