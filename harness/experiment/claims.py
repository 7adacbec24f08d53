"""Claims of a source, held against records: reproduced, partly, not reproduced, or not run here."""

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
"""Share of a claim's points that have to hold for it to be partly reproduced, where not all do."""


class Evidence(NamedTuple):
    """Whether a claim holds, and the numbers that say so."""

    holds: bool
    numbers: str
    share: float = math.nan
    """Of its points, those that hold; NaN: it has but one, or they only say something together."""


def tally(held: Iterable[bool], what: str, numbers: str = "") -> Evidence | None:
    """Whether every point holds, and how many do, as `7 of 8 pairs; NUMBERS`; None where there are no points.

    Args:
        held: of each point; what holds by construction, as a baseline relative to itself, is none.
        what: the points are called, as `pairs`.
    """
    held = list(held)
    if not held:
        return None
    text = f"{sum(held)} of {len(held)} {what}"
    return Evidence(all(held), f"{text}; {numbers}" if numbers else text, sum(held) / len(held))


BY_FORMULA = ("tp_calls", "tp_bytes_sent", "dp_bytes_sent", "pp_sends", "pp_bytes_sent")
"""What a simulated record has by the very formulas that measured ones are held against: no evidence."""
Row = Mapping[str, Any]
"""A run and one of its evaluations; NaN: not measured."""
Check = Callable[[Sequence[Row]], Evidence | None]
"""None: these runs cannot tell."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement that records can bear out or refute."""

    text: str
    source: str
    check: Check
    compares: bool = False
    """It is about simulated runs beside measured ones, and judged by both together."""
    published: str = ""
    """What the source prints, for a reader to hold beside the numbers found; an experiment's first such claim is its
    headline."""
    hardware: str = ""
    """Part of the name of the device that its absolute numbers are for: what ran on another, or was simulated for one,
    is not compared."""


def measured(records: Sequence[Record]) -> list[Row]:
    """One row per run and evaluation, one for a run without any: `measures.frame` beside `perplexity.evaluations`."""
    if not records:
        return []
    return [*rows_of(frame(records).merge(evaluations(records), on="id", how="left"))]


def evidence(claims: Sequence[Claim], records: Sequence[Record]) -> dict[str, list[Evidence | None]]:
    """Evidence on every claim, by where its runs were: "" what was measured, else the systems it was simulated for.

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
    """On a claim, of what was run, or was simulated for these systems."""
    own: Sequence[Row] = rows[system]
    if system:
        own = [{**row, **dict.fromkeys(BY_FORMULA, math.nan)} for row in own]
    if claim.compares:
        if not system:
            return None
        own = [*rows.get("", []), *own]
    return claim.check([row for row in own if claim.hardware in str(row["device_name"])])


def claims_table(claims: Sequence[Claim], records: Sequence[Record]) -> Table:
    """The verdict on every claim, with the numbers it rests on."""
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
    """In words; a claim that holds for half of its points or more, and not for all, is partly reproduced."""
    if found is None:
        return "not run here"
    if found.holds:
        return "reproduced"
    return "partly" if PARTLY <= found.share < 1 else "not reproduced"


def with_size(measure: str, name: str, *, falls: bool) -> Check:
    """A check that the mean of an evaluation's measure falls, or rises, strictly with the number of parameters.

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
    """The mean of a measure over the rows of equal key; rows without key or measure are left out."""
    groups: dict[Any, list[float]] = {}
    for row in rows:
        if (at := key(row)) is not None and not math.isnan(row[measure]):
            groups.setdefault(at, []).append(row[measure])
    return {at: math.fsum(values) / len(values) for at, values in groups.items()}
