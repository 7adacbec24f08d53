"""Whose engine trains fastest, and in least memory: ours, DeepSpeed's, or PyTorch's own parts?

The same model, data, seed and plan, trained by each: ZeRO's stages 0 to 3, tensor parallelism with and without sequence
parallelism, and pipelines by GPipe, 1F1B and interleaved, each alone over all ranks. PyTorch's parts are DDP, FSDP2,
DTensor and torch.distributed.pipelining; DeepSpeed's its ZeRO and its pipeline. What an engine cannot do is a point
with its reason. Losses are compared step by step, so that speed is that of the same work, and engines take turns run
by run, so that what slows the machine down meets all.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from experiments import ours
from harness.experiment.checks import at_most
from harness.experiment.kit import (
    MARK, RUNS, Cell, Check, Column, EngineName, Estimate, Evidence, Experiment, Plan, Precision, Recipe, Record, Run,
    Table, Tolerance, about, cells, less, named, step_seconds, tabulate, tally, with_interval,
)  # fmt: skip

ENGINES: tuple[EngineName, ...] = get_args(EngineName)
PEERS = tuple(engine for engine in ENGINES if engine != "native")
FP32, BF16 = (Tolerance(limit, "sums in another order, over 20 steps", "2026-11-21") for limit in (1e-5, 1e-3))
"""Largest relative difference of two engines' losses at a step."""
ZERO_3, SHARED, PIPED = (Tolerance(limit, "a goal", "2026-11-21") for limit in (0.9, 0.85, 0.95))
"""Our step's time in bf16 over the best peer's."""
SAME_MEMORY = Tolerance(1.02, "peaks of one engine differ as much from run to run", "2026-11-21")
"""Ratio of peaks that still counts as no more memory."""


def compared(records: Sequence[Record]) -> list[Cell]:
    """Return each plan in each precision by all engines, our step time relative to the fastest peer's."""
    found = sorted(cells(records, "engine", choice=lambda run: run.engine), key=ours.by_plan)
    return [cell.compare("native", fastest_peer(cell)) for cell in found]


def fastest_peer(cell: Cell) -> str:
    there = (peer for peer in PEERS if peer in cell.choices)
    return min(there, key=lambda peer: cell.of(peer).mean(step_seconds), default="")


def memory(cell: Cell, engine: str) -> float:
    return cell.of(engine).mean(lambda record: record.peak_memory_bytes)


def loss_difference(cell: Cell) -> float:
    """Return the largest relative difference of a peer's loss to ours at any step."""
    each = [cell.loss_difference("native", peer) for peer in PEERS]
    return max((one for one in each if not math.isnan(one)), default=math.nan)


def last_loss(cell: Cell) -> float:
    """Return our last loss, or an engine's where ours is unknown."""
    found = (record.losses[-1] for engine in ENGINES for record in cell.of(engine).records if record.losses)
    return next(found, math.nan)


def rate_of(engine: str) -> Column:
    """Return the column of an engine's rate, or of what became of its runs."""
    rate = lambda cell: cell.of(engine).estimate(lambda record: record.tokens_per_second)
    text = lambda cell: rate(cell) if rate(cell).n else cell.why_not.get(engine)
    return Column(key=f"{engine}_rate", header=engine, unit="tokens/s", si="tokens/s", of=text)


def memory_of(engine: str) -> Column:
    return ours.gib(f"{engine}_memory", f"{engine}, memory per rank", lambda cell: memory(cell, engine))


BEST = Column(key="best", header="best peer", text=True, of=lambda cell: cell.other)
LAST_LOSS = Column(key="last_loss", header="last loss", unit="nats", si="nats", digits=6, of=last_loss)
DIFFERENCE = Column(key="loss_difference", header="losses differ by", si="ratio", digits=2, of=loss_difference)
RATIO = ours.relative("step time, native / best peer")
SHOWN = (*ours.SETUP, *map(rate_of, ENGINES), BEST, RATIO, *map(memory_of, ENGINES), LAST_LOSS, DIFFERENCE, RUNS, MARK)


def table(records: Sequence[Record]) -> Table:
    """Tabulate throughput, memory and loss of every engine on every plan, and our step time over the best peer's."""
    found = compared(records)
    ranks = (rank for cell in found for record in cell.records for rank in record.ranks if rank.peak_memory_bytes)
    kinds = ", ".join(dict.fromkeys(rank.memory_kind for rank in ranks if rank.memory_kind))
    notes = (
        "Engines take turns, run by run. Native / best peer: medians of a run's steps, mean over the pairs of repeats, "
        "with its 95% t-interval; below 1 ours is faster. The best peer is the one whose steps take least. A word in "
        "place of a rate: the engine's points ended so; points without a result have the reason.",
        f"Memory: the largest rank's {kinds or 'peak'}; of a process, it has the engine's libraries in it.",
        "Losses: native's last one, and the largest relative difference of a peer's at any step.",
    )
    return tabulate("engines", f"Engines side by side{about(records)}", SHOWN, found, notes, apart=True)


def same_losses(precision: Precision, within: float) -> Check:
    """Return a check that all engines' losses are ours at every step."""

    def check(records: Sequence[Record]) -> Evidence | None:
        meant = [cell for cell in compared(records) if cell.run.precision == precision]
        found = [cell for cell in meant if not math.isnan(loss_difference(cell))]
        if not found:
            return None
        steps = min(len(cell.of("native").records[0].losses) for cell in found)
        worst, plan = max((loss_difference(cell), ours.plan_name(cell.run.plan)) for cell in found)
        numbers = f"{len(found)} plans, {steps} steps or more; largest difference {worst:.1e} ({plan})"
        return tally([worst <= within], "", numbers)

    return check


def ours_takes(limit: float, kind: str = "") -> Check:
    """Return a check that our step takes at most this share of the best peer's; of a kind of plan, in bf16 only."""
    text = lambda cell: f"{with_interval(cell.relative)} of {cell.other}'s ({ours.where(cell)})"
    is_meant = lambda run: not kind or (run.precision == "bf16" and ours.plan_name(run.plan).startswith(kind))

    def check(records: Sequence[Record]) -> Evidence | None:
        found = [cell for cell in compared(records) if is_meant(cell.run)]
        return at_most(found, limit, "plans", text, is_brief=True)

    return check


def least_memory(records: Sequence[Record]) -> Evidence | None:
    """Judge whether no peer needs less memory on a rank where states are divided; holds with any number of cores."""
    found: list[tuple[Estimate, str]] = []
    peak = lambda record: record.peak_memory_bytes
    for cell in compared(records):
        least = min((peer for peer in PEERS if peer in cell.choices), key=lambda peer: memory(cell, peer), default="")
        ratio = cell.of("native").estimate(peak) / cell.of(least).estimate(peak)
        if cell.run.plan.zero_stage and not math.isnan(ratio.mean):
            found.append((ratio, ours.where(cell)))
    numbers = ", ".join(f"{ratio:.3f} ({at})" for ratio, at in found)
    return tally([less(ratio, SAME_MEMORY) for ratio, _ in found], "plans", f"{numbers} of the least")


def by_engines(run: Run) -> list[Run]:
    return [replace(run, engine=engine) for engine in ENGINES]


TWO = [*ours.data_parallel(2), *ours.pipelines(2, chunks=2)]
"""Plans that divide a batch of 16 over two ranks; those that share layers have a whole batch of 8 on both."""
CPU = Recipe(steps=20, global_batch=16, microbatch=2, lr=1e-4, warmup_steps=2, eps=1e-6)
GPU = replace(CPU, steps=30, global_batch=64, microbatch=2, lr=1.5e-4)
SMALL = ours.in_both(ours.MODEL_7M, TWO, CPU) + ours.in_both(
    ours.MODEL_7M, ours.layers_shared(2), replace(CPU, global_batch=8)
)
ON_8, ON_32, ON_64 = (replace(named(name), dropout=0.0) for name in ("gpt-1.2b", "gpt-2.5b", "gpt-8.3b"))
PAPER = [
    ours.timed(model, plan, replace(GPU, global_batch=batch, microbatch=microbatch), "bf16")
    for model, plans, batch, microbatch in (
        (ON_8, [*ours.data_parallel(8, bucket_bytes=2**27), *ours.pipelines(8, chunks=5)], 64, 2),
        (ON_8, ours.layers_shared(8), 32, 4),
        (ON_32, ours.data_parallel(32, bucket_bytes=2**27), 256, 2),
        (ON_64, ours.data_parallel(64, bucket_bytes=2**27)[1:], 256, 1),
        (ON_64, ours.pipelines(8, chunks=3), 32, 1),
        (ON_64, ours.layers_shared(8), 32, 4),
    )
    for plan in plans
]


EXPERIMENT = Experiment(
    source="our own; ZeRO 2019, PTD-P 2021 and Megatron-LM 2019 by three implementations",
    expectation="the same losses; ours as fast as the best peer everywhere, and faster in bf16, where it copies less",
    claims=(
        ours.claim(
            "the engines' losses agree in fp32 at every step, within 1e-5", same_losses("fp32", FP32), tolerance=FP32
        ),
        ours.claim(
            "the engines' losses agree in bf16 at every step, within 1e-3", same_losses("bf16", BF16), tolerance=BF16
        ),
        ours.claim("native's step takes at most the best peer's time on every plan", ours_takes(1.0)),
        ours.claim(
            "with ZeRO-3 in bf16, at most 90% of the best peer's", ours_takes(ZERO_3, "zero 3"), tolerance=ZERO_3
        ),
        ours.claim(
            "with tensor parallelism in bf16, at most 85% of the best peer's",
            ours_takes(SHARED, "tp"),
            tolerance=SHARED,
        ),
        ours.claim("with a pipeline in bf16, at most 95% of the best peer's", ours_takes(PIPED, "pp"), tolerance=PIPED),
        ours.claim(
            "no peer needs less memory on a rank where states are divided, but for 2%",
            least_memory,
            tolerance=SAME_MEMORY,
        ),
    ),
    table=table,
    profiles=True,
    cost={"smoke": "1 min, 2 CPU cores", "small": "76 min, 2 CPU cores", "paper": "3 hours, 64 GPUs with 80 GB"},
    deviations="Engines have the same numbers to compute with: fp32 master weights, moments and accumulated gradients, "
    "clipping, fused AdamW. Its eps is 1e-6: divided by less, gradients that are nearly zero make rounding errors of "
    "the first steps whole updates. No dropout, as PyTorch's model has none. Over two cores, engines are compared, not "
    "clusters.",
    runs={
        "smoke": ours.in_turn(
            by_engines, [ours.timed(named("gpt-0.5m"), plan, CPU) for plan in (TWO[3], Plan(pp=2))], 1
        ),
        "small": ours.in_turn(by_engines, SMALL, 3),
        "paper": ours.in_turn(by_engines, PAPER, 3),
    },
)
