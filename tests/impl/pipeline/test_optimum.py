"""The bound below which no schedule is, and searched tables against all tables of small pipelines."""

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impl.errors import InputError
from impl.pipeline import optimum
from impl.pipeline.bound import Problem, lower_bound
from impl.pipeline.optimum import search
from impl.pipeline.schedule import Action, Op, Schedule, peak_in_flight
from impl.pipeline.schedules import SCHEDULES, build
from impl.pipeline.simulate import Cost, Number, simulate, uniform
from tests.impl.pipeline import own_schedule

OWN = own_schedule.__name__
CHUNKS = {"interleaved": 3, f"{OWN}:two_ways": 2, "zbv": 2, "v_half": 2, "v_min": 2, "dualpipe_v": 2}
NAMES = (*SCHEDULES, f"{OWN}:two_ways", f"{OWN}:every_other")
times = st.fractions(Fraction(1, 6), 8, max_denominator=6)


def by_stage(drawn: list[tuple[Fraction, Fraction, Fraction]]) -> Cost:
    """Costs that differ from stage to stage."""

    def cost(action: Action) -> Number:
        forward, inputs, weights = drawn[action.stage % len(drawn)]
        return {Op.F: forward, Op.I: inputs, Op.W: weights, Op.B: inputs + weights}[action.op]

    return cost


costs = st.lists(st.tuples(times, times, times), min_size=1, max_size=5).map(by_stage)
transfers = st.fractions(0, 2, max_denominator=4)


def step(problem: Problem, schedule: Schedule) -> Number:
    return simulate(schedule, problem.cost, problem.transfer).step_time


# The bound -----------------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 13), costs, transfers)
def test_no_schedule_goes_below_the_bound(name: str, p: int, m: int, cost: Cost, transfer: Fraction) -> None:
    m = {"interleaved": -(-m // p) * p, "dualpipe_v": max(m, 2 * p)}.get(name, m)
    schedule = build(name, p, m, CHUNKS.get(name, 1))
    problem = Problem.of(schedule, cost, transfer)
    assert step(problem, schedule) >= lower_bound(problem)
    assert lower_bound(replace(problem, most=problem.most + 1)) <= lower_bound(problem)


def test_known_optima_meet_the_bound() -> None:
    """With T_F = T_B = T_W ZB-H1 is optimal in 1F1B's memory, and ZB-H2 is no shorter where all ranks wait."""
    for p, m in product(range(1, 9), range(1, 20)):
        for name, most in (("zb_h1", p), ("zb_h2", 2 * p - 1)):
            if m >= most:
                schedule = build(name, p, m)
                problem = Problem.of(schedule, uniform())
                assert step(problem, schedule) == lower_bound(problem) == 3 * m + p - 1


# Searched tables -----------------------------------------------------------------------------------------------------


@cache
def every_row(m: int, stages: tuple[int, ...]) -> list[tuple[Action, ...]]:
    """Every order of the passes of a rank's stages, microbatches in turn."""

    def orders(left: dict[tuple[Op, int], int]) -> Iterator[tuple[Action, ...]]:
        if not any(left.values()):
            yield ()
        for op, stage in left:
            follower = {Op.F: Op.I, Op.I: Op.W}.get(op)
            if left[op, stage] > (left[follower, stage] if follower else 0):
                before = orders(left | {(op, stage): left[op, stage] - 1})
                yield from ((*row, Action(op, stage, left[op, stage] - 1)) for row in before)

    return list(orders({(op, stage): m for stage in stages for op in (Op.F, Op.I, Op.W)}))


@pytest.mark.parametrize(
    ("rank_of", "m"), [((0,), 3), ((0, 1), 2), ((0, 1), 3), ((0, 1, 2), 2), ((0, 1, 1, 0), 1), ((0, 1, 0, 1), 1)]
)
def test_a_searched_table_is_the_shortest_of_all(rank_of: tuple[int, ...], m: int) -> None:
    uneven = by_stage([(Fraction(1), Fraction(3), Fraction(2)), (Fraction(2), Fraction(1), Fraction(3))])
    chunks = len(rank_of) // (1 + max(rank_of))
    for cost, transfer, most in product((uniform(), uneven), (0, 1), range(chunks, chunks * m + 1)):
        problem = Problem(rank_of, m, cost, transfer, most)
        own = [tuple(problem.stages_of(rank)) for rank in problem.ranks]
        rows = [[row for row in every_row(m, stages) if peak_in_flight(row) <= most] for stages in own]
        shortest = min(_steps(problem, [Schedule("", one) for one in product(*rows)]))
        found = search(problem)
        assert found.step == shortest
        assert found.step == found.bound
        assert max(map(peak_in_flight, found.schedule.rows)) <= most


def _steps(problem: Problem, schedules: list[Schedule]) -> Iterator[Number]:
    for schedule in schedules:
        try:
            yield step(problem, schedule)
        except InputError:  # ranks wait for each other
            continue


def test_a_searched_table_is_shorter_than_all_known_in_their_memory() -> None:
    """ZB-V's step by 3 of 30 passes; in half of 1F1B's memory one chunk needs 4 more than 3 m + p - 1."""
    zbv = Problem.of(build("zbv", 4, 4, 2), uniform(2, 2, 2, chunks=2))
    assert (step(zbv, build("zbv", 4, 4, 2)), search(zbv).step, lower_bound(zbv)) == (30, 27, 27)
    less = Schedule("", tuple(map(tuple, optimum.shortest(4, 8))))
    assert set(map(peak_in_flight, less.rows)) == {2}
    assert simulate(less, uniform()).step_time == 41


def test_what_is_not_decided_is_not_optimal() -> None:
    problem = Problem(tuple(range(4)), 8, uniform(), 0, 3)
    found = search(problem, seconds=0)
    assert (found.step, found.bound) == (72, 28) == (72, lower_bound(problem))


def test_what_cannot_be_searched_is_refused() -> None:
    with pytest.raises(InputError, match="a rank may hold 1 activations, and has 2 stages; valid: 2 or more"):
        Problem((0, 1, 1, 0), 4, uniform(), 0, 1)
    with pytest.raises(
        InputError, match=r"a step of 27 in units of 0\.0001, .* valid: up to 50000, so round the times"
    ):
        search(Problem(tuple(range(4)), 8, uniform(Fraction("1.0001")), 0, 4))
    with pytest.raises(InputError, match=r"shortest_v has 2 chunks a rank, not plan\.chunks 3"):
        build(f"{optimum.__name__}:shortest_v", 2, 4, 3)
