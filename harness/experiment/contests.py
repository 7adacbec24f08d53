"""Engines side by side: whose step is shortest, whose memory is least and whose losses agree, on any plan or device."""

import math
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, get_args

from harness.analysis.columns import MODEL, RANKS, gib, of_run, ratio
from harness.analysis.points import Measure, Point
from harness.analysis.render import Column
from harness.experiment.checks import at_most
from harness.experiment.claims import Check, Evidence, Tolerance, less, tally
from harness.experiment.pairs import Cell, cells, step_seconds, with_interval
from harness.records.record import Record
from harness.records.statistics import Estimate
from impl.pipeline.schedules import short
from impl.plan import Plan
from impl.run import EngineName, Precision, Run

SCHEDULES = {"gpipe": "GPipe", "one_f_one_b": "1F1B", "interleaved": "interleaved"}


def plan_name(plan: Plan) -> str:
    """Return the name of a plan over one axis: `dp`, `zero 3`, `tp, sequence parallel`, `pp, 1F1B`."""
    if plan.tp > 1:
        return "tp, sequence parallel" if plan.sequence_parallel else "tp"
    if plan.pp > 1:
        return f"pp, {SCHEDULES.get(plan.schedule, short(plan.schedule))}"
    return f"zero {plan.zero_stage}" if plan.zero_stage else "dp"


def by_plan(point: Point) -> tuple[Any, ...]:
    """Return the sort key of a point: by model size, then by plan as in `plan_name`, fp32 before bf16."""
    run, plan = point.run, point.run.plan
    schedule = [*SCHEDULES, plan.schedule].index(plan.schedule)
    axis = (plan.pp > 1, plan.tp > 1, plan.sequence_parallel, schedule, plan.zero_stage)
    return (point.parameters, *axis, run.precision != "fp32")


def where(point: Point) -> str:
    """Return plan and precision of a point: `zero 3, bf16`."""
    return f"{plan_name(point.run.plan)}, {point.run.precision}"


PLAN = of_run("plan", "plan", lambda run: plan_name(run.plan), text=True)
PRECISION = of_run("precision", "precision", lambda run: run.precision, text=True)
SETUP = (MODEL, RANKS, PLAN, PRECISION)
"""Columns of what ran."""
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
PEERS = tuple(engine for engine in ENGINES if engine != "native")
peak = attrgetter("peak_memory_bytes")
SAME_MEMORY = Tolerance(1.02, "peaks of one engine differ as much from run to run", "2026-11-21")
"""Ratio of peaks that still counts as no more memory."""


def by_engine(records: Sequence[Record]) -> list[Cell]:
    """Return each plan in each precision by all engines, our step time relative to the fastest peer's."""
    found = sorted(cells(records, "engine", choice=lambda run: run.engine), key=by_plan)
    return [cell.compare("native", least(cell, step_seconds)) for cell in found]


def least(cell: Cell, measure: Measure) -> str:
    """Return the peer with the least of a measure; empty if there is none."""
    there = (peer for peer in PEERS if peer in cell.choices)
    return min(there, key=lambda peer: cell.of(peer).mean(measure), default="")


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
    return gib(f"{engine}_memory", f"{engine}, memory per rank", lambda cell: cell.of(engine).mean(peak))


def same_losses(within: float, precision: Precision) -> Check:
    """Return a check that all engines' losses are ours at every step."""

    def check(records: Sequence[Record]) -> Evidence | None:
        meant = [cell for cell in by_engine(records) if cell.run.precision == precision]
        found = [cell for cell in meant if not math.isnan(loss_difference(cell))]
        if not found:
            return None
        steps = min(len(cell.of("native").records[0].losses) for cell in found)
        worst, plan = max((loss_difference(cell), plan_name(cell.run.plan)) for cell in found)
        numbers = f"{len(found)} plans, {steps} steps or more; largest difference {worst:.1e} ({plan})"
        return tally([worst <= within], "", numbers)

    return check


def ours_takes(limit: float, kind: str = "") -> Check:
    """Return a check that our step takes at most this share of the best peer's; of a kind of plan, in bf16 only."""
    text = lambda cell: f"{with_interval(cell.relative)} of {cell.other}'s ({where(cell)})"
    is_meant = lambda run: not kind or (run.precision == "bf16" and plan_name(run.plan).startswith(kind))

    def check(records: Sequence[Record]) -> Evidence | None:
        found = [cell for cell in by_engine(records) if is_meant(cell.run)]
        return at_most(found, limit, "plans", text, is_brief=True)

    return check


def least_memory(records: Sequence[Record]) -> Evidence | None:
    """Judge whether no peer needs less memory on a rank where states are divided; holds with any number of cores."""
    found: list[tuple[Estimate, str]] = []
    for cell in by_engine(records):
        over = cell.of("native").estimate(peak) / cell.of(least(cell, peak)).estimate(peak)
        if cell.run.plan.zero_stage and not math.isnan(over.mean):
            found.append((over, where(cell)))
    numbers = ", ".join(f"{over:.3f} ({at})" for over, at in found)
    return tally([less(over, SAME_MEMORY) for over, _ in found], "plans", f"{numbers} of the least")


BEST = Column(key="best", header="best peer", text=True, of=lambda cell: cell.other)
LAST_LOSS = Column(key="last_loss", header="last loss", unit="nats", si="nats", digits=6, of=last_loss)
DIFFERENCE = Column(key="loss_difference", header="losses differ by", si="ratio", digits=2, of=loss_difference)
RATIO = ratio("ratio", "step time, native / best peer", lambda cell: cell.relative)
OVERLAPS = {
    "overlap_grad_reduce": "gradients' reductions, with the backward pass",
    "overlap_param_gather": "parameters' gathers, ahead of their use",
    "overlap_input_grad_reduce": "input gradients' reductions, with weight gradients",
}
"""Fields of the plan, and the communication and computation that each overlaps."""


def lacks(run: Run) -> str:
    """Return the overlap that a run lacks; empty if it has all."""
    return " ".join(name for name in OVERLAPS if not getattr(run.plan, name))


def by_overlap(records: Sequence[Record]) -> list[Cell]:
    """Return each plan with each of its overlaps, its step time relative to that without the overlap."""
    found = sorted(cells(records, *(f"plan.{name}" for name in OVERLAPS), choice=lacks), key=by_plan)
    return [cell.compare("", name) for cell in found for name in OVERLAPS if {"", name} <= cell.choices.keys()]


def no_slower_with(name: str, limit: float) -> Check:
    """Return a check that steps with an overlap take at most this share of the time without it, on every plan."""
    text = lambda cell: f"{with_interval(cell.relative)} ({where(cell)})"
    of_one = lambda records: [cell for cell in by_overlap(records) if cell.other == name]
    return lambda records: at_most(of_one(records), limit, "plans", text)


def same_without(records: Sequence[Record]) -> Evidence | None:
    """Judge whether every step's loss is the same with and without each overlap, with any number of cores."""
    differences = [cell.loss_difference("", cell.other) for cell in by_overlap(records)]
    same = [one == 0 for one in differences if not math.isnan(one)]
    return tally(same, "pairs")


def plan_in_words(run: Run) -> str:
    """Return a plan's fields that are not defaults, as `tp 8, pp 8, dp 24, microbatch 2, interleaved 2, full`."""
    plan = run.plan
    parts = [f"{axis} {getattr(plan, axis)}" for axis in ("tp", "pp", "dp") if getattr(plan, axis) > 1]
    parts += [f"microbatch {run.train.microbatch}"]
    if plan.pp > 1 and plan.schedule != "one_f_one_b":
        parts += [short(plan.schedule) + (f" {plan.chunks}" if plan.chunks > 1 else "")]
    parts += [f"{plan.recompute} recomputation"] if plan.recompute != "none" else []
    parts += [f"ZeRO {plan.zero_stage}"] if plan.zero_stage else []
    flags = ("sequence_parallel", "partition_activations", "offload_activations", "offload_optimizer")
    return ", ".join([*parts, *(flag.replace("_", " ") for flag in flags if getattr(plan, flag))])


def by_engines(run: Run) -> list[Run]:
    return [replace(run, engine=engine) for engine in ENGINES]
