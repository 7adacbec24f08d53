"""How far the ratio of two predicted steps is off, by pairs of published steps that no constant was fitted to."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from harness.analysis.render import Column, Table, texts
from harness.predict.benchmark import PERCENT
from harness.predict.doubt import shared_causes
from harness.predict.held_out import Case, Part, Result, fitted_system
from harness.records.statistics import NINE_TENTHS, rest

MOST = 24
"""Rows of a set, evenly chosen, whose pairs are looked at."""
COLUMNS = (
    *texts(set="set", what="rows"),
    Column(key="n", header="pairs"),
    Column(key="step", header="a step is off by", **PERCENT),
    Column(key="ratio", header="a ratio, over √2", **PERCENT),
    Column(key="inside", header="ratios inside the 90% interval", **PERCENT),
)


def ratios_table(results: Sequence[Result]) -> Table:
    """Tabulate errors of the ratio of two steps of one set, and how often its 90% interval has the measured ratio."""
    rows = []
    for result in results:
        found = [pair for part in result.parts for pair in _pairs(result.case, part)]
        if found:
            steps, apart, inside = (np.array(column) for column in zip(*found, strict=True))
            size = lambda logs: 100 * float(np.sqrt(np.mean(logs**2)))
            own = {"step": size(steps), "ratio": size(apart) / math.sqrt(2), "inside": 100 * float(inside.mean())}
            rows.append({"set": result.case.id, "what": result.case.what, "n": len(found)} | own)
    mean = {name: float(np.mean([row[name] for row in rows])) for name in ("step", "ratio", "inside")}
    rows.append({"set": "all", "what": "mean of the sets", "n": sum(row["n"] for row in rows)} | mean)
    notes = (
        f"Pairs of up to {MOST} rows of a set with the same fitted constants. Errors are root mean squares of "
        "logarithms. If two steps were off alike, their ratio would be off by less than either; it is off as if they "
        "had nothing in common. So verdicts on simulated ratios count as a step's own what the constants leave of its "
        "90% interval.",
    )
    return Table("ratios", "Errors of ratios of two steps", COLUMNS, pd.DataFrame(rows), notes)


def _pairs(case: Case, part: Part) -> list[tuple[float, float, bool]]:
    """Return for pairs of rows their mean error, that of the ratio, and whether its interval has the measured one."""
    chosen = np.unique(np.linspace(0, len(part.rows) - 1, MOST).round().astype(int))
    system = fitted_system(case.system, tuple(part.fitted), case.has_surface)
    causes = [shared_causes(part.rows[i].run, system) for i in chosen]
    names = sorted({name for one in causes for name in one})
    shared = np.array([[one.get(name, 0.0) for name in names] for one in causes])
    whole = np.log(part.bounds[chosen, 1] / part.bounds[chosen, 0]) / (2 * NINE_TENTHS)
    own = [max(system.row_sd, rest(*both)) for both in zip(whole.tolist(), shared.tolist(), strict=True)]
    off = np.log(part.measured[chosen] / part.predicted[chosen])
    found = []
    for i, j in itertools.combinations(range(len(chosen)), 2):
        deviation = math.hypot(own[i], own[j], *(shared[i] - shared[j]))
        apart = off[i] - off[j]
        found.append((math.hypot(off[i], off[j]) / math.sqrt(2), apart, abs(apart) <= NINE_TENTHS * deviation))
    return found
