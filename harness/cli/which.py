"""Options that choose the points of an experiment for a verb."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from harness.experiment.folders import sweep_folder, sweep_tier
from harness.experiment.tiers import Tier
from harness.records.store import Store
from impl.plan import Plan
from impl.run import EngineName

if TYPE_CHECKING:
    from harness.experiment.experiment import Experiment, Point


@dataclass(frozen=True)
class Which:
    """Choice of an experiment's points, and the folder of their records."""

    tier: Tier | None = None
    """smoke (CPU, a minute or so), small (one machine), paper (the paper's scale). Without it `run` takes smoke, the
    other verbs the tier with a sweep under way, else the largest one with records."""
    only: str | None = None
    """Only points whose label contains this, or matches it as a pattern, or whose id starts with it."""
    out: Path | None = None
    """Folder of records, tables and figures; without it `runs` in the working directory."""
    data: str | None = None
    """Token folder to train on, in place of the experiment's."""
    engine: EngineName | None = None
    """Who trains every point: ours, DeepSpeed, or PyTorch's own parts; without it each point's own."""

    def points(self, found: "Experiment", tier: Tier, plan: Plan, plan_fields: Iterable[str]) -> list["Point"]:
        """Return the points of a tier, with these fields of the plan in place of each one's own.

        Raises:
            InputError: `only` matches none.
        """
        from harness.experiment.experiment import changed, points

        return points(changed(found.runs[tier], self.data, self.engine, plan, plan_fields), self.only)

    def words(self, plan: Plan, plan_fields: Iterable[str], *, data: bool = False) -> list[str]:
        """Return the options that choose the same points and folder in another command.

        Args:
            data: name the token folder and the engine too, which not every verb takes.
        """
        given = {"--only": self.only, "--out": self.out}
        given |= {"--data": self.data, "--engine": self.engine} if data else {}
        words = [word for name, value in given.items() if value is not None for word in (name, shlex.quote(str(value)))]
        for field in sorted(plan_fields):
            name, value = field.replace("_", "-"), getattr(plan, field)
            is_flag = isinstance(value, bool)
            words += [f"--plan.{'no-' * (value is False)}{name}"] if is_flag else [f"--plan.{name}", str(value)]
        return words

    def tier_of(self, found: "Experiment") -> Tier:
        """Return the tier that is meant, of a sweep that has been started before."""
        return self.tier or sweep_tier(sweep_folder(self.out), found.id)

    def store(self, found: "Experiment", tier: Tier) -> Store:
        return Store(sweep_folder(self.out), found.id, tier)


Chosen = Annotated[Which, tyro.conf.arg(name="")]
WHICH = Which()
