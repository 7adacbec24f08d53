"""Claims of a source, checked against records: reproduced, partly, not reproduced, or not run here."""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple, TypeVar

import pandas as pd

from harness.analysis.render import Column, Table, number
from harness.records.measures import about, is_one_each, size_name
from harness.records.parts import Evaluation
from harness.records.record import Record

_T = TypeVar("_T")
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


Check = Callable[[Sequence[Record]], Evidence | None]
"""Function that checks a claim by records of one tier; it returns None if they cannot decide it."""


@dataclass(frozen=True)
class Claim:
    """Statement of a source or of our own that records can confirm or refute."""

    text: str
    source: str
    check: Check
    published: str = ""
    """Numbers that the source prints, for comparison; an experiment's first claim with any is its headline."""
    compares: bool = field(default=False, kw_only=True)
    """True if the claim compares simulated with measured runs, and is judged by both together."""
    hardware: str = field(default="", kw_only=True)
    """Part of the name of the device that the claim's absolute numbers are for; other devices are not compared."""


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
    by_system = {system: list(map(_without_traffic, by_system[system])) for system in sorted(by_system)} or {"": []}
    return {system: [_evidence(claim, by_system, system) for claim in claims] for system in by_system}


def _without_traffic(record: Record) -> Record:
    """Return a simulated record without its traffic: formulas of the claims' checks gave it, so it is no evidence."""
    if not record.is_simulated:
        return record
    other = copy.copy(record)
    other.ranks = [dataclasses.replace(rank, traffic=None) for rank in record.ranks]
    return other


def _evidence(claim: Claim, found: Mapping[str, Sequence[Record]], system: str) -> Evidence | None:
    """Return evidence on a claim from the measured records, or from those simulated for these systems."""
    own = found[system]
    if claim.compares:
        if not system:
            return None
        own = [*found.get("", []), *own]
    return claim.check([one for one in own if claim.hardware in (one.environment.device_name or "")])


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


def with_size(measure: Callable[[Evaluation], float], name: str, *, falls: bool) -> Check:
    """Return a check that an evaluation's mean measure falls, or rises, strictly with the number of parameters.

    A run that diverged refutes the claim.

    Args:
        measure: function of an evaluation, as `lambda evaluation: evaluation.token_perplexity`.
        name: name of the evaluated text.
    """

    def check(records: Sequence[Record]) -> Evidence | None:
        pairs = ((record.parameters, last) for record in records for last in record.last_evaluations)
        ordered = sorted(means((size, measure(last)) for size, last in pairs if last.name == name).items())
        if len(ordered) < 2:
            return None
        numbers = ", ".join(f"{number(value)} ({size_name(round(size))})" for size, value in ordered)
        if any(record.has_diverged for record in records):
            return Evidence(False, f"{numbers}; a run diverged")
        return tally([(b < a) if falls else (b > a) for (_, a), (_, b) in pairwise(ordered)], "steps in size", numbers)

    return check


def means(found: Iterable[tuple[_T, float]]) -> dict[_T, float]:
    """Return the mean of the values of each key; NaN is left out."""
    groups: dict[_T, list[float]] = {}
    for key, value in found:
        if not math.isnan(value):
            groups.setdefault(key, []).append(value)
    return {key: math.fsum(values) / len(values) for key, values in groups.items()}
