"""PTD-P's table 2: its rows are the runs, printed numbers stand beside ours, and verdicts turn."""

import copy
import math
from collections.abc import Callable

import pytest

from experiments.ptdp2021.zero3_versus_ptdp import FIGURE, kept, sent_beyond_layers, zero_3
from harness.experiment.loading import load
from harness.experiment.published import published
from harness.records.parts import Collective
from harness.records.record import Record
from impl.cost.flops import hardware_flops
from impl.cost.parameters import count_parameters
from impl.cost.place import Place
from impl.cost.traffic import pipeline_traffic, state_traffic
from impl.run import Run
from tests.experiments.as_printed import A100, ABSENT, NO, YES, as_fast_as_printed, collectives, fast, turned
from tests.harness.made_up_records import record_of

EXPERIMENT = load("zero3_versus_ptdp")


def paper(factor: Callable[[Run], float] = lambda _: 1.0) -> list[Record]:
    """Records of the table's rows that are as fast as printed, times a factor."""
    return as_fast_as_printed(FIGURE, factor, fast, device="cuda", device_name=A100, tier="paper")


def on_cpu(run: Run, seconds: float) -> Record:
    """A record whose ranks have sent what the formulas say."""
    full = record_of(run, seconds=seconds)
    for i, rank in enumerate(full.ranks):
        place = Place(run, run.model.vocabulary(257), i // (run.plan.dp * run.plan.tp))
        traffic = {**state_traffic(place), **({"pp": found} if (found := pipeline_traffic(place)) else {})}
        rank.traffic = (rank.traffic or {}) | collectives(traffic)
    return full


def verdicts(records: list[Record]) -> list[str]:
    return turned(EXPERIMENT, records)


def test_the_paper_tier_is_table_2_row_by_row() -> None:
    rows = published("ptdp2021", "hardware_flop_rate").query("where == 'table 2'").to_dict("records")
    for row, run in zip(rows, FIGURE.runs, strict=True):
        assert f"microbatch {run.train.microbatch}" in row["note"]
        assert run.plan.zero_stage == (3 if row["note"].startswith("ZeRO-3") else 0)
    sizes = {round(count_parameters(run.model) / 1e9, 1) for run in FIGURE.runs}
    assert sizes == {174.6, 529.6}
    assert {run.plan.world_size for run in EXPERIMENT.runs["smoke"]} == {2}


def test_printed_days_follow_from_printed_rates() -> None:
    days = published("ptdp2021", "training_days").to_dict("records")
    rates = published("ptdp2021", "hardware_flop_rate").query("where == 'table 2'").to_dict("records")
    for run, day, rate in zip(FIGURE.runs, days, rates, strict=True):
        flops = hardware_flops("ptdp", run.model, 1, recompute="full") / run.model.seq_len * 300e9
        seconds = flops / (rate["value"] * 1e12 * rate["gpus"])
        assert seconds / 86400 == pytest.approx(day["value"], abs=1.1)


def test_every_printed_row_stands_in_the_table_beside_ours_or_below() -> None:
    assert EXPERIMENT.table is not None
    below = EXPERIMENT.table([on_cpu(run, 0.1) for run in EXPERIMENT.runs["smoke"]])
    assert sum(not math.isnan(rate) for rate in below.frame["published_rate"]) == 12
    assert all(size > 0 for size, tp in zip(below.frame["between_nodes"], below.frame["tp"], strict=True) if tp != 2)
    assert "between_nodes" in [column.key for column in below.columns]
    beside = EXPERIMENT.table(paper()).frame
    assert len(beside) == 12
    assert list(beside["relative"]) == pytest.approx(list(beside["published_relative"]))


def test_what_is_kept_of_a_rate_is_compared_at_equal_batches() -> None:
    """On 640 GPUs 530B has 2,560 sequences a step, on more it has 2,240."""
    of_models = kept(zero_3(FIGURE.known(paper())))
    assert {model: one.mean for model, one in of_models.items()} == pytest.approx(
        {"GPT 175B": 44 / 144, "GPT 530B": 48 / 98}, rel=0.02
    )


def test_by_formula_zero_3_sends_a_hundred_times_as_much_between_nodes() -> None:
    by_ranks = {(run.plan.world_size, run.plan.zero_stage): sent_beyond_layers(run, 51200) for run in FIGURE.runs[:9]}
    parameters = count_parameters(FIGURE.runs[0].model)
    assert by_ranks[384, 3] == pytest.approx((2 + 2 + 2) * parameters, rel=0.02)
    assert all(by_ranks[ranks, 3] > 20 * by_ranks[ranks, 0] for ranks in (384, 768, 1536))


TURNED: list[tuple[Callable[[Run], float], list[str]]] = [
    (lambda run: 1.0, [YES] * 4),
    (lambda run: 2.0 if run.plan.zero_stage == 3 and run.plan.dp == 768 else 1.0, [NO, NO, YES, NO]),
    (lambda run: 3.0 if run.plan.dp in (1536, 2240) else 1.0, [YES, YES, NO, NO]),
]


@pytest.mark.parametrize(("factor", "expected"), TURNED)
def test_verdicts_on_the_papers_own_numbers(factor: Callable[[Run], float], expected: list[str]) -> None:
    assert verdicts(paper(factor)) == [*expected, ABSENT]


def test_verdicts_of_small_runs() -> None:
    smoke = [on_cpu(run, 0.2 if run.plan.zero_stage else 0.1) for run in EXPERIMENT.runs["smoke"]]
    assert verdicts(smoke) == [YES, ABSENT, ABSENT, ABSENT, YES]
    smoke = copy.deepcopy(smoke)  # rows of the same records are made once
    for rank in (rank for record in smoke for rank in record.ranks):
        if rank.traffic and "dp" in rank.traffic:
            rank.traffic["dp"] = {"all_reduce": Collective(calls=1, bytes=8)}
    assert verdicts(smoke)[4:] == [NO]
