"""Is it better to compute LayerNorm, dropout and residuals on every rank, or once and send what they give?

Ranks that share a layer's matrices all need what lies between them. Megatron-LM computes it on each of them again,
rather than on one and send it (section 3). Computed by each rank for its part of the tokens and gathered, it would cost
two gathers more in each pass of a layer. Sequence parallelism (Korthikanti et al. 2022) has it computed once for none:
its gathers and scatters take the place of all-reduces. Here both of the two that are built run side by side, and are
simulated over model sizes, ranks that share a layer, and networks; what the gathers would add follows from the same
curves.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby, pairwise
from operator import attrgetter

from experiments.ours import SLOWER, claim, in_turn, milliseconds, timed
from harness.experiment.checks import at_most, ends, known, within_points
from harness.experiment.kit import (
    DEVICE, MARK, MODEL, RANKS, RUNS, Cell, Claim, Evidence, Experiment, ModelConfig, Plan, Recipe, Record, Run,
    Table, Tolerance, about, cells, less, named, published, share, step_seconds, tabulate, tally,
)  # fmt: skip
from harness.predict.systems import load_system, names
from impl.cost.parameters import ELEMENT_BYTES
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
    one = float(collective(system, "all_gather", size, group(("tp",), run.plan, system.node.size.value)))
    return cell.of(True).mean(step_seconds) + GATHERS * run.model.num_layers * run.microbatches * one


def gathered_ratio(cell: Cell) -> float:
    """Return a step computed once and gathered, over one computed on every rank; NaN if unknown."""
    return gathered(cell) / cell.of(False).mean(step_seconds)


def extra(cell: Cell) -> float:
    """Return a step computed once and gathered, over one that each rank does its part of."""
    return gathered(cell) / cell.of(True).mean(step_seconds)


def published_ratio(cell: Cell) -> float:
    """Return table 4's time of its layer (22B, 8 GPUs, four sequences) split over that in full; NaN for others."""
    model, at = cell.run.model, (cell.run.plan.tp, cell.run.train.microbatch)
    if model != replace(named(OF_TABLE_4), num_layers=model.num_layers) or at != (8, 4):
        return math.nan
    full, split = (
        published("korthikanti2022", f"layer_combined_milliseconds{way}")["value"].iloc[0]
        for way in ("", "_sequence_parallel")
    )
    return split / full


SHOWN = (
    MODEL, DEVICE, RANKS,
    milliseconds("duplicated", "step, computed on every rank", lambda cell: cell.of(False).estimate(step_seconds)),
    milliseconds("split", "step, each its part", lambda cell: cell.of(True).estimate(step_seconds)),
    share("ratio", "each its part, of every rank", lambda cell: cell.relative),
    share("published", "published", published_ratio),
    milliseconds("gathered", "step, once and gathered", gathered),
    share("gathered_ratio", "once and gathered, of every rank", gathered_ratio),
    RUNS, MARK,
)  # fmt: skip


def table(records: Sequence[Record]) -> Table:
    """Tabulate steps of both ways, and of the third by formula, by model, ranks and system."""
    found = compared(records)
    simulated = ", ".join(filter(None, dict.fromkeys(cell.system for cell in found)))
    notes = (
        "What lies between a layer's split matrices (LayerNorm, dropout, residuals): computed on every rank, as in "
        "Megatron-LM; by each rank for its part of the tokens, as in sequence parallelism; once and gathered: the "
        "latter's step and two gathers of all hidden states in each pass of a layer, by the system's curves. "
        "Published: one layer of 22B (Korthikanti et al. 2022, table 4).",
        *([f"Simulated for {simulated}; nothing was run there."] if simulated else []),
    )
    title = f"Duplicate or communicate{about(records)}"
    return tabulate("redundant_compute", title, SHOWN, found, notes, apart=True)


def beats_gathering(records: Sequence[Record]) -> Evidence | None:
    """Judge whether computing on every rank is faster than computing once and gathering."""
    found = [cell for cell in known(compared(records)) if not math.isnan(gathered_ratio(cell))]
    numbers = ends(found, gathered_ratio, lambda cell: f"{gathered_ratio(cell):.3f} {where(cell)}")
    return tally([cell.relative.scaled(extra(cell)) - 1 for cell in found], "points", numbers)


def no_slower(records: Sequence[Record]) -> Evidence | None:
    """Judge whether splitting makes no step slower, but for SLOWER."""
    text = lambda cell: f"{cell.relative:.3f} {where(cell)}"
    return at_most(compared(records), SLOWER, "points", text, is_brief=True)


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


def both(run: Run) -> list[Run]:
    """Return the run with the work between split matrices done by every rank in full, and by each for its part."""
    return [replace(run, plan=replace(run.plan, sequence_parallel=is_split)) for is_split in (False, True)]


CPU = Recipe(steps=13, global_batch=8, microbatch=8, lr=1e-4, warmup_steps=2)
GPU = Recipe(steps=30, global_batch=4, microbatch=4, lr=1e-4, warmup_steps=5)
SMOKE = ModelConfig(num_layers=2, hidden_size=128, num_heads=4, seq_len=128, dropout=0.1)
SMALL = [replace(SMOKE, num_layers=4, hidden_size=hidden, num_heads=hidden // 32) for hidden in (128, 256, 512)]
UP_TO_TWO_NODES = (2, 4, 8, 16)
PAPER = [
    timed(replace(named(name), num_layers=layers), Plan(tp=tp), GPU, "bf16")
    for name, layers, degrees in (
        ("gpt-1.2b", 4, UP_TO_TWO_NODES), ("gpt-8b", 4, UP_TO_TWO_NODES), (OF_TABLE_4, 4, UP_TO_TWO_NODES),
        ("korthikanti-1t", 2, (8, 16)),
    )
    for tp in degrees
]  # fmt: skip
"""Models with as many layers left, as one layer decides a step; and ranks that share them, of nodes with 8 or 16."""


EXPERIMENT = Experiment(
    source="our own; Megatron-LM 2019, section 3; Korthikanti et al. 2022, section 4, table 4",
    expectation="computing again is faster than gathering on every network, by far on slow ones; splitting saves 3% of "
    "a layer of 22B on 8 GPUs, more on more ranks and less in wider models",
    claims=(
        Claim(
            "to compute LayerNorm and dropout on every rank is faster than to compute them once and gather",
            "Megatron-LM 2019, section 3",
            beats_gathering,
            kind="direction",
            about="network",
        ),
        Claim(
            "to split them over the tokens saves what table 4 says of a layer of 22B, within two points",
            "Korthikanti et al. 2022, table 4",
            saves_as_published,
            published="3.1%: 19.0 ms of 19.6",
            kind="quantitative",
            about="computing",
            tolerance=NEAR,
            hardware="A100",
        ),
        claim("to split them makes no step over 2% slower", no_slower, about="network", tolerance=SLOWER),
        claim("the more ranks share a layer, the more splitting saves", grows_with_ranks, about="computing"),
    ),
    table=table,
    cost={"smoke": "1 min, 2 CPU cores", "small": "4 min, 2 CPU cores", "paper": "10 min, 16 GPUs with 80 GB"},
    deviations="Computing once and gathering is not built; it is told from the split step and the time of its gathers. "
    "The papers' models have two or four layers here, nothing is recomputed; bf16, and fp16 where there is no bf16.",
    runs={
        "smoke": in_turn(both, [timed(replace(SMOKE, hidden_size=size), Plan(tp=2), CPU) for size in (128, 256)], 1),
        "small": in_turn(both, [timed(model, Plan(tp=2), CPU) for model in SMALL], 3),
        "paper": in_turn(both, PAPER, 1),
    },
)
