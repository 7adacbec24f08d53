"""The papers' schedules, and their construction by name: one of these, a function's, or a written table.

To add a schedule, write a function of p pipeline ranks, m microbatches and, if it has them, v model chunks a rank, that
returns the rows; add it to SCHEDULES, or name it as `impl.own_code` has it.
"""

import importlib
import inspect
from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256
from itertools import chain, repeat, zip_longest

from impl.errors import InputError
from impl.pipeline.schedule import NOMINAL, Action, Op, Rows, Schedule


def gpipe(p: int, m: int) -> Rows:
    """Return GPipe: all forward passes, then all backward passes: bubble (p-1)/m, m microbatches in flight.

    Source: GPipe, Huang et al. 2019 (1811.06965), section 2.3; PTD-P (2104.04473), figure 3.
    """
    return [row_of(rank, p, m, 1, warmup=m) for rank in range(p)]


def one_f_one_b(p: int, m: int) -> Rows:
    """Return PipeDream-flush (1F1B): bubble (p-1)/m, p - rank microbatches in flight at most.

    Source: PTD-P (2104.04473), section 2.2.1, figure 4 (top).
    """
    return [row_of(rank, p, m, 1, warmup=p - rank - 1) for rank in range(p)]


def interleaved(p: int, m: int, v: int) -> Rows:
    """Return 1F1B over v model chunks a rank: bubble (p-1)/(v m), and v times as many transfers; v = 1 is 1F1B.

    In flight on rank 0: p + (p-1)/v microbatches (Korthikanti et al. 2022, section 4.2.3), or all where m = p.

    Source: PTD-P (2104.04473), section 2.2.2, figure 4 (bottom).

    Raises:
        InputError: m is not a multiple of p.
    """
    if m % p:
        near = f"{m // p * p} or {(m // p + 1) * p}" if m > p else p
        raise InputError(
            f"plan.schedule interleaved takes multiples of plan.pp {p} microbatches, not {m}; valid: {near}"
        )
    if v == 1:
        return one_f_one_b(p, m)
    return [row_of(rank, p, m, v, warmup=2 * (p - rank - 1) + (v - 1) * p) for rank in range(p)]


def row_of(rank: int, p: int, m: int, v: int, warmup: int, owed: int | None = None) -> tuple[Action, ...]:
    """Return a row: `warmup` forward passes, then forward and backward in turn until both have run out.

    Chunk c of a rank is stage c p + rank; every chunk takes p microbatches in a row.

    Args:
        owed: the most weight gradients deferred; None: backward passes are not split.
    """
    turns = [(c, i) for first in range(0, m, p) for c in range(v) for i in range(first, min(first + p, m))]
    chunks, microbatches = zip(*turns, strict=True)
    back = [(v - 1 - c) * p + rank for c in chunks]
    each = lambda op, stages: list(map(Action._make, zip(repeat(op), stages, microbatches)))
    forwards = each(Op.F, [c * p + rank for c in chunks])
    backwards = [each(Op.B, back)] if owed is None else [each(Op.I, back), [None] * owed + each(Op.W, back)]
    steady = chain.from_iterable(zip_longest(forwards[warmup:], *backwards))
    return (*forwards[:warmup], *filter(None, steady))


SCHEDULES: dict[str, Callable[..., Rows] | str] = {f.__name__: f for f in (gpipe, one_f_one_b, interleaved)}
LATER = ("zb_h1", "eager_one_f_one_b", "zb_h2", "zbv", "v_half", "v_min", "dualpipe_v")
SCHEDULES |= {name: f"impl.pipeline.zero_bubble:{name}" for name in LATER}
WRITTEN = ("rows:", "v-rows:")
"""Beginnings of names that are a table, as `impl.pipeline.written` reads it."""


def is_written(name: str) -> bool:
    """Return True if the name is a table."""
    return name.startswith(WRITTEN)


def short(name: str) -> str:
    """Return a schedule's name as results have it: of a table, digits that tell it from others."""
    return f"rows-{sha256(name.encode()).hexdigest()[:8]}" if is_written(name) else name


def is_packaged(name: str) -> bool:
    """Return True if no code of the user's makes the schedule: it is one of SCHEDULES, or a written table."""
    return name in SCHEDULES or is_written(name)


MOST_PASSES = 2**20
"""Most passes of all microbatches through all chunks of all ranks, since a table of them is built."""


@lru_cache(maxsize=8)  # a large table takes long to check
def build(name: str, p: int, m: int, v: int = 1) -> Schedule:
    """Build and check the table of plan.schedule, as `generator` takes it; p is plan.pp, v is plan.chunks.

    Raises:
        InputError: there is no such schedule, its name is not trusted, it is impossible for these numbers, or its rows
            are no schedule.
    """
    schedule = Schedule(short(name), _rows(name, p, m, v))
    check(schedule, p, m, v)
    return schedule


@lru_cache(maxsize=256)
def ranks_of(name: str, p: int, m: int, v: int = 1) -> tuple[int, ...]:
    """Return the pipeline rank of every stage, with errors as `build`; in SCHEDULES, m moves no stage."""
    schedule = Schedule(name, _rows(name, p, m, v)) if name in SCHEDULES else build(name, p, m, v)
    return tuple(schedule.rank_of[stage] for stage in range(p * v))


def require(name: str, p: int, m: int, v: int = 1) -> None:
    """Check that `build` builds a schedule, without checking the tables of SCHEDULES, which are valid where they exist.

    Raises:
        InputError: it does not; says what would be valid.
    """
    (_require_rows if name in SCHEDULES else build)(name, p, m, v)


@lru_cache(maxsize=4096)  # predictions of a table or a search ask about the same few pipelines
def _require_rows(name: str, p: int, m: int, v: int) -> None:
    _rows(name, p, m, v)


def _rows(name: str, p: int, m: int, v: int) -> tuple[tuple[Action, ...], ...]:
    rows_of = generator(name)
    for field, value in (("plan.pp", p), ("microbatches", m), ("plan.chunks", v)):
        if value < 1:
            raise InputError(f"{field} {value} is not a count; valid: 1 or more")
    if (passes := p * m * v) > MOST_PASSES:
        what = f"plan.pp {p} x plan.chunks {v} x {m} microbatches"
        raise InputError(f"plan.schedule {short(name)}: {what} are {passes} passes; valid: up to {MOST_PASSES}")
    chunked = _has_chunks(rows_of)
    if v > 1 and not chunked:
        with_chunks = ", ".join(other for other in SCHEDULES if _has_chunks(generator(other)))
        raise InputError(f"plan.schedule {name} has 1 chunk a rank, not plan.chunks {v}; with chunks: {with_chunks}")
    try:
        rows = tuple(map(tuple, rows_of(p, m, v) if chunked else rows_of(p, m)))
        is_action = lambda one: isinstance(one, Action) and list(map(isinstance, one, (Op, int, int))) == [True] * 3
        if name not in SCHEDULES and (wrong := [one for row in rows for one in row if not is_action(one)]):
            raise TypeError(f"{wrong[0]!r} in its rows is no Action")
        return rows
    except InputError:
        raise
    except Exception as error:  # a user's own function
        raise InputError(f"plan.schedule {name} fails with plan.pp {p}, {m} microbatches: {error!r:.200}") from error


def _has_chunks(rows_of: Callable[..., Rows]) -> bool:
    return "v" in inspect.signature(rows_of).parameters


def generator(name: str) -> Callable[..., Rows]:
    """Return the function of a schedule: of a written table, of SCHEDULES, or of a user's own."""
    if is_written(name):
        written = importlib.import_module("impl.pipeline.written")
        return lambda p, m, v: written.rows_in(name, p, v)
    found = SCHEDULES.get(name, name)
    if callable(found):
        return found
    if name in SCHEDULES:
        module, _, function = found.partition(":")
        return getattr(importlib.import_module(module), function)
    from impl.own_code import load  # for few runs

    return load("plan.schedule", name, SCHEDULES, inspect.signature, ", or a table as rows:FFIWIW,FIWFIW")


def check(schedule: Schedule, p: int, m: int, v: int = 1) -> None:
    """Check that a table is a training step: every microbatch once through every stage, in an order that can run.

    Raises:
        InputError: what is wrong with the table.
    """
    if reason := _defect(schedule, p, m, v):
        raise InputError(f"schedule {schedule.name} with plan.pp {p}, {m} microbatches, plan.chunks {v}: {reason}")
    _ = schedule.order  # raises where none is possible


def _defect(schedule: Schedule, p: int, m: int, v: int) -> str | None:
    seen: set[Action] = set()
    for rank, action in ((rank, action) for rank, row in enumerate(schedule.rows) for action in row):
        if action.op not in NOMINAL or not (0 <= action.stage < p * v and 0 <= action.microbatch < m):
            return f"{action} on rank {rank}; valid: F, B, I, W of stages 0 to {p * v - 1}, microbatches 0 to {m - 1}"
        if schedule.rank_of[action.stage] != rank:
            return f"stage {action.stage} is on ranks {rank} and {schedule.rank_of[action.stage]}; valid: on one"
        if action in seen:
            return f"{action} is there twice"
        seen.add(action)
    for stage, microbatch in ((stage, i) for i in range(m) for stage in range(p * v)):
        ops = "".join(op for op in NOMINAL if (op, stage, microbatch) in seen)
        if ops not in ("FB", "FIW"):
            return f"stage {stage}, microbatch {microbatch} has {' '.join(ops) or 'nothing'}; valid: F B, or F I W"
    stages = [len(schedule.stages_of(rank)) for rank in range(len(schedule.rows))]
    return f"its ranks have {stages} stages; valid: {[v] * p}" if stages != [v] * p else None
