"""Tables, and the frame of all records, as Parquet files: types as they are, units in the columns' metadata."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd

from harness.analysis.render import Table
from harness.records.frames import none_if_missing
from harness.records.measures import frame
from harness.records.record import Record
from impl.errors import InputError

RECORDS = "records"
"""Stem of the file with one row per record and every measure."""


def write(folder: Path, tables: Sequence[Table], records: Sequence[Record]) -> list[Path]:
    """Write every table as NAME.parquet with unrounded SI values, and `frame(records)` as records.parquet.

    A reason for a missing number is left out: such a column has numbers alone.

    Raises:
        InputError: pyarrow is not installed.
        OSError: the folder cannot be written.
    """
    if find_spec("pyarrow") is None:
        raise InputError("--format parquet needs the package pyarrow; install it: pip install 'lmscale[parquet]'")
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}.parquet" for name in (*(table.name for table in tables), RECORDS)]
    for table, path in zip(tables, files, strict=False):
        units = {key: c.si for c in table.columns for key in (c.key, c.interval) if key}
        texts = {c.key for c in table.columns if c.text}
        _write(
            path, table.frame.loc[:, list(units)], units, texts, {"title": table.title, "notes": "\n".join(table.notes)}
        )
    every = frame(records).assign(point=lambda rows: [run.id for run in rows.get("point", ())])
    _write(files[-1], every, {}, set(every) - {"cores"}, {"title": "one row per record, SI units"})
    return files


def _write(path: Path, rows: pd.DataFrame, units: dict[str, str], texts: set[str], about: dict[str, str]) -> None:
    import pyarrow
    from pyarrow import parquet

    columns, fields = [], []
    for name, values in rows.items():
        known = _alike(none_if_missing(values), str(name) in texts)
        # without a type an empty column could not be read together with that of another file
        empty = pyarrow.string() if str(name) in texts and values.dtype == object else pyarrow.float64()
        columns.append(pyarrow.array(known, None if any(value is not None for value in known) else empty))
        fields.append(pyarrow.field(str(name), columns[-1].type, metadata={"unit": units.get(str(name), "")}))
    parquet.write_table(pyarrow.table(columns, pyarrow.schema(fields, metadata=about)), path)


def _alike(values: list[Any], may_be_text: bool) -> list[Any]:
    """Return values of one type: numbers, or texts where the column may have them and some are."""
    values = [value.item() if hasattr(value, "item") else value for value in values]
    kinds = {type(value) for value in values} - {type(None)}
    if kinds <= {int, float} or kinds == {bool}:
        return [float(value) if isinstance(value, int) and float in kinds else value for value in values]
    if may_be_text:
        return [None if value is None else str(value) for value in values]
    return [value if isinstance(value, int | float) else None for value in values]
