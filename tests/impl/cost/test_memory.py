"""Memory formulas against the papers, and against what a rank really holds."""

from dataclasses import replace
from itertools import cycle, pairwise, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.experiment.published import published
from impl.cost.buffers import gathered_elements
from impl.cost.memory import StateBytes, memory_of_ranks, model_state_bytes, state_bytes
from impl.cost.place import Place, ranks_of_stages
from impl.instruments import state_bytes as counted_state_bytes
from impl.model.config import ModelConfig, padded_vocabulary
from impl.model.sizes import named
from impl.pipeline.schedules import SCHEDULES
from impl.plan import Plan, ZeroStage
from impl.recipe import Recipe
from impl.run import Precision, Run
from impl.train import Trainer
from tests.impl.on_ranks import on_ranks
from tests.impl.pipeline import own_schedule

MODEL = ModelConfig(num_layers=2, hidden_size=64, num_heads=4, seq_len=32, dropout=0.1)


def held_here(one: Trainer) -> tuple[int, StateBytes]:
    """Pipeline rank, and its states after a step."""
    one.step(0)
    return one.pp_group.rank(), counted_state_bytes(one)


STATES: list[tuple[Plan, Precision]] = [
    *product([Plan(), Plan(tp=2)], ("fp64", "fp32", "bf16", "fp16")),
    (Plan(tp=4), "bf16"),
    (Plan(pp=2), "fp32"),
    (Plan(pp=4, schedule="gpipe"), "bf16"),
    (Plan(pp=2, schedule="interleaved", chunks=3), "fp64"),
    (Plan(pp=2, schedule="zb_h1", tp=2), "bf16"),
    (Plan(pp=3, dp=2), "bf16"),
    (Plan(pp=2, schedule="interleaved", chunks=2, tp=2, dp=2, sequence_parallel=True), "fp32"),
    # rank 0 has both ends, and the embedding once
    (Plan(pp=3, schedule=f"{own_schedule.__name__}:two_ways", chunks=2), "bf16"),
    (Plan(pp=2, schedule="v_half", chunks=2, tp=2), "fp32"),
]


def test_states_of_every_pipeline_rank_are_the_formula_to_the_byte(data: Path) -> None:
    recipe = lambda plan: Recipe(steps=1, global_batch=plan.pp * plan.dp, microbatch=1)
    models = cycle((MODEL, replace(MODEL, family="bert", norm_placement="sandwich"), MODEL))
    in_stages = lambda model, plan: replace(model, num_layers=plan.pp * plan.chunks + 1)
    runs = [
        Run(model=in_stages(model, plan), plan=plan, train=recipe(plan), precision=kind)
        for (plan, kind), model in zip(STATES, models, strict=False)
    ]
    for run, ranks in on_ranks(held_here, runs, data).items():
        vocab_size, of_rank = run.model.vocabulary(257), {}
        for pp_rank, states in ranks:
            stages = Place(run, vocab_size, pp_rank).stages
            expected = state_bytes(run.model, vocab_size, tp=run.plan.tp, precision=run.precision, stages=stages)
            assert states == expected
            of_rank[pp_rank] = states
        whole = state_bytes(run.model, vocab_size, tp=run.plan.tp, precision=run.precision)
        tied = padded_vocabulary(vocab_size, run.plan.tp) // run.plan.tp * run.model.hidden_size
        first, *_, last = 2 * ranks_of_stages(run)
        twice = tied if first != last else 0
        each = {"fp64": 32, "fp32": 16, "bf16": 2 + 3 * 4 + 4, "fp16": 2 + 3 * 4 + 4}[run.precision]
        assert len(of_rank) == run.plan.pp
        assert sum(states.split for states in of_rank.values()) == whole.split + twice * each
        assert sum(states.whole for states in of_rank.values()) == whole.whole


STAGES: tuple[ZeroStage, ...] = (0, 1, 2, 3)
PARAMETERS = {"7.5b": 7.5e9, "128b": 128e9, "1t": 1e12}


def in_zeros_precision(zero_stage: ZeroStage, dp: int) -> Run:
    """2 bytes for a gradient, as in the paper."""
    return Run(plan=Plan(zero_stage=zero_stage, dp=dp), precision="fp16", fp32_gradients=False)


def test_model_states_are_zeros_table_1_and_figure_1() -> None:
    rows = [row for row in published("zero2019").to_dict("records") if row["where"] in ("table 1", "figure 1")]
    for row in rows:
        _, _, size, _, stage = row["quantity"].split("_")
        run = in_zeros_precision(STAGES[int(stage)], row["dp"])
        ours = model_state_bytes(run, PARAMETERS[size]) / 1e9
        decimals = len(f"{row['value']:g}".partition(".")[2])
        assert abs(ours - row["value"]) < 10**-decimals, row["quantity"]  # some are rounded, some cut off
    assert len(rows) == 54 + 4


def test_ptdps_ten_runs_fit_80_gb() -> None:
    assert len(PTDP) == 10
    for name, (tp, pp, dp, batch, microbatch, chunks) in PTDP.items():
        schedule = "interleaved" if chunks > 1 else "one_f_one_b"
        run = Run(
            model=named(name),
            plan=Plan(tp=tp, pp=pp, dp=dp, schedule=schedule, chunks=chunks, recompute="full"),
            train=Recipe(global_batch=batch, microbatch=microbatch),
            precision="fp16",
        )
        assert run.problems() == []
        ranks = memory_of_ranks(run, 51200, run.model.seq_len)
        fullest = max(ranks, key=lambda rank: rank.total)
        assert fullest.total < 0.8 * 80e9
        # what a person works out by hand: 18 bytes a parameter, and a layer's input for every microbatch in flight
        layers = -(-run.model.num_layers // pp)
        parameters = 12 * layers * run.model.hidden_size**2 / tp
        inputs = (
            2 * microbatch * run.model.seq_len * run.model.hidden_size * layers * min(pp, batch // (dp * microbatch))
        )
        assert fullest.total == pytest.approx(18 * parameters + inputs, rel=0.25)


PTDP = {
    "ptdp-1.7b": (1, 1, 32, 512, 16, 1),
    "ptdp-3.6b": (2, 1, 32, 512, 16, 1),
    "ptdp-7.5b": (4, 1, 32, 512, 16, 1),
    "ptdp-18.4b": (8, 1, 32, 1024, 8, 1),
    "ptdp-39.1b": (8, 2, 32, 1536, 4, 1),
    "ptdp-76.1b": (8, 4, 32, 1792, 2, 3),
    "ptdp-145.6b": (8, 8, 24, 2304, 2, 2),
    "ptdp-310.1b": (8, 16, 15, 2160, 1, 2),
    "ptdp-529.6b": (8, 35, 9, 2520, 1, 3),
    "ptdp-1t": (8, 64, 6, 3072, 1, 1),
}
"""t, p, d, batch and (from the authors' script run_table_1.sh) microbatch and chunks of table 1."""


@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([("one_f_one_b", 1, 1), ("gpipe", 2, 1), ("zb_h1", 2, 1), ("interleaved", 2, 2)]),
    st.sampled_from(["fp32", "bf16", "fp16"]),
    st.booleans(),
)
def test_dividing_and_recomputing_more_never_needs_more(
    tp: int, dp: int, pipeline: tuple[str, int, int], precision: Precision, is_split: bool
) -> None:
    schedule, pp, chunks = pipeline
    plan = Plan(tp=tp, dp=dp, pp=pp, schedule=schedule, chunks=chunks, sequence_parallel=is_split and tp > 1)
    model = replace(MODEL, num_layers=5, vocab_size=512)
    recipe = Recipe(global_batch=4 * dp, microbatch=1)
    run = Run(model=model, plan=plan, train=recipe, precision=precision)
    with_plan = lambda **changed: memory_of_ranks(replace(run, plan=replace(plan, **changed)), 512, model.seq_len)
    by_stage = [with_plan(zero_stage=stage) for stage in STAGES]
    padding = 16 * 16 * dp * tp * 5 * 12  # bytes: every parameter's, at the worst
    for less, more in pairwise(by_stage):
        for a, b in zip(less, more, strict=True):
            assert b.states <= a.states + padding
    offloaded = with_plan(offload_optimizer=True)
    for none, selective, full, there in zip(
        by_stage[0], with_plan(recompute="selective"), with_plan(recompute="full"), offloaded, strict=True
    ):
        assert none.activations >= selective.activations >= full.activations
        assert none.states == selective.states == full.states
        assert (there.optimizer, there.host >= none.optimizer) == (0, True)


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [(name, 2 if name in ("interleaved", "zbv", "v_half", "v_min", "dualpipe_v") else 1) for name in SCHEDULES],
)
@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_what_many_microbatches_need_a_few_show(
    schedule: str, chunks: int, zero_stage: ZeroStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(pp=3, dp=2, schedule=schedule, chunks=chunks, zero_stage=zero_stage, bucket_bytes=2**14)
    model = replace(MODEL, num_layers=7)
    run = Run(model=model, plan=plan, train=Recipe(global_batch=2 * 27, microbatch=1), precision="bf16")
    found = memory_of_ranks(run, 300, model.seq_len)
    monkeypatch.setattr("impl.cost.memory._shortened", lambda whole: whole)
    assert memory_of_ranks(run, 300, model.seq_len) == found


def test_matrices_that_are_gathered_one_by_one_are_never_more_than_whole_blocks() -> None:
    h = 1024
    model = replace(MODEL, hidden_size=h, num_layers=4, vocab_size=2 * h)

    def gathered(live: int | None, *, ahead: bool = True) -> int:
        plan = Plan(dp=2, zero_stage=3, overlap_param_gather=ahead)
        place = Place(Run(model=model, plan=plan, train=Recipe(global_batch=2, microbatch=1)), model.vocab_size or 0)
        return gathered_elements(place, place.buckets, live)

    whole = gathered(None)
    assert whole >= 2 * 12 * h**2
    assert gathered(10**9) == whole, "all of it may stay"
    assert gathered(0) == 4 * h**2, "the largest alone: nothing is gathered ahead of it"
    assert gathered(2 * h**2) == (4 + 1) * h**2, "a projection, after it or before it"
    assert gathered(5 * h**2) == (4 + 4) * h**2, "both of an MLP"
    assert gathered(9 * h**2) == 9 * h**2
    assert gathered(5 * h**2, ahead=False) == 5 * h**2
