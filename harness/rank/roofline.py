"""Roofline of a step: its matrix products, attention and collectives, each alone, on all ranks at once."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from harness.records.store import Document
from impl.collectives import all_gather_into_start, all_reduce_start, reduce_scatter_into_start
from impl.context_parallel import all_to_all, pass_on
from impl.cost.gemms import Core, Product, core, products
from impl.cost.place import Place, Sizes
from impl.cost.traffic import Count, Op, step_traffic
from impl.data.batches import head_positions
from impl.device import Device
from impl.mesh import ends_group, joint_group, neighbours, zero_groups
from impl.run import Run
from impl.train import MASTERS, WEIGHTS

GEMM_SECONDS = 0.2
REPEATS = 5
ZERO = ("zero", "zero_tp", "replicas")
"""Axes of `zero_groups`, in order."""
LAUNCHES = {"cpu": 1, "cuda": 10}
"""Number of launches of an operation between two marks."""

Operation = Callable[[], object]


def gemm_rate(run: Run, device: torch.device) -> Document:
    """Return FLOP/s of a layer's largest matrix product alone, [b s, h] x [h, 4h]; the vocabulary's may be larger."""
    m, h = Sizes(run).tokens, run.model.hidden_size
    operation = product(Product("", "input gradient", m, 4 * h, h, 1, False), WEIGHTS[run.precision], device)
    seconds = median_seconds(operation, device, at_least=GEMM_SECONDS)
    return {"gemm_flops_per_s": 2 * m * h * 4 * h / seconds, "gemm_shape": [m, h, 4 * h]}


def roofline(run: Run, vocab_size: int, mesh: DeviceMesh, device: torch.device) -> Document:
    """Return seconds of this rank's products, attention and collectives in an optimizer step, each kind alone.

    Every distinct product and collective is measured after a first one that does not count, in the run's precision; a
    step's seconds are the sum over layers and microbatches, recomputation included. The list of operations follows
    from the run, not from its engine: products by `impl.cost.gemms`, collectives by `impl.cost.traffic`.

    Communication: the collectives; all ranks have to call this at the same time.
    """
    places = [Place(run, vocab_size, pp_rank) for pp_rank in range(run.plan.pp)]
    stages = places[mesh.get_local_rank("pp")].stages
    dtype = WEIGHTS[run.precision]
    dist.barrier()
    gemms: list[Document] = [
        {"name": one.name, "pass": one.pass_, "shape": [one.m, one.n, one.k]}
        | _timed(one.count * run.microbatches, product(one, dtype, device), device)
        for one in products(run, vocab_size, stages, head_positions(run.model))
    ]
    dist.barrier()
    attention = _attention(core(run, stages), run.microbatches, dtype, device)
    collectives = _collectives(places, mesh, device)
    total = lambda rows: sum(row["calls"] * row["seconds"] for row in rows)
    return {
        "gemm_seconds": total(gemms),
        "attention_seconds": total(attention),
        "collective_seconds": total(collectives),
        "products": gemms,
        "attention": attention,
        "collectives": collectives,
    }


def median_seconds(operation: Operation, device: torch.device, *, at_least: float = 0.0) -> float:
    """Return the median of a few calls after a first one that does not count, and of more until some time is over."""
    operation()
    times, begin = [], time.perf_counter()
    while len(times) < REPEATS or time.perf_counter() - begin < at_least:
        times.append(seconds(operation, device))
    return sorted(times)[len(times) // 2]


def seconds(operation: Operation, device: torch.device) -> float:
    """Return the duration of one call; on a GPU the mean of some launches in a row, by its own clock."""
    clock, launches = Device.of(device), LAUNCHES[device.type]
    begin = clock.mark()
    for _ in range(launches):
        operation()
    return clock.seconds(begin, clock.mark()) / launches


def _timed(calls: int, operation: Operation, device: torch.device) -> Document:
    return {"calls": calls, "seconds": median_seconds(operation, device)}


def product(of: Product, dtype: torch.dtype, device: torch.device) -> Operation:
    """Return a function that computes a matrix product, its operands transposed as they are in its pass."""
    m, n, k = of.m, of.n, of.k
    generator = torch.Generator(device).manual_seed(0)
    random = lambda *shape: torch.randn(*shape, dtype=dtype, device=device, generator=generator)
    a = random(k, m).t() if of.pass_ == "weight gradient" else random(m, k)
    b = random(n, k).t() if of.pass_ == "forward" else random(k, n)
    out = torch.empty(m, n, dtype=dtype, device=device)
    return lambda: torch.mm(a, b, out=out)


def _attention(core: Core, microbatches: int, dtype: torch.dtype, device: torch.device) -> list[Document]:
    """Measure the forward and backward pass, on heads that are adjacent in memory, as in layers."""
    generator = torch.Generator(device).manual_seed(0)
    shape = core.batch, core.seq_len, 3, core.heads, core.head_size
    qkv = torch.randn(*shape, dtype=dtype, device=device, generator=generator).permute(2, 0, 3, 1, 4)
    q, k, v = (part.detach().requires_grad_() for part in qkv)
    forward = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=core.is_causal)
    out = forward()
    backward = lambda: torch.autograd.grad(out, (q, k, v), qkv[0], retain_graph=True)
    shown = [core.batch, core.heads, core.seq_len, core.head_size]
    return [
        {"pass": pass_, "shape": shown} | _timed(calls * microbatches, operation, device)
        for pass_, calls, operation in (("forward", core.forwards, forward), ("backward", core.backwards, backward))
    ]


def _collectives(places: list[Place], mesh: DeviceMesh, device: torch.device) -> list[Document]:
    """Measure the collectives of this rank in a step; several sizes of one kind are calls of their mean.

    A send is measured on all pipeline ranks at once, to the next one, and from the last one to the first.
    """
    run = places[0].run
    traffic = [step_traffic(place, head_positions(run.model)) for place in places]
    mine = traffic[mesh.get_local_rank("pp")]
    every: list[tuple[str, Op]] = sorted(
        {(axes, op) for counts in traffic for axes, ops in counts.items() for op in ops}
    )
    groups = {axes: _group(axes, places[0], mesh) for axes in dict.fromkeys(axes for axes, _ in every)}
    found = []
    for axes, op in every:
        dist.barrier()
        group, count = groups[axes], mine.get(axes, {}).get(op)
        if op == "send" and count is None:  # a rank that sends nothing receives
            count = Count(0, 0)
        if group is None or count is None:
            continue
        size = places[0].transferred if axes == "pp" and op == "send" else count.bytes // count.calls
        # gradients are reduced in the type of their sums, all else has the weights' type
        is_gradient = op in ("all_reduce", "reduce_scatter") and axes not in ("tp", "heads", "features")
        dtype = (MASTERS if is_gradient and run.fp32_gradients else WEIGHTS)[run.precision]
        operation = collective(op, size, dtype, group, device)
        found.append({"axes": axes, "op": op, "bytes": size} | _timed(count.calls, operation, device))
    return found


def _group(axes: str, place: Place, mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return the ranks that differ in these axes; None at neither end of the pipeline. All ranks have to call this."""
    if axes == "ends":
        rank_of = place.schedule.rank_of
        return ends_group(mesh, {rank_of[0], rank_of[len(rank_of) - 1]})
    plan = place.run.plan
    if axes == "heads":
        return neighbours(mesh, place.run.model.sharing(plan.x))
    if axes in ("tp", "features") and plan.y > 1:
        return neighbours(mesh, plan.x) if axes == "tp" else neighbours(mesh, plan.y, plan.x)
    if axes in ZERO:
        return zero_groups(mesh, plan)[ZERO.index(axes)]
    return joint_group(mesh, *axes.split("_"))


def collective(
    op: Op, whole_bytes: int, dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device
) -> Operation:
    """Return a function that does a collective from its start until its result is there."""
    ranks = group.size()
    part = torch.zeros(max(1, whole_bytes // dtype.itemsize // ranks), dtype=dtype, device=device)
    whole = part.repeat(ranks)
    operations: dict[Op, Operation] = {
        "all_reduce": lambda: all_reduce_start(whole, group).wait(),
        "all_gather": lambda: all_gather_into_start(whole, part, group).wait(),
        "reduce_scatter": lambda: reduce_scatter_into_start(part, whole, group).wait(),
        "send": lambda: pass_on(whole, group).wait(),
        "all_to_all": lambda: all_to_all(whole, group),
    }
    return operations[op]
