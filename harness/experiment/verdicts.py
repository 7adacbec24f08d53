"""Verdicts on the claims of experiments: per tier, measured and simulated, counted and as tables."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pandas as pd

from harness.analysis.render import Table, texts
from harness.experiment.claims import KINDS, Claim, Evidence, Kind, Verdict, evidence, in_full, verdict
from harness.experiment.experiment import Experiment
from harness.experiment.folders import stores
from harness.experiment.tiers import TIERS, Tier
from harness.records.printable import printable, several
from harness.records.record import Record
from harness.terminal import tell_ignored
from impl.errors import InputError
from impl.grouping import by_key

NOT_RUN = "not run here"
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


class Judged(NamedTuple):
    """Claim with the verdict of the runs of one tier."""

    claim: Claim
    tier: Tier | None
    """Tier of the runs; None if no run can decide the claim."""
    systems: str
    """Systems that the runs were simulated for; empty if they were measured."""
    evidence: Evidence | None = None
    basis: str = ""
    """What a simulated verdict rests on: calibration, extrapolation, interval; for a measured one the repeats."""

    @property
    def verdict(self) -> Verdict:
        """Verdict in a word or two."""
        return verdict(self.evidence)

    @property
    def in_full(self) -> str:
        """Verdict with the share of points that hold, or the repeats that would decide."""
        return in_full(self.evidence)

    @property
    def numbers(self) -> str:
        """Numbers of the evidence."""
        return self.evidence.numbers if self.evidence else ""

    @property
    def runs(self) -> str:
        """Description of the runs, as `paper, simulated for selene`; empty if there are none."""
        kind = f"simulated for {self.systems}" if self.systems else "measured"
        return f"{self.tier}, {kind}" if self.tier else ""


def records_of(
    experiment: Experiment, out: Path | None, tiers: Iterable[Tier] = TIERS, tracked: set[Path] | None = None
) -> list[Record]:
    """Return all records of an experiment at these tiers, each tier's measured ones before the simulated.

    Args:
        out: folder of records; None for the choice of `harness.experiment.folders`.
        tracked: the only files whose records are returned; None for all.
    """
    found: list[Record] = []
    for store in (store for tier in tiers for store in stores(out, experiment.id, tier)):
        folder, records = store.recorded.resolve(), store.records()
        found += [one for one in records if tracked is None or folder / f"{one.id}.json" in tracked]
        tell_ignored(store)
    return found


def judged(experiment: Experiment, records: Sequence[Record]) -> list[Judged]:
    """Return for every claim one verdict on measured runs, and one for each system that it was simulated for.

    Each is of the largest tier whose runs can decide the claim; if none can, the only verdict is `not run here`.
    """
    of_tier: dict[Tier, list[Record]] = {}
    known: dict[Tier, dict[str, list[Evidence | None]]] = {}
    for tier in TIERS[::-1]:
        if of_one := [record for record in records if record.tier == tier]:
            of_tier[tier], known[tier] = of_one, evidence(experiment.claims, of_one)
    out: list[Judged] = []
    for i, claim in enumerate(experiment.claims):
        found: list[Judged] = []
        for tier, by_system in known.items():
            done = {bool(one.systems) for one in found if one.tier != tier}
            for system, of_claims in by_system.items():
                said = of_claims[i]
                if said is not None and bool(system) not in done:
                    found.append(Judged(claim, tier, system, said, _basis(claim, of_tier[tier], system)))
        order = sorted(found, key=lambda one: bool(one.systems))
        out += order or [Judged(claim, None, "")]
    return out


def verdicts_of(experiment: Experiment, records: Sequence[Record]) -> list[Judged]:
    """Return the verdicts on an experiment's claims; a claim whose check fails is reported, and not judged."""
    return judged(replace(experiment, claims=sound(experiment.claims)), records)


def sound(claims: Iterable[Claim]) -> tuple[Claim, ...]:
    """Return claims whose checks report a fault, on standard error too, and decide nothing; the others are judged."""

    def guarded(claim: Claim) -> Claim:
        def check(rows: Sequence[Record]) -> Evidence | None:
            try:
                return claim.check(rows)
            except InputError as error:
                why = printable(str(error))
                print(f"claim {claim.text!r} cannot be checked: {why}", file=sys.stderr)
                return Evidence(0, 0, 0, f"its check failed: {why}")

        return replace(claim, check=check)

    return tuple(map(guarded, claims))


def _basis(claim: Claim, records: Sequence[Record], systems: str) -> str:
    """Return the basis of verdicts on these runs, in words."""
    if claim.kind == "arithmetic" or (systems and claim.about is None and claim.kind != "own question"):
        return "formulas"
    if not systems:
        repeats = Counter(record.point for record in records if not record.is_simulated)
        least, most = min(repeats.values()), max(repeats.values())
        return f"{least} to {most} runs a point" if least < most else f"{most} run{'s' * (most > 1)} a point"
    own = [one for one in records if one.is_simulated and one.environment.system in systems.split(", ")]
    kept = [one.prediction for one in own if one.prediction.seconds and one.prediction.low and one.prediction.high]
    if not kept:
        return "formulas"
    fitted = sorted({one.calibrated_on or 0 for one in kept})
    rows = " or ".join([*map(str, fitted[:-1]), several(fitted[-1], "row")])
    beyond = {doubt.split()[1] for one in kept for doubt in one.warnings if doubt.startswith("extrapolates: ")}
    low = min(float(one.low or 0) / float(one.seconds or 1) for one in kept)
    high = max(float(one.high or 0) / float(one.seconds or 1) for one in kept)
    return "; ".join([
        f"constants fitted to {rows}" if fitted != [0] else "constants are priors",
        *([f"extrapolates {', '.join(sorted(beyond))}"] if beyond else []),
        f"90% interval of a step {low:.2f} to {high:.2f} times",
    ])  # fmt: skip


def verdicts_table(experiment: str, found: Sequence[Judged]) -> Table:
    """Return the table of claims and published numbers, with one row per verdict."""
    rows = pd.DataFrame([
        {
            **{name: getattr(one.claim, name) for name in ("text", "source", "kind", "published")},
            **{name: getattr(one, name) or None for name in ("runs", "in_full", "numbers", "basis")},
        }
        for one in found
    ])  # fmt: skip
    headers = {"text": "claim", "source": "source", "kind": "kind", "published": "published", "runs": "runs"}
    headers |= {"in_full": "verdict", "numbers": "numbers", "basis": "rests on"}
    if not any(one.claim.published for one in found):
        headers.pop("published")
    return Table("verdicts", f"Claims: {experiment}", texts(**headers) if len(rows) else (), rows)


def headline_table(experiment: str, found: Sequence[Judged]) -> Table:
    """Return the headline: the first claim with published numbers, next to the simulated and measured ones."""
    claims = list(dict.fromkeys(one.claim for one in found))
    headline = next((claim for claim in claims if claim.published), claims[0] if claims else None)
    title = f"Headline: {experiment}"
    if headline is None:
        return Table("headline", title, (), pd.DataFrame())
    row: dict[str, Any] = {"text": headline.text, "published": headline.published or None}
    headers = {"text": "headline", "published": "published"}
    by_kind: dict[str, Callable[[Judged], bool]] = {
        "simulated": lambda one: bool(one.systems), "measured": lambda one: not one.systems
    }  # fmt: skip
    for kind, is_of in by_kind.items():
        said = [one for one in found if one.claim is headline and one.tier and is_of(one)]
        row[kind] = "; ".join(one.numbers for one in said) or None
        where = "; ".join(", ".join(filter(None, [one.tier, one.systems])) for one in said)
        headers[kind] = f"{kind} ({where})" if where else kind
    return Table("headline", title, texts(**headers), pd.DataFrame([row]))


def counts(found: Sequence[Judged]) -> dict[str, Any]:
    """Count the claims, the verdicts on them, measured and simulated, and the claims that no run can decide.

    A claim that was simulated for several systems counts once, by the verdict of all systems together.
    """
    said: dict[str, Any] = {"claims": len({id(one.claim) for one in found})}
    said |= {runs: _counted(own) for runs, own in _by_runs(found).items()}
    return said | {NOT_RUN: sum(one.tier is None for one in found)}


def _by_runs(found: Sequence[Judged]) -> dict[str, list[Judged]]:
    """Return the verdicts on measured and those on simulated runs."""
    of = lambda is_simulated: [one for one in found if bool(one.systems) == is_simulated]
    return {"measured": of(False), "simulated": of(True)}


def _counted(found: Iterable[Judged]) -> dict[Verdict, int]:
    """Count verdicts, one on each claim."""
    by_claim = by_key((id(one.claim), one.verdict) for one in found if one.tier)
    verdicts = [together(of) for of in by_claim.values()]
    return {each: verdicts.count(each) for each in VERDICTS if each != NOT_RUN}


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """Return one verdict of several: the common one, else `partly` if one of them is that the claim is reproduced."""
    said = set(verdicts)
    if len(said) == 1:
        return verdicts[0]
    return "partly" if "reproduced" in said else "cannot tell here" if "cannot tell here" in said else "not reproduced"


def by_kind(found: Sequence[Judged]) -> list[tuple[Kind, str, dict[Verdict, int]]]:
    """Return for every kind of claim the verdicts on measured and on simulated runs, counted; none are left out.

    Arithmetic is counted once, whatever runs it was shown with.
    """
    rows: list[tuple[Kind, str, dict[Verdict, int]]] = []
    for kind in KINDS:
        own = [one for one in found if one.claim.kind == kind]
        by_runs = {"formulas": own} if kind == "arithmetic" else _by_runs(own)
        for runs, of in by_runs.items():
            if any((said := _counted(of)).values()):
                rows.append((kind, runs, said))
    return rows


def in_words(said: dict[str, Any]) -> str:
    """Return the counts as text: `3 claims; measured: 1 reproduced, 1 partly; simulated: 2 reproduced`."""
    parts = [several(said["claims"], "claim")]
    parts += [f"{kind}: {listed}" for kind in ("measured", "simulated") if (listed := listed_counts(said[kind]))]
    return "; ".join([*parts, *([f"{NOT_RUN}: {said[NOT_RUN]}"] if said[NOT_RUN] else [])])


def listed_counts(verdicts: dict[str, int]) -> str:
    """Return the counts of verdicts as text: `1 reproduced, 1 partly`."""
    return ", ".join(f"{count} {each}" for each, count in verdicts.items() if count)
