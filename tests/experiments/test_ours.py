"""Our own experiments: pairs of repeats, tables of all engines and overlaps, and verdicts that turn."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from experiments.ours import cost_scaling, engines, overlap, single_device
from harness.analysis import render
from harness.analysis.tables import failures_table, scaling_table
from harness.experiment.claims import evidence, verdict
from harness.experiment.loading import load
from harness.figures import figures
from harness.records.parts import Collective, Limit
from harness.records.record import Record
from impl.cost.memory import memory_of_ranks
from impl.run import Run
from tests.experiments.as_printed import ABSENT, NO, OPEN, PARTLY, YES, thrice, timed
from tests.experiments.as_printed import verdicts as verdicts_on
from tests.harness.made_up_records import record_of

NAMES = ("engines", "single_device", "overlap", "redundant_compute", "cost_scaling")
Seconds = Callable[[Run], float]
Change = Callable[[Record], None]
H200: dict[str, Any] = {"device": "cuda", "device_name": "NVIDIA H200", "tier": "paper"}


def verdicts(name: str, records: list[Record]) -> list[str]:
    return verdicts_on(load(name), records)


def made(run: Run, seconds: float = 0.1, **place: Any) -> Record:
    """A record of a run, or that its engine cannot do it."""
    if problems := run.problems():
        return record_of(run, status="invalid", reason=problems[0], **place)
    return record_of(run, seconds=seconds, nats=2.5, **place)


def small(name: str, seconds: Seconds = lambda _: 0.1) -> list[Record]:
    """Records of the small tier on two cores, of its first repeat."""
    runs = [run for run in load(name).runs["small"] if run.repeat == 0]
    return [made(run, seconds(run), cores=2, tier="small") for run in runs]


@pytest.mark.parametrize("name", NAMES)
def test_large_runs_fit_the_gpus_they_are_for(name: str) -> None:
    room = 80e9 if "80 GB" in load(name).cost["paper"] else 141e9
    for run in load(name).runs["paper"]:
        if run.engine == "native" and run.repeat == 0:
            ranks = memory_of_ranks(run, run.model.vocabulary(1), run.model.seq_len)
            assert max(rank.total for rank in ranks) < room, (run.model, run.plan, run.train)


@pytest.mark.parametrize("name", NAMES)
def test_crowded_ranks_are_no_evidence_of_speed(name: str) -> None:
    crowded = [replace(full, run=replace(full.run, threads=9)) for full in small(name)]
    of_speed = {
        "engines": slice(2, 6),
        "single_device": slice(0, 5),
        "overlap": slice(0, 3),
        "redundant_compute": slice(0, 4),
        "cost_scaling": slice(0, 2),
    }
    assert set(verdicts(name, crowded)[of_speed[name]]) == {ABSENT}
    table = load(name).table
    assert table is not None
    assert set(table(crowded).frame["mark"]) == {"†"}


def ours_takes(share: float) -> Seconds:
    """Of what peers take."""
    return lambda run: 0.1 * (share if run.engine == "native" else 1.0)


def test_engines_table_has_every_plan_and_the_engines_that_cannot() -> None:
    assert engines.EXPERIMENT.table is not None
    table = engines.EXPERIMENT.table(found := thrice(small("engines", ours_takes(0.8))))
    rows = {(row["plan"], row["precision"]): row for row in table.frame.to_dict("records")}
    assert len(rows) == 9 * 2
    assert [row["ratio"] for row in rows.values()] == pytest.approx([0.8] * len(rows))
    assert rows["tp", "fp32"]["deepspeed_rate"] == "invalid"
    assert rows["zero 3", "bf16"]["native_rate"] == pytest.approx(1.25 * rows["zero 3", "bf16"]["deepspeed_rate"])
    assert all(row["n"] == 3 for row in rows.values())
    assert all("invalid" in text for text in (render.markdown(table), render.csv(table)))
    problems = {problem for run in engines.EXPERIMENT.runs["small"] for problem in run.problems()}
    assert {row["reason"] for row in failures_table(found).frame.to_dict("records")} == problems


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (ours_takes(0.8), [YES] * 4),
        (ours_takes(0.92), [YES, NO, NO, YES]),
        (ours_takes(0.97), [YES, NO, NO, NO]),
        (ours_takes(1.1), [NO] * 4),
        (lambda run: ours_takes(2 if run.plan.zero_stage == 2 else 0.8)(run), [PARTLY, YES, YES, YES]),
    ],
)
def test_engines_verdicts_on_speed(seconds: Seconds, expected: list[str]) -> None:
    assert verdicts("engines", small("engines", seconds))[2:6] == expected


def off_by(share: float) -> Change:
    def change(full: Record) -> None:
        full.steps.losses[7] *= 1 + share

    return change


def hoard(full: Record) -> None:
    full.ranks[1].peak_memory_bytes = round(1.05 * (full.ranks[1].peak_memory_bytes or 0))


@pytest.mark.parametrize(
    ("change", "of", "expected"),
    [
        (off_by(5e-6), {"precision": "fp32", "engine": "torch"}, [YES, YES, YES]),
        (off_by(2e-5), {"precision": "fp32", "engine": "torch", "pp": 2}, [NO, YES, YES]),
        (off_by(math.nan), {"precision": "fp32", "engine": "torch"}, [NO, YES, YES]),
        (off_by(2e-3), {"precision": "bf16", "engine": "deepspeed", "zero_stage": 2}, [YES, NO, YES]),
        (hoard, {"engine": "native", "zero_stage": 3}, [YES, YES, PARTLY]),
        (hoard, {"engine": "native", "zero_stage": 0}, [YES, YES, YES]),
    ],
)
def test_engines_verdicts_on_losses_and_memory(change: Change, of: dict[str, Any], expected: list[str]) -> None:
    found = small("engines", ours_takes(0.8))
    for full in found:
        if full.status == "ok" and of.items() <= {**vars(full.run), **vars(full.run.plan)}.items():
            change(full)
    said = verdicts("engines", found)
    assert [*said[:2], said[6]] == expected


def test_an_interval_on_both_sides_of_the_border_decides_nothing() -> None:
    found = [one for one in thrice(small("engines", ours_takes(1.0))) if one.status == "ok"]
    noise = lambda run: (0.98 + 0.1 * (run.repeat - 1)) if run.engine == "native" else 1.0
    noisy = [timed(one, one.step_seconds * noise(one.run)) for one in found]
    [said] = [one for one in evidence(load("engines").claims, noisy)[""][2:3] if one]
    assert (said.holds, said.fails, verdict(said)) == (0, 0, OPEN)


def at_rate(rate: Callable[[Run], float], run: Run, **place: Any) -> Record:
    """A record whose device reaches this rate, what is recomputed counted."""
    full = made(run, **place)
    return timed(full, full.flops_per_step(recomputed=True) / rate(run)) if full.status == "ok" else full


@pytest.mark.parametrize(
    ("mfu", "expected"),
    [
        (lambda run: 0.6 if run.engine == "native" else 0.5, [YES, YES, YES]),
        (lambda run: 0.5 if run.engine == "native" else 0.4, [NO, YES, YES]),
        (lambda run: 0.6 if run.engine == "native" and run.train.microbatch == 8 else 0.3, [YES, YES, YES]),
        (lambda run: 0.4 if run.plan.recompute == "full" else 0.57 + 0.01 * (run.engine == "torch"), [YES, NO, PARTLY]),
    ],
)
def test_single_device_verdicts_on_a_gpu(mfu: Callable[[Run], float], expected: list[str]) -> None:
    runs = [r for r in load("single_device").runs["paper"] if r.compile and r.engine != "deepspeed"]
    found = [at_rate(lambda run: mfu(run) * 989e12, run, **H200) for run in runs if not run.plan.zero_stage]
    enough, best, plain, alone, recomputed = verdicts("single_device", found)
    assert (plain, alone) == (ABSENT, ABSENT)
    assert [enough, best, recomputed] == expected


@pytest.mark.parametrize(("share", "limit", "expected"), [(0.8, 0.9, [YES, YES]), (0.9, 0.7, [NO, NO])])
def test_single_device_verdicts_on_a_cpu(share: float, limit: float, expected: list[str]) -> None:
    """Our step takes this share of a peer's, and products and attention alone this share of our step."""
    found = []
    for run in load("single_device").runs["small"]:
        full = at_rate(lambda run: 1e11 / (share if run.engine == "native" else 1.0), run, cores=2, tier="small")
        if full.status == "ok":
            alone = limit * full.timed_seconds[0]
            full.ranks[0].limit = Limit(gemm_seconds=0.75 * alone, attention_seconds=0.25 * alone, collective_seconds=0)
        found.append(full)
    assert verdicts("single_device", [one for one in found if not one.run.repeat]) == [ABSENT, ABSENT, *expected, YES]


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


def all_pay(run: Run) -> float:
    return 0.1 if all(getattr(run.plan, name) for name in overlap.OVERLAPS) else 0.11


def test_overlap_table_has_every_overlap_of_every_plan() -> None:
    assert overlap.EXPERIMENT.table is not None
    rows = overlap.EXPERIMENT.table(small("overlap", all_pay)).frame
    assert len(rows) == 2 * (4 + 3 + 2)
    assert list(rows["ratio"]) == pytest.approx([0.1 / 0.11] * len(rows))


@pytest.mark.parametrize("slower", overlap.OVERLAPS)
def test_overlaps_are_judged_one_by_one(slower: str) -> None:
    costs = lambda run: 0.1 if getattr(run.plan, slower) else 0.09
    assert verdicts("overlap", small("overlap", costs)) == [
        *(NO if n == slower else YES for n in overlap.OVERLAPS),
        YES,
    ]


def test_overlaps_that_change_a_loss_by_a_bit_are_found() -> None:
    different = small("overlap", all_pay)
    assert verdicts("overlap", different) == [YES] * 4
    different[0].steps.losses[5] += 1e-12
    assert verdicts("overlap", different) == [YES, YES, YES, PARTLY]


def cost(factor: Seconds) -> list[Record]:
    """Time as FLOPs, and for more ranks than two cores as their turns."""
    found = []
    for run in (run for run in load("cost_scaling").runs["small"] if run.repeat == 0):
        full = record_of(run, cores=2, tier="small")
        turns = max(1.0, run.plan.dp / 2)
        seconds = factor(run) * turns * full.flops_per_step() / 1e11 / run.plan.dp
        found.append(timed(full, seconds))
    return found


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (lambda _: 1.0, [YES, YES]),
        (lambda run: 1.1 if run.model.hidden_size == 320 else 1.0, [YES, YES]),
        (lambda run: 1.3 if run.model.hidden_size == 1280 else 1.0, [PARTLY, YES]),
        (lambda run: 0.8 if run.plan.dp == 8 else 1.0, [YES, PARTLY]),
    ],
)
def test_cost_scaling_verdicts(factor: Seconds, expected: list[str]) -> None:
    found = cost(factor)
    assert verdicts("cost_scaling", found) == expected
    few = [full for full in found if full.run.model.hidden_size < 768]
    assert verdicts("cost_scaling", few) == [ABSENT, expected[1]]


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


@pytest.mark.parametrize(
    ("shared", "balanced", "expected"),
    [(0.9, 0.8, [YES, YES]), (1.0, 0.9, [PARTLY, YES]), (1.2, 1.1, [NO, YES]), (1.2, 1.3, [NO, NO])],
)
def test_experts_verdicts(shared: float, balanced: float, expected: list[str]) -> None:
    """Times in those of an MLP's step, with the choices of an untrained router and with balanced ones."""

    def seconds(run: Run) -> float:
        return 0.1 if run.plan.ep == 1 else 0.1 * (balanced if run.model.balance_bias else shared)

    assert verdicts("experts", thrice(small("experts", seconds))) == expected


@pytest.mark.parametrize(
    ("of_pre", "split", "sent", "expected"),
    [
        (1.05, 1.02, 1.0, [YES, YES, YES]),
        (1.05, 1.02, 1.1, [YES, PARTLY, YES]),
        (1.2, 1.05, 1.0, [PARTLY, YES, YES]),
        (1.2, 1.3, 1.0, [NO, YES, NO]),
    ],
)
def test_placement_costs_verdicts(of_pre: float, split: float, sent: float, expected: list[str]) -> None:
    """Steps in those of pre, where all ranks compute all of a norm and each its part; and what sub's send in pre's."""

    def seconds(run: Run) -> float:
        share = split if run.plan.sequence_parallel else of_pre
        return 0.1 if (run.model.norm_placement, run.model.norm) == ("pre", "layernorm") else 0.1 * share

    found = list[Record]()
    for one in small("placement_costs", seconds):
        more = sent if one.run.model.norm_placement == "sub" else 1.0
        traffic = {"tp": {"all_reduce": Collective(1, round(1000 * more))}}
        found.append(replace(one, ranks=[replace(rank, traffic=traffic) for rank in one.ranks]))
    assert verdicts("placement_costs", thrice(found)) == expected
