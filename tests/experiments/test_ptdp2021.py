"""PTD-P's figures: their points are the runs, printed numbers stand beside ours, and verdicts that turn."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest

from experiments.ptdp2021 import (
    end_to_end,
    interleaving,
    microbatch_size,
    pipeline_schedules,
    pipeline_versus_data,
    pipeline_weak_scaling,
    scatter_gather,
    tensor_versus_data,
    tensor_versus_pipeline,
    zero3_versus_ptdp,
)
from harness.experiment.comparison import Comparison
from harness.experiment.loading import load
from harness.experiment.published import published
from harness.records.record import Record
from impl.cost.memory import memory_of_ranks
from impl.cost.parameters import count_parameters
from impl.model.sizes import named
from impl.pipeline.schedules import build
from impl.pipeline.simulate import simulate, uniform
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from tests.experiments.as_printed import A100, ABSENT, NO, OPEN, YES, as_fast_as_printed, at_rate, fast, judged, thrice
from tests.experiments.as_printed import turned as verdicts
from tests.harness.made_up_records import record_of, with_pipeline

MODULES: dict[str, Any] = {
    module.__name__.rpartition(".")[2]: module
    for module in (
        pipeline_weak_scaling, interleaving, tensor_versus_pipeline, pipeline_versus_data, tensor_versus_data,
        microbatch_size, scatter_gather,
    )
}  # fmt: skip
FIGURES: dict[str, Comparison] = {name: module.FIGURE for name, module in MODULES.items()}
SCHEDULES = load("pipeline_schedules")
GPU: dict[str, Any] = {"device": "cuda", "device_name": A100, "tier": "paper"}


def paper(name: str, factor: Callable[[Run], float] = lambda _: 1.0) -> list[Record]:
    """Records of the figure's runs that are as fast as printed, times a factor."""
    return as_fast_as_printed(FIGURES[name], factor, fast, **GPU)


OF_PAPER: dict[str, Comparison] = {
    **FIGURES,
    "end_to_end": end_to_end.FIGURE,
    "zero3_versus_ptdp": zero3_versus_ptdp.FIGURE,
}


@pytest.mark.parametrize("name", OF_PAPER)
def test_the_paper_tier_is_the_figure_point_by_point(name: str) -> None:
    figure, runs = OF_PAPER[name], load(f"ptdp2021/{name}").runs["paper"]
    rows = published("ptdp2021").query("where == @figure.where and unit == 'TFLOP/s per GPU'").to_dict("records")
    assert len(rows) == len(runs) == len(figure.printed)
    for row, run in zip(rows, runs, strict=True):
        plan, model = run.plan, run.model
        assert (plan.tp, plan.pp, plan.dp, plan.world_size) == (row["tp"], row["pp"], row["dp"], row["gpus"])
        assert run.train.global_batch == row["global_batch"]
        shape = f"{model.num_layers} layers, hidden size {model.hidden_size}, {model.num_heads} heads"
        is_named = row["model"] and named(row["model"]).num_layers == model.num_layers
        assert is_named or shape in row["note"]
        assert (model.seq_len, model.vocab_size, run.precision, plan.recompute) == (2048, 51200, "bf16", "full")


@pytest.mark.parametrize("name", [*FIGURES, "pipeline_schedules"])
def test_small_tiers_have_two_ranks_or_four(name: str) -> None:
    experiment = load(name)
    assert max(run.plan.world_size for tier in ("smoke", "small") for run in experiment.runs[tier]) <= 4
    crowded = [run for run in experiment.runs["smoke"] if run.plan.world_size > 2]
    assert not crowded or name == "scatter_gather"


def test_models_have_the_papers_parameters() -> None:
    for name, billions in {
        "interleaving": 175, "tensor_versus_pipeline": 162.2, "pipeline_versus_data": 5.9, "tensor_versus_data": 5.9,
        "microbatch_size": 91, "scatter_gather": 175,
    }.items():  # fmt: skip
        assert count_parameters(FIGURES[name].runs[0].model) / 1e9 == pytest.approx(billions, rel=0.01)
    first, last = FIGURES["pipeline_weak_scaling"].runs[0], FIGURES["pipeline_weak_scaling"].runs[-1]
    assert count_parameters(first.model) / 1e9 == pytest.approx(15, rel=0.1)
    assert count_parameters(last.model) / 1e9 == pytest.approx(121, rel=0.02)


@pytest.mark.parametrize("name", FIGURES)
def test_every_printed_point_stands_in_the_table_beside_ours_or_below(name: str) -> None:
    figure, experiment = FIGURES[name], load(name)
    assert experiment.table is not None
    below = experiment.table(smoke(name))
    printed = [rate for rate in below.frame["published_rate"] if not math.isnan(rate)]
    assert len(printed) == len(figure.runs)
    assert any("recomputed" in note for note in below.notes)
    beside = experiment.table(paper(name)).frame
    assert len(beside) == len(figure.runs)
    assert list(beside["relative"]) == pytest.approx(list(beside["published_relative"]))
    expected = published("ptdp2021").query("where == @figure.where")["value"]
    assert sorted(beside["published_rate"] / 1e12) == pytest.approx(sorted(expected))


def test_recomputation_is_taken_out_of_printed_rates_before_they_are_related() -> None:
    printed = [one.printed for one in FIGURES["interleaving"].printed.values()]
    assert all(one["model_rate"] / one["published_rate"] == pytest.approx(0.75, abs=0.01) for one in printed)
    assert [round(one["relative"], 2) for one in printed[5:]] == [1.45, 1.23, 1.16, 1.10, 1.08]


@pytest.mark.parametrize("name", FIGURES)
def test_verdicts_on_the_papers_own_numbers(name: str) -> None:
    found = verdicts(load(name), paper(name))
    of_bytes_or_timelines = [claim.source in ("our own", "section 3.2", "section 4.1") for claim in load(name).claims]
    assert [v for v, other in zip(found, of_bytes_or_timelines, strict=True) if not other] == [YES] * (
        of_bytes_or_timelines.count(False)
    )
    assert {v for v, other in zip(found, of_bytes_or_timelines, strict=True) if other} <= {ABSENT}


TURNED: list[tuple[str, Callable[[Run], float], dict[int, str]]] = [
    ("pipeline_weak_scaling", lambda run: 2.0 if run.plan.pp == 8 else 1.0, {0: NO, 1: YES, 2: NO}),
    ("pipeline_weak_scaling", lambda run: 0.5 if run.train.global_batch == 128 and run.plan.pp == 8 else 1.0, {1: NO}),
    ("interleaving", lambda run: 0.9 if run.plan.chunks == 4 else 1.0, {0: NO, 2: NO}),
    ("interleaving", lambda run: 1.5 if run.plan.chunks == 4 and run.train.global_batch == 60 else 1.0, {1: NO}),
    ("tensor_versus_pipeline", lambda run: 1.2 if run.plan.tp == 16 else 1.0, {0: NO, 1: NO}),
    ("pipeline_versus_data", lambda run: 1.2 if run.plan.pp == 8 else 1.0, {0: NO, 1: NO}),
    ("tensor_versus_data", lambda run: 1.2 if run.plan.tp == 4 else 1.0, {0: NO, 1: NO}),
    ("microbatch_size", lambda run: 2.0 if run.train.microbatch == 8 else 1.0, {0: NO, 1: NO, 2: NO}),
    ("microbatch_size", lambda run: 1.2 if run.train.microbatch == 4 else 1.0, {0: YES, 1: NO}),
    ("scatter_gather", lambda run: 0.8 if run.plan.scatter_gather else 1.0, {1: NO, 2: NO}),
]


@pytest.mark.parametrize(("name", "factor", "expected"), TURNED)
def test_every_verdict_on_speed_can_turn(name: str, factor: Callable[[Run], float], expected: dict[int, str]) -> None:
    found = verdicts(load(name), paper(name, factor))
    assert {claim: found[claim] for claim in expected} == expected


def test_gains_below_one_by_less_than_their_noise_are_open() -> None:
    experiment = load("interleaving")
    every = thrice(paper("interleaving", lambda run: 0.6 if run.plan.chunks == 4 else 1.0))
    assert judged(experiment.claims, every)[1] == NO
    noisy = [at_rate(one, one.flop_rate * (1 + 0.3 * (one.run.repeat - 1))) for one in every]
    assert judged(experiment.claims, noisy)[1] == OPEN


def smoke(name: str, cores: int = 64) -> list[Record]:
    """Records of the smoke tier, with timelines of their schedules."""
    full = [record_of(run, cores=cores) for run in load(name).runs["smoke"]]
    return [at_rate(with_pipeline(record) if record.run.plan.pp > 1 else record, 1e9) for record in full]


@pytest.mark.parametrize("name", FIGURES)
def test_oversubscribed_and_missing_points_are_not_run_here(name: str) -> None:
    experiment = load(name)
    by_source = [
        (claim.source, v) for claim, v in zip(experiment.claims, verdicts(experiment, smoke(name, 1)), strict=True)
    ]
    one_core = {v for source, v in by_source if source not in ("section 3.2", "section 4.1")}
    ranks = {run.plan.world_size for run in experiment.runs["smoke"]}
    assert one_core == {ABSENT} or 1 in ranks
    assert set(verdicts(experiment, smoke(name)[:1])) <= {ABSENT, YES}


def test_bytes_are_judged_even_where_time_is_not() -> None:
    crowded = smoke("scatter_gather", 1)
    assert verdicts(load("scatter_gather"), crowded) == [YES, ABSENT, ABSENT]
    crowded = copy.deepcopy(crowded)  # rows of the same records are made once
    for rank in crowded[0].ranks:
        assert rank.traffic is not None
        rank.traffic["pp"]["send"].bytes += 2
    assert verdicts(load("scatter_gather"), crowded)[0] == NO
    for size, expected in ((2**40, YES), (1, NO)):
        mixed = smoke("tensor_versus_pipeline", 1)
        for rank in (rank for full in mixed for rank in full.ranks):
            if rank.traffic and "tp" in rank.traffic:
                rank.traffic["tp"]["all_reduce"].bytes = size
        assert verdicts(load("tensor_versus_pipeline"), mixed)[2] == expected


@pytest.mark.parametrize(
    ("schedule", "p", "m"),
    [
        (schedule, p, m)
        for schedule in pipeline_schedules.SCHEDULES
        for p in (2, 3, 4)
        for m in (2, 4, 8, 12)
        if schedule != "interleaved" or m % p == 0
    ],
)
def test_closed_forms_are_the_simulated_schedules(schedule: str, p: int, m: int) -> None:
    v = 2 if schedule == "interleaved" else 1
    run = Run(plan=Plan(pp=p, schedule=schedule, chunks=v), train=Recipe(global_batch=m, microbatch=1))
    timeline = simulate(build(schedule, p, m, v), uniform(chunks=v))
    assert timeline.bubble == pipeline_schedules.closed_bubble(run)
    most = max(timeline.microbatches_in_flight(rank) for rank in range(p))
    assert most == pipeline_schedules.closed_in_flight(run)


def schedules(late: float = 0.0) -> list[Record]:
    return [with_pipeline(record_of(run, seconds=0.1), late=late) for run in SCHEDULES.runs["smoke"]]


def test_schedules_stand_beside_the_closed_forms() -> None:
    assert SCHEDULES.table is not None
    rows = SCHEDULES.table(schedules()).frame.to_dict("records")
    assert [row["schedule"] for row in rows] == 2 * list(pipeline_schedules.SCHEDULES)
    for row in rows:
        assert row["bubble"] == pytest.approx(row["closed_bubble"])
        assert row["predicted_bubble"] == pytest.approx(row["closed_bubble"])
        assert row["microbatches_in_flight"] == row["closed_in_flight"]
    gpipe, one_f_one_b = rows[4:6]
    assert gpipe["in_flight_bytes"] == 4 * one_f_one_b["in_flight_bytes"]


def test_verdicts_on_schedules() -> None:
    assert verdicts(SCHEDULES, schedules()) == [YES] * 5
    assert verdicts(SCHEDULES, schedules(late=2e-3))[::4] == [NO, NO]
    for schedule, claim in {"interleaved": 1, "zb_h1": 2}.items():
        records = [with_pipeline(one, late=1e-3) if one.run.plan.schedule == schedule else one for one in schedules()]
        assert verdicts(SCHEDULES, records)[claim] == NO
    records = schedules()
    hoarder = next(i for i, full in enumerate(records) if full.run.plan.schedule == "one_f_one_b")
    records[hoarder] = with_pipeline(records[hoarder], schedule="gpipe")
    assert verdicts(SCHEDULES, records)[3] == NO


def test_schedules_that_are_crowded_are_judged_by_their_counts_only() -> None:
    crowded = [with_pipeline(record_of(run, cores=1)) for run in SCHEDULES.runs["smoke"]]
    assert verdicts(SCHEDULES, crowded) == [ABSENT] * 3 + [YES, ABSENT]
    assert verdicts(SCHEDULES, [record_of(run) for run in SCHEDULES.runs["paper"][:1]]) == [ABSENT] * 5


def test_the_papers_runs_fit_its_gpus() -> None:
    for name in (*FIGURES, "pipeline_schedules"):
        for run in load(name).runs["paper"]:
            ranks = memory_of_ranks(run, run.model.vocabulary(1), run.model.seq_len)
            assert max(rank.total for rank in ranks) < 80e9, (name, run.plan)
