"""Schedules of which only what does not repeat itself is executed, against all of them executed.

Seconds are multiples of 1/8, which floats add up exactly.
"""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impl.pipeline.schedule import Op
from impl.pipeline.schedules import build
from impl.pipeline.simulate import simulate
from impl.simulator.periodic import PERIODIC, Last, Ran, execute
from tests.impl.pipeline import own_schedule

OPS = (Op.F, Op.B, Op.I, Op.W)
OWN = own_schedule.__name__
seconds = st.integers(1, 48).map(lambda eighths: eighths / 8)
cached = cache(build)


def whole(name: str, p: int, m: int, v: int, costs, transfer) -> Ran:
    """The same by the simulation of every action."""
    timeline = simulate(cached(name, p, m, v), lambda action: costs[action.op][action.stage], transfer)
    ended = {span.action.stage: span for span in timeline.spans if span.action[2] == m - 1 and span.action.op in "BW"}
    last = {stage: Last(float(span.start), float(span.end)) for stage, span in ended.items()}
    ends = [float(row[-1].end) for row in timeline.rows.values()]
    return Ran(ends, [float(timeline.busy(rank)) for rank in timeline.rows], last, len(timeline.spans))


@st.composite
def pipelines(draw: st.DrawFn):
    """A schedule, even or with slow stages, and links that are free, alike, or each another."""
    name = draw(st.sampled_from(PERIODIC))
    p = draw(st.integers(1, 5))
    v = draw(st.integers(1, 3)) if name == "interleaved" else 1
    m = p * draw(st.integers(1, 9)) if name == "interleaved" else draw(st.integers(1, 40))
    base = {op: draw(seconds) for op in OPS}
    slow = draw(st.dictionaries(st.tuples(st.sampled_from(OPS), st.integers(0, p * v - 1)), seconds, max_size=4))
    costs = {op: [slow.get((op, stage), base[op]) for stage in range(p * v)] for op in OPS}
    common = draw(st.sampled_from([0.0, 0.25, 2.0]))
    links = draw(st.dictionaries(st.tuples(st.integers(0, p - 1), st.integers(0, p - 1)), seconds, max_size=2))
    return name, p, m, v, costs, lambda sender, receiver: links.get((sender, receiver), common)


@given(pipelines())
@settings(max_examples=80)
def test_what_is_skipped_changes_nothing(pipeline):
    """Of seconds that floats round too, which are not rounded on the way."""
    found, expected = execute(*pipeline), whole(*pipeline)
    assert found[:3] == expected[:3]
    assert found.executed <= expected.executed
    name, p, m, v, exact, transfer = pipeline
    costs = {op: [cost / 7 for cost in of_stages] for op, of_stages in exact.items()}
    delay = lambda sender, receiver: transfer(sender, receiver) / 7
    ends = whole(name, p, m, v, costs, delay).ends
    assert execute(name, p, m, v, costs, delay).ends == pytest.approx(ends, rel=1e-12)


@pytest.mark.parametrize(("name", "v"), [("gpipe", 1), ("one_f_one_b", 1), ("interleaved", 3), ("zb_h1", 1)])
@pytest.mark.parametrize("delay", [0.0, 0.02])
def test_most_of_a_long_step_is_skipped(name: str, v: int, delay: float):
    """With a heavier last stage, as the output head makes it, and with a slow link."""
    costs = {op: [1.0] * (8 * v - 1) + [1.07] for op in OPS}
    actions = 8 * v * 4096 * (3 if name == "zb_h1" else 2)
    assert execute(name, 8, 4096, v, costs, delay).executed < 0.03 * actions


@pytest.mark.parametrize("name", ["gpipe", "zb_h1"])
def test_a_slow_rank_drifts_away_from_the_others_until_they_wait_for_it(name: str):
    """One that is 1% slower than the first: what piles up before it is skipped as well."""
    costs = {op: [1.0, 1.0, 1 + 1 / 128, 1.0] for op in OPS}
    ran, expected = execute(name, 4, 1000, 1, costs), whole(name, 4, 1000, 1, costs, 0)
    assert ran.executed < 0.1 * expected.executed
    assert ran[:3] == expected[:3]


@pytest.mark.parametrize(("name", "v"), [(f"{OWN}:two_ways", 2), (f"{OWN}:every_other", 1), ("zb_h2", 1), ("zbv", 2)])
def test_other_schedules_are_executed_wholly(name: str, v: int):
    costs = {op: [(2 + stage) / 4 for stage in range(3 * v)] for op in OPS}
    run = name, 3, 10, v, costs, 0.125
    assert execute(*run) == whole(*run)
