"""Seconds after the last microbatch: gradient reduction in the pipeline's drain, the update, then parameters."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from impl.cost.parameters import MASTER_BYTES, named_parameters
from impl.cost.place import Place, parameter_bytes
from impl.cost.traffic import Count, Counts, state_traffic
from impl.pipeline.stage import Stage
from impl.run import Run
from impl.simulator.periodic import Last
from impl.simulator.seconds import STATE_BYTES, Size, beside, collective, group, optimizer, placed, strided
from impl.simulator.system import System

REDUCING = ("all_reduce", "reduce_scatter")


class States(NamedTuple):
    """Data that one pipeline rank sends and updates in a step."""

    traffic: dict[str, Counts]
    """Collectives by axes of the mesh."""
    updated: int
    """Parameters whose moments the rank has."""
    tensors: int
    shares: tuple[float, ...]
    """Share of the rank's parameters in each of its stages."""
    layers: tuple[float, ...]
    """Number of blocks (`blocks_of`) in each of its stages."""


class Moving(NamedTuple):
    """Seconds of a rank's collectives for gradients and parameters in a step."""

    reducing: float
    """Seconds of reducing gradients, without those over replicas."""
    summing: float
    """Seconds of summing gradients over ZeRO's replicas, once a step at every stage."""
    gathering: float
    """Seconds of gathering parameters."""


def states(place: Place) -> States:
    """Return the states of a rank of a run, independent of the system."""
    run = place.run
    sizes = [
        sum(p.size for p in named_parameters(run.model, place.vocab_size, run.plan.x, [stage], run.plan.ep, run.plan.y))
        for stage in place.stages
    ]
    return States(
        state_traffic(place),
        sum(bucket.updated for bucket in place.buckets),
        sum(len(bucket.names) for bucket in place.buckets),
        tuple(size / sum(sizes) for size in sizes),
        tuple(blocks_of(run, place.vocab_size, stage) for stage in place.stages),
    )


def blocks_of(run: Run, vocab_size: int, stage: Stage) -> float:
    """Return the blocks in which a stage's parameters move: its layers, or their size over that of a shared one."""
    if not (run.model.shared_layers and stage.layers):
        return max(1, len(stage.layers))
    named = named_parameters(run.model, vocab_size, run.plan.tp, [stage], run.plan.ep)
    return sum(p.size for p in named) / sum(p.size for p in named if p.name.startswith("trunk.layers."))


def moving(system: System, run: Run, state: States) -> Moving:
    """Return the summed seconds of all that a rank reduces and gathers in a step."""
    found, plan = dict.fromkeys(Moving._fields, 0.0), run.plan
    for axes, counts in _moved(system, run, state).items():
        if axes == "ends" or "pp" in axes.split("_"):
            continue
        if axes == "owners":
            ranks = strided(plan.zero // plan.ep, plan.tp * plan.ep, plan, system)
        else:
            ranks = group(tuple(axes.split("_")), plan, system)
        for op, count in counts.items():
            use = "summing" if axes == "replicas" else "reducing" if op in REDUCING else "gathering"
            found[use] += count.calls * float(collective(system, op, count.bytes / count.calls, ranks))
    return Moving(**found)


def _moved(system: System, run: Run, state: States) -> dict[str, Counts]:
    """Return a rank's collectives for gradients and parameters as the system's software does them.

    Where each tensor has one owner, stage 1 sums gradients on all data-parallel ranks, and every owner sends what it
    has: as many broadcasts as ranks that divide the states, or as tensors if these are fewer.
    """
    if not system.habits.owns_tensors or run.plan.zero_stage != 1:
        return state.traffic
    layers = run.model.num_layers if run.model.shared_layers else sum(state.layers)
    tensors = state.tensors / layers * run.model.num_layers / run.plan.pp  # of a rank, not of a unit
    sent = sum(counts["all_gather"].bytes for counts in state.traffic.values() if "all_gather" in counts)
    found = defaultdict[str, Counts](lambda: defaultdict(Count))
    for axes, counts in state.traffic.items():
        for op, count in counts.items():
            if op == "all_gather":
                messages = state.tensors * min(1.0, run.plan.zero / tensors) * count.bytes / sent
                found[axes]["broadcast"] += Count(messages, count.bytes)  # type: ignore[arg-type]  # of a unit, a part
            elif axes != "replicas":  # summed with the others
                found[axes.replace("zero", "dp")]["all_reduce"] += count
    return found


def sharded(
    system: System, gathering: Size, reducing: Size, computing: Size, layers: Size, *, ahead: Size, behind: Size
) -> Size:
    """Return the seconds that a pass through a stage waits for gathered parameters and divided gradients.

    Transfers that overlap the pass go block by block: the first block's are not hidden, the others' are hidden by the
    blocks before.

    Args:
        ahead: whether parameters are gathered during the pass.
        behind: whether gradients are divided during the pass.
    """
    hidden = gathering * ahead + reducing * behind
    first = hidden / layers
    return gathering + reducing - hidden + (first + beside(system, hidden - first, computing))


def beyond(system: System, moved: Size, computing: Size, stages: Size, ranks: Size, layers: Size) -> Size:
    """Return the seconds that gradients go on after a rank's last pass, or parameters delay its first, at least.

    A block's transfer is beside the passes of other blocks; of several stages of a rank, beside those of other stages
    too, which take turns with the pipeline's other ranks. A share of the transfers can hide.

    Args:
        computing: seconds of a microbatch's pass through all of the rank's `stages`.
        layers: layers of one stage.
    """
    chunk = computing / stages
    most = np.maximum(moved / stages, moved - (stages - 1) * ranks * chunk) - chunk * (1 - 1 / layers)
    share = system.constant("overlap")
    return share * np.maximum(most, moved / stages / layers) + (1 - share) * moved


def reduced(system: System, run: Run, state: States, seconds: float, last: Sequence[Last], end: float) -> float:
    """Return when a rank's gradients are reduced, given its last backward passes.

    Each block's reduction starts when the block's gradient is complete, one after another, replicas' sums included.
    """
    if not run.plan.overlap_grad_reduce:
        return end + seconds
    lane = 0.0
    for share, layers, (start, stop) in sorted(zip(state.shares, state.layers, last, strict=True), key=lambda x: x[2]):
        block = share * seconds / layers
        lane = max(max(lane, start + (stop - start) / layers) + share * seconds, stop + block)
    share = system.constant("overlap")
    return end + share * max(0.0, lane - end) + (1 - share) * seconds


def ends_seconds(system: System, run: Run, state: States) -> float:
    """Return the seconds to sum a tied embedding's gradient over both ends of the pipeline."""
    found = state.traffic.get("ends", {}).get("all_reduce")
    if found is None:
        return 0.0
    world, pp = run.plan.world_size, run.plan.pp
    ranks = placed(2, world // pp, system, lambda size: 2 if world <= size else 1)
    return found.calls * float(collective(system, "all_reduce", found.bytes / found.calls, ranks))


def update(system: System, run: Run, state: States) -> float:
    """Return the seconds of the optimizer's step; for offloaded states with gradients moved there and weights back."""
    master, each = MASTER_BYTES[run.precision], parameter_bytes(run)
    if not run.plan.offload_optimizer or system.device.kind == "cpu":
        return optimizer(system, state.updated, master, state.tensors)
    moved = state.updated * (each.gradient + each.weight) / system.constant("host_link")
    return moved + state.updated * master * STATE_BYTES / system.constant("host_memory")


def finish(
    system: System,
    run: Run,
    every: Sequence[States],
    ends: Sequence[float],
    last: Sequence[Sequence[Last]],
    forward: Sequence[float],
) -> list[dict[str, float]]:
    """Return the seconds of each pipeline rank after its last microbatch, part by part, waits included.

    Added to the time before, the sums are equal on all ranks. Gradients are reduced, then those of a tied embedding
    over its two ends; then all ranks agree on the norm, update what they own, and gather what others own: beside the
    next step's first forward passes where the software does.

    Args:
        ends: when each rank is done with its microbatches.
        last: the last backward passes through its stages.
        forward: seconds of a microbatch's forward pass through its stages.
    """
    zero, moved = run.plan.zero_stage, [moving(system, run, one) for one in every]
    sums = [one.summing + (one.reducing if zero < 2 else 0.0) for one in moved]
    done = [reduced(system, run, *of) for of in zip(every, sums, last, ends, strict=True)]
    tied = ends_seconds(system, run, every[0])
    summed = [max(done[0], done[-1]) + tied if rank in (0, len(done) - 1) else end for rank, end in enumerate(done)]
    step = system.constant("step_seconds")
    updates = [update(system, run, one) for one in every]
    gathers = [one.gathering if zero in (1, 2) else 0.0 for one in moved]
    if run.plan.overlap_param_gather and system.habits.gathers_ahead:
        shapes = [(len(one.layers), run.plan.pp, sum(one.layers) / len(one.layers)) for one in every]
        each = zip(gathers, forward, shapes, strict=True)
        gathers = [float(beyond(system, gather, passing, *shape)) for gather, passing, shape in each]
    slowest = max(summed) + max(a + b for a, b in zip(updates, gathers, strict=True))
    parts = []
    for rank, end in enumerate(ends):
        own = {
            "gradients": done[rank] - end,
            "ends": tied if summed[rank] > done[rank] else 0.0,
            "optimizer": updates[rank],
            "parameters": gathers[rank],
            "step": step,
        }
        parts.append(own | {"wait": slowest + step - end - sum(own.values())})
    return parts
