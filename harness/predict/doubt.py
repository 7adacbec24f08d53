"""How far a simulated step may be off, by causes that runs share, and its seconds on idealised machines."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from harness.predict.csv_rows import fitted_row
from harness.predict.interval import OCTAVE, log_bounds, octaves_beyond
from harness.predict.simulation import Done, predicted, predicted_seconds
from harness.records.statistics import NINE_TENTHS
from impl.simulator.constants import Constant
from impl.simulator.step import WAITS
from impl.simulator.system import System

FREE = 1e4
"""Factor by which an idealised machine's part is faster: its time is lost in rounding."""
NETWORK = (
    {"link_efficiency": FREE, "nic_efficiency": FREE, "send_efficiency": FREE, "host_link": FREE},
    ("link_latency", "nic_latency", "send_latency", "send_wait", "host_collective"),
)
"""Constants of a system by which communication takes no time: those to multiply, and those to set to zero."""
COMPUTING = (
    {"gemm_efficiency": FREE, "attention_efficiency": FREE, "memory_efficiency": FREE, "optimizer_efficiency": FREE,
     "host_memory": FREE},
    ("kernel_seconds", "host_forward", "host_backward", "host_unfused", "optimizer_tensor", "microbatch_seconds",
     "step_seconds"),
)  # fmt: skip
"""Constants of a system by which computing takes no time, in the form of NETWORK."""


def doubt(run: Done, system: System) -> dict[str, Any]:
    """Return how far a prediction may be off, and what it is on idealised machines: fields of a record's prediction.

    Slopes are by direction of the constants' joint spread after calibration, independent of each other, and by size
    beyond the calibrated ones: what two runs share cancels in their ratio. A row scatters by the system's `row_sd`
    around its prediction where constants were fitted to few rows; a calibration without a recorded spread has no
    slopes, and all of its error is the run's own.
    """
    known, own = system.calibration, system.row_sd
    if known is not None and not known.spread:
        low, high = log_bounds(known, run)
        own = (high - low) / 2 / NINE_TENTHS
    return {
        "fitted": fitted_row(run, system),
        "calibrated_on": len(known.rows) if known else 0,
        "slopes": shared_causes(run, system),
        "own_sd": own,
        "without": without(run, system),
    }


def shared_causes(run: Done, system: System) -> dict[str, float]:
    """Return the change of log seconds per standard deviation of what runs on a system have in common."""
    beyond = octaves_beyond(run, system.calibration).items()
    return _slopes(run, system) | {f"beyond {name}": round(OCTAVE * by, 6) for name, by in beyond}


def _slopes(run: Done, system: System) -> dict[str, float]:
    known = system.calibration
    free = {name: one for name, one in system.all_constants.items() if one.log_sd > 0}
    if known is not None and not known.spread:
        return {}
    moved = {name: _moved(run, system, name, one) for name, one in free.items()}
    if known is None:
        return {name: slope for name, slope in moved.items() if slope}
    rows = [[moved.get(name, 0.0) * share for share in known.spread[name]] for name in known.spread]
    return {f"direction {i + 1}": round(sum(column), 6) for i, column in enumerate(zip(*rows, strict=True))}


def _moved(run: Done, system: System, name: str, one: Constant) -> float:
    """Return the change of log seconds when a constant rises by its prior standard deviation."""
    step = 0.1
    there = [_with(system, {name: math.exp(way * step * one.log_sd)}) for way in (1, -1)]
    up, down = (math.log(predicted_seconds(run, other)) for other in there)
    return round((up - down) / (2 * step), 6)


def _with(system: System, factors: Mapping[str, float], zero: tuple[str, ...] = ()) -> System:
    known = system.all_constants
    moved = {name: dataclasses.replace(known[name], value=known[name].value * by) for name, by in factors.items()}
    gone = {name: dataclasses.replace(known[name], value=0.0) for name in zero}
    return dataclasses.replace(system, constants=system.constants | moved | gone)


def without(run: Done, system: System) -> dict[str, float]:
    """Return the seconds of a step on machines whose network, computing or pipeline bubble takes no time."""
    no_curves = dataclasses.replace(system, collectives=[])
    quick = dataclasses.replace(
        system,
        gemm=[_faster(table, (3,)) for table in system.gemm],
        attention=[_faster(table, (4, 5)) for table in system.attention],
    )
    found = predicted(run, system)
    in_pipeline = max(sum(parts[name] for name in ("compute", *WAITS)) for parts in found.parts)
    idle = in_pipeline * found.bubble / (1 + found.bubble) if run.plan.pp > 1 else 0.0
    return {
        "network": predicted_seconds(run, _with(no_curves, *NETWORK)),
        "computing": predicted_seconds(run, _with(quick, *COMPUTING)),
        "bubble": found.seconds - idle,
    }


def _faster(table: Any, seconds: tuple[int, ...]) -> Any:
    """Return a table of measured kernels whose seconds, at these places of a row, are divided by FREE."""
    rows = [tuple(one / FREE if i in seconds else one for i, one in enumerate(row)) for row in table.rows]
    return dataclasses.replace(table, rows=rows)
