"""Levels of a network besides its nodes: islands within them, and switches whose spine is oversubscribed."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impl.errors import InputError
from impl.plan import Plan
from impl.run import Run
from impl.simulator.closed_form import ClosedForm
from impl.simulator.plans import every
from impl.simulator.seconds import collective, group
from impl.simulator.step import predict, transfer_seconds
from impl.simulator.system import System
from tests.impl.simulator.made_up import DOCUMENT, SYSTEM, number, run_of
from tests.impl.simulator.test_step import VOCAB, plans, seconds

ISLAND, SPINE = (4, 100e9), (32, 50e9)
"""Half a node, with less than a device's own link; four nodes, with an eighth of their adapters' bandwidth."""


def with_levels(*levels: tuple[int, float]) -> System:
    named = [{"name": f"of {size}", "size": number(size), "way_out": number(rate)} for size, rate in levels]
    return System.from_dict({**DOCUMENT, "levels": named})


def all_reduce(plan: Plan, axis: str, system: System, size: float = 1e10) -> float:
    return float(collective(system, "all_reduce", size, group((axis,), plan, system)))


@settings(max_examples=15, deadline=None)
@given(plans(), st.floats(1.0, 8.0))
def test_a_level_never_makes_a_step_faster_nor_does_a_narrower_way_out(run: Run, factor: float):
    without, narrow = seconds(run), seconds(run, with_levels(ISLAND, SPINE))
    wide = seconds(run, with_levels(*((size, factor * rate) for size, rate in (ISLAND, SPINE))))
    assert without <= wide * (1 + 1e-9) <= narrow * (1 + 2e-9)
    assert seconds(run, with_levels((4, 1e15), (32, 1e15))) == without


def test_tensor_parallelism_across_islands_is_slower_and_within_one_as_before():
    system = with_levels(ISLAND)
    assert all_reduce(Plan(tp=4), "tp", system) == all_reduce(Plan(tp=4), "tp", SYSTEM)
    across = all_reduce(Plan(tp=8), "tp", system)
    rate = ISLAND[1] * system.constant("link_efficiency")
    assert across == pytest.approx(2 * 7 / 8 * 1e10 / rate, rel=1e-3)
    assert seconds(run_of(tp=4, dp=2), system) < seconds(run_of(tp=8), system)


def test_groups_share_the_spine_and_of_an_all_to_all_more_passes_it():
    system, plan = with_levels(SPINE), Plan(tp=8, dp=8)
    rate = SPINE[1] * system.constant("nic_efficiency")
    assert [way.per_unit for way in group(("dp",), plan, system).ways] == [4]
    assert all_reduce(plan, "dp", system) == pytest.approx(
        8 * 2 * 7 / 8 * 1e10 / rate, rel=1e-3
    )  # eight groups share it
    everyone = float(collective(system, "all_to_all", 1e10, group(("dp",), plan, system)))
    assert everyone == pytest.approx(8 * 4 * (1 - 4 / 8) * 1e10 / rate, rel=1e-3)
    assert not group(("dp",), Plan(tp=8, dp=4), system).ways


def test_a_pipeline_is_slowed_where_it_leaves_a_unit():
    system, run = with_levels(SPINE), run_of(tp=8, pp=8)
    before, now = transfer_seconds(run, SYSTEM), transfer_seconds(run, system)
    assert [now(rank, rank + 1) > 1.1 * before(rank, rank + 1) for rank in range(7)] == [False] * 3 + [True] + [
        False
    ] * 3


def test_ends_of_a_pipeline_share_the_way_out_among_themselves_only():
    """Two pipelines of eight ranks, whose first and last ranks are in other units: both sum the tied embedding."""
    run, rate = run_of(pp=8, dp=8), 1e9
    slow = predict(run, VOCAB, with_levels((32, rate))).exposed["ends"] - predict(run, VOCAB, SYSTEM).exposed["ends"]
    assert slow > 0
    wider = predict(run, VOCAB, with_levels((32, 8 * rate))).exposed["ends"]
    assert wider < predict(run, VOCAB, with_levels((32, rate))).exposed["ends"] / 4


def test_the_closed_form_has_levels_too():
    base, gpus = replace(run_of(global_batch=64, microbatch=1), plan=Plan()), 64
    system, all_plans = with_levels(ISLAND, SPINE), every(base.model, gpus, 64, node=8)
    some = all_plans.take(np.random.default_rng(0).choice(len(all_plans), 12, replace=False))
    runs = [some.run(i, base) for i in range(len(some))]
    events = np.array([predict(run, VOCAB, system).seconds for run in runs])
    found = ClosedForm(base, VOCAB, system, gpus).estimate(some).seconds
    without = ClosedForm(base, VOCAB, SYSTEM, gpus).estimate(some).seconds
    assert np.abs(found / events - 1).mean() < 0.02
    assert (found > 1.01 * without).any()


@pytest.mark.parametrize("sizes", [(4, 4), (4, 6), (1,)], ids=str)
def test_units_that_do_not_nest_are_refused(sizes: tuple[int, ...]):
    with pytest.raises(InputError, match=r"system field levels.*must be above 1, and each a multiple"):
        with_levels(*((size, 1e9) for size in sizes))
