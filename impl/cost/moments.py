"""The moments of a step at which a rank's memory may be fullest: what is kept then, and what is being computed.

Letters as in `impl.cost.activations`. A backward pass frees what it has used, so that the last block's, the first to
go back, finds most kept; which of its operations takes most besides depends on the shape.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from impl.cost.activations import has_products, stage_bytes, working_bytes
from impl.cost.parameters import ELEMENT_BYTES, MASTER_BYTES
from impl.cost.place import Place, parameter_bytes
from impl.model.config import GELU_CHUNK, LOSS_CHUNK, PRODUCT_ROWS
from impl.pipeline.schedule import HELD, SENDS_UNDER_WAY, Action, Op
from impl.pipeline.stage import Stage
from impl.run import Run
from impl.zero.partition import BucketLayout

OFFLOADED = "offloaded_layers"
"""What `stage_bytes` calls activations that wait in host memory."""


class Moment(NamedTuple):
    """Bytes of activations that wait for their backward pass, and of what comes and goes."""

    kept: int
    computed: int

    def plus(self, other: "Moment", times: int = 1) -> "Moment":
        return Moment(self.kept + times * other.kept, self.computed + times * other.computed)


def fullest(place: Place, row: Iterable[Action], head_positions: int, device: str) -> Moment:
    """Of all forward and backward passes of a step."""
    stages = dict(zip(place.schedule.stages_of(place.pp_rank), place.stages, strict=True))
    kept = {i: Moment(kept_bytes(place, stage, head_positions, device), 0) for i, stage in stages.items()}
    owed = {i: _owed(place, stage) for i, stage in stages.items()}
    backward = {i: _fullest_of_backward(place, stage, head_positions, device) for i, stage in stages.items()}
    held = Moment(0, _handed_over(place))
    found = held
    for op, stage, _ in row:
        if op is Op.F:
            held = held.plus(kept[stage])
        found = max(found, held.plus(backward[stage]) if op in (Op.B, Op.I) else held, key=sum)
        if op in (Op.B, Op.I):
            held = held.plus(kept[stage], -1)
        if op in (Op.I, Op.W):
            held = held.plus(owed[stage], 1 if op is Op.I else -1)
    return found


def offloaded(place: Place, row: Iterable[Action], head_positions: int) -> int:
    """Most bytes of activations that wait in host memory at a time."""
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
    """Of the optimizer's step: gradients that are smaller than the master weights are converted, bucket by bucket."""
    is_small = not run.fp32_gradients and not run.plan.offload_optimizer
    largest = max(bucket.updated for bucket in buckets)
    return Moment(0, largest * MASTER_BYTES[run.precision] if is_small else 0)


def kept_bytes(place: Place, stage: Stage, head_positions: int, device: str) -> int:
    """Of a microbatch in a stage, on the device, without the input where that stays in the buffer it came in."""
    run, plan = place.run, place.run.plan
    parts = stage_bytes(run, place.vocab_size, stage, head_positions)
    is_copied = plan.partition_activations or (run.scatters and plan.tp > 1)
    elsewhere = parts.get(OFFLOADED, 0) if device != "cpu" else 0
    stays = not (stage.is_first or is_copied or elsewhere)
    return sum(parts.values()) - elsewhere - (place.transferred if stays else 0)


def _handed_over(place: Place) -> int:
    """What the pipeline's ranks send, which is not freed before it has left, and a tensor to take its shape from."""
    return place.own + (SENDS_UNDER_WAY * place.transferred if place.run.plan.pp > 1 else 0)


def _owed(place: Place, stage: Stage) -> Moment:
    """What matrices' gradients are computed from later, where the schedule puts them off: inputs, and gradients."""
    kept, computed = 2 * place.own + 5 * place.features, 2 * place.activations + 7 * place.features
    return Moment(len(stage.layers) * kept, len(stage.layers) * computed)


def _fullest_of_backward(place: Place, stage: Stage, head_positions: int, device: str) -> Moment:
    """What a stage's backward pass, or its forward pass's end, adds to what is kept; less what is freed by then."""
    parts = stage_bytes(place.run, place.vocab_size, stage, head_positions)
    ends = Moment(parts.get("head", 0) + parts.get("loss", 0), 0)
    reduced = 0 if stage.is_first or not stage.is_last else _head_reduced(place, device)
    under_way = Moment(0, reduced * place.run.plan.overlap_grad_reduce)
    found = [moment.plus(ends, -1).plus(under_way) for moment in _layer_computed(place, stage)]
    found.append(Moment(0, _gelu(place.run)).plus(ends, -1))
    if stage.is_last:
        found.append(Moment(0, _head_computed(place, head_positions, device, reduced)))
    if stage.is_first:
        freed = kept_bytes(place, stage, head_positions, device) - parts["embedding"]
        found.append(Moment(-freed, place.activations + _look_up_computed(place, device)))
    return max(found, key=sum)


def _layer_computed(place: Place, stage: Stage) -> Iterator[Moment]:
    """Of the last layer's MLP and attention."""
    run, plan, model = place.run, place.run.plan, place.run.model
    e, h, t = ELEMENT_BYTES[run.precision], model.hidden_size, plan.tp
    own, features, again = place.own, place.features, working_bytes(run)
    arrives = stage.is_last or (run.scatters and t > 1)  # else it is in the buffer it was received in
    gradients = own * (1 if model.norms.sum else arrives + model.norms.output)
    gradients += own * (model.dropout > 0) + place.activations * (plan.sequence_parallel and t > 1)
    if stage.is_first and stage.is_last and not _are_added(place):
        gradients += _embedding_rows(place)  # the head's part of the tied embedding's gradient
    product = 4 * features if place.schedule.is_split else 0 if _are_summed_at_once(place) else 4 * h * h // t * e
    mlp = Moment(-own * (model.norms.sum + model.norms.output), gradients + 4 * features + product)
    if plan.recompute == "full":
        yield Moment(0, _gelu(run) + gradients + again)
        mlp = mlp.plus(Moment(0, again))
    yield mlp
    if core := _core_computed(run):
        attention, freed = gradients + again + features + core, own + 8 * features
        yield Moment(0, attention - freed) if plan.recompute == "full" else Moment(-freed, attention)


def _core_computed(run: Run) -> int:
    """The scores' gradients, of all sequences at once; without dropout what `attend` works with, a sequence at a time,
    and the gradients of queries, keys and values; nothing where that is left to the fused kernel.
    """
    model, t, e = run.model, run.plan.tp, ELEMENT_BYTES[run.precision]
    heads, length = model.num_heads // t, model.seq_len
    if model.dropout > 0:
        return run.train.microbatch * heads * length**2 * e
    if not has_products(run):
        return 0
    of_sequence = length * model.hidden_size // t * e
    working = 2 * heads * min(PRODUCT_ROWS, length) * length * e + length**2 * e
    return 3 * run.train.microbatch * of_sequence + 4 * of_sequence + working


def _gelu(run: Run) -> int:
    """What it works with in fp32, a chunk at a time."""
    elements = 4 * run.train.microbatch * run.model.seq_len * run.model.hidden_size // run.plan.tp
    return 3 * 4 * min(GELU_CHUNK, elements)


def _head_computed(place: Place, head_positions: int, device: str, reduced: int) -> int:
    """The gradients of the logits' two factors, the matrix's unless it is summed at once, and where tokens are split
    the other whole and gathered anew, and what its reduction takes; or a part of the logits in fp32; they are
    overwritten by their own.
    """
    run = place.run
    e, rows = ELEMENT_BYTES[run.precision], place.rows
    scored = run.train.microbatch * head_positions
    chunk = min(scored, max(1, LOSS_CHUNK[device] // rows)) * min(rows, place.vocab_size)
    wholes = 3 if run.plan.sequence_parallel and run.plan.tp > 1 else 1
    of_matrix = 0 if _are_summed_at_once(place) else _embedding_rows(place)
    return max(chunk * 4 if e < 4 else 0, of_matrix + reduced + wholes * scored * run.model.hidden_size * e)


def _head_reduced(place: Place, device: str) -> int:
    """While the matrix's gradient is summed over ranks that divide it: what gloo's parts of it are, and the rank's own
    part where another microbatch's waits already.
    """
    run, plan = place.run, place.run.plan
    if plan.zero_stage == 0 or plan.dp == 1:
        return 0
    whole = place.rows * run.model.hidden_size * parameter_bytes(run).gradient
    return (whole if device == "cpu" else 0) + (whole // plan.dp if plan.zero_stage >= 2 else 0)


def _look_up_computed(place: Place, device: str) -> int:
    """The matrix's gradient, or what is added to its rows, if that has another type."""
    if device != "cpu" or not _are_added(place):
        return _embedding_rows(place)
    if _are_summed_at_once(place):
        return 0
    precision = place.run.precision
    return place.activations // ELEMENT_BYTES[precision] * MASTER_BYTES[precision]


def _are_added(place: Place) -> bool:
    """Whether layers add their matrices' gradients up themselves, and autograd keeps none of them."""
    return place.schedule.is_split or not place.run.compile


def _are_summed_at_once(place: Place) -> bool:
    """Whether they do so without a tensor of each gradient: it has the type of their sum."""
    e = ELEMENT_BYTES[place.run.precision]
    return _are_added(place) and (not place.run.fp32_gradients or e == MASTER_BYTES[place.run.precision])


def _embedding_rows(place: Place) -> int:
    """Bytes of a tensor like the rank's part of the embedding."""
    return place.rows * place.run.model.hidden_size * ELEMENT_BYTES[place.run.precision]
