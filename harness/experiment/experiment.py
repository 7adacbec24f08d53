"""Definition of experiments, and their loading by name."""

import dataclasses
import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any, TypeVar

from harness.analysis.render import Table
from harness.experiment.claims import Claim
from harness.experiment.tiers import TIERS, Tier
from harness.records.labels import labels_by, varying
from harness.records.record import Record
from impl.data.config import DataConfig
from impl.errors import InputError
from impl.plan import Plan
from impl.run import EngineName, Run

_T = TypeVar("_T")


class RunsOfTiers:
    """Field of an experiment that is given its runs by tier, or one list for all tiers, and has them by tier."""

    def __get__(self, of: object | None, owner: type) -> dict[Tier, list[Run]]:
        if of is None:  # a dataclass asks for the field's default
            raise AttributeError
        return vars(of)["_runs"]

    def __set__(self, of: object, value: dict[Tier, list[Run]] | list[Run]) -> None:
        vars(of)["_runs"] = dict.fromkeys(TIERS, value) if isinstance(value, list) else value


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Question of a paper and the runs that answer it; the docstring of its file begins with the question.

    Raises:
        InputError: a field has a value of the wrong type.
    """

    runs: RunsOfTiers = RunsOfTiers()
    source: str = "our own"
    expectation: str = ""
    cost: dict[Tier, str] = field(default_factory=lambda: dict.fromkeys(TIERS, ""))
    """Expected time, and the machine that it is for, per tier."""
    claims: tuple[Claim, ...] = ()
    """Claims, judged by runs of the experiment's own engines, or by another engine's if there are no others."""
    table: Callable[[Sequence[Record]], Table] | None = None
    """Function that makes the experiment's own table from records of the same engines; its name is its files' stem."""
    figure: Callable[[Sequence[Record]], Any] | None = None
    """Function that draws the experiment's own figure from the records of its table.

    It returns a Matplotlib figure made without pyplot, or None if there is nothing to draw. Without this function the
    table is drawn if its columns are known.
    """
    profiles: bool = False
    """True if the runs are profiled after their timed steps."""
    deviations: str = ""
    """Differences from the source, with reasons."""
    id: str = ""
    question: str = ""
    about: str = ""
    """Docstring after the question."""
    file: str = ""
    """Path of the file that it was loaded from."""

    def __post_init__(self) -> None:
        """Check the fields, which come from a user's file, and trust the code that the runs name."""
        texts = ("source", "expectation", "deviations", "id", "question", "about", "file")
        is_tiers = lambda value, each: (
            isinstance(value, dict) and set(value) == set(TIERS) and all(map(each, value.values()))
        )
        is_runs = lambda value: isinstance(value, list) and bool(value) and all(isinstance(run, Run) for run in value)
        is_claims = isinstance(self.claims, tuple) and all(isinstance(claim, Claim) for claim in self.claims)
        checks = {
            **{name: (isinstance(getattr(self, name), str), "a text") for name in texts},
            "cost": (is_tiers(self.cost, lambda text: isinstance(text, str)), f"a text for each of {', '.join(TIERS)}"),
            "runs": (is_tiers(self.runs, is_runs), f"a list of at least one Run for each of {', '.join(TIERS)}"),
            "claims": (is_claims, "a tuple of Claim"),
            "table": (self.table is None or callable(self.table), "a function of records"),
            "figure": (self.figure is None or callable(self.figure), "a function of records"),
            "profiles": (isinstance(self.profiles, bool), "True or False"),
        }
        for name, (is_valid, what) in checks.items():
            if not is_valid:
                raise InputError(f"Experiment.{name} {_shown(getattr(self, name))}: must be {what}")
        from impl.own_code import trust_code_of  # for few runs

        for run in (run for runs in self.runs.values() for run in runs):
            trust_code_of(run)


@dataclass(frozen=True)
class Point:
    """Run of a sweep, with a label that distinguishes it from the others."""

    run: Run
    label: str

    @property
    def id(self) -> str:
        """Id of the run."""
        return self.run.id


def _shown(value: object) -> str:
    """Return a short text for any value."""
    is_plain = isinstance(value, str | int | float | list | dict | None)
    return " ".join(reprlib.repr(value).split()) if is_plain else type(value).__name__


def points(runs: list[Run], only: str | None = None) -> list[Point]:
    """Return the sweep's points, labelled by the fields in which they differ; `only` selects by label or id.

    Raises:
        InputError: two runs are equal, a run cannot be named, or nothing matches `only`.
    """
    try:
        labelled = list(map(Point, runs, _labels(runs)))
        ids = {point.id for point in labelled}
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(f"a run of the sweep cannot be named: {' '.join(str(error).split())[:200]}") from None
    if len(ids) < len(runs):
        raise InputError("two points of the sweep are the same run; give them different seeds or repeats")
    kept = [p for p in labelled if only is None or only in p.label or fnmatch(p.label, only) or p.id.startswith(only)]
    if not kept:
        raise InputError(f"--only {only!r} matches no point; points: {'; '.join(p.label for p in labelled)}")
    return kept


def _labels(runs: Sequence[Run]) -> list[str]:
    """Return what distinguishes each run from the others, as `norm=pre seed=1`; its id if nothing does."""
    names, again = varying(runs), [name for name in ("seed", "repeat") if len({getattr(run, name) for run in runs}) > 1]
    usual, whole, repeats = labels_by(runs, names), labels_by(runs, names, unsaid={}), labels_by(runs, again)
    return [
        " ".join(filter(None, [text or full, repeat])) or run.id
        for run, text, full, repeat in zip(runs, usual, whole, repeats, strict=True)
    ]


def changed(
    runs: list[Run], data: str | None, engine: EngineName | None, plan: Plan, plan_fields: Iterable[str]
) -> list[Run]:
    """Return the runs with the given token folder, engine and fields of the plan.

    Runs that become equal are returned once.
    """
    given = {name: getattr(plan, name) for name in plan_fields}
    others: dict[str, Any] = {"data": DataConfig(dataset=data)} if data else {}
    others |= {"engine": engine} if engine else {}
    if not given and not others:
        return runs
    new = [dataclasses.replace(run, plan=dataclasses.replace(run.plan, **given), **others) for run in runs]
    return list({run.id: run for run in new}.values()) if given or engine else new
