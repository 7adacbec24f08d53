"""What an experiment is, and how one is found by its name."""

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from types import ModuleType
from typing import Literal, TypeVar, get_args

from harness.claims import Claim
from harness.labels import Record, label
from harness.measures import engine_of
from harness.render import Table
from impl.errors import InputError
from impl.run import Run, to_dict

Tier = Literal["smoke", "small", "paper"]
TIERS: tuple[Tier, ...] = get_args(Tier)
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One question of a paper and the runs that answer it; its file's docstring opens with the question."""

    source: str
    expectation: str
    cost: dict[Tier, str]
    """Expected time and the machine it is for, per tier."""
    runs: dict[Tier, list[Run]]
    claims: tuple[Claim, ...] = ()
    """They are judged by the runs of the experiment's own engines; by those of another where there are no others."""
    table: Callable[[Sequence[Record]], Table] | None = None
    """A table of the experiment's own, of whatever records of the same engines there are; the stem of its files is its
    name."""
    profiles: bool = False
    """Its runs are asked, after what is timed, where a step's time goes."""
    deviations: str = ""
    """What differs from the source, and why."""
    found: str = ""
    """What the committed records say, in the words of whoever looked at them; EXPERIMENTS.md shows it."""
    id: str = ""
    question: str = ""
    about: str = ""
    """The docstring after the question."""


@dataclass(frozen=True)
class Point:
    """One run of a sweep; `label` says what distinguishes it from the others."""

    run: Run
    label: str


def experiment_ids() -> list[str]:
    """Ids of all experiments, `quickstart` or `paper/question`."""
    package = importlib.import_module("experiments")
    found = pkgutil.walk_packages(package.__path__, "experiments.")
    return sorted(m.name.removeprefix("experiments.").replace(".", "/") for m in found if not m.ispkg)


def load(name: str) -> Experiment:
    """The experiment with this id, or with this last word where that is unique.

    Raises:
        InputError: there is none, or several.
    """
    ids = experiment_ids()
    matches = [i for i in ids if i == name] or [i for i in ids if i.rsplit("/", 1)[-1] == name]
    if len(matches) != 1:
        what = "names several experiments" if matches else "is not an experiment"
        near = difflib.get_close_matches(name, ids, n=1)
        hint = f"did you mean {near[0]}? " if near and not matches else ""
        raise InputError(f"{name!r} {what}; {hint}valid: {', '.join(matches or ids)}")
    return _from_module(matches[0], importlib.import_module("experiments." + matches[0].replace("/", ".")))


def _from_module(name: str, module: ModuleType) -> Experiment:
    experiment = getattr(module, "EXPERIMENT", None)
    if not isinstance(experiment, Experiment) or not module.__doc__:
        raise InputError(f"experiments/{name}.py: an experiment needs a docstring and an EXPERIMENT = Experiment(...)")
    question, _, about = module.__doc__.strip().partition("\n")
    named = replace(experiment, id=name, question=question, about=about.strip())
    return replace(named, claims=_claims_of_own_engines(named), table=_table_of_own_engines(named))


def _claims_of_own_engines(experiment: Experiment) -> tuple[Claim, ...]:
    def checked(claim: Claim) -> Claim:
        return replace(claim, check=lambda rows: claim.check(_of_own_engines(experiment, rows, lambda r: r["engine"])))

    return tuple(map(checked, experiment.claims))


def _table_of_own_engines(experiment: Experiment) -> Callable[[Sequence[Record]], Table] | None:
    table = experiment.table
    return table and (lambda records: table(_of_own_engines(experiment, records, engine_of)))


def _of_own_engines(experiment: Experiment, found: Sequence[_T], engine: Callable[[_T], str]) -> list[_T]:
    """What the engines found that the experiment compares; where there is nothing of them, another engine."""
    own, there = {run.engine for runs in experiment.runs.values() for run in runs}, sorted(set(map(engine, found)))
    chosen = own.intersection(there) or there[:1]
    return [one for one in found if engine(one) in chosen]


def points(runs: list[Run], only: str | None = None) -> list[Point]:
    """The sweep's points, labelled by the fields in which they differ; `only` keeps those whose label or id it matches.

    Raises:
        InputError: two runs are the same, or nothing matches `only`.
    """
    configs = [to_dict(run) for run in runs]
    labelled = [
        Point(run, _seeded_label(run, runs, label(config, configs))) for run, config in zip(runs, configs, strict=True)
    ]
    if len({run.id for run in runs}) < len(runs):
        raise InputError("two points of the sweep are the same run; give them different seeds or repeats")
    kept = [
        p for p in labelled if only is None or only in p.label or fnmatch(p.label, only) or p.run.id.startswith(only)
    ]
    if not kept:
        raise InputError(f"--only {only!r} matches no point; points: {'; '.join(p.label for p in labelled)}")
    return kept


def _seeded_label(run: Run, runs: list[Run], text: str) -> str:
    parts = [text] if text else []
    parts += [f"seed={run.seed}"] if len({r.seed for r in runs}) > 1 else []
    parts += [f"repeat={run.repeat}"] if len({r.repeat for r in runs}) > 1 else []
    return " ".join(parts) or run.id
