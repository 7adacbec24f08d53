"""How a prediction must change when the run or the machine does, for random plans; more such laws are in test_step."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impl.run import Run
from impl.simulator.step import predict, step_seconds
from impl.simulator.system import System
from tests.impl.simulator.made_up import SYSTEM, faster, longer, run_of, with_constants
from tests.impl.simulator.test_step import LATENCIES, VOCAB, plans, seconds

SAME = 1 + 1e-9
FREE: dict[str, float] = {"link_bandwidth": 1e12, "nic_bandwidth": 1e12}
related = lambda: settings(max_examples=12, deadline=None)


def planned(run: Run, **plan: Any) -> Run:
    return replace(run, plan=replace(run.plan, **plan))


def trained(run: Run, **recipe: Any) -> Run:
    return replace(run, train=replace(run.train, **recipe))


def free_network() -> System:
    silent = {name: 0.0 for name in LATENCIES if name.startswith(("link", "nic", "send"))}
    return with_constants(faster(**FREE), "made up", **silent, overlap=1.0, send_efficiency=1e9)


def fullest(run: Run, system: System = SYSTEM) -> int:
    return max(one.total for one in predict(run, VOCAB, system).memory)


@related()
@given(plans())
def test_half_the_batch_is_faster_by_half_of_it_at_most(run: Run):
    twice = trained(run, global_batch=2 * run.train.global_batch)
    assert seconds(run) < seconds(twice) <= 2 * seconds(run) * SAME


@related()
@given(plans())
def test_a_network_that_takes_no_time_leaves_no_communication(run: Run):
    found = predict(run, VOCAB, free_network())
    waits = [one for axis, one in found.exposed.items() if axis != "pp"]  # whose waits are the schedule's
    assert sum(waits) < 1e-6 * found.seconds
    assert found.seconds <= seconds(run) * SAME


@related()
@given(plans(), st.integers(0, 3), st.floats(1.0, 4.0))
def test_a_slower_rank_never_speeds_a_step_up_and_slows_it_by_its_own_factor_at_most(
    run: Run, rank: int, factor: float
):
    usual = seconds(run)
    slow = predict(run, VOCAB, SYSTEM, slowdown={rank % run.plan.pp: factor}).seconds
    assert usual <= slow * SAME
    assert slow <= factor * usual * SAME


@related()
@given(plans())
def test_one_more_layer_a_stage_takes_time_and_memory(run: Run):
    more = longer(run, num_layers=run.model.num_layers + run.plan.pp * run.plan.chunks)
    assert seconds(more) > seconds(run)
    assert fullest(more) > fullest(run)


@related()
@given(plans())
def test_recomputation_takes_time_and_saves_memory(run: Run):
    none, selective, full = (planned(run, recompute=which) for which in ("none", "selective", "full"))
    assert seconds(none) < seconds(selective) < seconds(full)
    kept = [predict(one, VOCAB, SYSTEM).memory[0].activations for one in (none, selective, full)]
    assert kept == sorted(kept, reverse=True)


@related()
@given(plans())
def test_each_stage_of_zero_needs_no_more_memory_than_the_one_before(run: Run):
    states = [predict(planned(run, zero_stage=stage), VOCAB, SYSTEM).memory[0].states for stage in range(4)]
    assert states == sorted(states, reverse=True)


@related()
@given(plans())
def test_a_longer_sequence_takes_more_time_and_memory(run: Run):
    """But for buffers: buckets are cut between parameters, and more positions may cut them into smaller ones."""
    longest = longer(run, seq_len=2 * run.model.seq_len)
    assert seconds(longest) > seconds(run)
    besides = lambda one: max(rank.total - rank.buffers for rank in predict(one, VOCAB, SYSTEM).memory)
    assert besides(longest) > besides(run)


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "zb_h1"])
def test_the_bubble_goes_to_0_as_microbatches_grow(schedule: str):
    of = lambda m: predict(run_of(pp=4, microbatch=1, global_batch=m, schedule=schedule), VOCAB, free_network())
    idle = []
    for m in (4, 16, 64, 256):
        idle.append(min(parts["pipeline"] / sum(parts.values()) for parts in of(m).parts))  # of the busiest rank
    assert idle == sorted(idle, reverse=True)
    assert idle[-1] < idle[0] / 16


def test_stage_3_moves_one_and_a_half_times_what_stage_0_does():
    """Two gathers of parameters and a scatter of gradients, where an all-reduce is a scatter and a gather: ZeRO, 7.2.

    On a network so slow that all else is nothing, seconds are bytes; of layers, as an embedding is gathered otherwise.
    """
    slow = with_constants(faster(nic_bandwidth=1e-4, link_bandwidth=1e-4), overlap=0.0)
    run = longer(run_of(dp=8, microbatch=4, overlap_param_gather=False), vocab_size=128)
    run = replace(run, fp32_gradients=False)
    times = [step_seconds(planned(run, zero_stage=stage), 128, slow) for stage in range(4)]
    assert times[3] / times[0] == pytest.approx(1.5, rel=0.02)
    assert times[1] == pytest.approx(times[0], rel=0.02)
    assert times[2] == pytest.approx(times[0], rel=0.02)
