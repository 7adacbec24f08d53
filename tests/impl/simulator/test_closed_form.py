"""The gear that all plans are estimated with, against the one that carries out events."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from harness.predict.systems import load_system
from impl.cost.memory import memory_of_ranks
from impl.model.sizes import named
from impl.pipeline.stage import Stage
from impl.recipe import Recipe
from impl.run import Run
from impl.simulator.closed_form import ClosedForm, Estimate
from impl.simulator.plans import NAMES, Plans, every
from impl.simulator.step import predict, stages_of
from impl.simulator.system import System

GPUS, BATCH, SOME = 8, 24, 6
BASE = Run(model=named("gpt-2.5b"), train=Recipe(global_batch=BATCH, microbatch=1), precision="bf16")
VOCAB = BASE.model.vocab_size or 0


@cache
def plans() -> Plans:
    return every(BASE.model, GPUS, BATCH, node=2)


@cache
def estimate() -> Estimate:
    return form().estimate(plans())


@cache
def form() -> ClosedForm:
    return ClosedForm(BASE, VOCAB, load_system("selene"), GPUS)


@cache
def both() -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Estimates over what events say, less 1: seconds and bytes of some plans of every schedule."""
    generator, chosen = np.random.default_rng(1), list[int]()
    for schedule in range(len(NAMES["schedule"])):
        few = plans()["microbatch"] <= 8
        for in_groups in (False, True):
            there = np.flatnonzero((plans()["schedule"] == schedule) & few & ((plans()["zero_group"] > 0) == in_groups))
            chosen += generator.choice(there, SOME, replace=False).tolist()
    system = load_system("selene")
    runs, stages = [system.habits.of(plans().run(i, BASE)) for i in chosen], system.habits.stages_of
    found = [predict(run, VOCAB, system, stages=stages(run)) for run in runs]
    seconds = np.array([one.seconds for one in found])
    sizes = np.array([max(memory.total for memory in one.memory) for one in found])
    return estimate().seconds[chosen] / seconds - 1, estimate().bytes[chosen] / sizes - 1, chosen


def assert_as_by_events(base: Run, some: Plans, of_seconds: float) -> None:
    system = load_system("selene")
    found = ClosedForm(base, VOCAB, system, GPUS).estimate(some)
    for i in range(len(some)):
        run = system.habits.of(some.run(i, base))
        one = predict(run, VOCAB, system, stages=system.habits.stages_of(run))
        assert found.seconds[i] == pytest.approx(one.seconds, rel=of_seconds)
        assert found.bytes[i] == pytest.approx(max(memory.total for memory in one.memory), rel=0.12)


def test_layers_that_share_weights_are_estimated_as_other_layers() -> None:
    base = replace(BASE, model=replace(BASE.model, shared_layers=True))
    own = every(base.model, GPUS, BATCH, node=2)
    assert set(own["pp"].tolist()) == {1}
    assert_as_by_events(base, own.take(np.random.default_rng(1).choice(len(own), 4 * SOME, replace=False)), 0.01)


@pytest.mark.parametrize(("layers", "period"), [(24, 2), (24, 3), (16, 4)])
def test_of_layers_some_of_which_have_experts_stages_have_as_many_of_each_kind(layers: int, period: int) -> None:
    base = replace(BASE, model=replace(BASE.model, num_layers=layers, experts=8, experts_every=period))
    own = every(base.model, GPUS, BATCH, node=2, sharing=1)
    stages = set((own["pp"] * own["chunks"]).tolist())
    assert all(layers % (one * period) == 0 for one in stages)
    assert max(stages) == layers // period
    pipelines = np.flatnonzero((own["microbatch"] <= 4) & (own["pp"] > 1))
    assert_as_by_events(base, own.take(np.random.default_rng(1).choice(pipelines, 4 * SOME, replace=False)), 0.04)


def test_seconds_are_those_of_events_and_bytes_those_of_a_whole_rank() -> None:
    seconds, sizes, _ = both()
    assert np.abs(seconds).mean() < 0.01
    assert np.abs(seconds).max() < 0.06
    assert np.abs(sizes).mean() < 0.02
    assert np.abs(sizes).max() < 0.12


@pytest.mark.parametrize("name", ["internevo", "dgx_h100"])
def test_broadcasts_of_tensors_and_larger_buckets_are_those_of_events(name: str) -> None:
    system = load_system(name)
    alike = (plans()["zero_stage"] == 1) & (plans()["microbatch"] <= 4) & (plans()["dp"] >= 8)
    chosen = np.random.default_rng(2).choice(np.flatnonzero(alike), 3, replace=False)
    runs = [system.habits.of(plans().run(i, BASE)) for i in chosen]
    found = [predict(run, VOCAB, system, stages=system.habits.stages_of(run)) for run in runs]
    seconds = np.array([one.seconds for one in found])
    assert np.abs(ClosedForm(BASE, VOCAB, system, GPUS).estimate(plans()).seconds[chosen] / seconds - 1).max() < 0.06


def test_the_best_plan_is_among_the_best_that_are_estimated() -> None:
    off, _, chosen = both()
    estimated = estimate().seconds[chosen]
    best = np.argmin(estimated / (1 + off))
    assert np.argsort(estimated).tolist().index(best) < 3


@pytest.mark.parametrize("kind", NAMES["cp_attention"])
def test_so_where_ranks_share_sequences(kind: str) -> None:
    base, system = replace(BASE, model=replace(BASE.model, dropout=0.0)), load_system("dgx_h100")
    of = every(base.model, GPUS, BATCH)
    is_kind = of["cp_attention"] == NAMES["cp_attention"].index(kind)
    few = (of["tp"] < 4) & (of["zero_stage"] < 2) & (of["microbatch"] < 4)
    some = of.take(np.random.default_rng(3).choice(np.flatnonzero(few & is_kind & (of["cp"] > 1)), 12, replace=False))
    estimated = ClosedForm(base, VOCAB, system, GPUS).estimate(some)
    for i, seconds in enumerate(estimated.seconds):
        run = system.habits.of(some.run(i, base))
        found = predict(run, VOCAB, system, stages=system.habits.stages_of(run))
        assert seconds == pytest.approx(found.seconds, rel=0.06)
        assert estimated.bytes[i] == pytest.approx(max(one.total for one in found.memory), rel=0.12)


def test_a_plan_alone_is_estimated_as_among_others() -> None:
    _, _, chosen = both()
    for i in chosen[::10]:
        one = ClosedForm(BASE, VOCAB, load_system("selene"), GPUS).estimate(plans().take(slice(i, i + 1)))
        assert one.seconds == pytest.approx(estimate().seconds[i : i + 1])
        assert one.bytes == pytest.approx(estimate().bytes[i : i + 1])


def test_all_of_them_are_positive_numbers() -> None:
    assert len(estimate().seconds) == len(estimate().bytes) == len(plans())
    assert np.isfinite(estimate().seconds).all()
    assert (estimate().seconds > 0).all()
    assert (estimate().bytes > 0).all()


def test_overlap_slows_by_no_more_than_what_the_closed_form_leaves_out() -> None:
    for knob in ("overlap_grad_reduce", "overlap_param_gather", "overlap_input_grad_reduce"):
        rows = plans().take(np.flatnonzero(plans()[knob] == 0)[::9])
        faster = Plans({**rows.columns, knob: np.ones(len(rows), dtype=np.int32)})
        assert (form().estimate(faster).seconds <= form().estimate(rows).seconds * 1.002).all()


def bytes_off(name: str, model: str, gpus: int, batch: int, **values: int) -> np.ndarray:
    """Estimates of some plans' bytes on a system with its own size of buckets over what events say, less 1."""
    system = load_system(name)
    bucket = system.defaults.get("plan.bucket_bytes", BASE.plan.bucket_bytes)
    base = replace(BASE, model=named(model), plan=replace(BASE.plan, bucket_bytes=bucket))
    base = replace(base, train=replace(base.train, global_batch=batch), fp32_gradients=False)
    of, vocab = every(base.model, gpus, batch, node=8, sharing=1), base.model.vocab_size or 0
    fixed = {"sequence_parallel": 0, "offload_activations": 0, "offload_optimizer": 0, "partition_activations": 0}
    chosen = [of[knob] == value for knob, value in (fixed | values).items()]
    some = of.take(np.random.default_rng(4).permutation(np.flatnonzero(np.logical_and.reduce(chosen)))[:10])
    found = ClosedForm(base, vocab, system, gpus).estimate(some).bytes
    runs = [system.with_scores(system.habits.of(some.run(i, base))) for i in range(len(some))]
    live, parts = system.habits.live_parameters, [parts_of(system, run, vocab) for run in runs]
    each = zip(runs, parts, strict=True)
    ranks = [memory_of_ranks(run, vocab, run.model.seq_len, parts=of, live=live) for run, of in each]
    return found / [max(memory.total for memory in each) for each in ranks] - 1


def parts_of(system: System, run: Run, vocab: int) -> tuple[Stage, ...]:
    return stages_of(run, vocab, system.habits.stages_of(run))


@pytest.mark.parametrize("name", ["fms_h100", "h100_hbm2e", "jean_zay"])
@pytest.mark.parametrize("schedule", range(len(NAMES["schedule"])))
def test_buckets_of_whole_stages_need_as_much_as_by_events(name: str, schedule: int) -> None:
    off = bytes_off(name, "ptdp-7.5b", 16, 32, zero_stage=2, pp=2, schedule=schedule)
    assert np.abs(off).mean() < 0.08
    assert off.min() > -0.2


def test_a_bucket_that_is_widened_for_its_update_counts() -> None:
    assert (
        np.abs(bytes_off("fms_h100", "ptdp-7.5b", 16, 16, zero_stage=0, tp=2, microbatch=1, recompute=2)).max() < 0.03
    )


@pytest.mark.parametrize("schedule", [NAMES["schedule"].index(name) for name in ("one_f_one_b", "zb_h1")])
def test_few_microbatches_in_a_deep_pipeline_need_as_much_as_by_events(schedule: int) -> None:
    off = bytes_off("selene", "llama-2-13b", 32, 16, pp=16, microbatch=8, schedule=schedule)
    assert np.abs(off).mean() < 0.04
    assert np.abs(off).max() < 0.12


def test_matrices_gathered_one_by_one_need_as_much_as_by_events() -> None:
    assert np.abs(bytes_off("selene_deepspeed", "ptdp-145.6b", 128, 256, zero_stage=3, tp=1, pp=1)).max() < 0.05
