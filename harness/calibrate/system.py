"""Conversion of the measurements of a calibration's ranks into a system to predict for."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from harness.predict.fit import Measured, fit
from impl.cost.peaks import PEAKS
from impl.run import Precision, from_dict
from impl.simulator.constants import CONSTANTS
from impl.simulator.seconds import STATE_BYTES, TRAVELS
from impl.simulator.system import System

Facts = dict[str, Any]
"""Measurements that a rank wrote."""
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


def system_of(found: Sequence[Facts], about: Mapping[str, Any], precisions: Sequence[Precision], source: str) -> System:
    """Return the system, with constants fitted to the steps of the trained runs; arguments as of `described`."""
    system = described(found, about, precisions, source)
    return fit(trained(found), system, row_sd=ROW_SD, with_surface=False)


def described(found: Sequence[Facts], about: Mapping[str, Any], precisions: Sequence[Precision], source: str) -> System:
    """Return the system before fitting: tables and curves of the median rank, and constants at their priors.

    Args:
        found: measurements of every rank.
        about: name, stack, hardware, kind, memory_bytes and, of a GPU, processors.
        source: source of every number.
    """
    ranks, kind = len(found), about["kind"]
    number = lambda value, says=source: {"value": _short(value), "source": says}
    tables = {p: _over(found, f"products, {p}") for p in precisions}
    moved = {p: _over(found, f"elementwise, {p}") for p in precisions}
    added = moved[precisions[0]]["added"]
    bandwidth = added[-1][0] / added[-1][1]
    links = {} if ranks == 1 else curves(_over(found, "collectives"))
    reduced = links.get("all_reduce")
    link = TRAVELS["all_reduce"] * (1 - 1 / ranks) * reduced[-1][0] / reduced[-1][1] if reduced else bandwidth / 2
    alone = "one machine: nothing leaves it"
    document = {
        "name": about["name"],
        "stack": about["stack"],
        "hardware": about["hardware"],
        "device": {
            "kind": kind,
            "memory_bytes": number(about["memory_bytes"], "the system says so"),
            "memory_bandwidth": number(bandwidth),
            "peak_flops": {p: _peak(about["hardware"], p, tables[p], number) for p in precisions},
            "elementwise": [one for p in precisions for one in _elementwise(p, moved[p]["rates"], source)],
            "fused_attention": True,
            **({"processors": {"value": about["processors"], "source": source}} if kind == "cuda" else {}),
        },
        "node": {
            "size": {"value": ranks, "source": source},
            "nics": {"value": 1, "source": alone},
            "nic_bandwidth": number(link, alone),
            "link_bandwidth": number(link, source if reduced else "one rank: not measured"),
        },
        "gemm": [
            {"precision": p, "pass_": pass_, "source": source, "rows": _rounded(rows)}
            for p in precisions
            for pass_, rows in tables[p].items()
        ],
        "attention": [
            {"precision": p, "source": source, "rows": _rounded(_over(found, f"attention, {p}"))} for p in precisions
        ],
        "collectives": [
            {"op": op, "span": "intra", "ranks": ranks, "source": source, "rows": _rounded(rows)}
            for op, rows in links.items()
        ],
        "constants": _constants(found, kind, added, bandwidth, source),
    }
    return System.from_dict(document)


def trained(found: Sequence[Facts]) -> list[Measured]:
    """Return the trained runs with their step times: of each step the slowest rank's, of all steps the median."""
    rows = []
    for name, facts in found[0].items():
        if name.startswith("training, "):
            steps = np.array([rank[name]["seconds"] for rank in found]).max(0)
            label = name.removeprefix("training, ")
            rows.append(Measured(label, from_dict(facts["run"]), float(np.median(steps))))
    return rows


def _constants(
    found: Sequence[Facts], kind: str, added: list[list[float]], bandwidth: float, source: str
) -> dict[str, dict[str, Any]]:
    """Return all constants: measured, fitted, and the rest at their priors."""
    update = _over(found, "update")
    per_tensor = update["tensor"]
    rate = update["count"] * 4 * STATE_BYTES / max(update["parameters"] - per_tensor, 1e-9)
    measured = {
        "kernel_seconds": added[0][1],
        "optimizer_efficiency": rate / bandwidth,
        "optimizer_tensor": per_tensor,
        "overlap": _overlap(_over(found, "collectives beside products")) if len(found) > 1 else 1.0,
    }
    given = {"gemm_fill": 20.0, "gemm_efficiency": 0.9} if kind == "cpu" else {}
    constants = {name: {"value": one.value, "source": "not fitted here"} for name, one in CONSTANTS.items()}
    constants |= {name: {"value": value, "source": "CPUs"} for name, value in given.items()}
    constants |= {name: {"value": _short(value), "source": source} for name, value in measured.items()}
    return constants | {name: {"value": v, "log_sd": sd, "source": "prior"} for name, (v, sd) in FREE.items()}


def _elementwise(precision: str, rates: Mapping[str, list[float]], source: str) -> list[dict[str, Any]]:
    """Return operations with a rate of their own; the layout of heads is part of attention's time."""
    known = {name: (_short(forward), _short(backward), source) for name, (forward, backward) in rates.items()}
    known["heads"] = NOTHING, NOTHING, "measured with attention"
    return [
        {"precision": precision, "name": name, "forward": forward, "backward": backward, "source": says}
        for name, (forward, backward, says) in known.items()
    ]


def _overlap(rows: list[dict[str, float]]) -> float:
    """Return the share of a collective that hides behind computing, of the largest one measured."""
    last = rows[-1]
    hidden = last["computing"] + last["sending"] - last["both"]
    return min(1.0, max(0.0, hidden / min(last["computing"], last["sending"])))


def _peak(hardware: str, precision: str, tables: Mapping[str, list[list[float]]], number: Any) -> dict[str, Any]:
    known = PEAKS.get(hardware)
    if known is not None and precision in known.flops:
        return number(known.flops[precision], known.source)
    best = max(2 * m * n * k / seconds for rows in tables.values() for m, n, k, seconds in rows)
    return number(best, "the fastest product measured here")


def curves(measured: Mapping[str, list[list[float]]]) -> dict[str, list[list[float]]]:
    """Return curves in which fewer bytes never take longer: a disturbed point is as fast as the next larger one."""
    found = {}
    for op, rows in measured.items():
        seconds = np.minimum.accumulate([row[1] for row in reversed(rows)])[::-1]
        found[op] = [[row[0], float(second)] for row, second in zip(rows, seconds, strict=True)]
    return found


def _over(found: Sequence[Facts], name: str) -> Any:
    """Return the median over all ranks of every number in their measurements."""
    return _median([rank[name] for rank in found])


def _median(values: Sequence[Any]) -> Any:
    if isinstance(values[0], dict):
        return {key: _median([value[key] for value in values]) for key in values[0]}
    if isinstance(values[0], list):
        return [_median(each) for each in zip(*values, strict=True)]
    return float(np.median(values))


def _rounded(rows: list[list[float]]) -> list[list[float]]:
    return [[_short(x) for x in row] for row in rows]


def _short(x: float) -> float:
    return int(x) if x == math.floor(x) and x < 10**9 else float(f"{x:.{DIGITS}g}")
