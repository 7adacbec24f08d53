"""Simulated times against the closed forms of the papers, exactly, and against what any timeline must obey."""

from collections import Counter
from fractions import Fraction
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.errors import InputError
from impl.pipeline.schedule import Action, Op, Schedule
from impl.pipeline.schedules import build
from impl.pipeline.simulate import Number, Span, Timeline, simulate, uniform

P, M, V = range(1, 9), range(1, 17), range(1, 5)
PLAIN = [(p, m) for p in P for m in M]
CHUNKED = [(p, m, v) for p, m in PLAIN for v in V if m % p == 0]

seconds = st.fractions(Fraction(1, 12), 100, max_denominator=12)
cached = cache(build)


def in_flight(timeline: Timeline) -> list[Fraction]:
    return [timeline.microbatches_in_flight(rank) for rank in timeline.rows]


def test_gpipe_holds_every_microbatch_and_1f1b_p_minus_rank():
    """PTD-P, section 2.2.1: m, and at most p; rank r of 1F1B has p - r - 1 warm-up forward passes and the next."""
    for p, m in PLAIN:
        assert in_flight(simulate(cached("gpipe", p, m), uniform())) == [m] * p
        assert in_flight(simulate(cached("one_f_one_b", p, m), uniform())) == [min(m, p - r) for r in range(p)]


def test_interleaving_holds_p_plus_p_minus_1_over_v():
    """Korthikanti et al. 2022, section 4.2.3: p (1 + (p-1)/(p v)) on rank 0, where m is 2p or more; all m at m = p.

    Rank r has 2 (p - r - 1) + (v - 1) p warm-up forward passes of a chunk, and the next, of v m at most.
    """
    for p, m, v in CHUNKED:
        held = in_flight(simulate(cached("interleaved", p, m, v), uniform(chunks=v)))
        if v > 1:
            chunks = [2 * (p - r - 1) + (v - 1) * p + 1 for r in range(p)]
            assert held == [min(Fraction(n, v), m) for n in chunks]
            assert held[0] == (p + Fraction(p - 1, v) if m > p else m)
        else:
            assert held == [min(m, p - r) for r in range(p)]


def test_zb_h1_idles_a_third_of_1f1b_and_holds_p_microbatches_on_every_rank():
    """Zero bubble, table 1 at T_F = T_B = T_W: (p-1)(T_F + T_B - T_W) idle, where m is p or more."""
    for p, m in PLAIN:
        timeline = simulate(cached("zb_h1", p, m), uniform())
        assert timeline.step_time - timeline.busy(0) == 2 * (p - 1) - (min(p, m) - 1)
        assert in_flight(timeline) == [min(p, m)] * p
        if m >= p:
            assert timeline.bubble * 3 == simulate(cached("one_f_one_b", p, m), uniform()).bubble


@given(st.sampled_from(P), st.sampled_from(M), seconds, seconds, seconds)
def test_zb_h1_at_any_costs(p: int, m: int, forward: Fraction, input_gradient: Fraction, weight_gradient: Fraction):
    """Zero bubble, table 2: exact where T_W is at most T_F and T_B, a lower bound elsewhere; never over 1F1B."""
    cost = uniform(forward, input_gradient, weight_gradient)
    timeline = simulate(cached("zb_h1", p, m), cost)
    idle = (p - 1) * (forward + input_gradient) - (min(p, m) - 1) * weight_gradient
    if weight_gradient <= min(forward, input_gradient):
        assert timeline.step_time - timeline.busy(0) == idle
    else:
        assert timeline.step_time - timeline.busy(0) >= max(idle, 0)
    assert timeline.step_time <= simulate(cached("one_f_one_b", p, m), cost).step_time


@given(st.sampled_from(P), st.sampled_from(M), seconds, seconds)
def test_ptdp_step_time_at_any_costs(p: int, m: int, forward: Fraction, gradient: Fraction):
    """PTD-P, equation 1 and section 2.2.1: (m + p - 1)(t_f + t_b), a bubble of (p - 1) / m; below m = p as well."""
    for name in ("gpipe", "one_f_one_b"):
        timeline = simulate(cached(name, p, m), uniform(forward, gradient, gradient))
        assert timeline.step_time == (m + p - 1) * (forward + 2 * gradient)
        assert {timeline.bubble, *map(timeline.bubble_of, range(p))} == {Fraction(p - 1, m)}


@given(st.sampled_from(P), st.sampled_from(M), seconds, seconds, st.fractions(0, 1, max_denominator=8))
def test_eager_1f1b_hides_transfers_of_up_to_half_of_both_passes(
    p: int, m: int, forward: Fraction, gradient: Fraction, share: Fraction
):
    """A step is longer by the way of one microbatch down the ranks and back; 1F1B's is as long or longer."""
    cost, transfer = uniform(forward, gradient, gradient), share * (forward + 2 * gradient) / 2
    eager = simulate(cached("eager_one_f_one_b", p, m), cost, transfer)
    assert eager.step_time == (m + p - 1) * (forward + 2 * gradient) + 2 * (p - 1) * transfer
    assert in_flight(eager) == [min(m, 2 * (p - r) - 1) for r in range(p)]
    assert eager.step_time <= simulate(cached("one_f_one_b", p, m), cost, transfer).step_time


@given(st.sampled_from(CHUNKED), seconds, seconds)
def test_interleaved_step_time_at_any_costs(numbers: tuple[int, int, int], forward: Fraction, gradient: Fraction):
    """PTD-P, section 2.2.2: the bubble's time is (p - 1)(t_f + t_b) / v, the bubble (p - 1) / (v m)."""
    p, m, v = numbers
    timeline = simulate(cached("interleaved", p, m, v), uniform(forward, gradient, gradient, chunks=v))
    assert timeline.step_time == (m + Fraction(p - 1, v)) * (forward + 2 * gradient)
    assert timeline.bubble == Fraction(p - 1, v * m)


def test_zero_bubble_paper_divides_by_the_step_time():
    """Its table 5, ideal 1F1B at p = 8: 0.2258 with 24 microbatches, 0.0986 with 64."""
    for m, rate in ((24, 0.2258), (64, 0.0986)):
        bubble = simulate(build("one_f_one_b", 8, m), uniform()).bubble
        assert float(bubble / (1 + bubble)) == pytest.approx(rate, abs=5e-5)


@given(st.sampled_from(P), st.sampled_from(M), seconds, seconds)
def test_gpipe_waits_for_p_minus_1_transfers_each_way(p: int, m: int, forward: Fraction, part: Fraction):
    transfer = min(forward, 2) * part / 100  # no more than a forward or backward pass, so that links keep up
    step_time = simulate(cached("gpipe", p, m), uniform(forward), transfer).step_time
    assert step_time == (m + p - 1) * (forward + 1 + 1) + 2 * (p - 1) * transfer


def test_a_link_carries_one_transfer_at_a_time():
    timeline = simulate(build("gpipe", 2, 4), uniform(), 3)
    assert [span.start for span in timeline.rows[1] if span.action.op is Op.F] == [4, 7, 10, 13]
    # gradients leave every 2 and arrive every 3: the first at 14 + 2 + 3
    assert [span.start for span in timeline.rows[0] if span.action.op is Op.B] == [19, 22, 25, 28]


@given(
    st.sampled_from([("gpipe", 3, 5), ("one_f_one_b", 4, 6), ("interleaved", 3, 6, 2), ("zb_h1", 4, 7)]),
    st.randoms(use_true_random=False),
    st.integers(0, 4),
)
def test_every_action_starts_as_early_as_it_can(case: tuple, random, transfer: int):
    schedule = build(*case)
    costs = {action: random.randint(1, 9) for _, action in schedule.order}
    timeline = simulate(schedule, costs.__getitem__, lambda sender, receiver: transfer * (sender + 1))
    ends = {span.action: span.end for span in timeline.spans}
    link_free: dict[tuple[int, int], Number] = {}
    arrivals: dict[Action, Number] = {}
    for rank, row in timeline.rows.items():
        assert [span.action for span in row] == list(schedule.rows[rank])
        for span in row:
            assert span.end - span.start == costs[span.action]
            if reader := schedule.transfers.get(span.action):
                link = rank, schedule.rank_of[reader.stage]
                arrivals[reader] = link_free[link] = max(span.end, link_free.get(link, 0)) + transfer * (rank + 1)
    for row in timeline.rows.values():
        free: Number = 0
        for span in row:
            inputs = [ends[need] for need in schedule.needs(span.action) if need not in schedule.transfers]
            assert span.start == max([free, arrivals.get(span.action, 0), *inputs])
            free = span.end


def test_floats_and_fractions_agree():
    for name, p, m, v in (("one_f_one_b", 4, 8, 1), ("interleaved", 4, 8, 2), ("zb_h1", 4, 8, 1)):
        schedule = build(name, p, m, v)
        floats = simulate(schedule, uniform(0.25, 0.5, 0.125, chunks=v), 0.0625)
        exact = simulate(schedule, uniform(Fraction(1, 4), Fraction(1, 2), Fraction(1, 8), chunks=v), Fraction(1, 16))
        assert floats.spans == exact.spans
        assert isinstance(floats.step_time, float)
        assert isinstance(exact.bubble, Fraction)


def test_a_table_that_cannot_run_is_not_simulated():
    with pytest.raises(InputError, match="rank 0 is stuck at 0B0, which needs 0F0"):
        simulate(Schedule("mine", ((Action(Op.B, 0, 0), Action(Op.F, 0, 0)),)), uniform())


def test_a_measured_timeline_is_read_the_same_way():
    """Clocks start anywhere, spans come in any order."""
    spans = (
        Span(1, Action(Op.B, 1, 0), 104.0, 106.0),
        Span(0, Action(Op.F, 0, 0), 100.0, 101.0),
        Span(1, Action(Op.F, 1, 0), 101.5, 103.0),
        Span(0, Action(Op.B, 0, 0), 107.0, 109.0),
    )
    timeline = Timeline(spans)
    assert timeline.step_time == 9.0
    assert timeline.busy(0) == 3.0
    assert timeline.bubble_of(0) == 2.0
    assert timeline.bubble == pytest.approx(2 * 9 / 6.5 - 1)
    assert in_flight(timeline) == [1, 1]
    rows = [[["0F0", 0.0, 1.0], ["0B0", 7.0, 9.0]], [["1F0", 1.5, 3.0], ["1B0", 4.0, 6.0]]]
    assert timeline.as_rows() == rows
    assert Timeline.from_rows(rows).as_rows() == rows


@pytest.mark.parametrize("case", [("one_f_one_b", 16, 128), ("interleaved", 4, 128, 4)])
def test_thousands_of_actions_are_each_simulated_once(case: tuple):
    """So the work grows with the actions; how many seconds it takes, the benchmarks say."""
    asked = Counter[Action]()

    def cost(action: Action) -> float:
        asked[action] += 1
        return 1.5

    timeline = simulate(build(*case), cost, 0.1)
    assert asked == {span.action: 1 for span in timeline.spans}
    assert len(asked) == 4096
