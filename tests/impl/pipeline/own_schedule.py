"""Schedules that a user might write, or have searched: `plan.schedule` names them as module:function."""

from collections.abc import Iterator
from itertools import chain, zip_longest

from impl.errors import InputError
from impl.own_code import trust
from impl.pipeline.schedule import Action, Op, Rows
from impl.pipeline.schedules import one_f_one_b


def two_ways(p: int, m: int, v: int) -> Rows:
    """The model down the ranks and back up: the first stage and the last (of 2 a rank) live together on rank 0.

    All forward passes on the way down, 1F1B on the way back, then all backward passes on the way up.
    """
    if v != 2:
        raise InputError(f"two_ways has 2 chunks a rank, not plan.chunks {v}")
    rows = []
    for rank in range(p):
        passes = lambda op, stage: [Action(op, stage, i) for i in range(m)]
        forwards, backwards = passes(Op.F, 2 * p - 1 - rank), passes(Op.B, 2 * p - 1 - rank)
        steady = chain.from_iterable(zip_longest(forwards[rank:], backwards))
        up = [*forwards[:rank], *(action for action in steady if action)]
        rows.append([*passes(Op.F, rank), *up, *passes(Op.B, rank)])
    return rows


def every_other(p: int, m: int) -> Rows:
    """1F1B, in which the weight gradients of every other microbatch wait until the end."""

    def put_off(row: tuple[Action, ...]) -> Iterator[Action]:
        is_split = lambda action: action.op is Op.B and action.microbatch % 2 == 1
        yield from (action._replace(op=Op.I) if is_split(action) else action for action in row)
        yield from (action._replace(op=Op.W) for action in row if is_split(action))

    return [tuple(put_off(tuple(row))) for row in one_f_one_b(p, m)]


SEARCHED, SEARCHED_V = "impl.pipeline.optimum:shortest", "impl.pipeline.optimum:shortest_v"
for _name in (*(f"{__name__}:{function.__name__}" for function in (two_ways, every_other)), SEARCHED, SEARCHED_V):
    trust(_name)
