"""Engines on one device: how near each comes to the rate of its own matrix products, and to the others."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from operator import attrgetter

from harness.analysis.points import Point
from harness.experiment.checks import at_most
from harness.experiment.claims import Check, Evidence, Tolerance, near, tally
from harness.experiment.pairs import Cell, cells, with_interval
from harness.records.record import Record
from harness.records.statistics import UNKNOWN
from impl.plan import Recompute, ZeroStage
from impl.run import EngineName, Run

H200 = "NVIDIA H200"
MFU = Tolerance(0.55, "about 70% of the rate of a bf16 product of 8192 x 8192 matrices", "2026-11-21")
"""Share to reach of an H200's 989 TFLOP/s."""
SAME_RATE = Tolerance(0.1, "assumed", "2026-11-21")
"""Relative tolerance between rates of the same operations."""
WAYS: tuple[Recompute, ...] = ("none", "selective", "full")
WHO: dict[str, tuple[EngineName, ZeroStage]] = {
    "native": ("native", 0), "torch": ("torch", 0), "torch, FSDP2": ("torch", 3), "deepspeed": ("deepspeed", 0),
}  # fmt: skip
"""Engine and ZeRO stage of each contestant; one rank divides nothing, the stage selects FSDP2 in PyTorch."""
PEERS = tuple(WHO)[1:]
tokens_per_second, mfu = attrgetter("tokens_per_second"), attrgetter("mfu")
hardware_rate = attrgetter("hardware_flop_rate")


def who_trains(run: Run) -> str:
    """Return the key of WHO of a run."""
    return "torch, FSDP2" if run.engine == "torch" and run.plan.zero_stage else run.engine


def contests(records: Sequence[Record]) -> list[Cell]:
    """Return runs of one rank that differ only in who trains."""
    found = cells(records, "engine", "plan.zero_stage", choice=who_trains)
    return [cell for cell in found if cell.run.plan.world_size == 1]


def contestants(records: Sequence[Record]) -> list[Point]:
    """Return points of one rank, with step times relative to ours."""
    found = [
        replace(one, relative=UNKNOWN if who == "native" else cell.ratio(who, "native"))
        for cell in contests(records)
        for who, one in cell.choices.items()
        if not math.isnan(one.mean(tokens_per_second))
    ]
    return sorted(found, key=order)


def order(one: Point) -> tuple[float, ...]:
    run, who = one.run, list(WHO).index(who_trains(one.run))
    way = WAYS.index(run.plan.recompute)
    return one.parameters, run.precision != "fp32", who, way, run.compile, run.train.microbatch


def is_trusted(one: Point, device: str) -> bool:
    """Return True for a point on a kind of device whose times can be trusted."""
    return one.records[0].environment.device == device and not one.is_oversubscribed


def best(records: Sequence[Record], who: Collection[str], device: str = "") -> dict[str, Point]:
    """Return each model's fastest point by one of these contestants, on a GPU or on this one."""
    found = [one for one in contestants(records) if is_trusted(one, "cuda") and device in ("", one.device)]
    ordered = sorted(found, key=lambda one: one.mean(tokens_per_second))
    return {one.model: one for one in ordered if who_trains(one.run) in who}


def enough_on_h200(records: Sequence[Record]) -> Evidence | None:
    """Judge whether our fastest settings reach the share MFU of an H200's peak, for every model."""
    found = best(records, ["native"], H200)
    way = lambda run: f"microbatch {run.train.microbatch}, recompute {run.plan.recompute}" + ", compiled" * run.compile
    numbers = ", ".join(f"{one.mean(mfu):.1%} ({model}, {way(one.run)})" for model, one in found.items())
    return tally([one.estimate(mfu) - MFU for one in found.values()], "models", numbers)


def best_is_ours(records: Sequence[Record]) -> Evidence | None:
    """Judge whether on a GPU our fastest settings are as fast as any peer's fastest, for every model."""
    ours, theirs = best(records, ["native"]), best(records, PEERS)
    ratios = {model: one.over(theirs[model], tokens_per_second) for model, one in ours.items() if model in theirs}
    numbers = [f"{ratio:.3g} times {who_trains(theirs[at].run)}'s rate ({at})" for at, ratio in ratios.items()]
    return tally([ratio - 1 for ratio in ratios.values()], "models", ", ".join(numbers))


def on_cpu(records: Sequence[Record], run: Run) -> list[Cell]:
    """Return the records of this run on a CPU by all engines, ours included."""
    meant = [cell for cell in contests(records) if cell.run == run]
    return [cell for cell in meant if "native" in cell.choices and is_trusted(cell, "cpu")]


def faster_than_plain(run: Run, limit: float) -> Check:
    """Return a check that our step of this run takes at most this share of PyTorch's own model's, on a CPU."""
    text = lambda cell: f"{with_interval(cell.relative)} of its time"
    found = lambda records: [cell.compare("native", "torch") for cell in on_cpu(records, run)]
    return lambda records: at_most(found(records), limit, "models", text)


def close_to_alone(run: Run, limit: float) -> Check:
    """Return a check that our step of this run takes at most a number of times its products and attention alone."""

    def check(records: Sequence[Record]) -> Evidence | None:
        ours = [cell.of("native") for cell in on_cpu(records, run)]
        ratios = [one.estimate(lambda record: record.step_seconds / record.alone_seconds) for one in ours]
        known = [ratio for ratio in ratios if not math.isnan(ratio.mean)]
        numbers = ", ".join(f"{with_interval(ratio)} times their time" for ratio in known)
        return tally([ratio.scaled(-1) - -limit for ratio in known], "models", numbers)

    return check


def recomputation_costs_its_operations(records: Sequence[Record]) -> Evidence | None:
    """Judge whether rates that count recomputed operations equal those without recomputation, within SAME_RATE."""
    found = [
        (cell.ratio(way, "none", hardware_rate), way, cell)
        for cell in cells(records, "plan.recompute", choice=lambda run: run.plan.recompute)
        if cell.run.plan.world_size == 1 and "none" in cell.choices and not cell.is_oversubscribed
        for way in cell.choices
        if way != "none"
    ]
    if not found:
        return None
    ratio, way, cell = max(found, key=lambda one: abs(one[0].mean - 1))
    where = f"{way}: {cell.model}, {who_trains(cell.run)}, {cell.run.precision}"
    numbers = f"furthest {ratio - 1:+.1%} ({where})"
    return tally([near(ratio, 1, SAME_RATE) for ratio, *_ in found], "points", numbers)


def by(who: str, run: Run, recompute: Recompute = "none", *, compile: bool = False) -> Run:
    """Return the run by a contestant."""
    engine, stage = WHO[who]
    plan = replace(run.plan, zero_stage=stage, recompute=recompute)
    return replace(run, engine=engine, plan=plan, compile=compile)


def all_ways(run: Run) -> list[Run]:
    """Return the run by us, with each way to recompute, and by PyTorch's own model."""
    return [*(by("native", run, way) for way in WAYS), by("torch", run)]


def every_way(run: Run, microbatches: Sequence[int]) -> list[Run]:
    """Return every microbatch by every engine, compiled and not; ours with recomputation at the second largest."""
    of = {size: replace(run, train=replace(run.train, microbatch=size)) for size in microbatches}
    swept = [by(who, run, compile=compile) for run in of.values() for who in WHO for compile in (True, False)]
    second = of[microbatches[-2]]
    return swept + [by("native", second, way, compile=compile) for way in WAYS[1:] for compile in (True, False)]
