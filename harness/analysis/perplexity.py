"""Perplexity and accuracy tables: model size against norm placement, one table for each comparability key."""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from harness.analysis.render import Column, Table, number, shown
from harness.analysis.tables import MODEL, PERCENT, VARIES
from harness.records import evaluations
from harness.records.frames import is_missing, once_for_all
from harness.records.labels import SHAPE, labels
from harness.records.measures import about, combine, frame
from harness.records.record import Record
from impl.errors import InputError
from impl.grouping import by_key
from impl.model.norm_placement import order_of

MOST_COLUMNS = 9
"""Most combinations of placement and learning rate that are shown as columns."""
TWO_SIDED = 1.96
"""Standard errors to either side of a mean that hold 95% of a normal distribution."""

TOKEN = Column(key="token_perplexity", header="perplexity", interval="token_perplexity_half_width")
WORD = Column(key="word_perplexity", header="word perplexity", interval="word_perplexity_half_width")
ACCURACY = Column(
    key="accuracy", header="accuracy", unit="%", si="fraction", scale=PERCENT, digits=3, interval="accuracy_half_width"
)
BITS = Column(key="bits_per_byte", header="bits per byte", interval="bits_per_byte_half_width")
FLOOR = Column(key="floor", header="entropy floor", interval="floor_half_width")
ABOVE = Column(key="above_floor", header="above floor", unit="%", si="fraction", scale=PERCENT, digits=3)
MEASURES = (*evaluations.SCORES, *evaluations.FLOOR)
IN_COLUMNS = (*SHAPE, "model.norm_placement", "train.lr")
KINDS: dict[str, tuple[str, str, tuple[Column, ...]]] = {
    "causal": ("perplexity", "Token perplexity", (TOKEN, WORD, BITS, FLOOR, ABOVE)),
    "masked": ("perplexity_masked", "Masked-token perplexity", (TOKEN,)),
    "words": ("perplexity", "Word perplexity", (WORD, TOKEN, BITS)),
    "last_word": ("accuracy", "Last-word accuracy", (ACCURACY, Column(key="questions", header="passages"))),
    "choice": ("accuracy", "Multiple-choice accuracy", (ACCURACY, Column(key="questions", header="questions"))),
}
"""Stem of the file, beginning of the title, and columns of each kind of evaluation, the main column first."""
NORM = Column(key="norm_placement", header="norm", text=True)
LR = Column(key="lr", header="learning rate", digits=2)
RUNS = (Column(key="n", header="n"), Column(key="diverged_runs", header="diverged", text=True))


def perplexity_tables(records: Sequence[Record]) -> list[Table]:
    """Return tables of every evaluation and comparability key: sizes against placements if these vary, and points.

    Raises:
        InputError: the records are of several tiers.
    """
    about(records)
    tables: list[Table] = []
    for name, kind, apart, chosen in comparable(records):
        matrix = placement_table(chosen, name, kind, apart)
        suffix = "points" if matrix else ""
        tables += [matrix] if matrix else []
        tables.append(perplexity_table(chosen, name, kind, apart, suffix))
    return tables


def comparable(records: Sequence[Record]) -> Iterator[tuple[str, str, str, list[Record]]]:
    """Yield name and kind of each evaluation, the differing part of its comparability key, and comparable records."""
    found = evaluations.evaluations(records)
    for name, kind in dict.fromkeys(zip(found["name"], found["kind"], strict=True)):
        rows = found[(found["name"] == name) & (found["kind"] == kind)]
        differing = differing_keys(list(rows["key"]))
        for key in dict.fromkeys(rows["key"]):
            apart = " ".join(f"{k}={_value(v)}" for k, v in json.loads(key).items() if k in differing)
            evaluated = set(rows["id"][rows["key"] == key])
            yield name, kind, apart, _with_unfinished(records, evaluated, set(rows["id"]))


def perplexity_table(records: Sequence[Record], name: str, kind: str, apart: str = "", suffix: str = "") -> Table:
    """Return the table of one evaluation, one row per point, with seeds combined.

    Args:
        name: name of the evaluation, as `valid`.
        kind: kind of the evaluation, as `causal`.
        apart: part of the comparability key that distinguishes this table from others, for its title and file.
        suffix: suffix of the name of its file.

    Raises:
        InputError: the records are of several tiers, or their comparability keys differ; names the differences.
    """
    points = scores(records, name, kind)
    points["varies"] = labels(list(points["point"]), IN_COLUMNS)
    lr = (LR,) if len(set(points["lr"])) > 1 else ()
    columns = shown((MODEL, NORM, *lr, VARIES, *KINDS[kind][2], *RUNS), points)
    heading = title(records, name, kind, apart) + (f", by {suffix.removesuffix('s')}" if suffix else "")
    return Table(stem(name, kind, apart, suffix), heading, columns, points, _notes(points))


def placement_table(records: Sequence[Record], name: str, kind: str, apart: str = "") -> Table | None:
    """Return model sizes against norm placements, and learning rates if a model has several; the main value only.

    A cell with a diverged seed shows that instead of a mean over the others. None if there is only one column.
    Arguments and errors as in `perplexity_table`.
    """
    points = scores(records, name, kind)
    main, by_lr = KINDS[kind][2][0], _lr_in_columns(points)
    points["varies"] = labels(list(points["point"]), IN_COLUMNS if by_lr else IN_COLUMNS[:-1])
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    order: dict[str, tuple[int, float]] = {}
    for point in points.to_dict("records"):
        norm, lr = point["norm_placement"], point["lr"]
        column = f"{norm} lr={lr:g}" if by_lr else norm
        order[column] = (order_of(norm), lr)
        row = rows.setdefault((point["model"], point["varies"]), {k: point[k] for k in ("model", "varies")})
        some_diverged = " of " in point["diverged_runs"]
        row[column] = f"diverged {point['diverged_runs']}" if some_diverged else point[main.key]
        row[_half_width(column)] = math.nan if some_diverged else point[f"{main.key}_half_width"]
        if not is_missing(point["floor"]):
            row |= {"floor": point["floor"], "floor_half_width": point["floor_half_width"]}
    if len(order) < 2:
        return None
    frame = pd.DataFrame(list(rows.values()))
    values = [replace(main, key=c, header=c, interval=_half_width(c)) for c in sorted(order, key=lambda c: order[c])]
    columns = shown((MODEL, VARIES, *values, FLOOR), frame)
    return Table(stem(name, kind, apart), title(records, name, kind, apart), columns, frame, _notes(points))


def _half_width(column: str) -> str:
    return f"{column}_half_width"


def differing_keys(keys: Sequence[str]) -> dict[str, list[Any]]:
    """Return the parts in which comparability keys, given as JSON, differ, with their values."""
    parsed = [json.loads(key) for key in dict.fromkeys(keys)]
    values = {part: list(dict.fromkeys(k.get(part) for k in parsed)) for key in parsed for part in key}
    return {part: found for part, found in values.items() if len(found) > 1}


@once_for_all
def scores(records: Sequence[Record], name: str, kind: str) -> pd.DataFrame:
    """Return one row per point: its means over the successful runs, or a text with the reason for their absence.

    Raises:
        InputError: as `perplexity_table`.
    """
    about(records)
    found = evaluations.evaluations(records)
    valid = ", ".join(dict.fromkeys(f"{n} ({k})" for n, k in zip(found["name"], found["kind"], strict=True)))
    found = pd.DataFrame(found[(found["name"] == name) & (found["kind"] == kind)])
    if not len(found):
        raise InputError(f"no record has the evaluation {name} ({kind}); valid: {valid or 'none'}")
    if differing := differing_keys(list(found["key"])):
        parts = "; ".join(f"{part}: {', '.join(map(_value, values))}" for part, values in differing.items())
        raise InputError(f"{name} ({kind}) mixes values that cannot be compared: {parts}; make one table for each")
    rows = frame(records).merge(found.drop(columns=["name", "kind"]), on="id", how="left")
    main = KINDS[kind][2][0].key
    unfinished = (rows["status"] != "ok") | rows["diverged"]
    rows = pd.DataFrame(rows[unfinished | rows["key"].notna()])
    rows["outcome"] = ["diverged" if d else s for d, s in zip(rows["diverged"], rows["status"], strict=True)]
    measures = [main, *(m for m in MEASURES if m != main)]
    rows.loc[rows["outcome"] != "ok", measures] = math.nan
    by = ["point", "source"]
    seeds = pd.DataFrame(combine(rows, [*by, "seed"], measures))  # repeats of a seed learn the same
    points = pd.DataFrame(combine(seeds, by, measures))
    outcomes = [list(group) for _, group in rows.groupby(by, sort=False, dropna=False)["outcome"]]
    points["diverged_runs"] = [_count_diverged(outcome) for outcome in outcomes]
    texts = ["diverged" if "diverged" in outcome else outcome[0] for outcome in outcomes]
    values = zip(points[main], points["n"], texts, strict=True)
    points[main] = pd.Series([value if n else text for value, n, text in values], dtype=object)
    points["floor_half_width"] = TWO_SIDED * points["floor_standard_error"]
    points["key"] = found["key"].iloc[0]  # the key of all rows; a point's first run may have none
    return points


def _count_diverged(outcome: Sequence[str]) -> str:
    """Return the count of diverged runs as `1 of 3`; empty if none diverged, `all` for a single run."""
    count = list(outcome).count("diverged")
    if not count:
        return ""
    return "all" if len(outcome) == 1 else f"{count} of {len(outcome)}"


def _notes(points: pd.DataFrame) -> tuple[str, ...]:
    notes = ["± is the half-width of the 95% t-interval over n seeds; a single one (n = 1) has none."]
    if any(points["floor"].notna()):
        language = points["language_floor"].dropna().iloc[0]
        notes.append(
            "Entropy floor: what the language's own probabilities reach on all held-out text, ± 1.96 standard errors "
            f"of what is scored of it; {number(language)} over the whole language. No model can be expected below it."
        )
    if any(points["diverged_runs"]):
        notes.append("Diverged: a loss was not a number, or the last training loss stands above the first.")
    if key := json.loads(points["key"].iloc[0]):
        notes.append("Comparable are values with " + ", ".join(f"{k} {_value(v)}" for k, v in key.items()) + ".")
    return tuple(notes)


def _lr_in_columns(points: pd.DataFrame) -> bool:
    """Return True if some model was trained with several learning rates, and they fit in columns."""
    rest = labels(list(points["point"]), IN_COLUMNS)
    models = zip(points["model"], points["norm_placement"], rest, strict=True)
    tried = by_key(zip(models, points["lr"], strict=True))
    side_by_side = len(points[["norm_placement", "lr"]].drop_duplicates())
    return any(len(set(rates)) > 1 for rates in tried.values()) and side_by_side <= MOST_COLUMNS


def _with_unfinished(records: Sequence[Record], evaluated: set[str], elsewhere: set[str]) -> list[Record]:
    """Return the evaluated records, and unevaluated ones that would have the same key as one of them."""

    def kin(record: Record) -> tuple[Any, ...]:
        return record.run.model.family, record.run.model.seq_len, record.run.data.dataset

    kinds = {kin(record) for record in records if record.id in evaluated}
    return [r for r in records if r.id in evaluated or (r.id not in elsewhere and kin(r) in kinds)]


def title(records: Sequence[Record], name: str, kind: str, apart: str) -> str:
    """Return the title of a table or a figure: kind of the evaluation and its text."""
    where = {"valid": "held-out text"}.get(name, name)
    return f"{KINDS[kind][1]} on {where}{f' ({apart})' if apart else ''}{about(records)}"


def stem(name: str, kind: str, apart: str, suffix: str = "") -> str:
    """Return the stem of the file of a table or a figure."""
    parts = [KINDS[kind][0], name, apart, suffix]
    return re.sub(r"[^a-z0-9]+", "_", " ".join(part for part in parts if part).lower()).strip("_")


def _value(value: Any) -> str:
    text = str(value)
    return text[:8] if re.fullmatch(r"[0-9a-f]{16,}", text) else text
