"""Fewest bytes that a step's matrix products need moved, however they are divided; and how many a plan does move."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any, Protocol

from impl.cost.gemms import products
from impl.cost.parameters import ELEMENT_BYTES
from impl.cost.place import Place
from impl.cost.traffic import TRAVELS
from impl.plan import Plan
from impl.run import Run


def least_words(m: int, n: int, k: int, ranks: int) -> float:
    """Return the fewest numbers that a rank takes in or gives away for a product [m, k] times [k, n] on equal ranks.

    Each of the three matrices is there once at the start and at the end, divided anyhow; memory has no limit, and one
    that has only makes more necessary. For its share of the V = m n k multiplications a rank needs parts x, y, z of the
    matrices with x y z of at least (V / ranks)^2 (Loomis and Whitney), none less than its own part; what exceeds its
    own parts is moved. Square products on many ranks: 3 (V / ranks)^(2/3) less the own parts; a product whose m is by
    far the largest: all of [k, n] but the own part.

    Source: Al Daas et al. 2022 (2205.13407), whose bound is reached where grids of ranks with these parts exist.
    """
    matrices = sorted((m * n, n * k, m * k), reverse=True)
    volume, moved = prod(matrices) / ranks**2, 0.0
    for left, size in zip((3, 2, 1), matrices, strict=True):
        part = max(size / ranks, volume ** (1 / left))
        moved, volume = moved + part - size / ranks, volume / part
    return moved


def needed_bytes(run: Run, vocab_size: int, head_positions: int) -> float:
    """Return `least_words` of a step's products in bytes, for the pipeline rank with most.

    A stage's ranks, d of data, c of context and t of tensor parallelism, share products of the whole batch: forward,
    input gradient and weight gradient of every matrix. Nothing is computed twice. What lies between products
    (attention's core, norms) and between stages is not counted, so a plan needs this much at least, unless it keeps a
    matrix in several copies from one product to the next: then it may do with less, as data parallelism does, whose
    ranks all keep the weights.
    """
    alone = Plan(pp=run.plan.pp, schedule=run.plan.schedule, chunks=run.plan.chunks)
    recipe = run.train
    whole = replace(run, plan=alone, train=replace(recipe, microbatch=recipe.global_batch))
    ranks = run.plan.tp * run.plan.dp_cp

    def of_rank(i: int) -> float:
        stages = Place(run, vocab_size, i).stages
        every = products(whole, vocab_size, stages, head_positions)
        return sum(one.count * least_words(one.m, one.n, one.k, ranks) for one in every)

    return max(map(of_rank, range(run.plan.pp))) * ELEMENT_BYTES[run.precision]


class Moved(Protocol):
    """Collectives of one kind, with the bytes of the whole tensors."""

    @property
    def bytes(self) -> int: ...


def moved_bytes(run: Run, traffic: Mapping[str, Mapping[Any, Moved]]) -> float:
    """Return the bytes that a rank takes in or gives away in a step's collectives, each done in a ring.

    Args:
        traffic: a rank's collectives by axes of the mesh, as `impl.cost.traffic.step_traffic` has them.
    """
    plan = run.plan
    special = {
        "heads": run.model.sharing(plan.x),
        "tp": plan.x,
        "features": plan.y,
        "ends": 2,
        "joint": plan.world_size,
        "owners": plan.zero // plan.ep,
    }

    def ranks(axes: str) -> int:
        return special.get(axes) or prod(getattr(plan, axis) for axis in axes.split("_"))

    def of(op: str, size: int, n: int) -> float:
        return size if op == "send" else TRAVELS[op] * (n - 1) / n * size

    return sum(of(op, one.bytes, ranks(axes)) for axes, counts in traffic.items() for op, one in counts.items())
