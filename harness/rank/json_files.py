"""Small JSON files in the folder of an attempt, each with the fields of one dataclass."""

import json
from dataclasses import asdict, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from harness.records.store import read_json, write_atomically

T = TypeVar("T")


def read_as(kind: type[T], path: Path) -> T | None:
    """Return the object of a dataclass in a file; None if the file is missing, damaged, or has other fields."""
    try:
        return from_document(kind, read_json(path))
    except TypeError:
        return None


def write_as(path: Path, found: Any) -> None:
    """Write an object of a dataclass.

    Raises:
        OSError: the folder cannot be written.
    """
    write_atomically(path, json.dumps(asdict(found)))


def from_document(kind: Any, found: Any) -> Any:
    """Return a value of a type from the value that JSON has for it; fields that a dataclass does not have are ignored.

    Raises:
        TypeError: the value has another type, or a field is missing.
    """
    if kind is Any:
        return found
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if found is None else from_document(inner[0], found)
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(found, dict):
        hints = get_type_hints(kind)
        return kind(**{name: from_document(hints[name], found[name]) for name in hints if name in found})
    if origin in (tuple, list) and isinstance(found, list):
        return origin(from_document(inner[0], one) for one in found)
    if origin is dict and isinstance(found, dict) and inner[1] is not Any:
        return {name: from_document(inner[1], one) for name, one in found.items()}
    if kind is Path and isinstance(found, str):
        return Path(found)
    plain: Any = (int, float) if kind is float else origin or kind
    if found not in inner if origin is Literal else not isinstance(found, plain):
        raise TypeError(f"{found!r:.60} is not {kind}")
    return found
