"""Find the moment of a step at which a rank's memory is fullest: activations kept and tensors being computed.

Letters as in `impl.cost.activations`. A backward pass frees what it has used, so most activations are kept when the
backward pass of the last block begins; which of its operations needs most memory depends on the shape.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from impl.cost.activations import (
    OFFLOADED,
    bytes_after_gelu,
    expert_bytes,
    has_products,
    stage_bytes,
    working_bytes,
)
from impl.cost.parameters import MASTER_BYTES
from impl.cost.place import Place, Sizes, parameter_bytes
from impl.model.config import GELU_CHUNK, LOSS_CHUNK, PRODUCT_ROWS
from impl.pipeline.schedule import HELD, SENDS_UNDER_WAY, Action, Op
from impl.pipeline.stage import Stage
from impl.run import Run
from impl.zero.partition import BucketLayout


class Moment(NamedTuple):
    """Bytes of activations kept for the backward pass, and of temporary tensors."""

    kept: int
    computed: int

    def plus(self, other: "Moment", times: int = 1) -> "Moment":
        return Moment(self.kept + times * other.kept, self.computed + times * other.computed)


class OfStage(NamedTuple):
    """Memory that a microbatch needs in a pipeline stage."""

    kept: int
    """Bytes that its forward pass keeps for its backward pass."""
    owed: Moment
    """Bytes from which its deferred weight gradients are computed (split schedules)."""
    fullest: dict[Op, Moment]
    """The fullest moment of each pass, its beginning included, relative to the activations kept."""


def of_stage(place: Place, stage: Stage, head_positions: int, device: str) -> OfStage:
    """Return the memory that a microbatch needs in a stage of the pipeline rank."""
    parts = stage_bytes(place.run, place.vocab_size, stage, head_positions)
    kept = _on_device(place, stage, parts, device)
    return OfStage(kept, _owed(place, stage), _fullest_of_passes(place, stage, parts, kept, head_positions, device))


def fullest(place: Place, row: Iterable[Action], head_positions: int, device: str) -> Moment:
    """Return the moment with most bytes over all forward and backward passes of a step."""
    stages = zip(place.schedule.stages_of(place.pp_rank), place.stages, strict=True)
    return fullest_of(place, {i: of_stage(place, stage, head_positions, device) for i, stage in stages}, row)


def fullest_of(place: Place, each: Mapping[int, OfStage], row: Iterable[Action]) -> Moment:
    """Return the moment of a row with most bytes, given what a microbatch needs in each stage."""
    # tensors on their way along the pipeline, and a template for their shape
    found = held = Moment(0, place.own + (SENDS_UNDER_WAY * place.transferred if place.run.plan.pp > 1 else 0))
    for op, i, _ in row:
        stage = each[i]
        if op is Op.F:
            held = held.plus(Moment(stage.kept, 0))
        found = max(found, held.plus(stage.fullest[op]), key=sum)
        if op in (Op.B, Op.I):
            held = held.plus(Moment(stage.kept, 0), -1)
        if op in (Op.I, Op.W):
            held = held.plus(stage.owed, 1 if op is Op.I else -1)
    return found


def offloaded(place: Place, row: Iterable[Action], head_positions: int) -> int:
    """Return the largest number of bytes of activations that wait in host memory at a time."""
    if not place.run.plan.offload_activations:
        return 0
    stages = zip(place.schedule.stages_of(place.pp_rank), place.stages, strict=True)
    host = {i: stage_bytes(place.run, place.vocab_size, stage, head_positions)[OFFLOADED] for i, stage in stages}
    held = most = 0
    for op, stage, _ in row:
        held += HELD.get(op, 0) * host[stage]
        most = max(most, held)
    return most


def update_moment(run: Run, buckets: Sequence[BucketLayout]) -> Moment:
    """Return the moment of the optimizer's step: smaller gradients are widened to master precision bucket by bucket."""
    is_small = not run.fp32_gradients and not run.plan.offload_optimizer
    largest = max(bucket.updated for bucket in buckets)
    return Moment(0, largest * MASTER_BYTES[run.precision] if is_small else 0)


def _on_device(place: Place, stage: Stage, parts: Mapping[str, int], device: str) -> int:
    """Return the bytes of a stage's parts that are kept on the device.

    An input that stays in the buffer it was received in is not counted.
    """
    run, plan = place.run, place.run.plan
    is_copied = plan.partition_activations or (run.scatters and plan.x > 1)
    elsewhere = parts.get(OFFLOADED, 0) if device != "cpu" else 0
    stays = not (stage.is_first or is_copied or elsewhere)
    return sum(parts.values()) - elsewhere - (place.transferred if stays else 0)


def _owed(place: Place, stage: Stage) -> Moment:
    """Return the bytes of inputs and gradients from which deferred weight gradients are computed (split schedules)."""
    total, kinds = Moment(0, 0), Counter(map(place.run.model.has_experts, stage.layers))
    for has_experts, layers in kinds.items():
        sizes = Sizes(place.run, of_experts=has_experts)
        rows = sizes.activations * (place.run.model.choices if has_experts else 1)
        into = (rows if place.run.plan.ep > 1 else sizes.activations) if has_experts else sizes.own
        kept = sizes.own + into + sizes.features + sizes.inner
        total = total.plus(Moment(kept, sizes.activations + rows + sizes.projected + sizes.widened), layers)
    return total


def _fullest_of_passes(
    place: Place, stage: Stage, parts: Mapping[str, int], kept: int, head_positions: int, device: str
) -> dict[Op, Moment]:
    """Return the fullest moment of a stage's forward and backward pass, as `OfStage` has it."""
    if place.run.model.experts:
        place = replace(place, of_experts=place.run.model.has_experts(stage.layers[-1]))
    ends = Moment(parts.get("head", 0) + parts.get("loss", 0), 0)
    waits = place.is_first and place.run.model.tied  # for the look-up's gradient of the same matrix
    reduced = _head_reduced(place, device) if stage.is_last and not waits else 0
    under_way = Moment(0, reduced * place.run.plan.overlap_grad_reduce)
    found = [moment.plus(ends, -1).plus(under_way) for moment in _layer_computed(place, stage)]
    if stage.is_last:
        found.append(Moment(0, _head_computed(place, head_positions, device, reduced)))
    if stage.is_first:
        found.append(Moment(parts["embedding"] - kept, place.activations + _look_up_computed(place, device)))
    behind = bytes_after_gelu(place.run, of_experts=place.of_experts)
    before = Moment(0, 0)
    forward, backward = max(before, Moment(-behind, _gelu(place)).plus(ends, -1), key=sum), max(before, *found, key=sum)
    again = place.activations * place.run.model.choices * (place.of_experts and place.run.plan.ep == 1)  # rows
    return {Op.F: forward, Op.B: backward, Op.I: backward, Op.W: Moment(0, again)}


def _layer_computed(place: Place, stage: Stage) -> Iterator[Moment]:
    """Yield the moments of the backward pass of the last layer's MLP and attention."""
    run, plan, model, t = place.run, place.run.plan, place.run.model, place.run.plan.x
    own, features, again = place.own, place.features, working_bytes(run, of_experts=place.of_experts)
    arrives = stage.is_last or (run.scatters and t > 1)  # else it is in the buffer it was received in
    norms = model.norms.mlp
    before = place.activations * (plan.sequence_parallel and t > 1)
    if stage.is_first and stage.is_last and model.tied and not _are_added(place):
        before += _embedding_rows(place)  # the head's part of the tied embedding's gradient
    gradients = before + own * (1 if norms.sum else arrives + norms.output) + own * (model.dropout > 0)
    product = 0 if _are_summed_at_once(place) else model.mlp_inner * model.hidden_size // plan.tp * place.e
    product = place.inner if place.schedule.is_split else product
    mlp = Moment(-own * (norms.sum + norms.output), gradients + place.inner + product)
    if plan.recompute == "full":
        behind = bytes_after_gelu(run, of_experts=place.of_experts)
        yield Moment(0, _gelu(place) + before + own * arrives + again - behind)
        mlp = mlp.plus(Moment(0, again))
    if place.of_experts:
        rows = place.activations * model.choices
        yield mlp.plus(Moment(0, 2 * rows - product - place.inner))  # rows' gradients, and their products with rows
        mlp = mlp.plus(Moment(-rows, 0))
        yield mlp.plus(Moment(0, rows))
        yield mlp.plus(Moment(-place.inner, (1 + (plan.ep == 1)) * rows - place.inner))  # rows taken once more
    yield mlp
    if working := _inner_computed(place):  # the last product has freed its input and what was gathered for it
        yield mlp.plus(Moment(0, working - product - place.inner - place.activations * (place.parts > 1)))
    if model.mlp != "gelu":
        function = place.activations * model.choices * (place.of_experts and place.schedule.is_split)  # rows are owed
        freed = norms.inner + (not place.schedule.is_split) if model.mlp != "relu" else 0  # by a norm, by the product
        function += ({"gelu_erf": 1, "relu": 1, "squared_relu": 3, "swiglu": 5}[model.mlp] - freed) * place.inner
        yield mlp.plus(Moment(0, function - product - place.activations * (place.parts > 1)))
    if core := _core_computed(place):
        attention = gradients + again + features + core
        freed = expert_bytes(run) if place.of_experts else own
        freed += place.before_function + (1 + norms.inner) * place.inner
        yield Moment(0, attention - freed) if plan.recompute == "full" else Moment(-freed, attention)


def _core_computed(place: Place) -> int:
    """Return the bytes that the backward pass of attention scores computes.

    With dropout: the scores' gradients of all sequences. Without: the working memory of `attend`, a sequence at a time,
    and the gradients of queries, keys and values. 0 where the fused kernel does it.
    """
    run, b, s, e, around = place.run, place.run.train.microbatch, place.run.model.seq_len, place.e, 0
    if run.plan.cp > 1:
        from impl.cost.context import core_computed  # for few runs

        around = core_computed(place)
    if run.model.scores_dropout > 0:
        return place.heads * place.tokens * s * e + around
    if not has_products(run):
        return around
    of_sequence = place.features // b
    working = 2 * place.core_heads * min(PRODUCT_ROWS, s) * s * e + s**2 * e
    return (3 * b + 4) * of_sequence + working


def _inner_computed(place: Place) -> int:
    """Return the bytes of the working memory of an MLP's inner norm, unless its own kernel needs none."""
    model, features = place.run.model, place.inner // place.e
    is_native = model.norm == "layernorm" and place.run.plan.x == 1
    of_element = 2 * place.e if model.norm == "dyt" else 3 * max(place.e, 4)
    return features * of_element if model.norms.mlp.inner and not is_native else 0


def _gelu(place: Place) -> int:
    """Return the bytes of the GELU's fp32 working memory, a chunk at a time, and of a sum that waits for the MLP's."""
    waits = place.own * place.run.model.parallel_residual
    return waits + (3 * 4 * min(GELU_CHUNK, place.inner // place.e) if place.run.model.mlp == "gelu" else 0)


def _head_computed(place: Place, head_positions: int, device: str, reduced: int) -> int:
    """Return the bytes that the head's backward pass computes: the larger of two moments.

    Either a chunk of the logits in fp32 (overwritten by its gradients); or the gradients of the logits' two factors
    (the matrix's unless it is added in place), the gathered input with sequence parallelism, and `reduced`.
    """
    run, e, rows = place.run, place.e, place.rows
    scored = place.scored(head_positions)
    chunk = min(scored, max(1, LOSS_CHUNK[device] // rows)) * min(rows, place.vocab_size)
    wholes = 3 if run.plan.sequence_parallel and run.plan.tp > 1 else 1
    of_matrix = 0 if _are_summed_at_once(place) else _embedding_rows(place)
    if run.plan.cp > 1 and run.model.family == "bert":  # whole sequences' gradient, and what is summed of it
        reduced += 2 * run.plan.cp * place.activations
    return max(
        chunk * 4 if e < 4 else 0, of_matrix + reduced + wholes * scored * run.model.hidden_size // run.plan.y * e
    )


def _head_reduced(place: Place, device: str) -> int:
    """Return the bytes needed while the head matrix's gradient is summed over the ranks that divide it.

    With gloo the received parts, and the rank's own part where another microbatch's sum already waits.
    """
    run, plan = place.run, place.run.plan
    if plan.zero_stage == 0 or plan.zero == 1:
        return 0
    whole = _embedding_rows(place) // place.e * parameter_bytes(run).gradient
    return (whole if device == "cpu" else 0) + (whole // plan.zero if plan.zero_stage >= 2 else 0)


def _look_up_computed(place: Place, device: str) -> int:
    """Return the bytes of the embedding's gradient, or of the rows added to it if these are converted first."""
    if device != "cpu" or not _are_added(place):
        return _embedding_rows(place)
    if _are_summed_at_once(place):
        return 0
    return place.activations // place.e * MASTER_BYTES[place.run.precision]


def _are_added(place: Place) -> bool:
    """Return True if layers accumulate their matrices' gradients themselves, so that autograd keeps none."""
    return place.schedule.is_split or not place.run.compile


def _are_summed_at_once(place: Place) -> bool:
    """Return True if layers add gradients to their sum without a tensor for each, since both have the same type."""
    is_same = not place.run.fp32_gradients or place.e == MASTER_BYTES[place.run.precision]
    return _are_added(place) and is_same


def _embedding_rows(place: Place) -> int:
    """Return the bytes of a tensor of the size of the rank's part of the embedding."""
    return place.rows * place.run.model.hidden_size // place.run.plan.y * place.e
