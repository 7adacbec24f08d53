"""One step: what it is made of, and what no prediction of it may do."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impl.cost.place import Place
from impl.cost.traffic import tensor_parallel_traffic
from impl.errors import InputError
from impl.pipeline.schedules import build
from impl.pipeline.simulate import simulate
from impl.pipeline.stage import Stage
from impl.run import Run
from impl.simulator.operations import block
from impl.simulator.passes import passes
from impl.simulator.step import pipeline_of, predict, step_seconds
from impl.simulator.system import Calibration
from tests.impl.pipeline import own_schedule
from tests.impl.simulator.made_up import MODEL, SYSTEM, faster, longer, run_of, with_constants

VOCAB = 51200
RING: dict[str, Any] = {"cp": 2}
SHARED: list[dict[str, Any]] = [RING, {"cp": 2, "cp_attention": "ulysses"}]
"""Plans by which two ranks share every sequence."""
LATENCIES = ("kernel_seconds", "host_forward", "host_backward", "host_collective", "link_latency", "nic_latency")
LATENCIES += ("send_latency", "send_wait", "microbatch_seconds", "step_seconds")


def seconds(run: Run, system=SYSTEM, **arguments: Any) -> float:
    return step_seconds(run, VOCAB, system, **arguments)


@st.composite
def plans(draw: st.DrawFn) -> Run:
    """Any plan of 16 sequences on up to 128 ranks."""
    tp, dp, pp = draw(st.sampled_from((1, 2, 8))), draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from((1, 2, 4)))
    schedule = draw(st.sampled_from(("gpipe", "one_f_one_b", "interleaved", "zb_h1", "zbv")))
    shared = draw(st.sampled_from(({}, {}, *SHARED)))
    return run_of(
        model=replace(MODEL, attention_dropout=0.0) if shared == RING else MODEL,
        global_batch=16,
        microbatch=1,
        tp=tp,
        dp=dp,
        pp=pp,
        schedule=schedule,
        chunks=2 if schedule == "zbv" else draw(st.sampled_from((1, 2))) if schedule == "interleaved" and pp > 1 else 1,
        recompute=draw(st.sampled_from(("none", "selective", "full"))),
        sequence_parallel=draw(st.booleans()) and tp > 1,
        zero_stage=draw(st.integers(0, 3)),
        **shared,
    )


@settings(max_examples=25, deadline=None)
@given(plans())
def test_parts_of_every_rank_add_up_to_the_step(run: Run):
    found = predict(run, VOCAB, SYSTEM)
    assert found.seconds == pytest.approx(seconds(run))
    for parts in found.parts:
        assert sum(parts.values()) == pytest.approx(found.seconds)
        assert all(part > -1e-9 for part in parts.values()), parts
    assert sum(found.exposed.values()) < found.seconds
    times, transfer = pipeline_of(run, VOCAB, SYSTEM)
    schedule = build(run.plan.schedule, run.plan.pp, run.microbatches, run.plan.chunks)
    timeline = simulate(schedule, lambda action: times[action.op][action.stage], transfer)
    assert float(timeline.bubble) == pytest.approx(found.bubble)


@pytest.mark.parametrize("plan", SHARED, ids=["ring", "ulysses"])
def test_ranks_that_share_long_sequences_take_half_the_time_each_besides_their_waits(plan: dict[str, Any]):
    whole = longer(run_of(), seq_len=2**14, attention_dropout=0.0)
    alone, shared = (predict(replace(whole, plan=replace(whole.plan, **how)), VOCAB, SYSTEM) for how in ({}, plan))
    assert alone.exposed["cp"] == 0 < shared.exposed["cp"] < 0.05 * shared.seconds
    assert shared.seconds - sum(shared.exposed.values()) == pytest.approx(
        alone.seconds / 2, rel=0.03
    )  # a ring adds results up


def test_only_a_rings_way_home_is_not_beside_its_meetings_while_these_are_longer():
    """In fp32 the gradients that go home are of 4 bytes: all that is sent is 2 bytes forward, 2 + 4 + 4 backward."""
    run, system = longer(run_of(**RING), seq_len=2**14, attention_dropout=0.0), with_constants(SYSTEM, overlap=1.0)
    sends = tensor_parallel_traffic(Place(run, VOCAB), run.model.seq_len, "cp")["send"].bytes
    rate = 300e9 * system.constant("send_efficiency")
    home = predict(run, VOCAB, system).exposed["cp"]
    assert home == pytest.approx(sends * 4 / 12 / rate, rel=0.1)
    slow = predict(run, VOCAB, with_constants(faster(link_bandwidth=0.001), overlap=1.0)).exposed["cp"]
    assert 500 * home < slow < 3000 * home


@settings(max_examples=25, deadline=None)
@given(plans(), st.sampled_from(("overlap_grad_reduce", "overlap_param_gather", "overlap_input_grad_reduce")))
def test_overlap_never_slows(run: Run, what: str):
    """Not even with recomputation and data parallelism, where running totals were once added for layers."""
    with_it, without = (replace(run, plan=replace(run.plan, **{what: on})) for on in (True, False))
    assert seconds(with_it) <= seconds(without) * (1 + 1e-9)


@settings(max_examples=15, deadline=None)
@given(plans(), st.floats(1.0, 8.0))
def test_a_faster_machine_is_never_slower(run: Run, factor: float):
    before = seconds(run)
    for rate in ("peak_flops", "memory_bandwidth", "link_bandwidth", "nic_bandwidth", "nics"):
        factor = round(factor) if rate == "nics" else factor
        assert seconds(run, faster(**{rate: factor})) <= before * (1 + 1e-9), rate


@settings(max_examples=15, deadline=None)
@given(plans())
def test_a_machine_twice_as_fast_takes_half_the_time(run: Run):
    """Units are consistent: what is no rate is a number of seconds, and all of these are named."""
    none = dict.fromkeys(LATENCIES, 0.0)
    rates = ("peak_flops", "memory_bandwidth", "link_bandwidth", "nic_bandwidth")
    slow, fast = with_constants(SYSTEM, **none), with_constants(faster(**dict.fromkeys(rates, 2.0)), **none)
    assert seconds(run, fast) == pytest.approx(seconds(run, slow) / 2)


@pytest.mark.parametrize("field", ["hidden_size", "seq_len", "vocab_size"])
def test_time_is_continuous_in_every_size_of_the_model(field: str):
    """128 more of a size of some thousand, 8 a head: never more than 7 times in proportion, and never less."""
    sizes = range(2048, 2048 + 20 * 128, 128)
    times = [
        step_seconds(longer(run_of(), **{field: size}), size if field == "vocab_size" else VOCAB, SYSTEM)
        for size in sizes
    ]
    for size, before, after in zip(sizes, times, times[1:], strict=False):
        growth = 128 / size
        assert before * (1 - 1e-9) <= after < before * (1 + 7 * growth), (size, before, after)


def test_flops_are_ptdps():
    found = predict(run_of(tp=2, recompute="full"), VOCAB, SYSTEM)
    layers, h, s = MODEL.num_layers, MODEL.hidden_size, MODEL.seq_len
    equation_3 = 96 * 32 * s * layers * h**2 * (1 + s / (6 * h) + VOCAB / (16 * layers * h))
    assert found.hardware_flops_per_gpu_s == pytest.approx(equation_3 / found.seconds / 2)
    assert found.hfu == pytest.approx(found.hardware_flops_per_gpu_s / 300e12)
    assert found.tokens_per_s == pytest.approx(32 * s / found.seconds)
    assert found.fits is True
    assert predict(run_of(), VOCAB, faster(memory_bytes=0.01)).fits is False


def test_scores_are_kept_where_attention_is_not_fused_whatever_the_dropout():
    scores = 2 * 2 * 2 * MODEL.num_heads * MODEL.seq_len**2 * MODEL.num_layers
    fused = replace(SYSTEM, device=replace(SYSTEM.device, fused_attention=True))
    kept = lambda system, **dropout: predict(longer(run_of(), **dropout), VOCAB, system).memory[0].activations
    masks = kept(SYSTEM, dropout=0.1) - kept(SYSTEM, dropout=0.0)
    assert masks == kept(fused, dropout=0.1) - kept(fused, dropout=0.0) > 0
    assert kept(SYSTEM, dropout=0.0) - kept(fused, dropout=0.0) > scores
    assert kept(fused, dropout=0.0, attention_dropout=0.1) == kept(fused, dropout=0.0)


@settings(max_examples=25, deadline=None)
@given(plans(), st.sampled_from(("splits_products", "gathers_ahead")))
def test_what_software_does_at_once_is_never_slower(run: Run, habit: str):
    able = replace(SYSTEM, habits=replace(SYSTEM.habits, **{habit: True}))
    assert seconds(run, able) <= seconds(run) * (1 + 1e-9)


def test_products_that_add_up_gradients_in_fp32_save_their_addition():
    able = replace(SYSTEM, habits=replace(SYSTEM.habits, fuses_gradients=True))
    half, whole = (replace(run_of(), fp32_gradients=is_whole) for is_whole in (False, True))
    assert seconds(whole, able) < seconds(whole)
    assert seconds(half, able) == seconds(half)


def test_eight_bits_make_layers_products_faster_and_nothing_else():
    peaks = SYSTEM.device.peak_flops
    twice = replace(peaks["bf16"], value=2 * peaks["bf16"].value)
    fast = replace(SYSTEM, device=replace(SYSTEM.device, peak_flops=peaks | {"fp8": twice}))
    of = lambda precision, system=fast: predict(replace(run_of(), precision=precision), VOCAB, system)
    eight, sixteen = of("fp8"), of("bf16")
    assert 0.5 * sixteen.seconds < eight.seconds < sixteen.seconds
    assert eight.memory == sixteen.memory
    with pytest.raises(InputError, match=r"no device.peak_flops for precision fp8"):
        of("fp8", SYSTEM)


def test_balanced_1f1b_takes_m_plus_p_minus_1_slots():
    """Layers only, alike on all ranks, and nothing between them."""
    none = dict.fromkeys(LATENCIES, 0.0) | {"send_efficiency": 1e9}
    system = with_constants(SYSTEM, "made up", **none)
    run = longer(run_of(pp=4, recompute="full"), vocab_size=None)
    stages = tuple(Stage(range(2 * i, 2 * i + 2), is_first=False, is_last=False) for i in range(4))
    found = predict(run, 128, system, stages=stages)
    layer = passes(system, run, block(run, 128, "layer", MODEL.seq_len), is_layer=True)
    ends = found.parts[0]["compute"] + found.parts[0]["pipeline"]
    assert ends == pytest.approx((run.microbatches + 3) * 2 * (layer.forward + layer.backward))


def test_a_slow_rank_computes_longer_and_waits_for_others_as_long_as_before():
    run = run_of(tp=8)
    usual, slow = (predict(run, VOCAB, SYSTEM, slowdown=of) for of in (None, {0: 2.0}))
    waits = usual.parts[0]["tensor_parallel"]
    assert waits > 0
    assert slow.parts[0]["tensor_parallel"] == pytest.approx(waits)
    gradients = usual.parts[0]["compute"]
    assert slow.seconds - usual.seconds == pytest.approx(gradients, rel=0.02)


def test_a_calibrations_residuals_correct_every_second():
    surface = {"places": [[2048, 1, 2]], "logs": [0.1], "noises": [0.02], "sd": 0.1}
    calibration = Calibration(stack="made up", rows=["a"], held_out=[], mape=1, worst=1, residuals=surface)  # type: ignore[arg-type]
    system = replace(SYSTEM, calibration=calibration)
    factor = system.correction(run_of())
    assert factor > 1.05
    found = predict(run_of(), VOCAB, system)
    assert found.seconds == pytest.approx(factor * seconds(run_of()))
    assert sum(found.parts[0].values()) == pytest.approx(found.seconds)


def test_an_impossible_run_is_told():
    with pytest.raises(InputError, match="does not divide"):
        predict(run_of(tp=3), VOCAB, SYSTEM)
    with pytest.raises(InputError, match=r"1 stages were given; valid: plan\.pp x plan\.chunks, 2"):
        predict(run_of(pp=2), VOCAB, SYSTEM, stages=(Stage(range(8), is_first=True, is_last=True),))
    with pytest.raises(InputError, match=r"made_up has no device.peak_flops for precision fp64; valid: bf16, fp16"):
        predict(replace(run_of(), precision="fp64"), VOCAB, SYSTEM)


@pytest.mark.parametrize(("name", "chunks"), [("two_ways", 2), ("every_other", 1)])
def test_a_schedule_of_ones_own_is_predicted(name: str, chunks: int):
    run = run_of(pp=2, dp=2, chunks=chunks, schedule=f"{own_schedule.__name__}:{name}")
    found = predict(run, VOCAB, SYSTEM)
    assert found.parts[1]["gradients"] > 0
    assert sum(found.parts[1].values()) == pytest.approx(found.seconds)


def test_selective_recomputation_adds_the_core_once():
    runs = [run_of(recompute=which) for which in ("none", "selective", "full")]
    layers = (passes(SYSTEM, run, block(run, VOCAB, "layer", MODEL.seq_len), is_layer=True) for run in runs)
    none, selective, full = (layer.backward for layer in layers)
    assert 0 < selective - none < 0.4 * (full - none)
    extra = runs[0].microbatches * MODEL.num_layers * (selective - none)
    assert seconds(runs[1]) - seconds(runs[0]) == pytest.approx(extra, rel=1e-6)


@pytest.mark.parametrize("way", ["ring", "ulysses"])
def test_the_loss_of_balance_is_summed_once_whatever_is_recomputed(way: str):
    def context(recompute: str, balance_loss: float) -> float:
        model = replace(MODEL, experts=8, dropout=0.0, balance_loss=balance_loss)
        run = run_of(model=model, cp=2, cp_attention=way, recompute=recompute)
        return passes(SYSTEM, run, block(run, VOCAB, "experts", MODEL.seq_len), is_layer=True).context

    once, *others = (context(which, 0.1) - context(which, 0.0) for which in ("none", "selective", "full"))
    assert once > 0
    assert others == pytest.approx([once, once])


def test_states_that_wait_in_host_memory_cost_time():
    usual, offloaded = run_of(dp=2, zero_stage=2), run_of(dp=2, zero_stage=2, offload_optimizer=True)
    assert seconds(offloaded) > seconds(usual) + 0.05
    kept, moved = run_of(recompute="full"), run_of(recompute="full", offload_activations=True)
    assert seconds(moved) > seconds(kept)


def test_every_stage_of_zero_costs_what_it_moves():
    times = [seconds(run_of(dp=16, microbatch=1, zero_stage=z, overlap_param_gather=False)) for z in range(4)]
    assert times[2] < times[3]
    assert times[0] != times[1]


def test_stage_3_within_nodes_waits_for_no_other_node_while_it_gathers():
    """Gathers go over links within the node; over 4 nodes 1 / 8 of the gradients is summed, of 4 microbatches once."""
    of = lambda **plan: predict(run_of(dp=32, global_batch=128, microbatch=1, zero_stage=3, **plan), VOCAB, SYSTEM)
    whole, within, alike = of(), of(zero_group=8), of(zero_group=32)
    assert within.exposed["zero"] < whole.exposed["zero"] / 2
    assert within.exposed["dp"] > whole.exposed["dp"] == 0.0
    assert within.seconds < whole.seconds == alike.seconds
    assert within.memory[0].optimizer == pytest.approx(4 * whole.memory[0].optimizer, rel=0.01)
    assert alike.memory == whole.memory
