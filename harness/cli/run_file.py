"""The option `--config FILE` of verbs with the fields of a run: a run in a TOML or JSON file, or that of a record."""

import tomllib
from collections.abc import Container
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness.records.store import loads
from impl.errors import InputError
from impl.files import read_text
from impl.own_code import FIELDS, code_of, names_code
from impl.run import Run, from_dict

VALID = "valid: the fields of a run as a TOML file (.toml) or as JSON, or a record"
RECORDED = "config"
"""Field of a record that has the fields of its run."""


def run_in(path: Path, given: Container[str]) -> tuple[Run, frozenset[str]]:
    """Return the run in a file, other fields at their defaults, and the fields that the file has, by dotted name.

    A schedule or norm placement that is not packaged is code, which a file cannot name unless the field is `given` too.

    Raises:
        InputError: the file is none of a run; names the first field that is not valid.
        OSError: it cannot be read.
    """
    fields = _fields(path)
    try:
        run = from_dict(fields)
    except ValidationError as error:
        raise InputError(f"{path}: {type(error).__name__}: {error}") from None
    for field in FIELDS:
        name = attrgetter(field)(run)
        if name in code_of(run) and names_code(field, name) and field not in given:
            option = f"--{field.replace('_', '-')}"
            raise InputError(
                f"{path}: {field} {name!r:.80} is code; valid: the option {option} besides, if you trust it"
            )
    names = (
        [f"{name}.{inner}" for inner in part] if isinstance(part, dict) else [name] for name, part in fields.items()
    )
    return run, frozenset(name for of_part in names for name in of_part)


def _fields(path: Path) -> dict[str, Any]:
    """Return the fields of a run in a file, not yet checked."""
    try:
        text = read_text(path)
        document = tomllib.loads(text) if path.suffix == ".toml" else loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: {' '.join(str(error).split()):.200}; {VALID}") from None
    if isinstance(document, dict) and RECORDED in document:
        document = document[RECORDED]
    if not isinstance(document, dict):
        raise InputError(f"{path} has no table of fields; {VALID}")
    return document
