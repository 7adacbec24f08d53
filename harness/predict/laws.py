"""What each law of the simulator is worth: errors on steps that were not fitted, with the law and without it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from harness.analysis.render import Column, Table
from harness.predict.benchmark import PERCENT
from harness.predict.fit import SURFACE_ROWS, Measured, percent_off, seconds_of
from harness.predict.held_out import CASES, Case, fitted_to, parts_of, result_of, with_priors
from harness.predict.systems import load_system, names
from harness.terminal import shown_progress
from impl.grouping import by_key
from impl.simulator.constants import Constant
from impl.simulator.system import System

SURFACE = "what the constants leave over is a surface over sizes"
CHANGES = 1e-6
"""Relative change of a step's seconds from which a law concerns it."""
Without = Callable[[System], System]
"""Function from a system to the same without a law."""


def _fixed(value: float, *names: str) -> Without:
    """Return the change of these constants to a value, which no fit moves."""
    return lambda system: replace(system, constants=system.constants | dict.fromkeys(names, Constant(value)))


def _lacking(**habits: Any) -> Without:
    return lambda system: replace(system, habits=replace(system.habits, **habits))


def _any_head(system: System) -> System:
    """Return the system with the highest peak for fp32: heads of any size have the rate of the aligned ones."""
    peaks = system.device.peak_flops
    fastest = max(peaks.values(), key=lambda peak: peak.value)
    return replace(system, device=replace(system.device, peak_flops=peaks | {"fp32": fastest}))


def _smooth(system: System) -> System:
    """Return the system whose products split over its processors continuously."""
    return replace(system, device=replace(system.device, processors=None))


LAWS: dict[str, Without] = {
    "products are computed in whole waves of tiles": _smooth,
    "tiles are filled and written": _fixed(0, "gemm_fill"),
    "cores of heads whose rows are not of 16 bytes have the rate of fp32": _any_head,
    "fused attention reaches less of the peak in short sequences": _fixed(0, "attention_fill"),
    "a kernel takes time of its own": _fixed(0, "kernel_seconds"),
    "a host launches the layers": _fixed(0, "host_forward", "host_backward", "host_collective", "host_unfused"),
    "collectives take the hops of rings and trees": _fixed(0, "link_latency", "nic_latency"),
    "groups that share network cards slow each other": _fixed(1, "nic_shared"),
    "sends between stages take time of their own": _fixed(0, "send_wait", "send_blocks", "send_latency"),
    "collectives slow the computing that they overlap": _fixed(1, "overlap"),
    "a microbatch takes time whatever its size": _fixed(0, "microbatch_seconds"),
    "a step takes time whatever its size": _fixed(0, "step_seconds"),
    "ZeRO's stage 1 broadcasts whole tensors (InternEvo)": _lacking(owns_tensors=False),
    "split products overlap their collectives (Megatron-Core)": _lacking(splits_products=False),
    "parameters are gathered ahead (Megatron-Core)": _lacking(gathers_ahead=False),
    "stages between the ends fetch no microbatch (Megatron-Core)": _lacking(fetches_at_ends=False),
    "products add up the weights' gradients (Megatron-Core)": _lacking(fuses_gradients=False),
    "experts get a tensor-parallel rank's own tokens (Megatron-Core)": _lacking(routes_parts=False),
    "ranks wait for the fullest of those that share experts": _lacking(imbalance=1.0),
    SURFACE: lambda one: one,
}
"""Laws that a system can be without, each with how. Laws without a switch, such as bytes of a collective, are not here,
nor are habits that change the run itself, such as the size of its buckets."""


class Worth(NamedTuple):
    """Mean errors in percent of a set of steps with a law, and fitted and predicted without it."""

    law: str
    case: Case
    n: int
    having: float
    lacking: float

    @property
    def gain(self) -> float:
        """Percentage points by which the mean error is smaller with the law."""
        return self.lacking - self.having


def worths(laws: Iterable[str] = LAWS, cases: Iterable[Case] = CASES) -> Iterator[Worth]:
    """Yield what each law is worth on each set of steps that it concerns; the constants are fitted again without it."""
    pairs = [(law, case) for law in laws for case in cases]
    for law, case in shown_progress(pairs, "fitting, predicting"):
        parts = parts_of(case)
        if any(_concerns(law, case, fitted, asked) for fitted, asked in parts):
            off = [_off(law, case, fitted, asked) for fitted, asked in parts]
            having = result_of(case).whole.off
            yield Worth(law, case, len(having), float(abs(having).mean()), float(abs(np.concatenate(off)).mean()))


def _concerns(law: str, case: Case, fitted: list[Measured], asked: list[Measured]) -> bool:
    """Return True if a step of these changes with the law: by the priors, or by the surface that a fit keeps."""
    if law == SURFACE:
        return case.has_surface and len(fitted) >= SURFACE_ROWS
    having, rows = with_priors(load_system(case.system)), [*fitted, *asked]
    ratios = seconds_of(rows, LAWS[law](having)) / seconds_of(rows, having)
    return bool((abs(ratios - 1) > CHANGES).any())


def _off(law: str, case: Case, fitted: list[Measured], asked: list[Measured]) -> np.ndarray:
    """Return errors in percent of the steps asked for, with constants fitted without the law."""
    has_surface = case.has_surface and law != SURFACE
    system = fitted_to(fitted, LAWS[law](load_system(case.system)), has_surface=has_surface)
    return percent_off(seconds_of(asked, system), np.array([row.seconds for row in asked]))


def laws_table(found: Iterable[Worth]) -> Table:
    """Tabulate for each law the set of steps that it makes most better, and the one that it makes most worse."""
    of_law = by_key((one.law, one) for one in found)
    rows = [{"law": law, "sets": 0} for law in LAWS if law not in of_law]
    for law, some in of_law.items():
        best, worst = max(some, key=lambda one: one.gain), min(some, key=lambda one: one.gain)
        gains = sum(one.n * one.gain for one in some) / sum(one.n for one in some)
        row = {"law": law, "sets": len(some), "mean": gains, "better": _set(best), "gain": best.gain}
        rows.append(row | {"having": best.having, "lacking": best.lacking, "worse": _set(worst), "loss": worst.gain})
    points: dict[str, Any] = {"unit": "points", "digits": 3}
    columns = (
        Column(key="law", header="law", text=True), Column(key="sets", header="sets that it concerns"),
        Column(key="mean", header="better by, all their steps", **points),
        Column(key="better", header="set that gains most", text=True),
        Column(key="having", header="with the law", **PERCENT), Column(key="lacking", header="without", **PERCENT),
        Column(key="gain", header="better by", **points),
        Column(key="worse", header="set that gains least", text=True),
        Column(key="loss", header="better by, there", **points),
    )  # fmt: skip
    notes = (
        "Mean errors on steps that were not fitted, sets as in accuracy.md. Without a law other constants are fitted "
        "again to the same rows, so that they make up for it where they can. Below 0: worse with the law.",
        "A law is kept for what it says beyond these steps, too: it has a source, or was measured by itself.",
    )
    return Table("laws", "What each law is worth", columns, pd.DataFrame(rows).sort_values("gain"), notes)


def _set(one: Worth) -> str:
    return f"{one.case.id}: {one.case.what} ({one.n})"


def constants_table() -> Table:
    """Tabulate the constants of every packaged system that a fit may move, and the rows that they were fitted to."""
    rows = []
    for system in map(load_system, names()):
        free = [name for name, one in system.all_constants.items() if one.log_sd > 0]
        fitted = system.calibration.rows if system.calibration else []
        rows.append({"system": system.name, "rows": len(fitted), "count": len(free), "names": ", ".join(free)})
    columns = (
        Column(key="system", header="system", text=True), Column(key="rows", header="rows fitted to"),
        Column(key="count", header="constants"), Column(key="names", header="which", text=True),
    )  # fmt: skip
    notes = (
        "A constant has a prior of a width that is set in `impl/simulator/constants.py`, or in the system's file: few "
        "rows move it little. Without rows it is its prior.",
    )
    return Table("constants", "Constants that a fit may move", columns, pd.DataFrame(rows), notes)
