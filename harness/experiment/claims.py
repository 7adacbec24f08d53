"""Claims of a source, judged by records: reproduced, partly, not reproduced, cannot tell here, or not run here."""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar, get_args

from harness.records.measures import about, is_one_each, with_seconds
from harness.records.record import Record
from harness.records.statistics import Estimate, estimate, exact, repeats_to_decide
from impl.errors import InputError
from impl.grouping import by_key

_T = TypeVar("_T")
Verdict = Literal["reproduced", "partly", "not reproduced", "cannot tell here", "not run here"]
Kind = Literal["quantitative", "direction", "self-consistency", "arithmetic", "own question"]
KINDS: dict[Kind, str] = {
    "quantitative": "against the paper, its number within a tolerance",
    "direction": "against the paper, the direction of its finding",
    "self-consistency": "our counters against our own or a paper's formulas",
    "arithmetic": "formulas alone, which no run can refute",
    "own question": "asked by no paper",
}
"""What a claim is held against. Each kind is counted apart."""
Part = Literal["network", "computing", "bubble"]
"""Part of a machine that a null model idealises: it takes no time."""
PARTLY = 0.5
"""Least share of a claim's points that must hold for the verdict `partly`."""


class Tolerance(float):
    """Largest difference that a claim allows, with the reason for it and the date on which it was set."""

    reason: str
    date: str

    def __new__(cls, value: float, reason: str, date: str) -> "Tolerance":
        """Return the number with its reason and its date, as 2026-11-21."""
        made = super().__new__(cls, value)
        made.reason, made.date = reason, date
        return made


class Evidence(NamedTuple):
    """Result of a claim's check: how many of its points hold, how many fail, and its numbers."""

    holds: int
    fails: int
    open: int
    """Points whose interval contains the border."""
    numbers: str
    repeats: int | None = None
    """Repeats by which each open point would probably be decided if means and deviations stayed; None: not known."""


def tally(points: Iterable[bool | Estimate], what: str = "", numbers: str = "") -> Evidence | None:
    """Return how many points hold, fail and are open, as `7 of 8 pairs, 1 open; NUMBERS`; None without points.

    Args:
        points: by how much each point holds, which its interval decides; or whether it does, where it is exact. Omit
            points that hold by construction, as a baseline relative to itself; NaN is left out.
        what: plural name of the points, as `pairs`; empty for a claim that has one.
    """
    known = [one for one in points if isinstance(one, bool) or not math.isnan(one.mean)]
    if not known:
        return None
    said = list(map(holds, known))
    undecided = [one for one, held in zip(known, said, strict=True) if held is None and isinstance(one, Estimate)]
    needed = [repeats_to_decide(one) for one in undecided]
    found = (said.count(True), said.count(False), len(undecided))
    text = f"{found[0]} of {len(said)} {what}" + (f", {found[2]} open" if found[2] else "") if what else ""
    repeats = max((one for one in needed if one), default=None) if None not in needed else None
    return Evidence(*found, "; ".join(filter(None, (text, numbers))), repeats)


def holds(point: bool | Estimate) -> bool | None:
    """Return whether a point holds by more than its interval; None if the interval contains 0, or there is none."""
    if isinstance(point, bool):
        return point
    if point.half_width is None or (point.half_width and abs(point.mean) <= point.half_width):
        return None
    return point.mean > 0


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
    kind: Kind = field(default="own question", kw_only=True)
    about: Part | None = field(default=None, kw_only=True)
    """Part of the machine without which the claim cannot hold, a null model that its simulated verdict is tested by."""
    tolerance: Tolerance | None = field(default=None, kw_only=True)
    compares: bool = field(default=False, kw_only=True)
    """True if the claim compares simulated with measured runs, and is judged by both together."""
    hardware: str = field(default="", kw_only=True)
    """Part of the name of the device that the claim's absolute numbers are for; other devices are not compared."""

    def __post_init__(self) -> None:
        """Refuse an `about` that is no part of a machine, which the type checker does not see everywhere."""
        if self.about not in (None, *(parts := get_args(Part))):
            raise InputError(f"claim {self.text!r}: about {self.about!r}; valid: {', '.join(parts)}")


def evidence(claims: Sequence[Claim], records: Sequence[Record]) -> dict[str, list[Evidence | None]]:
    """Return evidence on every claim, by systems of the simulated runs; "" for measured runs.

    Systems are judged together unless a run was simulated for several of them. Runs whose published numbers the
    system's constants were fitted to are no evidence.

    Raises:
        InputError: the records are of several tiers.
    """
    about(records)
    together = ", ".join(sorted({str(r.environment.system) for r in records if r.is_simulated}))
    are_apart = not is_one_each(records)
    own = lambda record: str(record.environment.system) if are_apart else together
    by_system = by_key((own(record) if record.is_simulated else "", record) for record in records)
    fair = {system: list(map(_fair, by_system[system])) for system in by_system}
    by_system = {system: fair[system] for system in sorted(fair)} or {"": []}
    return {system: [_evidence(claim, by_system, system) for claim in claims] for system in by_system}


def idealised(records: Iterable[Record], part: Part) -> list[Record]:
    """Return simulated records as on machines of which one part takes no time; measured ones are left out.

    What does not fit a device's memory does not fit the idealised one.
    """
    bubble = 0.0 if part == "bubble" else None
    ideal = lambda one: with_seconds(one, one.prediction.without[part], bubble)
    known = [one for one in records if one.is_simulated and (part in one.prediction.without or not one.steps)]
    return [ideal(one) if one.steps else one for one in known]


def _fair(record: Record) -> Record:
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
    is_free_of_fits = claim.kind in ("arithmetic", "self-consistency")
    own = [one for one in own if is_free_of_fits or not one.prediction.fitted]
    return claim.check([one for one in own if claim.hardware in (one.environment.device_name or "")])


def verdict(found: Evidence | None) -> Verdict:
    """Return the verdict that stands whatever the open points are; `cannot tell here` if it depends on them.

    `partly` is half of the points or more, but not all. Without a point evidence is only why nothing can be said.
    """
    if found is None:
        return "not run here"
    if not (count := found.holds + found.fails + found.open):
        return "cannot tell here"
    worst, best = _in_a_word(found.holds / count), _in_a_word((found.holds + found.open) / count)
    return worst if worst == best else "cannot tell here"


def _in_a_word(share: float) -> Verdict:
    return "reproduced" if share == 1 else "partly" if share >= PARTLY else "not reproduced"


def in_full(found: Evidence | None) -> str:
    """Return the verdict with what it rests on: `partly (7 of 8)`, `cannot tell here (1 of 8 fails; 5 repeats would)`.

    Where a point fails beyond its interval the claim does not hold in full, whatever the open ones are.
    """
    word = verdict(found)
    if found is None or word not in ("partly", "cannot tell here"):
        return word
    count = found.holds + found.fails + found.open
    failing = f"{found.fails} of {count} fail{'s' * (found.fails == 1)}" if found.fails else ""
    more = f"{found.repeats} repeats would" if found.repeats else ""
    of = f"{found.holds} of {count}" if word == "partly" else "; ".join(filter(None, (failing, more)))
    return f"{word} ({of})" if of else word


def means(found: Iterable[tuple[_T, float]]) -> dict[_T, Estimate]:
    """Return the mean of the values of each key with its interval; NaN is left out."""
    groups = by_key((key, value) for key, value in found if not math.isnan(value))
    return {key: estimate(values) for key, values in groups.items()}


def less(smaller: Estimate | float, larger: Estimate | float) -> bool | Estimate:
    """Return by which share the first is less than the second; numbers are exact.

    Measured means are compared by Welch's test of their difference, simulated ones by the ratio, in which what they
    have in common cancels. Infinite values are compared as they are.
    """
    a, b = (one if isinstance(one, Estimate) else exact(one) for one in (smaller, larger))
    if math.isinf(a.mean) or math.isinf(b.mean) or not a.mean or not b.mean:
        return a.mean < b.mean
    are_simulated = a.causes is not None and b.causes is not None
    margin = (a / b).scaled(-1) - -1 if are_simulated else (b - a).scaled(1 / abs(b.mean))
    return margin.mean > 0 if margin.half_width == 0 else margin


def near(ours: Estimate | float, expected: float, within: float) -> bool | Estimate:
    """Return by how much a number is within a distance of the expected one, in the number's unit."""
    one = ours if isinstance(ours, Estimate) else exact(ours)
    margin = dataclasses.replace(one, mean=within - abs(one.mean - expected), causes=None)
    return margin.mean >= 0 if margin.half_width == 0 and not math.isnan(margin.mean) else margin
