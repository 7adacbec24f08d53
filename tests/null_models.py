"""Null models: what simulated verdicts become on machines of which one part takes no time."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, get_args

from harness.analysis.render import Column, Table
from harness.analysis.tabulate import listed
from harness.experiment.claims import Claim, Part, Verdict, evidence, idealised, verdict
from harness.experiment.experiment import Experiment
from harness.experiment.tiers import TIERS
from harness.records.record import Record

PARTS: tuple[Part, ...] = get_args(Part)


class Idealised(NamedTuple):
    """Verdict of simulated runs on a claim, with those on machines of which one part takes no time."""

    experiment: str
    claim: Claim
    systems: str
    verdict: Verdict
    without: dict[str, str]
    """Verdict on a machine of which one part takes no time, by that part."""
    depends_on_time: bool
    """True if its evidence changes with any part: it is about speed, not about memory or counts."""

    @property
    def turns(self) -> bool:
        """True if it does not hold without the part that it is about."""
        return self.claim.about is not None and self.without[self.claim.about] != "reproduced"


def on_ideal_machines(experiment: Experiment, records: Sequence[Record]) -> Iterator[Idealised]:
    """Yield every claim with a verdict on simulated runs, by tier and systems."""
    for tier in TIERS:
        runs = [one for one in records if one.tier == tier and one.is_simulated]
        if not runs:
            continue
        ideal = {part: evidence(experiment.claims, idealised(runs, part)) for part in PARTS}
        for systems, found in evidence(experiment.claims, runs).items():
            for i, (claim, now) in enumerate(zip(experiment.claims, found, strict=True)):
                if now is None or claim.compares:
                    continue
                then = {part: ideal[part][systems][i] for part in PARTS}
                moves = any(one is None or one[:3] != now[:3] or one.numbers != now.numbers for one in then.values())
                without = {part: verdict(one) for part, one in then.items()}
                yield Idealised(experiment.id, claim, systems, verdict(now), without, moves)


def null_models_table(found: Sequence[Idealised]) -> Table:
    """Return the simulated verdicts against papers that are reproduced, with those of the null models."""
    part_of = lambda one: one.claim.about or ("no part named" if one.depends_on_time else "memory or counts")
    columns = (
        Column(key="experiment", header="experiment", text=True, of=lambda one: one.experiment),
        Column(key="claim", header="claim", text=True, of=lambda one: one.claim.text),
        Column(key="kind", header="kind", text=True, of=lambda one: one.claim.kind),
        Column(key="about", header="about", text=True, of=part_of),
        *(
            Column(key=part, header=f"{part} for free", text=True, of=lambda one, part=part: one.without[part])
            for part in PARTS
        ),
    )  # fmt: skip
    held = [one for one in found if one.verdict == "reproduced"]
    notes = [
        f"{part} for free: {sum(one.without[part] == 'reproduced' for one in held)} of {len(held)} stay reproduced, "
        f"{sum(one.without[part] == 'reproduced' for one in held if one.claim.about == part)} of "
        f"{sum(one.claim.about == part for one in held)} claims about it"
        for part in PARTS
    ]
    return listed("null_models", "Simulated verdicts on idealised machines", columns, held, notes)
