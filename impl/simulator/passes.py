"""Seconds of a microbatch's forward and backward pass through a block, and through a pipeline stage."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from impl.cost.gemms import Core, Pass, Product
from impl.cost.place import Sizes
from impl.cost.traffic import blocks, is_recomputed
from impl.pipeline.stage import Stage
from impl.plan import Plan
from impl.run import Run
from impl.simulator.operations import Block, BlockName, Moved
from impl.simulator.seconds import (
    Group,
    Size,
    attention,
    beside,
    collective,
    elementwise,
    gemm,
    group,
    launched,
    send,
    strided,
)
from impl.simulator.system import System


class Passes(NamedTuple):
    """Seconds through one block, or several."""

    forward: float = 0.0
    backward: float = 0.0
    input_gradient: float = 0.0
    """Seconds of the input gradient alone, with communication no longer hidden by weight gradients."""
    weight_gradient: float = 0.0
    tensor_parallel: float = 0.0
    """Seconds of waits for tensor-parallel ranks, forward and backward together, as in the fields below."""
    context: float = 0.0
    """Seconds of waits for the ranks that share sequences."""
    pipeline: float = 0.0
    gather: float = 0.0
    """Seconds of waits for gathered parameters or divided gradients."""
    host: float = 0.0
    """Seconds of waits for activations on their way to and from host memory."""
    experts: float = 0.0
    """Seconds of waits for rows on their way to experts and back."""

    def plus(self, other: "Passes", times: int = 1) -> "Passes":
        return Passes(*(a + times * b for a, b in zip(self, other, strict=True)))


def passes(system: System, run: Run, block: Block, *, is_layer: bool) -> Passes:
    """Return the seconds through one block; what its plan recomputes is part of the backward pass."""
    plan, around = run.plan, outside_layers(run)
    run = run if is_layer else around
    if is_layer and run.model.experts:
        from impl.simulator.routing import routed  # for few runs

        block = routed(system, run, block)
    if block.products and _fuses_gradients(system, run):
        block = block._replace(moved=tuple(one for one in block.moved if one.name != "gradients"))
    over = {one.over for one in block.collectives} - {"cp"}
    ranks = {name: _ranks(system, run, name) for name in over}
    to_experts = {name: ranks.pop(name) for name in over & {"ep"}}
    shared = {op: _context(system, run, block, op) for op in ("forward", "backward")}
    forward = _products(system, run, block, "forward") + _moved(system, run, block.moved, "forward")
    inputs = _products(system, run, block, "input gradient") + _moved(system, run, block.moved, "backward")
    weights = _products(system, run, block, "weight gradient") + _moved(system, run, block.moved, "weight")
    repeated = tuple(one for one in block.collectives if is_layer and is_recomputed(run, "layer", one))
    context_again = _context(system, run, block._replace(collectives=repeated), "forward")
    core = 0.0
    if block.core is not None:
        scores = () if system.device.fused_attention else block.scores
        core, of_core = (
            times * _core(system, around, block.core, when) + _moved(system, run, scores, when)
            for times, when in ((block.core.forwards, "forward"), (block.core.backwards, "backward"))
        )
        inputs += of_core
    forward += core + shared["forward"]
    again = {"none": 0.0, "selective": core + context_again, "full": forward if is_layer else 0.0}[plan.recompute]
    sums = {op: _collectives(system, run, block, ranks, op) for op in ("forward", "backward")}
    exchanges = {op: _collectives(system, run, block, to_experts, op) for op in ("forward", "backward")}
    times = 2 if plan.recompute == "full" and is_layer else 1
    again += (times - 1) * (sums["forward"] + exchanges["forward"])
    exposed = _collectives(system, run, block, ranks, "backward", is_hidden=True)
    host = _host(system, run, block) if is_layer else (0.0, 0.0)
    kept = _kept_in_host(system, run) if is_layer else 0.0
    both = again + inputs + weights + shared["backward"] + exchanges["backward"]
    put_off = system.constant("host_backward") / 3 if is_layer else 0.0  # a product for each of two others
    return Passes(
        forward=launched(system, forward + sums["forward"] + exchanges["forward"], host[0]) + kept,
        backward=launched(system, both + exposed, host[1]) + kept,
        input_gradient=launched(system, both - weights + sums["backward"], host[1] - put_off) + kept,
        weight_gradient=launched(system, weights, put_off),
        tensor_parallel=sums["forward"] * times + exposed,
        context=shared["forward"] + context_again + shared["backward"],
        host=2 * kept,
        experts=exchanges["forward"] * times + exchanges["backward"],
    )


def _ranks(system: System, run: Run, over: str) -> Group:
    """Return the ranks of a block's collectives: `Collective.over`, but for those that share sequences."""
    plan = run.plan
    if over == "ep":
        return strided(plan.ep, plan.tp, plan, system)
    if over == "features":  # x apart
        return group(("cp",), replace(plan, tp=plan.x, tp3=None, cp=plan.y, dp=plan.dp_cp), system)
    degree = run.model.sharing(plan.x) if over == "heads" else plan.x
    return group(("tp",), adjacent(plan, degree), system)


def adjacent(plan: Plan, degree: int) -> Plan:
    """Return the plan with a smaller tensor-parallel degree, the other ranks being data-parallel."""
    return plan if degree == plan.tp else replace(plan, tp=degree, tp3=None, dp=plan.dp * plan.tp // degree)


def outside_layers(run: Run) -> Run:
    """Return the run in the precision of attention's core, of embedding and head: 8 bits are for layers' products only.

    Source: NVIDIA's Transformer Engine, documentation of its FP8 recipes; MLPerf's GPT-3 submissions.
    """
    return replace(run, precision="bf16") if run.precision == "fp8" else run


def stage_passes(system: System, run: Run, each: Mapping[BlockName, Passes], stage: Stage) -> Passes:
    """Return the seconds through a stage: its layers and, at the model's ends, embedding and head."""
    total = Passes()
    for name, count in blocks(run, [stage]).items():
        total = total.plus(each[name], count) if count else total
    fetches = stage.is_first or stage.is_last or not system.habits.fetches_at_ends
    half = fetches * system.constant("microbatch_seconds") / 2
    return total._replace(
        forward=total.forward + half, backward=total.backward + half, input_gradient=total.input_gradient + half
    )


def _products(system: System, run: Run, block: Block, pass_: Pass) -> float:
    chosen = [p for p in block.products if p.pass_ == pass_]
    kernels = sum(p.count for p in chosen) * system.constant("kernel_seconds")
    return sum(p.count * _product(system, run, p) for p in chosen) + kernels


def _product(system: System, run: Run, one: Product) -> float:
    is_sum = one.pass_ == "weight gradient" and _fuses_gradients(system, run)
    return float(gemm(system, run.precision, one.m, one.n, one.k, one.pass_, is_sum=is_sum))


def _fuses_gradients(system: System, run: Run) -> bool:
    return system.habits.fuses_gradients and run.fp32_gradients


def _moved(system: System, run: Run, moved: Iterable[Moved], when: str) -> float:
    sizes = [(one.name, size) for one in moved if (size := getattr(one, when))]
    is_backward = when != "forward"
    seconds = sum(elementwise(system, run.precision, size, name, is_backward=is_backward) for name, size in sizes)
    return seconds + len(sizes) * system.constant("kernel_seconds")


def _collectives(
    system: System, run: Run, block: Block, ranks: Mapping[str, Group], when: str, *, is_hidden: bool = False
) -> float:
    """Return the seconds of a pass's collectives; with `is_hidden` what they add to products computed meanwhile.

    Software that splits products and collectives into parts hides those behind these in any case.
    """
    total = 0.0
    for one in (one for one in block.collectives if one.when == when and one.over in ranks):
        seconds = float(collective(system, one.op, one.bytes, ranks[one.over]))
        behind = (one.behind if is_hidden else None) or (one.split if system.habits.splits_products else None)
        if behind is not None:
            seconds = beside(system, seconds, _product(system, run, behind))
        total += seconds
    return total


def _context(system: System, run: Run, block: Block, when: str) -> float:
    """Return the seconds that a pass waits for the ranks that share sequences.

    Of a ring's sends all but the way home of the keys' and values' gradients are beside the meetings with others' keys;
    all-to-alls are beside nothing.
    """
    shared = [one for one in block.collectives if one.over == "cp" and one.when == when]
    if not shared:
        return 0.0
    ranks = group(("cp",), run.plan, system)
    total = sum(float(collective(system, one.op, one.bytes, ranks)) for one in shared if one.op != "send")
    is_inter = ranks.per_node < ranks.ranks
    most = min((way.rate for way in ranks.ways), default=math.inf)
    sent = partial(send, system, is_inter=is_inter, senders=ranks.sharing, most=most)
    sends = [sent(one.bytes) for one in shared if one.op == "send"]
    if sends and (core := block.core):
        home = sends.pop() if when == "backward" else 0.0
        meeting = _core(system, outside_layers(run), core, when)
        steps = run.plan.cp - 1
        total += home + steps * float(beside(system, sum(sends) / steps, meeting))
    return total


def _core(system: System, run: Run, core: Core, when: str) -> Size:
    shape = core.batch, core.heads, core.seq_len, core.head_size
    masked = core.is_causal / (run.plan.cp if run.plan.is_ring else 1)
    return attention(system, run.precision, shape, masked=masked, backward=when == "backward")


def _kept_in_host(system: System, run: Run) -> float:
    """Return the seconds that a layer's input takes to host memory, or back."""
    plan = run.plan
    if not plan.offload_activations or system.device.kind == "cpu":
        return 0.0
    parts = plan.x if plan.partition_activations or plan.sequence_parallel else 1
    return Sizes(run).activations / parts / system.constant("host_link")


def _host(system: System, run: Run, block: Block) -> tuple[float, float]:
    """Return the seconds to launch a layer, forward and backward."""
    heads = run.train.microbatch * run.model.num_heads // run.plan.x
    unfused = system.constant("host_unfused") * (heads % 4 != 0)
    of = {"cp": run.plan.cp, "features": run.plan.y}
    ranks = lambda one: of.get(one.over, run.plan.x)
    each = {
        when: system.constant("host_collective") * sum(math.log2(ranks(c)) for c in block.collectives if c.when == when)
        for when in ("forward", "backward")
    }
    forward = system.constant("host_forward") + unfused + each["forward"]
    backward = system.constant("host_backward") + each["backward"]
    return forward, backward + (forward if run.plan.recompute == "full" else 0.0)
