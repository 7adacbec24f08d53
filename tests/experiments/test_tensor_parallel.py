"""Tensor-parallel scaling and attention heads: the paper's shapes and numbers beside ours, and verdicts that turn."""

from collections.abc import Callable
from typing import Any

import pytest

from experiments.megatron2019 import MODELS
from harness.experiment.experiment import TIERS
from harness.experiment.loading import load
from harness.experiment.published import published
from harness.records.record import Record
from impl.cost.parameters import count_parameters
from impl.run import Run
from tests.experiments.as_printed import at_rate
from tests.experiments.as_printed import turned as verdicts
from tests.harness.made_up_records import record_of

SCALING = load("tensor_parallel_scaling")
HEADS = load("attention_heads")
GPU: dict[str, Any] = {"device": "cuda", "device_name": "Tesla V100-SXM3-32GB-H", "tier": "paper"}
ALONE = 39e12
"""FLOP/s of one GPU."""


def made(run: Run, efficiency: float, **place: Any) -> Record:
    """A record of the run whose devices reach this share of one GPU's rate of model FLOPs."""
    return at_rate(record_of(run, **place), efficiency * ALONE)


def plain(run: Run) -> bool:
    return not run.plan.sequence_parallel and run.plan.overlap_input_grad_reduce


def paper(efficiency: Callable[[Run], float]) -> list[Record]:
    return [made(run, efficiency(run), **GPU) for run in SCALING.runs["paper"] if run.repeat == 0]


def as_printed(run: Run) -> float:
    """Figure 5's efficiencies."""
    figure_5 = {(1, 1): 1.0, (2, 1): 0.95, (4, 1): 0.82, (8, 1): 0.77, (1, 64): 0.96, (2, 64): 0.83, (4, 64): 0.79}
    return figure_5.get((run.plan.tp, run.plan.dp), 0.74)


@pytest.mark.parametrize("tier", TIERS)
def test_parameters_on_a_rank_stay_about_the_same(tier: Any) -> None:
    counts = {tp: count_parameters(model, 51200 if tier == "paper" else 257) / tp for tp, model in MODELS[tier].items()}
    assert all(0.8 < count / counts[1] < 1.25 for count in counts.values())


def test_the_paper_tier_is_table_1() -> None:
    shapes = {
        tp: (m.num_layers, m.hidden_size, m.num_heads, m.seq_len, m.vocab_size) for tp, m in MODELS["paper"].items()
    }
    assert shapes == {
        1: (40, 1536, 16, 1024, 51200), 2: (54, 1920, 20, 1024, 51200), 4: (64, 2304, 24, 1024, 51200),
        8: (72, 3072, 32, 1024, 51200),
    }  # fmt: skip
    for row in published("megatron2019", "weak_scaling_efficiency").query("where == 'figure 5'").to_dict("records"):
        asked = (row["tp"], row["dp"], row["global_batch"])
        runs = [r for r in SCALING.runs["paper"] if (r.plan.tp, r.plan.dp, r.train.global_batch) == asked and plain(r)]
        assert [r for r in runs if r.model == MODELS["paper"][row["tp"]]], asked


def test_every_published_efficiency_stands_beside_ours() -> None:
    assert SCALING.table is not None
    rows = SCALING.table(paper(as_printed)).frame.dropna(subset="published").to_dict("records")
    beside = {(row["grows"], row["ranks"]): (row["published"], row["efficiency"]) for row in rows}
    assert len(rows) == len(beside) == 8
    assert all(ours == pytest.approx(printed, abs=0.001) for printed, ours in beside.values())
    assert (beside["model", 8][0], beside["model and data", 512][0]) == (0.77, 0.74)


def test_the_table_says_what_is_whole_on_every_rank() -> None:
    assert SCALING.table is not None
    first, second = (
        run
        for run in SCALING.runs["smoke"]
        if run.model == MODELS["smoke"][1] and run.plan.tp in (1, 2) and run.plan.dp == 1
    )
    shown = SCALING.table([made(first, 0.5), made(second, 0.4)])
    one, two = shown.frame.to_dict("records")
    assert one["whole_state_bytes"] == two["whole_state_bytes"] > 0
    assert two["split_state_bytes"] < 0.6 * one["split_state_bytes"]
    notes = " ".join(shown.notes)
    assert all(word in notes for word in ("LayerNorms", "position embedding", "row-parallel", "padding"))


def test_verdicts_on_the_papers_own_numbers_are_that_they_are_reproduced() -> None:
    assert verdicts(SCALING, paper(as_printed)) == ["reproduced"] * 5 + ["not run here"] * 3


@pytest.mark.parametrize(
    ("changed", "claim"),
    [
        (lambda run: 0.96 if run.plan.tp == 4 else None, 0),
        (lambda run: 0.70 if run.plan.tp == 8 and run.plan.dp == 1 else None, 1),
        (lambda run: 0.60 if run.plan.world_size == 512 else None, 2),
        (lambda run: 1.5 if run.plan.world_size == 1 else None, 3),
        (lambda run: 0.60 if run.plan.world_size == 512 else None, 4),
    ],
)
def test_every_verdict_can_turn(changed: Callable[[Run], float | None], claim: int) -> None:
    records = paper(lambda run: changed(run) or as_printed(run))
    assert verdicts(SCALING, records)[claim] == "not reproduced"


@pytest.mark.parametrize(("faster", "expected"), [(1.1, "reproduced"), (0.9, "not reproduced")])
def test_choices_are_judged_where_both_ways_were_measured(faster: float, expected: str) -> None:
    def rate(run: Run) -> float:
        plan = run.plan
        return faster if plan.sequence_parallel else 1.0 if plan.overlap_input_grad_reduce else 1.0 / faster

    made_up = [made(run, rate(run), cores=64) for run in SCALING.runs["small"] if run.repeat == 0]
    assert verdicts(SCALING, made_up)[6:] == [expected] * 2


def test_states_that_do_not_fall_are_told() -> None:
    records = [made(run, 0.5) for run in SCALING.runs["smoke"]]
    assert verdicts(SCALING, records)[5] == "reproduced"
    states = records[-1].ranks[0].state_bytes
    assert states is not None
    states["whole"] += 1
    assert verdicts(SCALING, records)[5] == "not reproduced"


def test_oversubscribed_and_missing_points_are_not_run_here() -> None:
    crowded = [made(run, 0.5, cores=1) for run in SCALING.runs["smoke"]]
    assert verdicts(SCALING, crowded) == ["not run here"] * 5 + ["reproduced"] + ["not run here"] * 2
    first = [made(run, 0.5) for run in SCALING.runs["smoke"] if run.plan.world_size == 1]
    assert verdicts(SCALING, first) == ["not run here"] * 8


def heads(efficiencies: dict[int, float]) -> list[Record]:
    first, *rest = (run for run in HEADS.runs["paper"] if run.repeat == 0)
    return [made(first, 1.0, **GPU), *(made(run, efficiencies[run.model.num_heads], **GPU) for run in rest)]


def test_heads_stand_beside_table_7() -> None:
    assert HEADS.table is not None
    rows = HEADS.table(heads({16: 0.82, 24: 0.80, 32: 0.77})).frame.to_dict("records")
    assert [(row["heads"], row["head_size"], row["published"]) for row in rows[1:]] == [
        (16, 192, 0.82), (24, 128, 0.80), (32, 96, 0.77),
    ]  # fmt: skip
    small = [made(run, 0.5) for run in HEADS.runs["smoke"]]
    rows = HEADS.table(small).frame.to_dict("records")
    assert [(row["heads"], row["published"]) for row in rows[1:]] == [(4, 0.82), (6, 0.80), (8, 0.77)]


def test_verdicts_on_heads() -> None:
    assert verdicts(HEADS, heads({16: 0.82, 24: 0.80, 32: 0.77})) == ["reproduced"] * 2
    assert verdicts(HEADS, heads({16: 0.82, 24: 0.80, 32: 0.81})) == ["not reproduced", "reproduced"]
    assert verdicts(HEADS, heads({16: 0.92, 24: 0.80, 32: 0.77})) == ["reproduced", "not reproduced"]
    assert verdicts(HEADS, [made(run, 0.5) for run in HEADS.runs["smoke"]]) == ["not reproduced", "not run here"]
