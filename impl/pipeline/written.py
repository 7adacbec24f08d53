"""Tables that a plan names by writing them out, so that one that was searched is run, recorded and shared as it is.

`rows:FFIWIW,FIWFIW` has a word for each rank, and a letter for each of its passes: F, B, I or W as in `Op`, of the
rank's first chunk, and with a number after it of another, as F1. The k-th forward pass of a chunk is microbatch k, and
so is its k-th B or I; its W are of its I in their order. Exchanging microbatches changes no time and no memory. Chunk c
of rank r is stage c p + r; after `v-rows:` the model runs down the ranks and back up, a V.
"""

import re
from collections import Counter, defaultdict, deque

from impl.errors import InputError
from impl.pipeline.schedule import NOMINAL, Action, Op, Rows, Schedule
from impl.pipeline.schedules import WRITTEN, short

DOWN, V = WRITTEN
PASS = re.compile(rf"([{''.join(NOMINAL)}])(\d*)")


def rows_in(name: str, p: int, v: int) -> Rows:
    """Return the rows that a name writes out, for p ranks with v chunks.

    Raises:
        InputError: there are not p rows, or one is not made of passes of v chunks.
    """
    words = name.partition(":")[2].split(",")
    if len(words) != p:
        raise InputError(f"plan.schedule {short(name)} has {len(words)} rows; valid: plan.pp {p}, one for each rank")
    return [_row(word, rank, p, v, is_v=name.startswith(V)) for rank, word in enumerate(words)]


def _row(word: str, rank: int, p: int, v: int, *, is_v: bool) -> list[Action]:
    seen, owed, row = Counter[tuple[bool, int]](), defaultdict[int, deque[int]](deque), []
    for op, chunk in PASS.findall(word):
        c, most = int(chunk or 0), min(v, 2) if is_v else v
        if c >= most:
            raise InputError(f"plan.schedule: row {rank} has {op}{chunk}; valid: chunks 0 to {most - 1}")
        stage = 2 * p - 1 - rank if is_v and c else c * p + rank
        if op == Op.W:
            if not owed[stage]:
                raise InputError(f"plan.schedule: row {rank} has more {op}{chunk} than I{chunk} before; valid: as many")
            row.append(Action(Op.W, stage, owed[stage].popleft()))
            continue
        kind = op == Op.F, stage
        row.append(Action(Op(op), stage, seen[kind]))
        owed[stage] += [seen[kind]] * (op == Op.I)
        seen[kind] += 1
    if PASS.sub("", word):
        raise InputError(f"plan.schedule: row {rank} has {PASS.sub('', word):.20}; valid: {', '.join(NOMINAL)}")
    return row


def written(schedule: Schedule) -> str | None:
    """Return a name that writes a table out; None if its stages are neither dealt to the ranks in turn nor in a V.

    `rows_in` has the same table again, but for which of its microbatches is which.
    """
    p = len(schedule.rows)
    stages = len(schedule.rank_of)
    dealt = [schedule.rank_of[stage] for stage in range(stages)]
    ways = {DOWN: [stage % p for stage in range(stages)], V: [*range(p), *reversed(range(p))]}
    way = next((way for way, ranks in ways.items() if ranks == dealt), None)
    letter = lambda action: f"{action.op}{action.stage // p or ''}"
    return way and way + ",".join("".join(map(letter, row)) for row in schedule.rows)
