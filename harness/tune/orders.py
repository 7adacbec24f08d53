"""Plans that the closed form does not know: other orders of a plan's passes, and ranks that divide hidden features."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

from harness.predict.simulation import Done, vocabulary_of
from harness.tune.search import Judged
from impl.data.batches import head_positions
from impl.errors import InputError
from impl.fields import divisors
from impl.pipeline.bound import Problem, lower_bound
from impl.pipeline.schedule import Action, Op
from impl.pipeline.schedules import SCHEDULES, build
from impl.pipeline.simulate import simulate
from impl.pipeline.written import written
from impl.run import Run
from impl.simulator.periodic import PERIODIC
from impl.simulator.plans import run_of
from impl.simulator.step import pipeline_of
from impl.simulator.system import System

OTHERS = tuple(name for name in SCHEDULES if name not in PERIODIC)
"""Schedules that are judged by events only."""
CHUNKS = (1, 2)
MOST_OF_GRIDS = 5
"""Fastest plans with tensor parallelism of which grids are judged."""
PARTS = 4
"""Units of time in the shortest pass, to which a searched problem's times are rounded."""


def others_of(named: Sequence[str] | None, fix: Sequence[str]) -> Sequence[str]:
    """Return the schedules that are judged by events only."""
    if named is None:
        return () if any(text.startswith("schedule=") for text in fix) else OTHERS
    if unknown := [name for name in named if name not in OTHERS]:
        raise InputError(f"--others {unknown[0]!r} is none of those; valid: {', '.join(OTHERS)}")
    return named


def in_other_orders(
    rows: Iterable[Judged], base: Run, names: Iterable[str], fix: Iterable[str] = ()
) -> Iterator[Judged]:
    """Yield the plans of rows with each of OTHERS that is named and possible for them, in the chunks that are fixed."""
    wanted = [number for text in fix if text.startswith("chunks=") for number in text[7:].split(",")]
    fixed = [int(number) for number in wanted if number.isdecimal()]
    for row, name, chunks in product(rows, names, fixed or CHUNKS):
        changed = {**row, "schedule": name, "chunks": chunks}
        if name in OTHERS and not run_of(changed, base).problems():
            yield changed


def in_grids(rows: Iterable[Judged], base: Run, *, splits: bool) -> Iterator[Judged]:
    """Yield the first rows with tensor-parallel ranks as each possible grid (`tp3`); none where tokens are split."""
    for row in [row for row in rows if row["tp"] > 1 and not splits][:MOST_OF_GRIDS]:
        z = run_of(row, base).plan.zero if row["zero_stage"] == 3 else 1
        for y in divisors(row["tp"])[1:]:
            changed = {**row, "sequence_parallel": False, "tp3": (row["tp"] // y, y, z)}
            if not run_of(changed, base).problems():
                yield changed


def shortest(run: Done, system: System, seconds: float, search: float) -> dict[str, Any]:
    """Return a bound of a run's step time over all orders of its passes in the same memory, and the best order found.

    Args:
        seconds: predicted seconds of the run's step.
        search: seconds to search for a shorter table, unless it is too large; 0: none is searched.
    """
    stages, positions = system.habits.stages_of(run), head_positions(run.model)
    times, transfer = pipeline_of(run, vocabulary_of(run), system, stages=stages, head_positions=positions)
    schedule = build(run.plan.schedule, run.plan.pp, run.microbatches, run.plan.chunks)

    def cost(action: Action) -> float:
        # an unsplit backward pass may be shorter than its parts: those are then as much shorter
        whole, parts = times[Op.B][action.stage], times[Op.I][action.stage] + times[Op.W][action.stage]
        share = min(1.0, whole / parts) if action.op in (Op.I, Op.W) and not schedule.is_split else 1.0
        return share * times[action.op][action.stage]

    hop = min(transfer(one, one + 1) for one in range(run.plan.pp - 1))
    problem = Problem.of(schedule, cost, hop)
    of = lambda table: simulate(table, cost, transfer).step_time
    pipeline = float(of(schedule))
    found: dict[str, Any] = {"bound": seconds - pipeline + float(lower_bound(problem))}
    if search:
        from impl.pipeline import optimum  # SciPy's solver takes long to import

        unit = min(one for op in optimum.OPS for one in problem.seconds(op)) / PARTS
        rounded = lambda action: Fraction(max(1, round(cost(action) / unit)))
        coarse = replace(problem, cost=rounded, transfer=Fraction(round(hop / unit)))
        try:
            table = optimum.search(coarse, search).schedule
            step = float(of(table))
            found["found"] = seconds + min(0.0, step - pipeline)
            found["schedule"] = written(table) if step < pipeline else None
        except InputError as error:
            found["not_searched"] = str(error)
    return found
