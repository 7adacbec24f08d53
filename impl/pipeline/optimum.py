"""Shortest tables of a pipeline, found by integer programming; the engine runs them as any other schedule.

Microbatches are alike, so the k-th pass of a kind may always be microbatch k: exchanging two changes no time and no
memory. What is searched is therefore only how many passes of each stage and operation have started by when, which are
stages x 3 x horizon whole numbers, whatever the number of microbatches. A horizon for which there is none is a proof
that every step is longer.

`--plan.schedule impl.pipeline.optimum:shortest` trains with one.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from scipy.optimize import milp
from scipy.sparse import coo_array

from impl.errors import InputError
from impl.pipeline.bound import Problem, lower_bound
from impl.pipeline.schedule import Action, Op, Rows, Schedule
from impl.pipeline.schedules import SCHEDULES, build, check
from impl.pipeline.simulate import Number, simulate, uniform
from impl.pipeline.zero_bubble import require_two

OPS = (Op.F, Op.I, Op.W)
MOST_NUMBERS = 50_000
"""Most whole numbers of a program, which takes minutes to hours to solve."""
INFEASIBLE = 2
"""Status of `milp` where there is no solution."""
Kind = tuple[Op, int]
"""Operation and stage."""
Term = tuple[int, Kind, int]
"""Factor, kind, and the time by which its passes have started."""


class Found(NamedTuple):
    """Table of a search, and what is proven of it."""

    schedule: Schedule
    step: Number
    """Simulated time of the table."""
    bound: Number
    """Time below which no table for the problem is."""


def search(problem: Problem, seconds: float = math.inf) -> Found:
    """Return the shortest table for the problem, or the best that was found within the seconds.

    Horizons are tried from the lower bound on; once one cannot be decided in half of what is left of the time, it stays
    in the gap, and those between it and the shortest known table are halved. Without a limit equal problems give equal
    tables.

    Raises:
        InputError: all times are multiples of too small a unit only.
    """
    unit, until = _unit(problem), time.monotonic() + seconds
    best = _known(problem)
    least, high = math.ceil(lower_bound(problem) / unit), math.ceil(_step(problem, best) / unit)
    tried = least - 1  # the largest horizon that is impossible or undecided
    while tried + 1 < high and (left := (until - time.monotonic()) / 2) > 0:
        horizon = least if tried < least else (tried + high) // 2
        rows, is_impossible = _rows_within(problem, unit, horizon, left)
        if rows is not None:
            found, high = Schedule("shortest", rows), horizon
            check(found, len(rows), problem.microbatches, len(problem.rank_of) // len(rows))
            best = min(found, best, key=partial(_step, problem))
        else:
            tried, least = horizon, horizon + 1 if is_impossible else least
    return Found(best, _step(problem, best), unit * least)


def _step(problem: Problem, schedule: Schedule) -> Number:
    return simulate(schedule, problem.cost, problem.transfer).step_time


def _unit(problem: Problem) -> Fraction:
    """Return the largest time of which all times are multiples."""
    times = [Fraction(one) for op in OPS for one in problem.seconds(op)] + [Fraction(problem.transfer)]
    common = math.lcm(*(one.denominator for one in times))
    unit = Fraction(math.gcd(*(int(one * common) for one in times)), common)
    if (numbers := len(problem.rank_of) * len(OPS) * math.ceil(lower_bound(problem) / unit)) > MOST_NUMBERS:
        raise InputError(
            f"a step of {float(lower_bound(problem)):.4g} in units of {float(unit):.4g}, of which all times are "
            f"multiples, is a program of {numbers} numbers; valid: up to {MOST_NUMBERS}, so round the times"
        )
    return unit


def _known(problem: Problem) -> Schedule:
    """Return the shortest known schedule within the memory: one of SCHEDULES, or one microbatch after another."""
    p, m, v = len(problem.ranks), problem.microbatches, len(problem.rank_of) // len(problem.ranks)
    way = [*((Op.F, stage) for stage in range(p * v)), *((op, stage) for stage in range(p * v)[::-1] for op in OPS[1:])]
    turns = [Action(*kind, i) for i in range(m) for kind in way]
    own = lambda rank: tuple(action for action in turns if problem.rank_of[action.stage] == rank)
    found = [Schedule("one after another", tuple(map(own, problem.ranks)))]
    for name in SCHEDULES:
        try:
            one = build(name, p, m, v)
        except InputError:  # not for this number of chunks or microbatches
            continue
        there = Problem.of(one, problem.cost, problem.transfer)
        if replace(there, most=problem.most) == problem and there.most <= problem.most:
            found.append(one)
    return min(found, key=partial(_step, problem))


def _rows_within(
    problem: Problem, unit: Fraction, horizon: int, seconds: float
) -> tuple[tuple[tuple[Action, ...], ...] | None, bool]:
    """Return rows that take at most a number of units, None if none were found; and whether none can exist."""
    length = {(op, stage): int(one / unit) for op in OPS for stage, one in enumerate(problem.seconds(op))}
    at = {kind: n * horizon for n, kind in enumerate(length)}
    lines, columns, factors, limits = list[int](), list[int](), list[int](), list[int]()
    for terms, limit in _constraints(problem, unit, horizon, length):
        for factor, kind, by in terms:
            if by >= 0:  # before that none has started
                lines.append(len(limits))
                columns.append(at[kind] + by)
                factors.append(factor)
        limits.append(limit)
    numbers, m = horizon * len(length), problem.microbatches
    least = np.zeros(numbers)
    for kind, first in at.items():
        least[first + horizon - length[kind] : first + horizon] = m
    solved = milp(
        np.zeros(numbers),
        integrality=np.ones(numbers),
        bounds=(least, m),
        constraints=(coo_array((factors, (lines, columns)), (len(limits), numbers)), -np.inf, limits),
        options={"time_limit": seconds} if math.isfinite(seconds) else {},
    )
    if solved.x is None:
        return None, solved.status == INFEASIBLE
    started = np.round(solved.x).astype(int).reshape(len(length), horizon)
    passes: list[list[tuple[int, Action]]] = [[] for _ in problem.ranks]
    for kind, count in zip(length, started, strict=True):
        starts = np.searchsorted(count, range(1, m + 1)).tolist()
        passes[problem.rank_of[kind[1]]] += [(start, Action(*kind, i)) for i, start in enumerate(starts)]
    return tuple(tuple(action for _, action in sorted(row)) for row in passes), False


def _constraints(
    problem: Problem, unit: Fraction, horizon: int, length: dict[Kind, int]
) -> Iterator[tuple[list[Term], int]]:
    """Yield sums of numbers of started passes, each with its upper limit."""
    last = len(problem.rank_of) - 1
    hops = [int(hop / unit) for hop in problem.hops]
    reads = [((Op.I, last), (Op.F, last), 0), *(((Op.W, stage), (Op.I, stage), 0) for stage in range(last + 1))]
    for stage, hop in enumerate(hops):
        reads += [((Op.F, stage + 1), (Op.F, stage), hop), ((Op.I, stage), (Op.I, stage + 1), hop)]
    for now in range(horizon):
        for kind in length:
            yield [(1, kind, now - 1), (-1, kind, now)], 0  # what has started stays so
        for reader, source, hop in reads:
            yield [(1, reader, now), (-1, source, now - length[source] - hop)], 0
        for rank in problem.ranks:
            own = [kind for kind in length if problem.rank_of[kind[1]] == rank]
            computing = [((1, kind, now), (-1, kind, now - length[kind])) for kind in own]
            yield [term for pair in computing for term in pair], 1
            begun = [(1, kind, now) for kind in own if kind[0] is Op.F]
            yield [*begun, *((-1, kind, now - length[kind]) for kind in own if kind[0] is Op.W)], problem.most


@lru_cache
def shortest(p: int, m: int) -> Rows:
    """Return the shortest table with one chunk a rank and equal passes in half of 1F1B's memory.

    That is p / 2 microbatches, rounded up. Every rank solves the program, which takes seconds with 4 ranks and 8
    microbatches, and on processors that round alike finds the same table.
    """
    return search(Problem(tuple(range(p)), m, uniform(), 0, (p + 1) // 2)).schedule.rows


@lru_cache
def shortest_v(p: int, m: int, v: int) -> Rows:
    """Return the shortest table down the ranks and back up, equal passes, in 1F1B's memory; else as `shortest`.

    Raises:
        InputError: v is not 2.
    """
    require_two("shortest_v", v)
    return search(Problem((*range(p), *reversed(range(p))), m, uniform(chunks=v), 0, v * p)).schedule.rows
