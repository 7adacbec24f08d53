"""Option --sweep: values of a run's fields, each with every other."""

import contextlib
import difflib
import itertools
import math
from collections.abc import Sequence
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from harness.records.labels import FIELDS
from impl.errors import InputError
from impl.run import Run, with_fields

MOST_POINTS = 100_000
"""As many records as a store is measured with (results/scale.md)."""


def swept(runs: Sequence[Run], sweep: Sequence[str]) -> list[Run]:
    """Return every run with every combination of values in place of its own; runs that become equal are returned once.

    Args:
        sweep: fields with values, such as `plan.tp=1,2` and `model.norm_placement=pre,post`.

    Raises:
        InputError: a word is not a field of a run with values that the field can have.
        pydantic.ValidationError: values do not go together.
    """
    values: dict[str, list[Any]] = {}
    for word in sweep:
        name, _, texts = word.partition("=")
        if name in values:
            raise InputError(f"--sweep {name} is given twice; valid: all its values in one word, {name}=A,B")
        values[name] = [_value(name, text) for text in texts.split(",")]
    if (points := len(runs) * math.prod(map(len, values.values()))) > MOST_POINTS:
        raise InputError(f"--sweep makes {points:,} points; valid: at most {MOST_POINTS:,}")
    combinations = [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]
    every = (with_fields(run, fields) for run in runs for fields in combinations)
    return list({run.id: run for run in every}.values())


def _value(name: str, text: str) -> Any:
    """Return the value that a text has as a field of a run."""
    if name not in FIELDS:
        near = difflib.get_close_matches(name, FIELDS, n=3) or ["plan.tp", "model.norm_placement", "train.lr", "seed"]
        raise InputError(f"--sweep {name!r:.60}: a run has no such field; valid: FIELD=A,B, such as {', '.join(near)}")
    of: Any = Run
    for part in name.split("."):
        of = get_type_hints(of, include_extras=True)[part]
    kind = TypeAdapter(of)
    with contextlib.suppress(ValidationError):
        return kind.validate_json("null" if text == "none" else text)  # before words, for choices of numbers
    try:
        return kind.validate_strings(text)
    except ValidationError as error:
        raise InputError(f"--sweep {name}={text:.40}: {error.errors()[0]['msg']}") from None
