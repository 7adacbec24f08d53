"""Loading of experiments by name from their files, whose functions are guarded against what they raise and return."""

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from harness.analysis.render import Table
from harness.experiment.claims import Evidence
from harness.experiment.experiment import Experiment
from harness.records.record import Record
from harness.records.store import require_name
from impl.errors import InputError, nearest
from impl.own_code import line_of, offered

_T = TypeVar("_T")


def experiment_ids() -> list[str]:
    """Return the ids of all experiments, `quickstart` or `paper/question`.

    They are files in packages of `experiments`, and what installed packages offer, by other names, in the group of
    entry points `lmscale.experiments`.
    """
    of_packages = (name for name in offered("experiments") if all(map(str.isidentifier, name.split("/"))))
    return sorted({*_files(), *of_packages})


def _files() -> list[str]:
    found = []
    for root in map(Path, importlib.import_module("experiments").__path__):
        for path in root.rglob("*.py"):
            name = path.relative_to(root).with_suffix("")
            folders = (root.joinpath(*name.parts[:n]) for n in range(1, len(name.parts)))
            is_named = all(part.isidentifier() for part in name.parts) and path.name != "__init__.py"
            if is_named and all((folder / "__init__.py").exists() for folder in folders):
                found.append(name.as_posix())
    return found


def load(name: str) -> Experiment:
    """Return the experiment with this id, or with this last word if it is unique, or in this file, NAME or NAME.py.

    Raises:
        InputError: there is none, or several.
    """
    ids = experiment_ids()
    if name.endswith(".py"):
        return _from_file(Path(name), ids)
    matches = [i for i in ids if i == name] or [i for i in ids if i.rsplit("/", 1)[-1] == name]
    if not matches and (own := Path(f"{name}.py")).is_file():
        return _from_file(own, ids)
    if len(matches) != 1:
        matches = matches or [i for i in ids if name and i.startswith(name)]
        what = "names several experiments" if len(matches) > 1 else "is not an experiment"
        hint = "" if matches else nearest(name, ids)
        raise InputError(f"{name!r} {what}; {hint}valid: a file NAME.py, or {', '.join(matches or ids)}")
    [found] = matches
    where = offered("experiments")[found].module if found not in _files() else f"experiments.{found.replace('/', '.')}"
    file = f"{where.replace('.', '/')}.py"
    with _faults_named(file):
        module = importlib.import_module(where)
    return _from_module(found, file, module)


def _from_file(path: Path, ids: Sequence[str]) -> Experiment:
    """Return the experiment in a file, whose id is the file's name.

    Raises:
        InputError: there is no such file, or its name cannot be an id.
    """
    if not path.is_file():
        raise InputError(f"{path} is no file; valid: a file of Python with EXPERIMENT = Experiment(runs=[...])")
    for root in map(Path, importlib.import_module("experiments").__path__):
        if path.resolve().is_relative_to(root.resolve()):
            known = path.resolve().relative_to(root.resolve()).with_suffix("").as_posix()
            if known in ids:
                return load(known)
    if not path.stem.isidentifier() or path.stem in ids:
        what = "is the id of another experiment" if path.stem in ids else "cannot be an id"
        raise InputError(f"{path}: {path.stem!r} {what}; valid: a name of its own, of letters, digits and _")
    specification = importlib.util.spec_from_file_location(f"experiments.{path.stem}", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    with _faults_named(str(path)):
        specification.loader.exec_module(module)
    return _from_module(path.stem, str(path), module)


@contextmanager
def _faults_named(file: str) -> Iterator[None]:
    """Turn any exception of an experiment's code into an InputError, whose one line says where in its file it is."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise InputError(_in_one_line(file, error)) from None


def _in_one_line(file: str, error: BaseException) -> str:
    """Return in one line what is wrong with an experiment's file, and in which line of it."""
    where = f"{file}, line {line}" if (line := line_of(file, error)) else file
    text = " ".join(_text(error).split())[:300]
    return f"{where}: {text}" if isinstance(error, InputError) else f"{where}: {type(error).__name__}: {text}"


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:
        return "(it has no text)"


def _from_module(name: str, file: str, module: ModuleType) -> Experiment:
    """Return the experiment in a module, named; the question is its docstring's first line, or else its name."""
    experiment = getattr(module, "EXPERIMENT", None)
    if not isinstance(experiment, Experiment):
        raise InputError(f"{file}: has no experiment; valid: EXPERIMENT = Experiment(runs=[...])")
    question, _, about = (module.__doc__ or name).strip().partition("\n")
    named = replace(experiment, id=name, question=question, about=about.strip(), file=str(module.__file__ or ""))
    return replace(
        named,
        claims=tuple(replace(claim, check=_guarded(named, file, claim.check, _plain)) for claim in named.claims),
        table=named.table and _guarded(named, file, named.table, _with_name),
        figure=named.figure and _guarded(named, file, named.figure, lambda drawn: drawn),
    )


def _plain(found: Evidence | None) -> Evidence | None:
    """Return evidence with plain numbers, whatever types the check gave."""
    counts = found and (int(found.holds), int(found.fails), int(found.open))
    return found and counts and Evidence(*counts, str(found.numbers), found.repeats and int(found.repeats))


def _with_name(table: Table) -> Table:
    """Return a table whose name can be that of its files; else raise an InputError."""
    require_name(table.name)
    return table


def _own(experiment: Experiment, records: Sequence[Record]) -> list[Record]:
    """Return the records that the experiment compares: of its own engines, or of one other if there are none.

    Records with code that cannot be trusted are left out.
    """
    known = [record for record in records if record.has_trusted_code]
    own = {run.engine for runs in experiment.runs.values() for run in runs}
    there = sorted({record.run.engine for record in known})
    chosen = own.intersection(there) or there[:1]
    return [record for record in known if record.run.engine in chosen]


def _guarded(
    experiment: Experiment, file: str, function: Callable[[Sequence[Record]], _T], checked: Callable[[_T], _T]
) -> Callable[[Sequence[Record]], _T]:
    """Wrap a function of records in an experiment's file: it gets those of its own engines, and its result is checked.

    Any exception becomes an InputError of one line.
    """

    @wraps(function)
    def guarded(records: Sequence[Record]) -> _T:
        with _faults_named(file):
            return checked(function(_own(experiment, records)))

    return guarded
