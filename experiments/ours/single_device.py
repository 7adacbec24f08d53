"""How close does one device come to the rate of its own matrix products?

One rank trains alone, so that nothing communicates: what is missing to the rate that the model's largest kind of matrix
product reaches by itself is attention, what lies between the products, the update, and Python. By model size,
precision, microbatch, recomputation and torch.compile, and by engine: ours, PyTorch's own model, the same in FSDP2's
hands, and in DeepSpeed's.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from operator import attrgetter

from experiments.ours import MODEL_25M, PRECISION, claim, gib, in_both, in_turn, milliseconds, relative, timed
from harness.experiment.checks import at_most
from harness.experiment.kit import (
    FLOP_RATE, MARK, MICROBATCH, MODEL, RATE, RUNS, Cell, EngineName, Evidence, Experiment, ModelConfig, Plan, Point,
    Precision, Recipe, Record, Run, Table, Tolerance, ZeroStage, about, cells, named, near, of_run, share,
    tabulate, tally, with_interval,
)  # fmt: skip
from harness.records.record import CONVENTION
from harness.records.statistics import UNKNOWN
from impl.plan import Recompute

H200 = "NVIDIA H200"
MFU = Tolerance(0.55, "about 70% of the rate of a bf16 product of 8192 x 8192 matrices", "2026-11-21")
"""Share to reach of an H200's 989 TFLOP/s."""
OF_PLAIN = Tolerance(0.85, "a goal", "2026-11-21")
"""Our step's time on a CPU in bf16 over PyTorch's model's."""
OF_ALONE = Tolerance(1.25, "a goal", "2026-11-21")
"""Our step's time on a CPU in fp32 over that of its products and attention alone."""
SAME_RATE = Tolerance(0.1, "assumed", "2026-11-21")
"""Relative tolerance between rates of the same operations."""
WAYS: tuple[Recompute, ...] = ("none", "selective", "full")
WHO: dict[str, tuple[EngineName, ZeroStage]] = {
    "native": ("native", 0), "torch": ("torch", 0), "torch, FSDP2": ("torch", 3), "deepspeed": ("deepspeed", 0),
}  # fmt: skip
"""Engine and ZeRO stage of each contestant; one rank divides nothing, the stage selects FSDP2 in PyTorch."""
PEERS = tuple(WHO)[1:]
tokens_per_second, mfu = attrgetter("tokens_per_second"), attrgetter("mfu")


def who_trains(run: Run) -> str:
    """Return the key of WHO of a run."""
    return "torch, FSDP2" if run.engine == "torch" and run.plan.zero_stage else run.engine


def hardware_rate(record: Record) -> float:
    """Return the FLOP/s of a device, what is recomputed counted."""
    return record.flop_rate_by(CONVENTION, recomputed=True)


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


SHOWN = (
    MODEL,
    of_run("engine", "engine", who_trains, text=True),
    PRECISION,
    of_run("recompute", "recompute", lambda run: run.plan.recompute, text=True),
    of_run("compiled", "compiled", lambda run: "yes" if run.compile else "no", text=True),
    MICROBATCH, RATE,
    milliseconds("step_seconds", "step, median"),
    relative("step over native's", "over_native"),
    FLOP_RATE,
    share("gemm_share", "share of GEMM rate", lambda one: one.mean(lambda record: record.flop_rate / record.gemm_rate)),
    share(
        "hardware_share", "recomputation counted",
        lambda one: one.mean(lambda record: hardware_rate(record) / record.gemm_rate),
    ),
    share("mfu", "MFU"),
    share("hfu", "HFU"),
    gib("peak_memory_bytes", "memory"),
    RUNS, MARK,
)  # fmt: skip


def table(records: Sequence[Record]) -> Table:
    """Tabulate rates of one rank, as shares of its products' rate alone, and each engine's step time over ours."""
    notes = (
        "Rates count model FLOPs (palm_12), those that training needs. The GEMM rate is what [b s, h] x [h, 4h] "
        "reached alone in the same run; recomputation counted: the rate of all operations, as a share of it.",
        "Over native's: medians of a run's steps by an engine and by ours with the same settings, mean over the pairs "
        "of repeats, with its 95% t-interval; above 1 ours is faster.",
    )
    return tabulate("single_device", f"One device{about(records)}", SHOWN, contestants(records), notes)


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


def our_25m(records: Sequence[Record], precision: Precision) -> list[Cell]:
    """Return runs of the 25M model on a CPU, ours among them, nothing recomputed or compiled."""
    meant = [cell for cell in contests(records) if cell.run == timed(MODEL_25M, Plan(), CPU, precision)]
    return [cell for cell in meant if "native" in cell.choices and is_trusted(cell, "cpu")]


def faster_than_plain(records: Sequence[Record]) -> Evidence | None:
    """Judge whether our step takes at most OF_PLAIN of PyTorch's model's, in bf16."""
    found = [cell.compare("native", "torch") for cell in our_25m(records, "bf16")]
    return at_most(found, OF_PLAIN, "models", lambda cell: f"{with_interval(cell.relative)} of its time")


def close_to_alone(records: Sequence[Record]) -> Evidence | None:
    """Judge whether our step takes at most OF_ALONE of the time of its products and attention alone, in fp32."""
    ours = [cell.of("native") for cell in our_25m(records, "fp32")]
    ratios = [one.estimate(lambda record: record.step_seconds / record.alone_seconds) for one in ours]
    known = [ratio for ratio in ratios if not math.isnan(ratio.mean)]
    numbers = ", ".join(f"{with_interval(ratio)} times their time" for ratio in known)
    return tally([ratio.scaled(-1) - -OF_ALONE for ratio in known], "models", numbers)


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


def on_gpu(model: ModelConfig, microbatches: Sequence[int]) -> list[Run]:
    """Return bf16 runs: every microbatch by every engine, compiled and not; ours recomputing at the second largest."""
    of = {size: timed(model, Plan(), replace(GPU, microbatch=size), "bf16") for size in microbatches}
    swept = [by(who, run, compile=compile) for run in of.values() for who in WHO for compile in (True, False)]
    second = of[microbatches[-2]]
    return swept + [by("native", second, way, compile=compile) for way in WAYS[1:] for compile in (True, False)]


CPU = Recipe(steps=13, global_batch=8, microbatch=4, lr=1e-4, warmup_steps=2)
GPU = Recipe(steps=15, global_batch=32, lr=1.5e-4, warmup_steps=2)
LARGE = (
    (named("gpt-1.2b"), (4, 8, 16)),
    (named("gpt-2.5b"), (2, 4, 8)),
    (replace(named("gpt-8.3b"), num_layers=24), (2, 4, 8)),
)
"""Models, all with sequences of 2,048 tokens, and microbatches that fit a GPU with 141 GB."""


EXPERIMENT = Experiment(
    source="our own; Megatron-LM 2019, section 5.1, and PTD-P 2021, section 5.1, report 30% and 52% of a GPU's peak",
    expectation="55% of an H200's peak for models of 1.2B and more; on a CPU, three quarters of the GEMM rate in fp32, "
    "and less in bf16, whose products are seven times as fast while all else is not",
    claims=(
        claim("every model reaches 55% MFU on an H200 with its best settings", enough_on_h200, tolerance=MFU),
        claim("no engine's best settings are faster than ours on a GPU", best_is_ours),
        claim(
            "on a CPU, the 25M model's step in bf16 takes at most 85% of PyTorch's own model's",
            faster_than_plain,
            tolerance=OF_PLAIN,
        ),
        claim(
            "on a CPU, its step in fp32 takes at most 1.25 times what its products and attention take alone",
            close_to_alone,
            tolerance=OF_ALONE,
        ),
        claim(
            "recomputation costs what its operations do: rates that count them differ by 10% at most",
            recomputation_costs_its_operations,
            tolerance=SAME_RATE,
        ),
    ),
    table=table,
    profiles=True,
    cost={"smoke": "1 min, 1 CPU core", "small": "12 min, 1 CPU core", "paper": "90 min, 1 GPU with 141 GB"},
    deviations="One CPU core is the device where there is no GPU. The 8.3B model has 24 of its 72 layers: all "
    "take 150 GB with their gradients and moments. Sequences are of 2,048 tokens, and there is no dropout.",
    runs={
        "smoke": in_turn(all_ways, in_both(named("gpt-0.5m"), [Plan()], CPU), 1),
        "small": in_turn(all_ways, in_both(MODEL_25M, [Plan()], CPU), 3),
        "paper": [run for model, sizes in LARGE for run in on_gpu(replace(model, seq_len=2048, dropout=0.0), sizes)],
    },
)
