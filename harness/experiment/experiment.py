"""Definition of experiments, and their loading by name."""

import dataclasses
import difflib
import importlib
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from harness.analysis.render import Table
from harness.experiment.claims import Claim, Evidence
from harness.experiment.tiers import TIERS, Tier
from harness.records.labels import labels_by, varying
from harness.records.record import Record
from harness.records.store import require_name
from impl.data.config import DataConfig
from impl.errors import InputError
from impl.pipeline.schedules import trust
from impl.plan import Plan
from impl.run import EngineName, Run

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Question of a paper and the runs that answer it; the docstring of its file begins with the question.

    Raises:
        InputError: a field has a value of the wrong type.
    """

    runs: dict[Tier, list[Run]]
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

    def __post_init__(self) -> None:
        """Check the fields, which come from a user's file, and trust the schedules of the runs."""
        texts = ("source", "expectation", "deviations", "id", "question", "about")
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
        for run in (run for runs in self.runs.values() for run in runs):
            trust(run.plan.schedule)


@dataclass(frozen=True)
class Point:
    """Run of a sweep, with a label that distinguishes it from the others."""

    run: Run
    label: str

    @property
    def id(self) -> str:
        """Id of the run."""
        return self.run.id


def experiment_ids() -> list[str]:
    """Return the ids of all experiments, `quickstart` or `paper/question`: files in packages of `experiments`."""
    found = []
    for root in map(Path, importlib.import_module("experiments").__path__):
        for path in root.rglob("*.py"):
            name = path.relative_to(root).with_suffix("")
            folders = (root.joinpath(*name.parts[:n]) for n in range(1, len(name.parts)))
            is_named = all(part.isidentifier() for part in name.parts) and path.name != "__init__.py"
            if is_named and all((folder / "__init__.py").exists() for folder in folders):
                found.append(name.as_posix())
    return sorted(found)


def load(name: str) -> Experiment:
    """Return the experiment with this id, or with this last word if it is unique.

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
    return _from_module(matches[0], _imported(matches[0]))


def _imported(name: str) -> ModuleType:
    """Import the module of an experiment.

    Raises:
        InputError: the import raises any exception; the message gives it in one line.
    """
    try:
        return importlib.import_module("experiments." + name.replace("/", "."))
    except (Exception, SystemExit) as error:
        raise InputError(_told(name, error)) from None


def _told(name: str, error: BaseException) -> str:
    """Return in one line what is wrong with an experiment's file, and in which line of it."""
    end = f"experiments/{name}.py"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(end)]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    where = f"{end}, line {line}" if line else end
    text = " ".join(_text(error).split())[:300]
    return f"{where}: {text}" if isinstance(error, InputError) else f"{where}: {type(error).__name__}: {text}"


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:
        return "(it cannot be told)"


def _shown(value: object) -> str:
    """Return a short text for any value."""
    try:
        return f"{value!r:.60}" if isinstance(value, str | int | float | bool | None) else type(value).__name__
    except Exception:
        return type(value).__name__


def _from_module(name: str, module: ModuleType) -> Experiment:
    experiment = getattr(module, "EXPERIMENT", None)
    if not isinstance(experiment, Experiment) or not (module.__doc__ or "").strip():
        raise InputError(f"experiments/{name}.py: an experiment needs a docstring and an EXPERIMENT = Experiment(...)")
    question, _, about = (module.__doc__ or "").strip().partition("\n")
    named = replace(experiment, id=name, question=question, about=about.strip())
    return replace(
        named,
        claims=tuple(replace(claim, check=_guarded(named, claim.check, _plain)) for claim in named.claims),
        table=named.table and _guarded(named, named.table, _with_name),
        figure=named.figure and _guarded(named, named.figure, lambda drawn: drawn),
    )


def _plain(found: Evidence | None) -> Evidence | None:
    """Return evidence with plain numbers, whatever types the check gave."""
    counts = found and (int(found.holds), int(found.fails), int(found.open))
    return found and counts and Evidence(*counts, str(found.numbers), found.repeats and int(found.repeats))


def _with_name(table: Table) -> Table:
    """Return a table whose name can be that of its files.

    Raises:
        InputError: it cannot.
    """
    require_name(table.name)
    return table


def _own(experiment: Experiment, records: Sequence[Record]) -> list[Record]:
    """Return the records that the experiment compares: of its own engines, or of one other if there are none.

    Records whose schedule cannot be trusted are left out.
    """
    known = [record for record in records if record.has_trusted_schedule]
    own = {run.engine for runs in experiment.runs.values() for run in runs}
    there = sorted({record.run.engine for record in known})
    chosen = own.intersection(there) or there[:1]
    return [record for record in known if record.run.engine in chosen]


def _guarded(
    experiment: Experiment, function: Callable[[Sequence[Record]], _T], checked: Callable[[_T], _T]
) -> Callable[[Sequence[Record]], _T]:
    """Wrap a function of records in an experiment's file: it gets those of its own engines, and its result is checked.

    Any exception becomes an InputError of one line.
    """

    def guarded(records: Sequence[Record]) -> _T:
        try:
            return checked(function(_own(experiment, records)))
        except (Exception, SystemExit) as error:
            raise InputError(_told(experiment.id, error)) from None

    return guarded


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
