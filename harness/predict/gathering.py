"""Work between a layer's split matrices: done on every rank, by each for its part, or once and then gathered."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby, pairwise
from operator import attrgetter

from harness.experiment.checks import at_most, ends, known, within_points
from harness.experiment.claims import Check, Evidence, Tolerance, less, tally
from harness.experiment.pairs import Cell, cells, step_seconds
from harness.experiment.published import published_number
from harness.predict.systems import load_system, names
from harness.records.record import Record
from impl.cost.parameters import ELEMENT_BYTES
from impl.model.sizes import named
from impl.simulator.seconds import collective, group

NEAR = Tolerance(0.02, "assumed", "2026-11-22")
"""Largest difference from a published ratio that counts as the same."""
GATHERS = 4
"""Gathers that computing once adds to a layer and microbatch: for attention and MLP, forward and backward."""
OF_TABLE_4 = "korthikanti-22b"
SPLIT = "plan.sequence_parallel"
system_of = cache(load_system)


def compared(records: Sequence[Record]) -> list[Cell]:
    """Return every model on each number of ranks, the step of ranks that do their part relative to that in full."""
    found = [cell for cell in cells(records, SPLIT, choice=attrgetter(SPLIT)) if len(cell.choices) == 2]
    order = lambda cell: (cell.system, cell.parameters, cell.run.plan.tp)
    return [cell.compare(True, False) for cell in sorted(found, key=order)]


def gathered(cell: Cell) -> float:
    """Return seconds of a step computed once, with GATHERS of all hidden states by the system's curves, if known."""
    if cell.system not in names():
        return math.nan
    run, system = cell.run, system_of(cell.system)
    size = run.train.microbatch * run.model.seq_len * run.model.hidden_size * ELEMENT_BYTES[run.precision]
    one = float(collective(system, "all_gather", size, group(("tp",), run.plan, system)))
    return cell.of(True).mean(step_seconds) + GATHERS * run.model.num_layers * run.microbatches * one


def gathered_ratio(cell: Cell) -> float:
    """Return a step computed once and gathered, over one computed on every rank; NaN if unknown."""
    return gathered(cell) / cell.of(False).mean(step_seconds)


def published_ratio(cell: Cell) -> float:
    """Return table 4's time of its layer (22B, 8 GPUs, four sequences) split over that in full; NaN for others."""
    model, at = cell.run.model, (cell.run.plan.tp, cell.run.train.microbatch)
    if model != replace(named(OF_TABLE_4), num_layers=model.num_layers) or at != (8, 4):
        return math.nan
    in_print = lambda way: published_number("korthikanti2022", f"layer_combined_milliseconds{way}")
    return in_print("_sequence_parallel") / in_print("")


def beats_gathering(records: Sequence[Record]) -> Evidence | None:
    """Judge whether computing on every rank is faster than computing once and gathering."""
    found = [cell for cell in known(compared(records)) if not math.isnan(gathered_ratio(cell))]
    numbers = ends(found, gathered_ratio, lambda cell: f"{gathered_ratio(cell):.3f} {where(cell)}")
    over_split = lambda cell: gathered(cell) / cell.of(True).mean(step_seconds)
    return tally([cell.relative.scaled(over_split(cell)) - 1 for cell in found], "points", numbers)


def where(cell: Cell) -> str:
    on = f" of {cell.system}" if cell.is_simulated else ""
    return f"({cell.model} on {cell.run.plan.tp}{on})"


def saves_as_published(records: Sequence[Record]) -> Evidence | None:
    """Judge whether splitting saves as much as in table 4, within NEAR, on table 4's hardware."""
    found = [cell for cell in known(compared(records)) if not math.isnan(published_ratio(cell))]
    numbers = ", ".join(f"{1 - cell.relative.mean:.1%}" for cell in found)
    pairs = [(cell.relative, published_ratio(cell)) for cell in found]
    return within_points(pairs, NEAR, "points", f"saves {numbers}")


def grows_with_ranks(records: Sequence[Record]) -> Evidence | None:
    """Judge whether splitting saves more with more ranks that share a model, as the divided work shrinks."""
    line = lambda cell: (cell.device, cell.model)
    found = sorted(known(compared(records)), key=lambda cell: (line(cell), cell.run.plan.tp))
    pairs = [pair for _, cells in groupby(found, line) for pair in pairwise(cells)]
    return tally([less(b.relative, a.relative) for a, b in pairs], "steps from fewer ranks to more")


def no_slower(limit: float) -> Check:
    """Return a check that a step with the work split takes at most this share of one without, in every model."""
    text = lambda cell: f"{cell.relative:.3f} {where(cell)}"
    return lambda records: at_most(compared(records), limit, "points", text, is_brief=True)
