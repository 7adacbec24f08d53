"""What ranks send each other in one training step, by formula: calls and bytes of every kind of collective."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from impl.cost.parameters import ELEMENT_BYTES, MASTER_BYTES
from impl.cost.place import Place, parameter_bytes
from impl.pipeline.schedule import Op as PipelineOp
from impl.plan import Plan
from impl.zero.partition import owners

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "send", "broadcast"]

LAYER: dict[bool, dict[Op, int]] = {
    False: {"all_reduce": 4},
    # f forward, again for the weight gradient, and g backward are gathers; g forward and f backward are scatters
    True: {"all_gather": 6, "reduce_scatter": 4},
}
"""Collectives of a layer's two blocks, forward and backward, without and with sequence parallelism; each moves the
activations [b s, h] of a microbatch (Megatron-LM 2019, figure 4; Korthikanti et al. 2022, section 4.2.2)."""
LAYER_FORWARD: dict[bool, dict[Op, int]] = {False: {"all_reduce": 2}, True: {"all_gather": 2, "reduce_scatter": 2}}
"""Those of them in the forward pass, which happens twice with full recomputation."""
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
    if plan.recompute == "full":
        calls.update({op: layers * n for op, n in LAYER_FORWARD[is_split].items()})
        calls.update({"all_gather": layers} if plan.partition_activations else {})  # their inputs
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
    return counts


def pipeline_traffic(place: Place) -> dict[Op, Count]:
    """What one rank sends to its pipeline neighbours in a step, and the sum of the loss with them; empty at degree 1.

    With sequence parallelism, or scattered, a tensor-parallel rank sends its part only.

    Source: PTD-P (2104.04473), sections 3.2 and 4.1.
    """
    plan = place.run.plan
    if plan.pp == 1:
        return {}
    sent = _transfers(place, PipelineOp.SEND_F, PipelineOp.SEND_B)
    counts: Counts = {"send": Count(sent, sent * place.transferred)} if sent else {}
    _add(counts, "all_reduce", Count(1, 8))  # the loss
    return counts


def state_traffic(place: Place) -> dict[str, Counts]:
    """What one rank takes part in for gradients and parameters in a step, by axes of the mesh, and for what it reports.

    With P bytes of gradients, as many of parameters and m microbatches: all-reduces of P at ZeRO's stage 0, else
    reduce-scatters of P (stages 2 and 3: m P) and all-gathers of P (stage 3: 2 m P, of embeddings m P). With sequence
    parallelism what every rank has whole but met only its tokens is summed over both axes; the tied embedding is summed
    over its two ends (`ends`) besides, where these are on different pipeline ranks.

    Source: ZeRO (1910.02054), section 7.
    """
    run, plan = place.run, place.run.plan
    each = parameter_bytes(run)
    traffic: dict[str, Counts] = {}
    for bucket in place.buckets:
        stage = bucket.zero_stage
        if owners(bucket.kind, plan) > 1:
            counts = traffic.setdefault(_axes(plan, ("dp", "tp") if bucket.kind == "partial" else ("dp",)), {})
            reduce: Op = "reduce_scatter" if stage else "all_reduce"
            _add(counts, reduce, Count(1, bucket.size * each.gradient) * (run.microbatches if stage >= 2 else 1))
            gathers = _gathers(place, bucket.unit) * run.microbatches if stage == 3 else int(stage > 0)
            _add(counts, "all_gather", Count(1, bucket.size * each.weight) * gathers)
        if bucket.kind == "tied":
            _add(traffic.setdefault("ends", {}), "all_reduce", Count(1, bucket.slice_size * each.gradient))
    if plan.dp > 1:
        _add(traffic.setdefault("dp", {}), "all_reduce", Count(1, 8))  # the loss
    if plan.world_size > 1:
        norm = Count(1, MASTER_BYTES[run.precision])
        _add(traffic.setdefault(_axes(plan, ("pp", "dp", "tp")), {}), "all_reduce", norm)
    return {
        axes: {op: count for op, count in counts.items() if count.calls} for axes, counts in traffic.items() if counts
    }


def step_traffic(place: Place, head_positions: int) -> dict[str, Counts]:
    """All that one rank takes part in in a step, by axes of the mesh."""
    traffic = {"tp": tensor_parallel_traffic(place, head_positions), "pp": pipeline_traffic(place)}
    for axes, counts in state_traffic(place).items():
        for op, count in counts.items():
            _add(traffic.setdefault(axes, {}), op, count)
    return {axes: counts for axes, counts in traffic.items() if counts}


def _gathers(place: Place, unit: str) -> int:
    """How often stage 3 gathers parameters for one microbatch: before the forward pass and the backward pass."""
    if unit == "embedding":
        return 1
    return place.is_first + 2 * place.is_last if unit == "tokens" else 2


def _axes(plan: Plan, axes: Sequence[str]) -> str:
    """The name of some axes together: those of more than one rank."""
    return "_".join(axis for axis in axes if getattr(plan, axis) > 1)


def _transfers(place: Place, *ops: PipelineOp) -> int:
    """How often a rank does these: once a microbatch for every stage of its own with one of another rank beside it."""
    rank_of, own = place.schedule.rank_of, place.schedule.stages_of(place.pp_rank)
    beside = {way: sum(rank_of.get(stage + way, place.pp_rank) != place.pp_rank for stage in own) for way in (1, -1)}
    of = {PipelineOp.SEND_F: 1, PipelineOp.RECV_B: 1, PipelineOp.RECV_F: -1, PipelineOp.SEND_B: -1}
    return place.run.microbatches * sum(beside[of[op]] for op in ops)


def _add(counts: Counts, op: Op, count: Count) -> None:
    counts[op] = counts.get(op, Count()) + count
