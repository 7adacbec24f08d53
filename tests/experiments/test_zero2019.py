"""ZeRO's figures 2, 3 and 6 to 8: their points are the runs, printed numbers stand beside ours, and verdicts turn."""

import copy
import math
from typing import Any

import pytest

from experiments.zero2019 import zero_r, zero_throughput
from harness.experiment.comparison import Printed
from harness.experiment.experiment import Experiment
from harness.experiment.loading import load
from harness.experiment.published import published
from harness.records.record import Record
from impl.cost.activations import layer_bytes
from impl.cost.memory import memory
from impl.cost.parameters import count_parameters
from impl.cost.place import Place
from impl.cost.traffic import state_traffic
from impl.run import Run
from tests.experiments import as_printed
from tests.experiments.as_printed import ABSENT, NO, YES, at_rate, collectives, fast, simulated
from tests.experiments.as_printed import turned as verdicts
from tests.harness.made_up_records import record_of

THROUGHPUT, ZERO_R = load("zero_throughput"), load("zero_r")
GPU: dict[str, Any] = {"device": "cuda", "device_name": "Tesla V100-SXM3-32GB", "tier": "paper"}


def bars(*figures: str) -> list[Printed]:
    """Rows of figures, those of rates only in figures 2 and 3."""
    rows = [row for row in published("zero2019").to_dict("records") if row["where"] in figures]
    return [row for row in rows if row["unit"] not in ("times", "TFLOP/s")]


def made(run: Run, rate: float = 1e9, **place: Any) -> Record:
    """A record of a run that has this rate of model FLOPs a device, keeps and sends what is predicted."""
    full = at_rate(record_of(run, **place), rate)
    vocab = run.model.vocabulary(257)
    traffic = state_traffic(Place(run, vocab))
    full.resolved.head_positions = run.model.seq_len
    sizes = memory(run, vocab, 0, run.model.seq_len, "cpu").as_dict()
    for rank in full.ranks:
        rank.activation_bytes = {"layer": round(layer_bytes(run))}
        rank.memory = {name: size for name, size in sizes.items() if name != "total"}
        rank.traffic = (rank.traffic or {}) | collectives(traffic)
    return full


def on_gpus(run: Run, teraflops: float) -> Record:
    """A record with a rate and nothing else."""
    return fast(run, teraflops * 1e12, **GPU)


@pytest.mark.parametrize(
    ("experiment", "figures", "count"),
    [(THROUGHPUT, ("figure 2", "figure 3"), 22), (ZERO_R, ("figure 7", "figure 8"), 13)],
    ids=lambda value: getattr(value, "id", ""),
)
def test_the_paper_tier_is_the_figures_point_by_point(
    experiment: Experiment, figures: tuple[str, ...], count: int
) -> None:
    rows, runs = bars(*figures), experiment.runs["paper"]
    assert len(rows) == len(runs) == count
    for row, run in zip(rows, runs, strict=True):
        plan, model = run.plan, run.model
        assert (plan.tp, plan.pp, plan.dp, plan.world_size) == (row["tp"], row["pp"], row["dp"], row["gpus"])
        assert (run.train.global_batch, run.microbatches, plan.recompute) == (row["global_batch"], 1, "full")
        billions = float(row["note"].partition("B:")[0])
        assert count_parameters(model) / 1e9 == pytest.approx(billions, rel=0.05)
        assert plan.zero_stage == {"megatron": 0, "zero": 2, "c1": 1, "c2": 1}.get(row["quantity"].split("_")[-1], 2)
        assert plan.partition_activations == (plan.tp > 1 and row["quantity"][-2:] not in ("on", "c1", "c3"))
        assert plan.offload_activations == row["quantity"].endswith("c5")


def test_printed_speedups_are_those_of_the_printed_rates() -> None:
    drawn = published("zero2019", "speedup_over_megatron").to_dict("records")
    ours = [one for one in zero_throughput.PAPER.values() if "published_speedup" in one.printed]
    assert len(drawn) == 9
    for row in drawn:
        same = [one.printed["published_speedup"] for one in ours if one.model == f"GPT {row['note'].partition(':')[0]}"]
        assert any(one == pytest.approx(row["value"], rel=0.05) for one in same), row


def test_printed_totals_are_the_printed_rates_times_the_gpus() -> None:
    totals = published("zero2019", "aggregate_flop_rate_zero").to_dict("records")
    for total, row in zip(totals, bars("figure 3"), strict=True):
        assert total["value"] == pytest.approx(row["value"] * row["gpus"], rel=0.01)


def test_throughput_table_has_every_printed_rate_beside_ours_or_below() -> None:
    assert THROUGHPUT.table is not None
    below = THROUGHPUT.table([made(run) for run in THROUGHPUT.runs["smoke"]]).frame
    assert sum(not math.isnan(rate) for rate in below["published_rate"]) == 22
    runs = THROUGHPUT.runs["paper"]
    rates = [row["value"] for row in bars("figure 2", "figure 3")]
    beside = THROUGHPUT.table([on_gpus(run, rate) for run, rate in zip(runs, rates, strict=True)]).frame
    assert len(beside) == 22
    for name in ("speedup", "scaling"):
        assert list(beside[name]) == pytest.approx(list(beside[f"published_{name}"]), nan_ok=True)


def test_throughput_verdicts() -> None:
    runs = THROUGHPUT.runs["paper"]
    rates = [row["value"] for row in bars("figure 2", "figure 3")]
    printed = [on_gpus(run, rate) for run, rate in zip(runs, rates, strict=True)]
    assert verdicts(THROUGHPUT, printed) == [YES] * 4 + [ABSENT]
    level = [on_gpus(run, 30 / run.plan.dp**0.1) for run in runs]
    assert verdicts(THROUGHPUT, level)[1:4] == [NO] * 3
    smoke = [made(run, 2e9 if run.plan.zero_stage else 1e9) for run in THROUGHPUT.runs["smoke"]]
    assert verdicts(THROUGHPUT, smoke) == [YES, ABSENT, NO, ABSENT, YES]
    smoke, twice = (copy.deepcopy(smoke) for _ in range(2))  # rows of the same records are made once
    for record in smoke:
        if record.run.plan.zero_stage == 3 and (traffic := record.ranks[0].traffic):
            traffic["dp"]["all_gather"].bytes *= 2
    assert verdicts(THROUGHPUT, smoke)[4] == NO
    for one in (one for record in twice for one in (record.ranks[0].traffic or {}).get("dp", {}).values()):
        one.bytes *= 2
    assert verdicts(THROUGHPUT, twice)[4] == NO, "all stages alike, but twice the parameters' bytes"


def test_configurations_are_table_3s() -> None:
    runs = ZERO_R.runs["smoke"][:5]
    assert [zero_r.configuration(run) for run in runs] == list(zero_r.CONFIGURATIONS)
    assert [run.plan.zero_stage for run in runs] == [1, 1, 2, 2, 2]
    assert [run.plan.partition_activations for run in runs] == [False, True, False, True, True]


def test_zero_r_table_and_verdicts() -> None:
    smoke = [made(run, 0.9e9 if run.plan.offload_activations else 1e9, cores=2) for run in ZERO_R.runs["smoke"]]
    assert ZERO_R.table is not None
    shown = ZERO_R.table(smoke).frame
    assert sum(not math.isnan(size) for size in shown["cached"]) == 7
    assert sum(not math.isnan(rate) for rate in shown["published_rate"]) == 6
    assert list(shown["memory_bytes"][:5]) == pytest.approx(list(shown["predicted_memory_bytes"][:5]))
    assert verdicts(ZERO_R, smoke) == [YES] * 3 + [ABSENT] * 2
    smoke = copy.deepcopy(smoke)  # rows of the same records are made once
    for rank in (rank for record in smoke[3:] for rank in record.ranks):
        assert rank.memory
        assert rank.activation_bytes
        rank.memory["rest"] *= 3
        rank.activation_bytes["layer"] += 8
    assert verdicts(ZERO_R, smoke)[:3] == [NO] * 3


def test_figure_8_is_reproduced_by_its_own_rates() -> None:
    every = zero_r.in_print().items()
    rates = {run: one.printed["published_rate"] for run, one in every if "published_rate" in one.printed}
    assert verdicts(ZERO_R, [fast(run, rate, **GPU) for run, rate in rates.items()])[4] == YES
    assert verdicts(ZERO_R, [on_gpus(run, 20) for run in rates])[4] == NO


def test_the_largest_models_are_held_against_figure_6(monkeypatch: pytest.MonkeyPatch) -> None:
    some = [simulated(ZERO_R.runs["paper"][0], device=GPU["device_name"])]
    assert as_printed.verdicts(ZERO_R, some)[3] == NO
    drawn = lambda name: published("zero2019", f"max_model_size_{name.lower()}")["value"].item() * 1e9
    monkeypatch.setattr(zero_r, "largest", drawn)
    assert as_printed.verdicts(ZERO_R, some)[3] == YES


def test_the_largest_models_fit_their_configurations_only() -> None:
    sizes = [zero_r.largest(name) / 1e9 for name in zero_r.CONFIGURATIONS]
    drawn = [published("zero2019", f"max_model_size_c{i}")["value"].item() for i in range(1, 6)]
    assert all(size >= bar for size, bar in zip(sizes, drawn, strict=True))
    assert sorted(range(5), key=lambda i: sizes[i]) == sorted(range(5), key=lambda i: drawn[i])
