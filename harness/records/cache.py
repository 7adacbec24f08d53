"""Records that were read and that nothing changes: what follows from them is computed once."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import pandas as pd

_T = TypeVar("_T")
MOST_FRAMES = 4
"""Lists of records whose rows are kept: all of a command, and some parts of them."""


class Kept(dict[str, Any]):
    """A record, or its configuration, that was read; a copy of it is a plain dict, which may be changed."""

    __slots__ = ("known",)
    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType] - one object is one record

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.known: dict[str, Any] = {}

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        return dict, (dict(self),)


def once(function: Callable[[Mapping[str, Any]], _T]) -> Callable[[Mapping[str, Any]], _T]:
    """A function of a record or configuration, computed once for one that is kept."""
    name = function.__qualname__

    @functools.wraps(function)
    def known(of: Mapping[str, Any]) -> _T:
        if not isinstance(of, Kept):
            return function(of)
        if name not in of.known:
            of.known[name] = function(of)
        return of.known[name]

    return known


def once_for_all(function: Callable[..., "pd.DataFrame"]) -> Callable[..., "pd.DataFrame"]:
    """A function of several records, computed once for the same ones in the same order where all are kept."""
    cached = functools.lru_cache(maxsize=MOST_FRAMES)(function)

    @functools.wraps(function)
    def known(records: Sequence[Mapping[str, Any]], *others: str) -> "pd.DataFrame":
        if all(isinstance(record, Kept) for record in records):
            return cached(tuple(records), *(others or function.__defaults__ or ())).copy(deep=False)
        return function(records, *others)

    return known
