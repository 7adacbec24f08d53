"""How many more bytes than its matrix products need does every plan send?

A product that ranks share has a least traffic, whatever its division, if each of its matrices is there once
(`impl/cost/least_traffic.py`). Data parallelism keeps every weight on every rank and may do with less; tensor
parallelism sends activations, of every token, where ZeRO-3 sends weights, for every microbatch. Here a step's counted
bytes stand over the least for the same products on as many ranks, beside the memory that a rank takes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter

from experiments.ours import claim, shared_by
from harness.experiment.kit import (
    DEVICE, GB, MARK, MICROBATCHES, MODEL, RANKS, RUNS, Experiment, Measure, ModelConfig, Plan, Point, Precision,
    Recipe, Record, Run, Tolerance, cost, each, figure_of, gigabytes, less, named, of_run, points, share, table_of,
    untested,
)  # fmt: skip
from impl.cost.least_traffic import moved_bytes, needed_bytes
from impl.data.batches import head_positions

NEAR = Tolerance(0.25, "embeddings are sent too, and a tied one is gathered once more than its products", "2026-11-25")


def moved(record: Record) -> float:
    """Return the bytes that the busiest rank takes in or gives away in a step."""
    run = record.run
    return max((moved_bytes(run, rank.traffic) for rank in record.ranks if rank.traffic), default=math.nan)


def needed(record: Record) -> float:
    """Return the least bytes that the step's products need on these ranks."""
    run, vocab_size = record.run, record.resolved.vocab_size or record.run.model.vocab_size
    return needed_bytes(run, vocab_size, head_positions(run.model)) if vocab_size else math.nan


def over(record: Record) -> float:
    """Return moved over needed bytes; NaN where nothing needs to be moved, as in a stage of one rank."""
    least = needed(record)
    return moved(record) / least if least else math.nan


def mean_of(measure: Measure) -> Callable[[Point], float]:
    return lambda one: one.mean(measure)


def way(run: Run) -> str:
    """Return how the plan divides a step, in words."""
    plan = run.plan
    parts = [*shared_by(plan), *[f"pp {plan.pp}"] * (plan.pp > 1), *[f"dp {plan.dp}"] * (plan.dp > 1)]
    within = f" within {plan.zero_group}" if plan.replicas > 1 else ""
    return " + ".join([*parts, *[f"ZeRO-{plan.zero_stage}{within}"] * (plan.zero_stage > 0)])


def holds_once(run: Run) -> bool:
    """Return True if every matrix, of weights, gradients and activations, is on one rank or divided."""
    plan = run.plan
    has_one = plan.dp_cp == 1 or (plan.zero_stage == 3 and plan.replicas == 1)
    return has_one and plan.pp == 1 and (plan.tp == 1 or plan.sequence_parallel)


def plans(records: Sequence[Record]) -> list[Point]:
    """Return the points by microbatches of a step, those that send least first."""
    return sorted(points(records, moved), key=lambda one: (one.device, one.run.microbatches, one.mean(moved)))


def single(records: Sequence[Record]) -> list[tuple[float, str]]:
    """Return the ratio of plans that hold every matrix once."""
    return [(one.mean(over), way(one.run)) for one in plans(records) if holds_once(one.run)]


def whole_batches(records: Sequence[Record]) -> list[tuple[float, str]]:
    """Return the ratio of ZeRO-3 alone in one microbatch."""
    alone = [one for one in plans(records) if holds_once(one.run) and one.run.plan.dp == one.run.plan.world_size]
    return [(one.mean(over), one.model) for one in alone if one.run.microbatches == 1]


SHOWN = (
    MODEL, DEVICE, RANKS, of_run("way", "plan", way, text=True), MICROBATCHES,
    gigabytes("moved", "moved by a rank", mean_of(moved)), gigabytes("needed", "needed", mean_of(needed)),
    share("over", "moved, of needed", mean_of(over)),
    gigabytes("memory", "memory of a rank", mean_of(attrgetter("peak_memory_bytes"))), RUNS, MARK,
)  # fmt: skip


def ways(n: int, part: int) -> list[Plan]:
    """Return ways to divide a step among n ranks, of which `part` share matrices, stages, sequences or states."""
    data = [Plan(dp=n, zero_stage=stage) for stage in (1, 3)]
    if part == n:
        return [*data, Plan(tp=n), Plan(tp=n, sequence_parallel=True), Plan(cp=n, zero_stage=3), Plan(pp=n)]
    rest, split = n // part, Plan(tp=part, dp=n // part, sequence_parallel=True)
    shared = [split, Plan(tp=part, dp=rest, sequence_parallel=True, zero_stage=3)]
    others = [Plan(dp=n, zero_stage=3, zero_group=part), Plan(cp=part, dp=rest, zero_stage=3), Plan(pp=part, dp=rest)]
    return [*data, *shared, *others, Plan(tp=part, pp=rest, sequence_parallel=True)]


def runs(model: ModelConfig, batch: int, n: int, part: int, counts: Sequence[int], precision: Precision) -> list[Run]:
    """Return every way, with microbatches that have as many tokens a rank: a pipeline has more of them."""

    def of(plan: Plan, count: int) -> Run:
        size = batch // (plan.dp * plan.pp * count)
        return untested(model, plan, Recipe(steps=6, global_batch=batch, microbatch=size, warmup_steps=2), precision)

    return [of(plan, count) for count in counts for plan in ways(n, part)]


CPU = ModelConfig(num_layers=4, hidden_size=256, num_heads=8, seq_len=128, positions="rotary", dropout=0.0)
WIDE = replace(CPU, hidden_size=512)
EXPERIMENT = Experiment(
    source="our own; ZeRO (1910.02054), section 7; Al Daas et al. 2022 (2205.13407)",
    expectation="ZeRO-3 in one microbatch moves what is needed, data parallelism less, as it keeps copies; tensor "
    "parallelism more, unless a step has many microbatches",
    claims=(
        claim(
            "no plan that holds every matrix once moves fewer bytes than its products need",
            each(single, lambda found, _: found >= 1, "plans", "{:.2f} ({})", is_brief=True), kind="self-consistency",
        ),
        claim(
            "ZeRO-3 alone, in one microbatch, moves at most a quarter more than its products need",
            each(whole_batches, lambda found, _: less(found, 1 + NEAR), "models", "{:.2f} ({})"), tolerance=NEAR,
        ),
    ),
    table=table_of("communication_bound", "Bytes moved over bytes needed", SHOWN, plans, [
        "Moved: by the busiest rank in a step's collectives, taken in or given away. Needed: by the least traffic of "
        "the step's matrix products on as many ranks, each matrix there once. Below 100%: a plan keeps copies."
    ]),
    figure=figure_of(
        "Bytes moved, by the memory that they save", "memory of a rank (GB)", "moved by a rank in a step (GB)", plans,
        name=lambda one: f"{one.model}, {way(one.run)}", at=lambda one: one.mean(attrgetter("peak_memory_bytes")) / GB,
        ours=lambda one: one.mean(moved) / GB,
    ),
    cost=cost("5 min", "30 min, 64 GPUs with 80 GB", smoke="3 min"),
    deviations="Simulated runs have bytes by formula, which the verdicts do not use. What attention's core and "
    "pipelines send is moved, and not counted as needed. At `smoke` and `small` two ranks.",
    runs={
        "smoke": runs(CPU, 8, 2, 2, (1, 4), "fp32"),
        "small": [one for model in (CPU, WIDE) for one in runs(model, 16, 2, 2, (1, 2, 8), "fp32")],
        "paper": runs(replace(named("llama-8b"), seq_len=2048), 512, 64, 8, (2, 4, 8), "bf16"),
    },
)  # fmt: skip
