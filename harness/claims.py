"""Claims of a source, held against records: reproduced, not reproduced, or not run here."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import pandas as pd

from harness.beside import is_one_each, is_simulated
from harness.measures import Record, about, frame, size_name
from harness.perplexity import evaluations
from harness.render import Column, Table, number

Verdict = Literal["reproduced", "not reproduced", "not run here"]


class Evidence(NamedTuple):
    """Whether a claim holds, and the numbers that say so."""

    holds: bool
    numbers: str


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


def measured(records: Sequence[Record]) -> list[Row]:
    """One row per run and evaluation, one for a run without any: `measures.frame` beside `perplexity.evaluations`."""
    if not records:
        return []
    rows = frame(records).merge(evaluations(records), on="id", how="left")
    return [{str(name): value for name, value in row.items()} for row in rows.to_dict("records")]


def claims_table(claims: Sequence[Claim], records: Sequence[Record]) -> Table:
    """The verdict on every claim, with the numbers it rests on."""
    by_system: dict[str, list[Record]] = {}
    together = ", ".join(sorted({r["environment"]["system"] for r in records if is_simulated(r)}))
    are_apart = not is_one_each(records)
    for record in records:
        own = record["environment"]["system"] if are_apart and is_simulated(record) else together
        by_system.setdefault(own if is_simulated(record) else "", []).append(record)
    columns = {"claim": [claim.text for claim in claims], "source": [claim.source for claim in claims]}
    ran = measured(by_system.get("", []))
    for name in sorted(by_system) or [""]:
        columns |= _judged(claims, ran, measured(by_system[name]), name) if name else _judged(claims, ran)
    shown = tuple(Column(key=key, header=key, text=True) for key in columns)
    return Table("claims", f"Claims{about(records)}", shown, pd.DataFrame(columns))


def _judged(
    claims: Sequence[Claim], ran: list[Row], simulated: Sequence[Row] = (), system: str = ""
) -> dict[str, list[str]]:
    """Two columns, the verdicts on the claims and the numbers, of what was run or was simulated on a system."""
    own = [{**row, **dict.fromkeys(BY_FORMULA, math.nan)} for row in simulated] if system else ran
    on = f", simulated on {system}" if system else ""
    found = [
        (claim.check([*ran, *own]) if system else None) if claim.compares else claim.check(own) for claim in claims
    ]
    return {f"verdict{on}": [verdict(e) for e in found], f"numbers{on}": [e.numbers if e else "" for e in found]}


def verdict(evidence: Evidence | None) -> Verdict:
    if evidence is None:
        return "not run here"
    return "reproduced" if evidence.holds else "not reproduced"


def with_size(measure: str, name: str, *, falls: bool) -> Check:
    """A check that the mean of an evaluation's measure falls, or rises, strictly with the number of parameters.

    A run that diverged refutes the claim.
    """

    def check(rows: Sequence[Row]) -> Evidence | None:
        means = mean_by(rows, measure, lambda row: row["parameters"] if row["name"] == name else None)
        if len(means) < 2:
            return None
        ordered = sorted(means.items())
        holds = all((b < a) if falls else (b > a) for (_, a), (_, b) in pairwise(ordered))
        numbers = ", ".join(f"{number(value)} ({size_name(round(size))})" for size, value in ordered)
        return Evidence(holds and not any(row["diverged"] for row in rows), numbers)

    return check


def mean_by(rows: Sequence[Row], measure: str, key: Callable[[Row], Hashable | None]) -> dict[Any, float]:
    """The mean of a measure over the rows of equal key; rows without key or measure are left out."""
    groups: dict[Any, list[float]] = {}
    for row in rows:
        if (at := key(row)) is not None and not math.isnan(row[measure]):
            groups.setdefault(at, []).append(row[measure])
    return {at: math.fsum(values) / len(values) for at, values in groups.items()}
