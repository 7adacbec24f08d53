"""Options that choose the points of an experiment for a verb."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_type_hints

import pydantic.dataclasses
import tyro

from harness.cli.sweep_fields import swept
from harness.experiment.folders import sweep_folder, sweep_tier
from harness.experiment.tiers import Tier
from harness.records.store import Store
from harness.terminal import Given, Unset
from impl.fields import CHECKED
from impl.plan import Plan
from impl.run import EngineName

if TYPE_CHECKING:
    from harness.experiment.experiment import Experiment, Point


class Chosen(NamedTuple):
    """Points of an experiment at one tier, and the store of their records."""

    experiment: "Experiment"
    tier: Tier
    store: Store
    points: "list[Point]"


def plan_fields(given: frozenset[str]) -> list[str]:
    """Return the fields of the plan among the given ones of a run."""
    return sorted(name.removeprefix("plan.") for name in given if name.startswith("plan."))


OWN = tyro.conf.arg(help_behavior_hint="(default: each point's own)")
_fields = {name: Annotated[kind, OWN] for name, kind in get_type_hints(Plan, include_extras=True).items()}
_checked: Any = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=CHECKED)
PlanOfPoints: type[Plan] = _checked(type("Plan", (Plan,), {"__annotations__": _fields}))
"""A plan as options that say in --help that a field which is not given stays as it is."""


@dataclass(frozen=True)
class Which:
    """Choice of an experiment's points, and the folder of their records."""

    experiment: tyro.conf.Positional[str]
    """Id of an experiment or its last word, as `list` shows them, or a file such as mine.py."""
    tier: Unset[Tier | None] = None
    """Scale; without it `run` takes smoke, the others what a sweep is under way at, else the largest with records."""
    only: Unset[str | None] = None
    """Only points whose label contains this, or matches it as a pattern, or whose id starts with it."""
    out: Unset[Path | None] = None
    """Folder of records, tables and figures; without it `runs` in the working directory."""
    data: Unset[str | None] = None
    """Token folder to train on, in place of the experiment's."""
    engine: Unset[EngineName | None] = None
    """Engine that trains every point: ours, DeepSpeed, or PyTorch's own parts; without it each point's own."""
    plan: Plan = PlanOfPoints()  # noqa: RUF009 - frozen
    """Fields of the parallel plan, in place of every point's own."""
    sweep: tuple[str, ...] = ()
    """Replace every point by one for each combination of fields' values: `plan.tp=1,2 seed=0,1,2` makes six of one."""
    given: Given = frozenset()

    def chosen(self, default: Tier | None = None) -> Chosen:
        """Return the points, with the given fields of the plan in place of each one's own.

        Without a tier they are of the default one, or of a sweep that has been started before.

        Raises:
            InputError: there is no such experiment, `only` matches no point, or `sweep` gives no values of fields.
        """
        from harness.experiment.experiment import changed, points
        from harness.experiment.loading import load

        found, folder = load(self.experiment), sweep_folder(self.out)
        tier = self.tier or default or sweep_tier(folder, found.id)
        runs = changed(found.runs[tier], self.data, self.engine, self.plan, plan_fields(self.given))
        runs = swept(runs, self.sweep) if self.sweep else runs
        return Chosen(found, tier, Store(folder, found.id, tier), points(runs, self.only))

    def words(self, *, data: bool = False) -> list[str]:
        """Return the options that choose the same points and folder in another command.

        With `data` they name the token folder and the engine too, which not every verb takes.
        """
        given = {"--only": self.only, "--out": self.out}
        given |= {"--data": self.data, "--engine": self.engine} if data else {}
        words = [word for name, value in given.items() if value is not None for word in (name, shlex.quote(str(value)))]
        for field in plan_fields(self.given):
            name, value = field.replace("_", "-"), getattr(self.plan, field)
            is_flag = isinstance(value, bool)
            words += [f"--plan.{'no-' * (value is False)}{name}"] if is_flag else [f"--plan.{name}", str(value)]
        return words + ["--sweep", *map(shlex.quote, self.sweep)] * bool(self.sweep)


OfWhich = Annotated[Which, tyro.conf.arg(name="")]
