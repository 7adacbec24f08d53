"""Errors caused by the user's input, in one line each."""

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError


class InputError(ValueError):
    """One line for the user: what is wrong, where, and what would be valid. The command line prints it and exits 2."""


def nearest(name: str, names: Iterable[str]) -> str:
    """Return `did you mean NAME? ` with the name that is most like another; empty if none is."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {near[0]}? " if near else ""


def first_problem(error: "ValidationError") -> tuple[str, Any, str]:
    """Return field, value and reason of the first problem that pydantic reports; that a field is missing comes last."""
    first = min(error.errors(include_url=False), key=lambda one: one["type"] == "missing")
    return ".".join(map(str, first["loc"])), first["input"], first["msg"].removeprefix("Value error, ")


def in_one_line(error: Exception) -> str:
    """Return an error's text as one line; of a file that does not fit its types the first field that does not."""
    from pydantic import ValidationError  # supervisors start faster without it

    if isinstance(error, ValidationError):
        field, _, reason = first_problem(error)
        return ": ".join(filter(None, (field, reason)))
    return " ".join(str(error).split())
