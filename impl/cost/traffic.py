"""Traffic of one training step by formula: calls and bytes of every kind of collective."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from impl.cost.parameters import ELEMENT_BYTES, INDEX_BYTES, MASTER_BYTES
from impl.cost.place import HEAD, Place, parameter_bytes
from impl.pipeline.schedule import DIRECTION
from impl.pipeline.schedule import Op as PipelineOp
from impl.pipeline.stage import Stage
from impl.plan import AXES, Plan
from impl.run import Run
from impl.zero.partition import owners

if TYPE_CHECKING:
    from impl.cost.gemms import Product

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "send", "broadcast", "all_to_all"]
When = Literal["forward", "backward"]
BlockName = Literal["embedding", "layer", "experts", "head"]
"""Of layers those that have experts are `experts`."""
LAYERS = ("layer", "experts")
TRAVELS: dict[str, int] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1, "all_to_all": 1}
"""Times that (n - 1) / n of the tensor passes every rank's link, in a ring."""


@dataclass(frozen=True)
class Count:
    """Collectives of one kind; bytes are those of the whole tensor: what is summed, or all parts together."""

    calls: int = 0
    bytes: int = 0

    def __add__(self, other: "Count") -> "Count":
        return Count(self.calls + other.calls, self.bytes + other.bytes)

    def __mul__(self, times: int) -> "Count":
        return Count(self.calls * times, self.bytes * times)


Counts = dict[Op, Count]


class Collective(NamedTuple):
    """Collective of tensor- or context-parallel ranks; bytes of the whole tensor."""

    op: Op
    bytes: int
    when: When
    behind: "Product | None" = None
    """Product that is computed meanwhile; None: the rank waits."""
    split: "Product | None" = None
    """Product whose output is sent or whose input is received; software that splits the product overlaps both."""
    over: Literal["tp", "heads", "features", "cp", "ep"] = "tp"
    """Ranks that take part: all of tp, those that share a head of keys and values, those of a grid's y, or those of cp
    or ep."""


def blocks(run: Run, stages: Iterable[Stage]) -> dict[BlockName, int]:
    """Return how many blocks of each kind these stages have."""
    found: dict[BlockName, int] = dict.fromkeys(get_args(BlockName), 0)
    for stage in stages:
        experts = sum(map(run.model.has_experts, stage.layers))
        found["experts"] += experts
        found["layer"] += len(stage.layers) - experts
        found["embedding"] += stage.is_first
        found["head"] += stage.is_last
    return found


def tensor_parallel_traffic(place: Place, head_positions: int, over: str = "tp") -> Counts:
    """Return one rank's collectives over its tensor-, context- or expert-parallel group in a step; empty at degree 1.

    Args:
        head_positions: positions of a sequence that the output head scores: all of GPT's, the masked ones of BERT's.
        over: `Collective.over` of those that are counted.
    """
    run, plan, counts = place.run, place.run.plan, defaultdict[Op, Count](Count)
    for name, count in blocks(run, place.stages).items():
        for one in collectives(place, name, head_positions) if count else ():
            if one.over != over:
                continue
            counts[one.op] += Count(1, one.bytes) * ((1 + is_recomputed(run, name, one)) * count * run.microbatches)
    if run.scatters and over == "tp" and plan.x > 1:
        received = _transfers(place, PipelineOp.RECV_F, PipelineOp.RECV_B)
        counts["all_gather"] += Count(received, received * place.activations)
    return counts


def collectives(at: Place, name: BlockName, head_positions: int, own: "Sequence[Product]" = ()) -> Iterator[Collective]:
    """Yield the collectives of one block and microbatch of all ranks that share layers, without recomputation.

    The heads of BERT work on whole activations; the input gradient of the masked positions is reduced.

    Args:
        own: the block's products, used to find what is computed meanwhile.

    Source: Megatron-LM 2019, figure 4; Korthikanti et al. 2022, section 4.2.2.
    """
    run, plan, size = at.run, at.run.plan, at.activations
    products = {(p.name, p.pass_): p for p in own}
    product = products if plan.overlap_input_grad_reduce else {}
    if plan.cp > 1 or plan.y > 1:
        from impl.cost.grid import other_collectives  # for few runs

        yield from other_collectives(at, name, head_positions, product)
    if name == "experts":
        yield from _experts(at)
    if plan.x == 1:
        return
    columns = {"layer": ("attention.qkv", "mlp.up"), "experts": ("attention.qkv", ""), "head": (HEAD,)}.get(name, ())
    # products, or look-ups, whose results are summed
    rows = {"embedding": ("",), "head": ()}.get(name, ("attention.projection", "mlp.down"))
    if name == "head" and run.model.family == "bert":
        columns = ()
        scored = run.train.microbatch * head_positions * run.model.hidden_size * ELEMENT_BYTES[run.precision]
        yield Collective("all_reduce", scored, "backward")
        if plan.sequence_parallel:
            yield Collective("all_gather", size, "forward")
    for column in columns:
        behind_input, behind_weight = product.get((column, "input gradient")), product.get((column, "weight gradient"))
        if plan.sequence_parallel:
            yield Collective("all_gather", size, "forward", split=products.get((column, "forward")))
            if column:  # what experts take is kept
                yield Collective("all_gather", size, "backward", behind_input)
            yield Collective("reduce_scatter", size, "backward", behind_weight)
        else:
            yield Collective("all_reduce", size, "backward", behind_weight)
    for row in rows:
        if plan.sequence_parallel:
            yield Collective("reduce_scatter", size, "forward", split=products.get((row, "forward")))
            yield Collective("all_gather", size, "backward", split=products.get((row, "input gradient")))
        else:
            yield Collective("all_reduce", size, "forward")
    if name in LAYERS and run.model.sharing(plan.x) > 1:
        whole = 2 * at.tokens * run.model.head_size * ELEMENT_BYTES[run.precision]
        yield Collective("all_gather", whole, "forward", over="heads")
        yield Collective("reduce_scatter", whole, "backward", over="heads")
    numbers = {"layernorm": 2, "rmsnorm": 1, "dyt": 0}[run.model.norm] if name in LAYERS else 0  # of split norms
    if numbers:
        of_tokens = at.tokens * numbers * max(ELEMENT_BYTES[run.precision], 4)
        for _ in range(run.model.norms.attention.inner + run.model.norms.mlp.inner):
            yield Collective("all_gather", plan.x * of_tokens, "forward")
            yield Collective("all_reduce", of_tokens, "backward")
    if name == "head":
        statistics = plan.x * 2 * at.scored(head_positions) * max(ELEMENT_BYTES[run.precision], 4)
        yield Collective("all_gather", statistics, "forward")
    if name in LAYERS and plan.partition_activations:
        yield Collective("all_gather", size, "backward")


def _experts(at: Place) -> Iterator[Collective]:
    """Yield what a layer's experts add: rows to experts and back, their numbers, and those of whole sequences."""
    run, plan, model = at.run, at.run.plan, at.run.model
    if plan.ep > 1:
        rows = at.activations * model.choices
        yield Collective("all_to_all", INDEX_BYTES * model.experts, "forward", over="ep")
        for when in ("forward", "forward", "backward", "backward"):
            yield Collective("all_to_all", rows, when, over="ep")
    if plan.cp > 1 and model.balance_loss:
        counts = INDEX_BYTES * model.experts * run.train.microbatch
        when = "backward" if plan.recompute == "full" else "forward"  # where the graph is made
        yield Collective("all_reduce", counts, when, over="cp")


def is_recomputed(run: Run, name: BlockName, one: Collective) -> bool:
    """Return True if the backward pass does a collective of the forward pass again: a layer's, or its core's alone."""
    is_of_core = one.over == "cp" and one.op != "all_reduce"  # which is the loss of balance's
    again = run.plan.recompute == "full" or (run.plan.recompute == "selective" and is_of_core)
    return again and name in LAYERS and one.when == "forward"


def pipeline_traffic(place: Place) -> Counts:
    """Return one rank's sends to pipeline neighbours in a step and the sum of the loss; empty at degree 1.

    With sequence parallelism, or scattered, a tensor-parallel rank sends its part only.

    Source: PTD-P (2104.04473), sections 3.2 and 4.1.
    """
    counts = defaultdict[Op, Count](Count)
    if place.run.plan.pp > 1:
        if sent := _transfers(place, PipelineOp.SEND_F, PipelineOp.SEND_B):
            counts["send"] += Count(sent, sent * place.transferred)
        counts["all_reduce"] += Count(1, 8)  # the loss
    return counts


def state_traffic(place: Place) -> dict[str, Counts]:
    """Return one rank's collectives for gradients, parameters, loss and norm in a step, by axes of the mesh.

    With P bytes of gradients, as many of parameters and m microbatches: all-reduces of P at ZeRO's stage 0, else
    reduce-scatters of P (stages 2 and 3: m P) and all-gathers of P (stage 3: 2 m P, of embeddings m P). Where only z of
    d data-parallel ranks (`zero`) divide them, these are over z ranks, and P / z is all-reduced over d / z `replicas`.
    With sequence parallelism, gradients of whole parameters computed from a rank's own tokens are summed over both
    axes; the tied embedding's also over its two ends (`ends`), where these are on different pipeline ranks; those of
    experts over the ranks that have the same ones (`owners`).

    Source: ZeRO (1910.02054), section 7.
    """
    run, plan = place.run, place.run.plan
    each, traffic = parameter_bytes(run), defaultdict[str, Counts](lambda: defaultdict(Count))
    data = ("zero",) if plan.replicas > 1 else ("dp", "cp")
    axes = _axes(plan, data)
    axes_of = {"partial": _axes(plan, (*data, "tp")), "expert": "owners"}
    for bucket in place.buckets:
        stage = bucket.zero_stage
        if owners(bucket.kind, plan) > 1:
            counts = traffic[axes_of.get(bucket.kind, axes)]
            reductions = run.microbatches if stage >= 2 else 1
            counts["reduce_scatter" if stage else "all_reduce"] += Count(1, bucket.size * each.gradient) * reductions
            if stage:
                gathers = _gathers(place, bucket.unit) * run.microbatches if stage == 3 else 1
                counts["all_gather"] += Count(1, bucket.size * each.weight) * gathers
        owned = Count(1, bucket.slice_size * each.gradient)
        if plan.replicas > 1:
            traffic["replicas"]["all_reduce"] += owned
        if bucket.kind == "tied":
            traffic["ends"]["all_reduce"] += owned
    if plan.dp_cp > 1:
        traffic[_axes(plan, ("dp", "cp"))]["all_reduce"] += Count(1, 8)  # the loss
    if plan.world_size > 1:
        traffic[_axes(plan, AXES)]["all_reduce"] += Count(1, MASTER_BYTES[run.precision])  # the norm
    return dict(traffic)


def step_traffic(place: Place, head_positions: int) -> dict[str, Counts]:
    """Return all collectives of one rank in a step, by axes of the mesh."""
    every = ("tp", "heads", "features", "cp", "ep")
    traffic = {over: tensor_parallel_traffic(place, head_positions, over) for over in every}
    traffic["pp"] = pipeline_traffic(place)
    for axes, counts in state_traffic(place).items():
        total = traffic.setdefault(axes, defaultdict(Count))
        for op, count in counts.items():
            total[op] += count
    return {axes: dict(counts) for axes, counts in traffic.items() if counts}


def _gathers(place: Place, unit: str) -> int:
    """Return how often stage 3 gathers parameters for one microbatch: before the forward and the backward pass."""
    if unit == "embedding":
        return 1
    return place.is_first + 2 * (place.is_last and place.run.model.tied) if unit == "tokens" else 2


def _axes(plan: Plan, axes: Sequence[str]) -> str:
    """Return the joint name of some axes: those of more than one rank."""
    return "_".join(axis for axis in axes if getattr(plan, axis) > 1)


def _transfers(place: Place, *ops: PipelineOp) -> int:
    """Return how often a rank does these transfers: per microbatch, once per neighbouring stage on another rank."""
    rank_of, own = place.schedule.rank_of, place.schedule.stages_of(place.pp_rank)
    others = {way: sum(rank_of.get(stage + way, place.pp_rank) != place.pp_rank for stage in own) for way in (1, -1)}
    return place.run.microbatches * sum(others[DIRECTION[op]] for op in ops)
