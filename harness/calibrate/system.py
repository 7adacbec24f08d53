"""Conversion of the measurements of a calibration's ranks into a system to predict for."""

import math
from typing import Any, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from harness.predict.fit import Measured, fit
from impl.cost.peaks import PEAKS
from impl.cost.traffic import TRAVELS, Op
from impl.fields import CHECKED
from impl.run import Precision
from impl.simulator.constants import CONSTANTS, Constant
from impl.simulator.seconds import STATE_BYTES
from impl.simulator.system import (
    AttentionTable,
    Count,
    Curve,
    Device,
    Elementwise,
    GemmTable,
    Node,
    Number,
    System,
    Two,
)

FREE = {
    "memory_efficiency": (0.6, 0.5),
    "host_forward": (2e-4, 1.0),
    "host_backward": (3e-4, 1.0),
    "host_collective": (1e-4, 1.0),
    "send_wait": (1e-4, 1.0),
    "microbatch_seconds": (5e-4, 1.0),
    "step_seconds": (2e-3, 1.0),
}
"""Priors of the constants that are fitted to the trained runs: value, and standard deviation of its logarithm."""
ROW_SD = 0.05
"""Standard deviation of the logarithm of a step's seconds between repeats, on a machine that others may use."""
DIGITS = 4
NOTHING = 1e18
"""Bytes a second that stand for an operation that takes no time of its own."""


@dataclass(config=CHECKED, kw_only=True)
class Measurements:
    """Measurements of all ranks at once, and what they ran on: of times the median rank's."""

    source: str
    """Source of every number."""
    stack: str
    hardware: str
    kind: Literal["cuda", "cpu"]
    memory_bytes: int
    """Memory of a rank."""
    processors: int | None = None
    """Processors of a GPU."""
    ranks: int
    gemm: list[GemmTable] = Field(default_factory=list)
    attention: list[AttentionTable] = Field(default_factory=list)
    elementwise: list[Elementwise] = Field(default_factory=list)
    added: list[Two] = Field(default_factory=list)
    """Bytes read and written, and seconds, of additions from small to large."""
    updated: int = 0
    """Parameters of the timed update."""
    update_seconds: float = 0.0
    tensor_seconds: float = 0.0
    """Seconds to update a tensor of few parameters among many."""
    collectives: dict[Op, list[Two]] = Field(default_factory=dict)
    """Bytes of the whole tensor, and seconds, of each collective."""
    overlap: float = 1.0
    """Share of a collective that hides behind products."""
    trained: list[Measured] = Field(default_factory=list)
    """Median step time of each trained run, of the slowest rank in every step."""


def system_of(found: Measurements, name: str) -> System:
    """Return the system, with constants fitted to the steps of the trained runs."""
    return fit(found.trained, described(found, name), with_surface=False)


def described(found: Measurements, name: str) -> System:
    """Return the system before fitting: what was measured, and constants at their priors."""
    number = lambda value, source=found.source: Number(value, source)
    bandwidth = found.added[-1][0] / found.added[-1][1]
    curves: dict[Op, list[Two]] = {op: undisturbed(rows) for op, rows in found.collectives.items()}
    link, of_link = bandwidth / 2, "one rank: not measured"
    if curves:
        size, seconds = curves["all_reduce"][-1]
        link, of_link = TRAVELS["all_reduce"] * (1 - 1 / found.ranks) * size / seconds, found.source
    # the layout of heads is part of attention's time
    peaks: dict[Precision, Number] = {table.precision: _peak(found, table.precision) for table in found.gemm}
    heads = [Elementwise(precision, "heads", NOTHING, NOTHING, "measured with attention") for precision in peaks]
    alone = "one machine: nothing leaves it"
    system = System(
        name=name,
        stack=found.stack,
        hardware=found.hardware,
        device=Device(
            kind=found.kind,
            memory_bytes=number(found.memory_bytes, "the system says so"),
            memory_bandwidth=number(bandwidth),
            peak_flops=peaks,
            elementwise=found.elementwise + heads,
            processors=Count(found.processors, found.source) if found.processors else None,
        ),
        node=Node(
            size=Count(found.ranks, found.source),
            nics=Count(1, alone),
            nic_bandwidth=number(link, alone),
            link_bandwidth=number(link, of_link),
        ),
        gemm=found.gemm,
        attention=found.attention,
        collectives=[Curve(op, "intra", found.ranks, found.source, rows) for op, rows in curves.items()],
        constants=_constants(found, bandwidth),
        row_sd=ROW_SD,
    )
    return System.from_dict(_rounded(system.as_dict()))


def _constants(found: Measurements, bandwidth: float) -> dict[str, Constant]:
    """Return all constants: measured, fitted, and the rest at their priors."""
    rate = found.updated * 4 * STATE_BYTES / max(found.update_seconds - found.tensor_seconds, 1e-9)
    measured = {
        "kernel_seconds": found.added[0][1],
        "optimizer_efficiency": rate / bandwidth,
        "optimizer_tensor": found.tensor_seconds,
        "overlap": found.overlap,
    }
    of_cpus = {"gemm_fill": 20.0, "gemm_efficiency": 0.9} if found.kind == "cpu" else {}
    constants = {name: Constant(one.value, source="not fitted here") for name, one in CONSTANTS.items()}
    constants |= {name: Constant(value, source="CPUs") for name, value in of_cpus.items()}
    constants |= {name: Constant(value, source=found.source) for name, value in measured.items()}
    return constants | {name: Constant(value, log_sd) for name, (value, log_sd) in FREE.items()}


def _peak(found: Measurements, precision: Precision) -> Number:
    known = PEAKS.get(found.hardware)
    if known is not None and precision in known.flops:
        return Number(known.flops[precision], known.source)
    rows = [row for table in found.gemm if table.precision == precision for row in table.rows]
    return Number(max(2 * m * n * k / seconds for m, n, k, seconds in rows), "the fastest product measured here")


def undisturbed(rows: list[Two]) -> list[Two]:
    """Return a curve in which fewer bytes never take longer: a disturbed point is as fast as the next larger one."""
    seconds = np.minimum.accumulate([row[1] for row in reversed(rows)])[::-1]
    return [(row[0], float(second)) for row, second in zip(rows, seconds, strict=True)]


def _rounded(value: Any) -> Any:
    """Return a document with numbers of few digits; whole numbers below a billion keep all of theirs."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    if not isinstance(value, int | float):
        return value
    return int(value) if value == math.floor(value) and value < 10**9 else float(f"{value:.{DIGITS}g}")
