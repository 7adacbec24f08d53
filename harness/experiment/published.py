"""Published numbers of the papers, for comparison with ours."""

import io
import math
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from impl.errors import InputError
from impl.files import read_text

FOLDER = Path(__file__).resolve().with_suffix("")
"""Folder with one CSV file per paper, all with the same columns."""

_INTEGERS = ("tp", "pp", "dp", "gpus", "global_batch")
_TEXTS = ("paper", "arxiv", "where", "quantity", "model", "norm_placement", "unit", "verified", "note")
VERIFIED = {
    "source": "checked against a copy of the paper, or of the table as its authors publish it elsewhere",
    "digitised": "read off a figure of the paper",
    "derived": "computed from other numbers of the paper",
    "formula": "computed by another tool from the paper's formulas, not read in the paper",
    "secondary": "read in others' texts or in the authors' scripts, not in the paper",
    "memory": "found in no copy of the paper or of other texts; a lead only",
}
"""How a published number was checked: words of the column `verified`, most certain first, with what they mean."""


def papers() -> list[str]:
    """Return the names of the papers with published numbers here."""
    return sorted(path.stem for path in FOLDER.glob("*.csv"))


def published(paper: str, quantity: str | None = None) -> pd.DataFrame:
    """Return the numbers that a paper prints, one per row, in the printed unit.

    Columns: paper, arxiv, where (table, figure or section), quantity, model (a name of `impl.model.sizes` if there is
    one), norm_placement, tp, pp, dp, gpus, global_batch, value, unit, verified (a word of `VERIFIED`), note. A value
    that the paper does not give is an empty text or a missing integer.

    Args:
        paper: name of its folder under `experiments`, for instance `megatron2019`.
        quantity: quantity of the rows; None for all.

    Raises:
        InputError: the paper or the quantity does not exist; lists the valid ones.
    """
    if paper not in papers():
        raise InputError(f"published numbers of {paper!r} do not exist; valid: {', '.join(papers()) or 'none'}")
    rows = _read(FOLDER / f"{paper}.csv")
    if quantity is None:
        return rows.copy()
    chosen = rows.loc[rows["quantity"] == quantity]
    if chosen.empty:
        valid = ", ".join(dict.fromkeys(rows["quantity"]))
        raise InputError(f"{paper} publishes no quantity {quantity!r}; valid: {valid}")
    return chosen.reset_index(drop=True)


@cache
def published_number(paper: str, quantity: str, model: str | None = None) -> float:
    """Return the first number that a paper prints of a quantity, for one model if it is given; NaN if there is none."""
    rows = published(paper, quantity)
    return float(next(iter(rows["value"] if model is None else rows.loc[rows["model"] == model, "value"]), math.nan))


@cache
def _read(path: Path) -> pd.DataFrame:
    columns: dict[Any, Any] = dict.fromkeys(_TEXTS, "str") | dict.fromkeys(_INTEGERS, "Int64") | {"value": "float64"}
    try:
        text = read_text(path)
        if not text.endswith("\n"):
            raise ValueError("its last line is cut short")
        rows = pd.read_csv(io.StringIO(text), dtype=columns)
        if missing := [name for name in columns if name not in rows]:
            raise ValueError(f"no column {', '.join(missing)}")
        rows[list(_TEXTS)] = rows[list(_TEXTS)].fillna("")
        if lacking := [row for row, value in enumerate(rows["value"], 2) if pd.isna(value)]:
            raise ValueError(f"line {lacking[0]} has no value")
        if unknown := [(row, word) for row, word in enumerate(rows["verified"], 2) if word not in VERIFIED]:
            row, word = unknown[0]
            raise ValueError(f"line {row} has verified {word!r}, which is none of {', '.join(VERIFIED)}")
    except ValueError as error:  # includes the errors of pandas
        why = " ".join(str(error).split())
        raise InputError(f"{path}: {why}; valid: a CSV file with columns {', '.join(columns)}") from None
    return rows
