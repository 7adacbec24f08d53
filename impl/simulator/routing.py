"""Layers with experts as a system's software sends their tokens, and as the fullest of the ranks that share them is."""

from collections.abc import Iterator
from math import ceil, sqrt
from statistics import NormalDist

from impl.cost.fullest import fullest_share
from impl.cost.gemms import Product
from impl.cost.place import Sizes
from impl.cost.traffic import Collective, Op, When
from impl.run import Run
from impl.simulator.operations import Block, Moved
from impl.simulator.system import System
from impl.zero.partition import EXPERT

AROUND: list[tuple[Op, When]] = [
    *(("all_gather", "forward"), ("reduce_scatter", "forward")),
    *(("all_gather", "backward"), ("reduce_scatter", "backward")),
]
"""Collectives of sequence-parallel ranks around a layer's experts."""


def routed(system: System, run: Run, block: Block) -> Block:
    """Return a layer with experts as it is on the fullest of the ranks that share them, for which the others wait.

    Its experts' products, what it moves between them and what it receives grow with its rows. Where the software routes
    a sequence-parallel rank's own part of the tokens (`habits.routes_parts`), that part goes to the experts' ranks,
    whose t tensor-parallel neighbours then gather their rows: all-to-alls carry 1/t of k [n, h], permuting and weighing
    take 1/t of the time, and gathers and reductions around experts are of k [n, h] in place of [n, h].

    Source: NVIDIA/Megatron-LM@0014f13, megatron/core/transformer/moe/token_dispatcher.py, MoEAlltoAllTokenDispatcher.
    """
    factor, parts = imbalance_of(system, run), _parts(system, run)
    if factor == parts == 1 or not any(EXPERT in one.name for one in block.products):
        return block
    scales = {"own": 1.0, "sent": 1 / parts, "arrived": factor}
    return block._replace(
        products=tuple(_grown(one, factor) for one in block.products),
        moved=tuple(_scaled(one, scales[one.where]) for one in block.moved),
        collectives=tuple(_sent(run, block.collectives, factor, parts)),
    )


def imbalance_of(system: System, run: Run) -> float:
    """Return the rows of the fullest of the ranks that share experts over the mean: as measured, or as of even choices.

    No rank has more than its experts' capacity.
    """
    model, plan = run.model, run.plan
    if plan.ep == 1:
        return 1.0
    mean, _ = fullest_share(Sizes(run).tokens * plan.ep, model.choices, model.experts, plan.ep)
    return min(system.habits.imbalance or mean, max(1.0, model.expert_capacity or plan.ep))


def imbalance_of_step(run: Run, share: float) -> float:
    """Return the imbalance that such a share of steps do not exceed, of a router with even choices.

    A step's is the mean over its layers and microbatches, which are independent, and so nearly normal.
    """
    model, plan = run.model, run.plan
    mean, deviation = fullest_share(Sizes(run).tokens * plan.ep, model.choices, model.experts, plan.ep)
    draws = model.expert_layers * run.microbatches
    return max(1.0, mean + deviation / sqrt(draws) * NormalDist().inv_cdf(share))


def _parts(system: System, run: Run) -> int:
    return run.plan.x if system.habits.routes_parts and run.plan.sequence_parallel else 1


def _grown(product: Product, factor: float) -> Product:
    """Return an expert's product with more rows; they are the depth of its weight gradient."""
    if EXPERT not in product.name:
        return product
    name = "k" if product.pass_ == "weight gradient" else "m"
    return product._replace(**{name: ceil(getattr(product, name) * factor)})


def _scaled(moved: Moved, by: float) -> Moved:
    return moved._replace(forward=by * moved.forward, backward=by * moved.backward)


def _sent(run: Run, collectives: tuple[Collective, ...], factor: float, parts: int) -> Iterator[Collective]:
    """Yield the collectives, those to and from experts with the bytes that are sent."""
    sizes, left = Sizes(run), list(collectives)
    rows, each = sizes.activations * run.model.choices, sizes.activations
    if parts > 1:
        gathered = int(factor * rows) + each * bool(run.model.shared_expert_size)
        for op, when in AROUND:
            left.remove(Collective(op, each, when))  # one that is like it is as good
            yield Collective(op, gathered, when)
    for one in left:
        is_routed = one.over == "ep" and one.bytes == rows
        yield one._replace(bytes=int(factor * rows / parts)) if is_routed else one
