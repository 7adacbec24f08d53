"""Layers with experts on the fullest rank: nothing changes where all are alike, and all grows with its rows."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.run import Run
from impl.simulator.closed_form import ClosedForm
from impl.simulator.operations import Block, block
from impl.simulator.plans import every
from impl.simulator.routing import imbalance_of, imbalance_of_step, routed
from impl.simulator.step import predict
from impl.simulator.system import System
from impl.zero.partition import EXPERT
from tests.impl.simulator.made_up import MODEL, SYSTEM, run_of

EXPERTS = replace(MODEL, experts=8, experts_per_token=2, dropout=0.0)
IMBALANCES = st.floats(1.0, 4.0)


def habitual(**habits: Any) -> System:
    return replace(SYSTEM, habits=replace(SYSTEM.habits, **habits))


def shared(model: Any = EXPERTS, **plan: Any) -> Run:
    return run_of(model=model, **{"dp": 4, "ep": 4, **plan})


def layer(run: Run) -> Block:
    return block(run, 51200, "experts", run.model.seq_len)


def seconds(run: Run, system: System) -> float:
    return predict(run, 51200, system).seconds


SHAPES = [{}, {"tp": 2, "sequence_parallel": True}, {"cp": 2}, {"recompute": "full"}]


@pytest.mark.parametrize("plan", SHAPES, ids=str)
def test_ranks_that_are_alike_change_nothing(plan: dict[str, Any]):
    run = shared(**plan)
    assert routed(habitual(imbalance=1.0), run, layer(run)) == layer(run)
    alone = run_of(model=EXPERTS, **plan)
    assert imbalance_of(habitual(imbalance=3.0), alone) == 1
    assert seconds(alone, habitual(imbalance=3.0)) == seconds(alone, SYSTEM)


@pytest.mark.parametrize("plan", SHAPES, ids=str)
@given(one=IMBALANCES, other=IMBALANCES)
def test_a_step_takes_the_longer_the_fuller_the_fullest_is(plan: dict[str, Any], one: float, other: float):
    less, more = sorted((one, other))
    assert seconds(shared(**plan), habitual(imbalance=less)) <= seconds(shared(**plan), habitual(imbalance=more))


def test_experts_and_what_is_sent_to_them_grow_and_nothing_else():
    run = shared()
    even, full = layer(run), routed(habitual(imbalance=1.5), run, layer(run))
    for one, other in zip(even.products, full.products, strict=True):
        assert other.flops == (1.5 if EXPERT in one.name else 1) * one.flops
    rows = run.train.microbatch * run.model.seq_len * 2 * run.model.hidden_size * 2
    assert [one.bytes for one in full.collectives if one.op == "all_to_all" and one.bytes > 100] == [1.5 * rows] * 4
    assert full.core == even.core


def test_no_rank_is_fuller_than_its_experts_capacity_and_without_a_measurement_choices_are_even():
    of = lambda run, system=SYSTEM: imbalance_of(system, run)
    few, many = (of(shared(microbatch=n)) for n in (1, 8))
    assert 1 < many < few < 1.1
    assert of(shared(replace(EXPERTS, expert_capacity=1.25)), habitual(imbalance=1.6)) == 1.25
    assert of(shared(replace(EXPERTS, expert_capacity=0.5))) == 1
    low, middle, high = (imbalance_of_step(shared(), share) for share in (0.1, 0.5, 0.9))
    assert low < middle < high
    assert middle == pytest.approx(of(shared()))


def test_software_that_routes_parts_sends_each_row_to_one_tensor_parallel_rank_and_gathers_it_there():
    """t = 2, k = 2: all-to-alls are half as large; what goes around the experts is of k [n, h] in place of [n, h]."""
    run = shared(tp=2, sequence_parallel=True)
    each = run.train.microbatch * run.model.seq_len * run.model.hidden_size * 2
    plain, parts = layer(run), routed(habitual(imbalance=1.0, routes_parts=True), run, layer(run))
    sent = lambda one, op: sorted(c.bytes for c in one.collectives if c.op == op and c.bytes >= each)
    assert sent(plain, "all_to_all") == [2 * each] * 4
    assert sent(parts, "all_to_all") == [each] * 4
    for op in ("all_gather", "reduce_scatter"):
        assert sum(sent(parts, op)) == sum(sent(plain, op)) + 2 * each
    dense = shared(replace(EXPERTS, shared_expert_size=1024), tp=2, sequence_parallel=True)
    more = routed(habitual(imbalance=1.0, routes_parts=True), dense, layer(dense))
    assert sum(sent(more, "all_gather")) == sum(sent(parts, "all_gather")) + 2 * each
    assert routed(habitual(imbalance=1.0, routes_parts=True), shared(), layer(shared())) == layer(shared())


def test_the_closed_form_counts_the_same_layers():
    base = run_of(model=EXPERTS)
    plans = every(EXPERTS, 4, 32, node=8)
    chosen = plans.take((plans["ep"] == 4) & (plans["zero_stage"] == 1) & (plans["microbatch"] == 2)).take(slice(1))
    of = lambda system: float(ClosedForm(base, 51200, system, 4).estimate(chosen).seconds[0])
    even, uneven, run = habitual(imbalance=1.0), habitual(imbalance=2.0), chosen.run(0, base)
    assert of(uneven) / of(even) == pytest.approx(seconds(run, uneven) / seconds(run, even), rel=0.01)
    assert of(uneven) > 1.1 * of(even)
