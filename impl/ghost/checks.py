"""Which ranks of a plan are executed, whom they stand for, and whether what they did is what the formulas say."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple, get_args

from impl.cost.place import Place, parameter_bytes
from impl.cost.traffic import BlockName, Collective, collectives, is_recomputed, step_traffic
from impl.cost.traffic import blocks as of_stages
from impl.ghost.events import TRANSFERS, Begin, Standing, Wait
from impl.ghost.orders import problems
from impl.ghost.rank import Executed, Pass
from impl.pipeline.schedule import Op as Work
from impl.plan import Plan
from impl.run import Run

MOST_RANKS = 16
"""Of more ranks only some are executed."""
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8}
"""Of an element."""
IN_LAYERS = ("tp", "heads", "features", "cp", "ep")
"""Groups in which passes communicate."""
TRANSFER = {Work.SEND_F: "send", Work.SEND_B: "send", Work.RECV_F: "receive", Work.RECV_B: "receive"}
Sent = tuple[str, str, int]
"""(axes, kind, bytes) of a collective."""


class Cast(NamedTuple):
    """Ranks that are executed."""

    first: tuple[int, ...]
    """One rank of each pipeline stage, or all ranks; they are a complete set by themselves."""
    standing: Standing
    """Function from any rank to the executed rank that represents it."""
    last: tuple[int, ...] = ()
    """Further ranks, each of which does the same as the first of its pipeline rank, in groups of its own."""


def cast(plan: Plan) -> Cast:
    """Return the ranks to execute: all of a few, else the first of every pipeline rank, and the last of some.

    These are the first and the last in all of dp, cp and tp; of the first, second and last pipeline rank.
    """
    each = plan.world_size // plan.pp
    if plan.world_size <= MOST_RANKS:
        return Cast(tuple(range(plan.world_size)), lambda rank: rank)
    ends = sorted({0, min(1, plan.pp - 1), plan.pp - 1})
    lasts = tuple((rank + 1) * each - 1 for rank in ends) if each > 1 else ()
    return Cast(tuple(range(0, plan.world_size, each)), lambda rank: rank // each * each, lasts)


def complaints(run: Run, vocab_size: int, chosen: Cast, done: Mapping[int, Executed]) -> dict[str, list[str]]:
    """Return the errors found by each kind of check, one line each."""
    ranks = list(done.values())
    blocks = blocks_of(Place(run, vocab_size), ranks[0].head_positions)
    return {
        "uses": [line for one in ranks for line in one.early],
        "orders": problems({rank: done[rank].log for rank in chosen.first}, chosen.standing),
        "equal ranks": [line for rank in chosen.last for line in _unlike(done[chosen.standing(rank)], done[rank], run)],
        "traffic": [line for one in ranks for line in _other_traffic(run, vocab_size, one)],
        "schedule": [line for one in ranks for line in _other_transfers(run, vocab_size, one)],
        "passes": [line for one in ranks for line in _other_passes(run, vocab_size, one, blocks)],
    }


def _unlike(first: Executed, last: Executed, run: Run) -> Iterator[str]:
    """Yield where two ranks of one pipeline rank do not do the same."""
    shape = lambda one: [_shape(event, one, run) for event in one.log]
    for nth, (a, b) in enumerate(zip_longest(shape(first), shape(last))):
        if a != b:
            yield f"event {nth} is {a} on rank {first.rank}, and {b} on rank {last.rank}"
            return


def _shape(event: Begin | Wait, one: Executed, run: Run) -> tuple[object, ...]:
    """Return an event without the ranks in which ranks that do the same differ."""
    if isinstance(event, Wait):
        return event
    each = run.plan.world_size // run.plan.pp
    peer = None if event.peer is None else event.peer // each
    return event.kind, one.names[event.group], len(event.members), event.elements, event.dtype, peer, event.batch


def _other_traffic(run: Run, vocab_size: int, one: Executed) -> Iterator[str]:
    """Yield calls and bytes that are not those of `impl.cost.traffic`."""
    expected = step_traffic(Place(run, vocab_size, one.pp_rank), one.head_positions)
    for axes in sorted(expected.keys() | one.counts.keys()):
        a, b = one.counts.get(axes, {}), expected.get(axes, {})
        for op in sorted(a.keys() | b.keys()):
            if a.get(op) != b.get(op):
                yield f"rank {one.rank}, {op} over {axes}: {a.get(op)} is done, the formula says {b.get(op)}"


def _other_transfers(run: Run, vocab_size: int, one: Executed) -> Iterator[str]:
    """Yield the first transfer that is not the one of the schedule's table."""
    place, each = Place(run, vocab_size, one.pp_rank), run.plan.world_size // run.plan.pp
    row = place.schedule.lowered[one.pp_rank]
    planned = [(TRANSFER[action.op], place.schedule.peer(action)) for action in row if action.op in TRANSFER]
    of_pipeline = (event for event in one.log if isinstance(event, Begin) and one.names[event.group] == "pp")
    begun = [(event.kind, (event.peer or 0) // each) for event in of_pipeline if event.kind in TRANSFERS]
    for nth, (a, b) in enumerate(zip_longest(begun, planned), 1):
        if a != b:
            yield f"rank {one.rank}, transfer {nth} of the pipeline is {a}, the schedule says {b}"
            return


def blocks_of(place: Place, head_positions: int) -> dict[BlockName, list[Collective]]:
    """Return the collectives of every kind of block, as the simulator takes them."""
    every: tuple[BlockName, ...] = get_args(BlockName)
    lacking: set[BlockName] = set() if place.run.model.experts else {"experts"}
    return {name: list(collectives(place, name, head_positions)) for name in every if name not in lacking}


def _other_passes(
    run: Run, vocab_size: int, one: Executed, blocks: Mapping[BlockName, Sequence[Collective]]
) -> Iterator[str]:
    """Yield passes of which what is sent within layers is not the simulator's list, collective by collective."""
    place = Place(run, vocab_size, one.pp_rank)
    stages = dict(zip(place.schedule.stages_of(one.pp_rank), place.stages, strict=True))
    sums: dict[tuple[int, str, int], Counter[Sent]] = {}
    for done in one.passes:
        op, stage, microbatch = done.action
        sums.setdefault((microbatch, "forward" if op is Work.F else "backward", stage), Counter()).update(
            _sent(one, done)
        )
    # gradients and parameters too go over tp or cp where no other ranks divide them
    each, is_shared = parameter_bytes(run), run.plan.zero == 1 or run.plan.dp == 1
    states = {b.size * of for b in place.buckets for of in (each.weight, each.gradient) if is_shared}
    expected: dict[tuple[str, int], Counter[Sent]] = {}
    for number, stage in stages.items():
        for when in ("forward", "backward"):
            found = expected[when, number] = Counter[Sent]()
            for name, times in of_stages(run, [stage]).items():
                for sent in blocks.get(name, ()):
                    if sent.when == when or (when == "backward" and is_recomputed(run, name, sent)):
                        found[sent.over, _as_begun(sent.op, one), sent.bytes] += times
    for (microbatch, when, number), found in sums.items():
        lacking, more = expected[when, number] - found, found - expected[when, number]
        for sent in [sent for sent in more if sent[2] in states]:
            del more[sent]
        if lacking or more:
            text = f"lacks {dict(lacking)}" if lacking else f"has {dict(more)} besides"
            yield f"rank {one.rank}, {when} pass of microbatch {microbatch} in stage {number} {text}"
            return


def _as_begun(op: str, one: Executed) -> str:
    return "all_to_all" if op == "reduce_scatter" and one.backend == "gloo" else op


def _sent(one: Executed, done: Pass) -> Iterator[Sent]:
    for event in one.log[done.start : done.stop]:
        if isinstance(event, Begin) and event.kind != "receive" and one.names[event.group] in IN_LAYERS:
            yield one.names[event.group], event.kind, event.elements * BYTES[event.dtype]
