"""Temporary memory of a step: gradients being reduced, gathered parameters, and pipeline receive buffers."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain, pairwise

from impl.cost.parameters import named_parameters
from impl.cost.place import Place
from impl.pipeline.schedule import Action, Op
from impl.pipeline.stage import Stage
from impl.zero.partition import OUTPUT, REDUCTIONS, TIED, BucketLayout, unit_of, units_of_block

BLOCKS = {"mlp": ("down", "up"), "attention": ("projection", "qkv")}
BACKWARD = [
    f"{block}{of}"
    for block, (rows, columns) in BLOCKS.items()
    for of in ("_norms.sum", "_norms.output", f".{rows}", ".inner", ".norms", f".{columns}", ".router", "_norms.input")
]
"""Parts of a layer in the order of the backward pass."""
WHICH = re.compile(r"\.(experts\.\d+|shared)\.")
"""In the name of an expert's parameter, which expert it is: without it the name is that of an MLP's."""


def received_at_once(row: Iterable[Action]) -> int:
    """Return the most receive buffers in use at once; each is kept until the microbatch's backward pass in the stage.

    Args:
        row: a rank's actions with sends and receives.
    """
    used = Counter[tuple[int, int]]()
    held = most = 0
    for op, *at in row:
        if op in (Op.RECV_F, Op.RECV_B):
            used[at[0], at[1]] += 1
            held += 1
            most = max(most, held)
        elif op in (Op.B, Op.W):
            held -= used.pop((at[0], at[1]), 0)
    return most


def gathered_elements(place: Place, buckets: Sequence[BucketLayout], live: int | None = None) -> int:
    """Return the most elements of divided parameters gathered at once: a block's, and the prefetched next one's.

    Args:
        live: where each matrix is gathered by itself, the elements that may wait for further use. While fewer are
            there, the next matrix is gathered too, whatever its size; neighbours go first in one pass or the other.
            Never more than blocks have. Source: DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py.
    """
    sizes = Counter[str]()
    for bucket in buckets:
        if bucket.zero_stage == 3:
            sizes[bucket.unit] += bucket.size
    if not sizes:
        return 0
    most = 0
    for stage in place.stages:
        layers = [f"layers.{i}" for i in place.run.model.own(stage.layers)]
        blocks = ["embedding", "embedding_norm"] * stage.is_first + layers + ["head"] * stage.is_last
        units = [set(units_of_block(block, place.run.model.tied)) for block in blocks]
        if place.run.plan.overlap_param_gather:
            units += [a | b for a, b in pairwise(units)]
        most = max(most, *(sum(sizes[unit] for unit in some) for some in units))
    if live is None:
        return most
    first, *others = sorted((slot.size for b in buckets if b.zero_stage == 3 for slot in b.slots), reverse=True)
    ahead = next((size for size in others if size < live), 0) * place.run.plan.overlap_param_gather
    return min(most, max(live, first + ahead))


def gradient_elements(place: Place, buckets: Sequence[BucketLayout], row: Iterable[Action]) -> int:
    """Return the elements of the buffers that hold gradients of divided buckets until all ranks' are summed.

    A buffer is as large as the largest bucket of several parameters; there are as many as are filled and reduced at a
    time. A parameter that is larger has its own, and none afterwards.
    """
    divided = [bucket for bucket in buckets if bucket.zero_stage >= 2]
    common = max((bucket.size for bucket in divided if len(bucket.names) > 1), default=0)
    shared = [common * (bucket.size <= common) for bucket in divided]
    alone = [bucket.size * (bucket.size > common) for bucket in divided]
    at_once = (buffers_at_once(place, divided, [row], sizes)[0] for sizes in (shared, alone))
    return sum(made[place.run.plan.overlap_grad_reduce] for made in at_once)


def buffers_at_once(
    place: Place, buckets: Sequence[BucketLayout], rows: Iterable[Iterable[Action]], sizes: Sequence[int] = ()
) -> list[tuple[int, int]]:
    """Return for each row of actions the most of these buckets that are filled at a time, and filled and reduced.

    They are counted, or their sizes added.
    """
    bucket_of = {name: i for i, bucket in enumerate(buckets) for name in bucket.names}
    stages = dict(zip(place.schedule.stages_of(place.pp_rank), place.stages, strict=True)) if buckets else {}
    arriving = {
        (op, i): [bucket_of[name] for name in names if name in bucket_of]
        for i, stage in stages.items()
        for op, names in _finished(place, stage).items()
    }
    expected = Counter(chain.from_iterable(arriving[Op.B, i] for i in stages))
    return [_at_once(row, arriving, expected, sizes or [1] * len(buckets)) for row in rows]


def _at_once(
    row: Iterable[Action],
    arriving: Mapping[tuple[Op, int], list[int]],
    expected: Mapping[int, int],
    sizes: Sequence[int],
) -> tuple[int, int]:
    """Return `buffers_at_once` of a row, whose passes complete gradients of the buckets that are `arriving`."""
    filled, reducing = Counter[int](), list[int]()
    filling = most = made = 0
    for op, stage, _ in row:
        reducing = [] if op is Op.F else reducing
        for bucket in arriving.get((op, stage), ()):
            if filled[bucket] == 0:
                reducing = reducing[1 - REDUCTIONS :]
                filling += sizes[bucket]
                most, made = max(most, filling), max(made, filling + sum(sizes[i] for i in reducing))
            filled[bucket] += 1
            if filled[bucket] == expected[bucket]:
                filled[bucket] = 0
                filling -= sizes[bucket]
                reducing.append(bucket)
    return most, made


def _finished(place: Place, stage: Stage) -> dict[Op, list[str]]:
    """Return the parameters that get a gradient in a backward pass, or a part of it, in that order."""
    named = named_parameters(
        place.run.model, place.vocab_size, place.run.plan.x, [stage], place.run.plan.ep, place.run.plan.y
    )
    names = [parameter.name for parameter in reversed(named)]
    unit = {name: unit_of(name) for name in names}
    place_of = {one: i for i, one in enumerate(dict.fromkeys(unit.values()))}
    names.sort(key=lambda name: (place_of[unit[name]], _place_in_layer(name), name.endswith(".bias")))
    if place.run.model.shared_layers:
        from impl.cost.shared_layers import with_each_layers  # for few runs

        names = with_each_layers(names, named, place, stage)
    head = TIED if place.run.model.tied else OUTPUT
    if head == OUTPUT or not stage.is_first:
        names.sort(key=lambda name: name != head)
    elif stage.is_last and (place.schedule.is_split or not place.run.compile):
        names.insert(0, TIED)  # the head's, before the look-up's, unless autograd adds them up
    is_matrix = lambda p: p.name.startswith("trunk.layers.") and len(p.shape) == 2 and ".router." not in p.name
    put_off = {p.name for p in named if is_matrix(p)}
    return {
        Op.B: names,
        Op.I: [name for name in names if name not in put_off],
        Op.W: [name for name in names if name in put_off],
    }


@lru_cache(maxsize=4096)
def _place_in_layer(name: str) -> int:
    """Return the place of a parameter's part of a layer in the order of the backward pass; 0 without a layer."""
    of_mlp = WHICH.sub(".", name)
    return next((i for i, part in enumerate(BACKWARD) if part in of_mlp), 0)
