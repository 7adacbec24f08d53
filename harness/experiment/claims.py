"""Claims of a source, checked against records: reproduced, partly, not reproduced, or not run here."""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import pandas as pd

from harness.analysis.render import Column, Table, number
from harness.records.evaluations import evaluations
from harness.records.frames import rows_of
from harness.records.measures import about, frame, size_name
from harness.records.record import Record
from harness.records.source import is_one_each

Verdict = Literal["reproduced", "partly", "not reproduced", "not run here"]
PARTLY = 0.5
"""Least share of a claim's points that must hold for the verdict `partly`."""


class Evidence(NamedTuple):
    """Result of a claim's check, with its numbers."""

    holds: bool
    numbers: str
    share: float = math.nan
    """Share of the claim's points that hold; NaN if it has a single point, or is judged as a whole."""


def tally(held: Iterable[bool], what: str, numbers: str = "") -> Evidence | None:
    """Return whether every point holds, and how many do, as `7 of 8 pairs; NUMBERS`; None without points.

    Args:
        held: whether each point holds; omit points that hold by construction, as a baseline relative to itself.
        what: plural name of the points, as `pairs`.
    """
    held = list(held)
    if not held:
        return None
    text = f"{sum(held)} of {len(held)} {what}"
    return Evidence(all(held), f"{text}; {numbers}" if numbers else text, sum(held) / len(held))


BY_FORMULA = ("tp_calls", "tp_bytes_sent", "dp_bytes_sent", "pp_sends", "pp_bytes_sent")
"""Columns that simulated records compute by the same formulas as the claims' checks: no evidence."""
Row = Mapping[str, Any]
"""Columns of a run and one of its evaluations; NaN where not measured."""
Check = Callable[[Sequence[Row]], Evidence | None]
"""Function that checks a claim; it returns None if the runs cannot decide it."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Statement of a source or of our own that records can confirm or refute."""

    text: str
    source: str
    check: Check
    compares: bool = False
    """True if the claim compares simulated with measured runs, and is judged by both together."""
    published: str = ""
    """Numbers that the source prints, for comparison; an experiment's first claim with any is its headline."""
    hardware: str = ""
    """Part of the name of the device that the claim's absolute numbers are for; other devices are not compared."""


def measured(records: Sequence[Record]) -> list[Row]:
    """Return one row per run and evaluation, one for a run without any: `measures.frame` joined with `evaluations`."""
    if not records:
        return []
    return [*rows_of(frame(records).merge(evaluations(records), on="id", how="left"))]


def evidence(claims: Sequence[Claim], records: Sequence[Record]) -> dict[str, list[Evidence | None]]:
    """Return evidence on every claim, by systems of the simulated runs; "" for measured runs.

    Systems are judged together unless a run was simulated for several of them.

    Raises:
        InputError: the records are of several tiers.
    """
    about(records)
    by_system: dict[str, list[Record]] = {}
    together = ", ".join(sorted({str(r.environment.system) for r in records if r.is_simulated}))
    are_apart = not is_one_each(records)
    for record in records:
        own = str(record.environment.system) if are_apart else together
        by_system.setdefault(own if record.is_simulated else "", []).append(record)
    rows = {system: measured(found) for system, found in sorted(by_system.items())} or {"": []}
    return {system: [_evidence(claim, rows, system) for claim in claims] for system in rows}


def _evidence(claim: Claim, rows: Mapping[str, Sequence[Row]], system: str) -> Evidence | None:
    """Return evidence on a claim from the measured runs, or from those simulated for these systems."""
    own: Sequence[Row] = rows[system]
    if system:
        own = [{**row, **dict.fromkeys(BY_FORMULA, math.nan)} for row in own]
    if claim.compares:
        if not system:
            return None
        own = [*rows.get("", []), *own]
    return claim.check([row for row in own if claim.hardware in str(row["device_name"])])


def claims_table(claims: Sequence[Claim], records: Sequence[Record]) -> Table:
    """Return the table of verdicts on the claims, with the numbers of their evidence."""
    columns = {"claim": [claim.text for claim in claims], "source": [claim.source for claim in claims]}
    if any(claim.published for claim in claims):
        columns["published"] = [claim.published for claim in claims]
    for system, found in evidence(claims, records).items():
        on = f", simulated on {system}" if system else ""
        columns |= {
            f"verdict{on}": [verdict(one) for one in found],
            f"numbers{on}": [one.numbers if one else "" for one in found],
        }
    shown = tuple(Column(key=key, header=key, text=True) for key in columns)
    return Table("claims", f"Claims{about(records)}", shown, pd.DataFrame(columns))


def verdict(found: Evidence | None) -> Verdict:
    """Return the verdict in words: `partly` if half of the claim's points or more hold, but not all."""
    if found is None:
        return "not run here"
    if found.holds:
        return "reproduced"
    return "partly" if PARTLY <= found.share < 1 else "not reproduced"


def with_size(measure: str, name: str, *, falls: bool) -> Check:
    """Return a check that an evaluation's mean measure falls, or rises, strictly with the number of parameters.

    A run that diverged refutes the claim.
    """

    def check(rows: Sequence[Row]) -> Evidence | None:
        means = mean_by(rows, measure, lambda row: row["parameters"] if row["name"] == name else None)
        if len(means) < 2:
            return None
        ordered = sorted(means.items())
        numbers = ", ".join(f"{number(value)} ({size_name(round(size))})" for size, value in ordered)
        if any(row["diverged"] for row in rows):
            return Evidence(False, f"{numbers}; a run diverged")
        return tally([(b < a) if falls else (b > a) for (_, a), (_, b) in pairwise(ordered)], "steps in size", numbers)

    return check


def mean_by(rows: Sequence[Row], measure: str, key: Callable[[Row], Hashable | None]) -> dict[Any, float]:
    """Return the mean of a measure over the rows of equal key; rows without key or measure are left out."""
    groups: dict[Any, list[float]] = {}
    for row in rows:
        if (at := key(row)) is not None and not math.isnan(row[measure]):
            groups.setdefault(at, []).append(row[measure])
    return {at: math.fsum(values) / len(values) for at, values in groups.items()}
