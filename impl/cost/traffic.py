"""What ranks send each other in one training step, by formula: calls and bytes of every kind of collective."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from impl.cost.memory import ELEMENT_BYTES, MASTER_BYTES
from impl.cost.parameters import rank_parameters
from impl.pipeline.schedule import Op as PipelineOp
from impl.pipeline.schedule import Schedule, lower
from impl.pipeline.schedules import build
from impl.pipeline.stage import Stage, split
from impl.run import Run

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "send", "broadcast"]

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


Counts = dict[Op, Count]


@dataclass(frozen=True)
class Place:
    """A pipeline rank of a run."""

    run: Run
    vocab_size: int
    pp_rank: int = 0

    @cached_property
    def schedule(self) -> Schedule:
        plan = self.run.plan
        return build(plan.schedule, plan.pp, self.run.microbatches, plan.chunks)

    @property
    def stages(self) -> list[Stage]:
        """Those that the rank owns."""
        every = split(self.run.model, self.vocab_size, self.run.plan.pp * self.run.plan.chunks)
        return [every[i] for i in self.schedule.stages_of(self.pp_rank)]

    @property
    def is_first(self) -> bool:
        return any(stage.is_first for stage in self.stages)

    @property
    def is_last(self) -> bool:
        return any(stage.is_last for stage in self.stages)

    @property
    def activations(self) -> int:
        """Bytes of a microbatch's [b s, h]."""
        model = self.run.model
        return self.run.train.microbatch * model.seq_len * model.hidden_size * ELEMENT_BYTES[self.run.precision]


def tensor_parallel_traffic(place: Place, head_positions: int) -> dict[Op, Count]:
    """What one rank takes part in over its tensor-parallel group in a step; empty at degree 1.

    Args:
        head_positions: positions of a sequence that the output head scores: all of GPT's, the masked ones of BERT's.
    """
    run, plan = place.run, place.run.plan
    if plan.tp == 1:
        return {}
    is_split, element = plan.sequence_parallel, ELEMENT_BYTES[run.precision]
    layers = sum(len(stage.layers) for stage in place.stages)
    calls: Counter[Op] = Counter({op: layers * n for op, n in LAYER[is_split].items()})
    calls.update(EMBEDDING[is_split] if place.is_first else {})
    calls.update((GPT_HEAD if run.model.family == "gpt" else BERT_HEADS)[is_split] if place.is_last else {})
    counts: Counts = {op: Count(n, n * place.activations) * run.microbatches for op, n in calls.items()}
    scored = run.train.microbatch * head_positions
    if place.is_last:
        _add(counts, "all_gather", Count(1, plan.tp * 2 * scored * max(element, 4)) * run.microbatches)  # the loss
        if run.model.family == "bert":
            _add(counts, "all_reduce", Count(1, scored * run.model.hidden_size * element) * run.microbatches)
    if run.scatters:
        received = _transfers(place, PipelineOp.RECV_F, PipelineOp.RECV_B)
        _add(counts, "all_gather", Count(received, received * place.activations))
    _add(counts, "all_reduce", Count(1, MASTER_BYTES[run.precision]))  # the gradient norm
    return counts


def pipeline_traffic(place: Place) -> dict[Op, Count]:
    """What one rank sends to its pipeline neighbours in a step, and sums of loss and norm with them; empty at degree 1.

    With sequence parallelism, or scattered, a tensor-parallel rank sends its part only.

    Source: PTD-P (2104.04473), sections 3.2 and 4.1.
    """
    plan = place.run.plan
    if plan.pp == 1:
        return {}
    sent = _transfers(place, PipelineOp.SEND_F, PipelineOp.SEND_B)
    size = place.activations // (plan.tp if plan.sequence_parallel or place.run.scatters else 1)
    counts: Counts = {"send": Count(sent, sent * size)} if sent else {}
    _add(counts, "all_reduce", Count(2, 8 + MASTER_BYTES[place.run.precision]))
    return counts


def gradient_bytes(place: Place) -> dict[str, int]:
    """Bytes of gradients that one rank takes part in summing in a step, by axes of the mesh; 0 are left out.

    With sequence parallelism what every rank has whole but met only its tokens is summed over both axes. The tied
    embedding is summed over its two ends where these are on different pipeline ranks, under `ends`.
    """
    plan = place.run.plan
    rank = rank_parameters(place.run.model, place.vocab_size, plan.tp, place.stages)
    tied = rank.embedding if place.is_first != place.is_last else 0
    over_tokens = rank.whole - rank.heads if plan.sequence_parallel and plan.tp > 1 else 0
    elements = {"dp": (rank.split - tied + rank.whole - over_tokens) * (plan.dp > 1), "ends": tied}
    joint = "dp_tp" if plan.dp > 1 else "tp"
    elements[joint] = elements.get(joint, 0) + over_tokens
    return {axes: n * MASTER_BYTES[place.run.precision] for axes, n in elements.items() if n}


def _transfers(place: Place, *ops: PipelineOp) -> int:
    return sum(action.op in ops for action in lower(place.schedule)[place.pp_rank])


def _add(counts: Counts, op: Op, count: Count) -> None:
    counts[op] = counts.get(op, Count()) + count
