"""Our own experiments: pairs of repeats, tables of all engines and overlaps, and verdicts that turn."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from experiments.ours import MODEL_7M, MODEL_25M, cost_scaling, engines, overlap, single_device
from harness.analysis import render
from harness.analysis.tables import failures_table, scaling_table
from harness.experiment.claims import claims_table
from harness.experiment.experiment import Experiment, load
from harness.figures import figures
from harness.records.parts import Limit
from harness.records.record import Record
from impl.cost.memory import memory_of_ranks
from impl.cost.parameters import count_parameters
from impl.run import Run
from tests.experiments.as_printed import ABSENT, NO, YES, timed
from tests.harness.made_up_records import record_of
from tests.turned import turned

NAMES = ("engines", "single_device", "overlap", "redundant_compute", "cost_scaling")
Seconds = Callable[[Run], float]
H200: dict[str, Any] = {"device": "cuda", "device_name": "NVIDIA H200", "tier": "paper"}


def verdicts(experiment: Experiment, records: list[Record]) -> list[str]:
    return turned(claims_table(experiment.claims, records))


def made(run: Run, seconds: float = 0.1, **place: Any) -> Record:
    """A record of a run, or that its engine cannot do it; repeats differ a little, the same way for all engines."""
    if problems := run.problems():
        return record_of(run, status="invalid", reason=problems[0], **place)
    return record_of(run, seconds=seconds * (1 + 0.01 * run.repeat), nats=2.5, **place)


def small(name: str, seconds: Seconds = lambda _: 0.1, *, repeats: int = 3) -> list[Record]:
    """Records of the small tier on two cores."""
    runs = [run for run in load(name).runs["small"] if run.repeat < repeats]
    return [made(run, seconds(run), cores=2, tier="small") for run in runs]


@pytest.mark.parametrize("name", NAMES)
def test_small_runs_have_at_most_two_ranks(name: str) -> None:
    most = {"single_device": 1, "cost_scaling": 8}  # that one asks what ranks do that share cores
    small_worlds = [run.plan.world_size for tier in ("smoke", "small") for run in load(name).runs[tier]]
    assert max(small_worlds) == most.get(name, 2)


@pytest.mark.parametrize("name", NAMES)
def test_large_runs_fit_the_gpus_they_are_for(name: str) -> None:
    room = 80e9 if "80 GB" in load(name).cost["paper"] else 141e9
    for run in load(name).runs["paper"]:
        if run.engine == "native" and run.repeat == 0:
            ranks = memory_of_ranks(run, run.model.vocabulary(1), run.model.seq_len)
            assert max(rank.total for rank in ranks) < room, (run.model, run.plan, run.train)


@pytest.mark.parametrize("name", NAMES)
def test_crowded_ranks_say_nothing_of_speed(name: str) -> None:
    crowded = [replace(full, run=replace(full.run, threads=9)) for full in small(name, repeats=1)]
    of_speed = {
        "engines": slice(2, 6),
        "single_device": slice(0, 5),
        "overlap": slice(0, 3),
        "redundant_compute": slice(0, 4),
        "cost_scaling": slice(0, 2),
    }
    assert set(verdicts(load(name), crowded)[of_speed[name]]) == {ABSENT}
    table = load(name).table
    assert table is not None
    assert set(table(crowded).frame["mark"]) == {"†"}


def ours_takes(share: float) -> Seconds:
    """Of what peers take."""
    return lambda run: 0.1 * (share if run.engine == "native" else 1.0)


def test_engines_table_has_every_plan_and_says_who_cannot() -> None:
    assert engines.EXPERIMENT.table is not None
    table = engines.EXPERIMENT.table(found := small("engines", ours_takes(0.8)))
    rows = {(row["plan"], row["precision"]): row for row in table.frame.to_dict("records")}
    assert len(rows) == 9 * 2
    assert [row["ratio"] for row in rows.values()] == pytest.approx([0.8] * len(rows))
    assert rows["tp", "fp32"]["deepspeed_rate"] == "invalid"
    assert rows["zero 3", "bf16"]["native_rate"] == pytest.approx(1.25 * rows["zero 3", "bf16"]["deepspeed_rate"])
    assert all(row["n"] == 3 for row in rows.values())
    assert "invalid" in render.markdown(table)
    assert "invalid" in render.csv(table)
    problems = {problem for run in engines.EXPERIMENT.runs["small"] for problem in run.problems()}
    assert {row["reason"] for row in failures_table(found).frame.to_dict("records")} == problems


def test_engines_verdicts_on_speed() -> None:
    judged = lambda seconds, repeats=1: verdicts(load("engines"), small("engines", seconds, repeats=repeats))[2:6]
    assert judged(ours_takes(0.8)) == [YES] * 4
    assert judged(ours_takes(0.92)) == [YES, NO, NO, YES]
    assert judged(ours_takes(0.97)) == [YES, NO, NO, NO]
    assert judged(ours_takes(1.1)) == [NO] * 4
    one_slower = lambda run: 0.2 if run.engine == "native" and run.plan.zero_stage == 2 else 0.08
    assert judged(one_slower)[0] == NO
    noisy = lambda run: 0.1 * (1 + (0.02 if run.engine == "native" else 0) * (run.repeat - 0.5))
    assert judged(noisy, 2)[0] == YES  # above 1 on average, but the interval reaches below


def test_engines_verdicts_on_losses_and_memory() -> None:
    def judged(change: Callable[[Record], None], **of: Any) -> list[str]:
        found = small("engines", ours_takes(0.8), repeats=1)
        for full in found:
            if full.status == "ok" and of.items() <= {**vars(full.run), **vars(full.run.plan)}.items():
                change(full)
        return [v for i, v in enumerate(verdicts(load("engines"), found)) if i in (0, 1, 6)]

    def off_by(share: float) -> Callable[[Record], None]:
        def change(full: Record) -> None:
            full.steps[7].loss = (full.steps[7].loss or 0) * (1 + share)

        return change

    def hoard(full: Record) -> None:
        full.ranks[1].peak_memory_bytes = round(1.05 * (full.ranks[1].peak_memory_bytes or 0))

    assert judged(lambda _: None) == [YES] * 3
    assert judged(off_by(5e-6), precision="fp32", engine="torch") == [YES] * 3
    assert judged(off_by(2e-5), precision="fp32", engine="torch", pp=2) == [NO, YES, YES]
    assert judged(off_by(2e-3), precision="bf16", engine="deepspeed", zero_stage=2) == [YES, NO, YES]
    assert judged(off_by(math.nan), precision="fp32", engine="torch")[0] == NO
    assert judged(hoard, engine="native", zero_stage=3) == [YES, YES, NO]
    assert judged(hoard, engine="native", zero_stage=0) == [YES] * 3


def at_rate(rate: Callable[[Run], float], run: Run, **place: Any) -> Record:
    """A record whose device reaches this rate, what is recomputed counted."""
    full = made(run, **place)
    return timed(full, full.flops_per_step(recomputed=True) / rate(run)) if full.status == "ok" else full


def on_h200(mfu: Callable[[Run], float]) -> list[str]:
    runs = [r for r in load("single_device").runs["paper"] if r.compile and r.engine != "deepspeed"]
    found = [at_rate(lambda run: mfu(run) * 989e12, run, **H200) for run in runs if not run.plan.zero_stage]
    return verdicts(load("single_device"), found)


def test_single_device_verdicts_on_a_gpu() -> None:
    assert on_h200(lambda run: 0.6 if run.engine == "native" else 0.5) == [YES, YES, ABSENT, ABSENT, YES]
    assert on_h200(lambda run: 0.5 if run.engine == "native" else 0.4)[:2] == [NO, YES]
    best_is_eight = lambda run: 0.6 if run.engine == "native" and run.train.microbatch == 8 else 0.3
    assert on_h200(best_is_eight)[:2] == [YES, YES]
    full_is_slow = lambda run: 0.4 if run.plan.recompute == "full" else 0.57 if run.engine == "native" else 0.58
    assert on_h200(full_is_slow) == [YES, NO, ABSENT, ABSENT, NO]


def on_cpu(share: float, limit: float) -> list[str]:
    """Where our step takes this share of a peer's, and products and attention alone this share of our step."""
    found = []
    for run in load("single_device").runs["small"]:
        full = at_rate(lambda run: 1e11 / (share if run.engine == "native" else 1.0), run, cores=2, tier="small")
        if full.status == "ok":
            alone = limit * full.timed_seconds[0]
            full.ranks[0].limit = Limit(gemm_seconds=0.75 * alone, attention_seconds=0.25 * alone, collective_seconds=0)
        found.append(full)
    return verdicts(load("single_device"), found)


def test_single_device_verdicts_on_a_cpu() -> None:
    assert on_cpu(0.8, 0.9) == [ABSENT, ABSENT, YES, YES, YES]
    assert on_cpu(0.9, 0.7) == [ABSENT, ABSENT, NO, NO, YES]


def test_single_device_table_counts_shares_and_stands_beside_ours() -> None:
    assert single_device.EXPERIMENT.table is not None
    runs = [run for run in load("single_device").runs["small"] if run.plan.recompute != "selective"]
    rows = single_device.EXPERIMENT.table([at_rate(lambda _: 25e9, run, cores=2) for run in runs]).frame
    assert len(rows) == 6
    assert list(rows["hardware_share"]) == pytest.approx([0.5] * 6)  # made-up records have products at 50 GFLOP/s
    assert all(rows["gemm_share"][rows["recompute"] == "full"] < 0.4)
    torch = rows[rows["engine"] == "torch"]
    assert list(torch["over_native"]) == pytest.approx([1.0] * 2)
    assert all(math.isnan(ratio) for ratio in rows["over_native"][rows["engine"] == "native"])


def test_overlap_table_and_verdicts() -> None:
    pays = lambda run: 0.1 if all(getattr(run.plan, name) for name in overlap.OVERLAPS) else 0.11
    assert overlap.EXPERIMENT.table is not None
    rows = overlap.EXPERIMENT.table(small("overlap", pays)).frame
    assert len(rows) == 2 * (4 + 3 + 2)
    assert list(rows["ratio"]) == pytest.approx([0.1 / 0.11] * len(rows))
    assert verdicts(load("overlap"), small("overlap", pays)) == [YES] * 4
    for i, name in enumerate(overlap.OVERLAPS):
        costs = lambda run, name=name: 0.1 if getattr(run.plan, name) else 0.09
        expected = [YES] * 4
        expected[i] = NO
        assert verdicts(load("overlap"), small("overlap", costs, repeats=1)) == expected
    different = small("overlap", pays, repeats=1)
    different[0].steps[5].loss = (different[0].steps[5].loss or 0) + 1e-12
    assert verdicts(load("overlap"), different) == [YES, YES, YES, NO]


def cost(factor: Callable[[Run], float] = lambda _: 1.0) -> list[Record]:
    """Time as FLOPs, and for more ranks than two cores as their turns."""
    found = []
    for run in load("cost_scaling").runs["small"]:
        full = record_of(run, cores=2, tier="small")
        turns = max(1.0, run.plan.dp / 2)
        seconds = factor(run) * turns * full.flops_per_step() / 1e11 / run.plan.dp
        found.append(timed(full, seconds))
    return found


def test_cost_scaling_verdicts() -> None:
    judged = lambda factor: verdicts(load("cost_scaling"), cost(factor))
    assert judged(lambda _: 1.0) == [YES, YES]
    assert judged(lambda run: 1.1 if run.model.hidden_size == 320 else 1.0) == [YES, YES]
    assert judged(lambda run: 1.3 if run.model.hidden_size == 1280 else 1.0)[0] == NO
    assert judged(lambda run: 0.8 if run.plan.dp == 8 else 1.0) == [YES, NO]
    few = [full for full in cost() if full.run.model.hidden_size < 768]
    assert verdicts(load("cost_scaling"), few)[0] == ABSENT


def test_cost_scaling_table_and_figure_say_what_is_over_proportional() -> None:
    assert cost_scaling.EXPERIMENT.table is not None
    table = cost_scaling.EXPERIMENT.table(found := cost(lambda run: run.model.hidden_size**0.1))
    rows = table.frame.to_dict("records")
    assert [round(row["parameters"] / 1e6) for row in rows] == [8, 25, 85, 202, 394]
    assert math.prod(1 + row["over"] for row in rows) == pytest.approx(1.0)
    assert [row["over"] for row in rows] == sorted(row["over"] for row in rows)
    assert figures.lines(table) is not None
    marked = scaling_table(found).frame
    assert set(marked["ranks"][marked["mark"] == "†"]) == {4, 8}
    assert all(math.isnan(one) for one in marked["efficiency"][marked["mark"] == "†"])


def test_models_have_the_parameters_they_are_named_by() -> None:
    assert [count_parameters(model).total / 1e9 for model, _ in single_device.LARGE] == pytest.approx(
        [1.2, 2.5, 2.9], rel=0.06
    )
    assert 22e6 < count_parameters(MODEL_25M).total < 28e6
    assert 6e6 < count_parameters(MODEL_7M).total < 8e6
