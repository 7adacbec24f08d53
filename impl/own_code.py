"""Schedules and norm placements of a user's own, by `module:name`, `FILE.py:name`, or the name of an entry point.

Installed packages offer them in groups of entry points, `lmscale.schedules` and `lmscale.placements`. Only code that
the user names, on the command line or in code, is executed.
"""

import contextlib
import hashlib
import importlib
import importlib.util
import traceback
from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from impl.errors import InputError, nearest
from impl.model.norm_placement import PLACEMENTS
from impl.pipeline.schedules import is_packaged

if TYPE_CHECKING:
    from impl.run import Run

FIELDS = {"plan.schedule": "schedules", "model.norm_placement": "placements"}
"""Fields of a run that may name code, each with the group of its entry points."""
_trusted: set[str] = set()


def trust(*names: str) -> None:
    """Allow the code of these names to be executed: they come from the user's command or code.

    A name that only stands in a record, a checkpoint or another file is not trusted.
    """
    _trusted.update(names)


def is_trusted(name: str) -> bool:
    """Return True if `trust` was called with this name."""
    return name in _trusted


def trust_code_of(run: "Run") -> None:
    """Trust the code that a run names, which the user's command or code made."""
    trust(*code_of(run))


def code_of(run: "Run") -> list[str]:
    """Return the names of a run's schedule and norm placement that are not packaged."""
    return [*_named(run).values()]


def _named(run: "Run") -> dict[str, str]:
    schedule, placement = run.plan.schedule, run.model.norm_placement
    named = {"plan.schedule": schedule} if not is_packaged(schedule) else {}
    return named | ({"model.norm_placement": placement} if placement not in PLACEMENTS else {})


def hashes(run: "Run") -> dict[str, str]:
    """Return the SHA-256 of the file that each of `code_of` stands in, by name; of trusted code alone."""
    found = {}
    for field, name in _named(run).items():
        where = _where(field, name).partition(":")[0]
        with contextlib.suppress(ImportError, OSError, ValueError):  # none, or a module without a file
            if not where.endswith(".py") and name in _trusted:  # a package around it is imported
                where = str((found_at := importlib.util.find_spec(where)) and found_at.origin)
            found[name] = hashlib.sha256(Path(where).read_bytes()).hexdigest()
    return found


def _where(field: str, name: str) -> str:
    """Return `module:name` or `FILE.py:name` of a name, which may be an entry point's."""
    entry = None if ":" in name else offered(FIELDS[field]).get(name)
    return entry.value if entry else name


def trust_words(words: Iterable[str]) -> None:
    """Trust what a command line gives as values of FIELDS: `--plan.schedule NAME`, or in `--sweep` FIELD=NAME,NAME."""
    option = ""
    for word in words:
        head, equals, value = word.partition("=")
        if option in FIELDS:
            trust(word)
        option = head.removeprefix("--").replace("-", "_")
        if equals and option in FIELDS:
            trust(value, *value.split(","))
            option = ""


def names_code(field: str, name: str) -> bool:
    """Return True if a value of one of FIELDS can be code: it has a colon, or a package offers it."""
    return ":" in name or name in offered(FIELDS[field])


@lru_cache(maxsize=4)
def offered(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group that installed packages offer, by name; none is imported."""
    return {entry.name: entry for entry in entry_points(group=f"lmscale.{group}")}


def load(field: str, name: str, packaged: Iterable[str], check: Callable[[Any], object], also: str = "") -> Any:
    """Return the object of a user's own that a value of one of FIELDS names.

    Args:
        packaged: names that are valid besides.
        check: function that raises an exception if the object is of another kind.
        also: what else is valid.

    Raises:
        InputError: there is no such object, it is not trusted, or its module fails.
    """
    where, _, attribute = _where(field, name).partition(":")
    if not attribute:
        raise InputError(unknown(f"{field} {name!r} does not exist", name, field, packaged, also))
    if name not in _trusted:
        own = f"--{field.replace('_', '-')} with this name in your own command, or impl.own_code.trust"
        raise InputError(f"{field} {name!r} is named by data, so it is not loaded; valid: {own}")
    try:
        module = _of_file(Path(where).resolve()) if where.endswith(".py") else importlib.import_module(where)
        found = getattr(module, attribute)
        check(found)
        return found
    except (Exception, SystemExit) as error:  # no module, not in it, of another kind, or an error of the module's own
        file = where if where.endswith(".py") else f"{where.replace('.', '/')}.py"
        line = line_of(file, error)
        place = f"{file}, line {line}: {type(error).__name__}: " if line else ""
        text = f"{place}{' '.join(str(error).split()):.300}"
        raise InputError(f"{field} {name!r} cannot be loaded: {text}") from error


def line_of(file: str, error: BaseException) -> int | None:
    """Return the line of a file in which an error arose; None if it arose elsewhere."""
    if isinstance(error, SyntaxError):
        return error.lineno
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(file)]
    return lines[-1] if lines else None


def unknown(what: str, name: str, field: str, packaged: Iterable[str], also: str = "") -> str:
    """Return a line on a name that nothing has, with the nearest one and all that are valid."""
    names = [*packaged, *offered(FIELDS[field])]
    return f"{what}; {nearest(name, names)}valid: {', '.join(names)}, module:name, FILE.py:name{also}"


@lru_cache
def _of_file(path: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module
