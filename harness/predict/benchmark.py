"""A benchmark of predictors: published steps to predict, those that one may be fitted to, and scores of predictions."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from harness.analysis.render import Column, Table, texts
from harness.predict.csv_rows import OPTIONAL, REQUIRED, SECONDS, SYSTEM
from harness.predict.fit import Measured, flops, scaled
from harness.predict.held_out import VTRAIN, Case, Result, on_data_sheet, parts_of
from harness.predict.simulation import predicted_seconds, vocabulary_of
from harness.predict.systems import load_system
from harness.records.store import write_atomically
from impl.errors import InputError

GUESS = "predicted_s"
KEYS = ("file", "name")
"""Columns by which a prediction belongs to a row."""
TIE = 1e-9
"""Relative difference of seconds up to which predictions count as equal."""
WORST = 10
"""Number of rows in the table of those that are missed most."""
PERCENT: dict[str, Any] = {"unit": "%", "digits": 3}
Seconds = Callable[[Measured], float]
"""What a predictor says of a row; NaN: nothing."""


def guesses(result: Result, others: Mapping[str, Seconds]) -> dict[str, np.ndarray]:
    """Return each predictor's seconds for the rows of a result, by the predictor's name.

    All but the simulator have one factor that is fitted to the rows that its constants are fitted to. A constant
    utilization is fitted to the rows themselves where nothing else is fitted. Where rows differ in the peak of their
    precision, the simple predictors also have a factor for each peak.
    """
    sheet = on_data_sheet(load_system(result.case.system))
    rated = cache(lambda run: predicted_seconds(run, sheet))
    peak = lambda row: sheet.peak(row.run.precision)
    parts = [(part.fitted, part.rows) for part in result.parts]
    simple = {
        "constant MFU": (flops, [(fitted or rows, rows) for fitted, rows in parts]),
        "data sheet": (lambda row: rated(row.run), parts),
    }
    whole = lambda seconds, parts: np.concatenate([scaled(seconds, *part) for part in parts])
    found = {name: whole(*one) for name, one in simple.items()}
    if len({peak(row) for part in parts for row in itertools.chain(*part)}) > 1:
        of_peak = lambda rows, row: [one for one in rows if peak(one) == peak(row)] or rows
        each = lambda parts: [(of_peak(fitted, row), [row]) for fitted, rows in parts for row in rows]
        found |= {f"{name}, by precision": whole(seconds, each(of)) for name, (seconds, of) in simple.items()}
    return found | {name: whole(seconds, parts) for name, seconds in others.items()}


def read_predictions(path: Path, cases: Sequence[Case] = ()) -> Seconds:
    """Return the seconds of a CSV file with columns file, name and predicted_s; an empty cell is no prediction.

    Raises:
        InputError: the file is no such table, or names a row that none of the cases has, if there are cases.
    """
    where, valid = f"--predictions {path}", f"valid: a CSV file with columns {', '.join((*KEYS, GUESS))}"
    try:
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0][:120]
        raise InputError(f"{where}: {reason}; {valid}") from None
    if missing := [name for name in (*KEYS, GUESS) if name not in frame]:
        raise InputError(f"{where}: has no column {', '.join(missing)}; it has {', '.join(frame)}; {valid}")
    seconds = pd.Series(pd.to_numeric(frame[GUESS], errors="coerce"))
    wrong = ~(frame[GUESS].isin(["", "nan"]) | seconds.between(0, math.inf, inclusive="neither"))
    for file, name, text in frame.loc[wrong, [*KEYS, GUESS]].itertuples(index=False):
        raise InputError(f"{where}: {GUESS} of {file}/{name} is {text}; valid: positive seconds, or empty")
    found = {(file, name): of_row for file, name, of_row in zip(*(frame[key] for key in KEYS), seconds, strict=True)}
    known = {(row.file, row.name) for case in cases for part in parts_of(case) for row in itertools.chain(*part)}
    if cases and (other := next((key for key in found if key not in known), None)):
        of = "valid: file and name of a line that `accuracy --rows FILE.csv` writes"
        raise InputError(f"{where}: no row is {'/'.join(other)}; {of}")
    return lambda row: found.get((row.file, row.name), math.nan)


def write_rows(path: Path, cases: Sequence[Case]) -> int:
    """Write every row once for each set that asks for it or may be fitted to it, and return their number.

    A set's constants may be fitted to its rows of role `fit`, and to rows of its other groups.
    """
    rows = [row for case in cases for row in _rows(case)]
    write_atomically(path, pd.DataFrame(rows).to_csv(index=False, lineterminator="\n"))
    return len(rows)


def _rows(case: Case) -> Iterator[dict[str, Any]]:
    for group, (fitted, asked) in enumerate(parts_of(case)):
        roles = [("asked", row) for row in asked]
        roles += [("fit", row) for row in fitted] if case.by is None else []
        for role, row in roles:
            fields = {name: attrgetter(field)(row.run) for name, field in (REQUIRED | OPTIONAL).items()}
            own = {"gpus": row.run.plan.world_size, **fields, "vocab": vocabulary_of(row.run)}
            of_set = {"set": case.what, "group": group, "role": role, SYSTEM: case.system}
            yield {**of_set, "file": row.file, "name": row.name, **own, SECONDS: row.seconds}


def choices(rows: Sequence[Measured], predicted: Iterable[float]) -> tuple[int, float, float, float]:
    """Return how well plans are chosen: groups, share of best plans found, mean loss, and Kendall's tau.

    A group has plans for the same model, GPUs and batch. The loss is how much slower the predicted best plan is than
    the measured best, as a share; tau is of the order within a group, on average.
    """
    from scipy.stats import kendalltau

    groups = [(row.run.model, row.run.plan.world_size, row.run.train.global_batch) for row in rows]
    frame = pd.DataFrame({"group": groups, "guess": predicted, "measured": [row.seconds for row in rows]}).dropna()
    found, losses, orders = [], [], []
    for _, plans in frame[frame.duplicated("group", keep=False)].groupby("group", sort=False):
        best = plans["measured"].min()
        chosen = plans["measured"][plans["guess"] <= plans["guess"].min() * (1 + TIE)]  # a tie is broken by chance
        found.append(np.mean(chosen == best))
        losses.append(np.mean(chosen) / best - 1)
        orders.append(kendalltau(plans["guess"], plans["measured"])[0])
    if not found:
        return 0, math.nan, math.nan, math.nan
    tau = np.nanmean(orders) if np.isfinite(orders).any() else math.nan  # equal predictions have no order
    return len(found), float(np.mean(found)), float(np.mean(losses)), float(tau)


def plans_table(results: Sequence[Result], others: Mapping[str, Seconds]) -> Table:
    """Tabulate whether the plan that is predicted to be the fastest is the fastest."""
    rows = []
    for result in results:
        if result.case.asked[0].file == VTRAIN.file:
            for by, predicted in {"simulator": result.whole.predicted, **guesses(result, others)}.items():
                groups, share, regret, tau = choices(result.whole.rows, predicted)
                row = {"set": result.case.id, "what": result.case.what, "by": by, "groups": groups, "tau": tau}
                rows.append(row | {"best": 100 * share, "regret": 100 * regret})
    columns = (
        *texts(set="set", what="rows", by="predicted by"),
        Column(key="groups", header="groups"),
        Column(key="best", header="best plan found", **PERCENT),
        Column(key="regret", header="slower than the best", **PERCENT),
        Column(key="tau", header="Kendall's tau", digits=2),
    )
    notes = (
        "A group: plans for the same model, GPUs and batch. Goal for H5: the best in 66 %, 3.4 % slower on average.",
        "Kendall's tau is of the order of the plans of a group, on average.",
    )
    return Table("plans", "The fastest plan", columns, pd.DataFrame(rows), notes)


def kinds_table(results: Sequence[Result]) -> Table:
    """Tabulate errors, and how many steps were in their intervals, by how a row differs from those fitted."""
    frame = pd.DataFrame(
        [
            {"kind": kind, "off": abs(off), "is_inside": is_inside}
            for whole in (result.whole for result in results)
            for kind, off, is_inside in zip(whole.kinds, whole.off, whole.is_inside, strict=True)
        ]
    )
    frame = pd.concat([frame, frame.assign(kind="all")])
    rows = [
        {"kind": kind, "n": len(own), "mape": own["off"].mean(), "inside": 100 * own["is_inside"].mean()}
        for kind, own in frame.groupby("kind", sort=False)
    ]
    columns = (
        Column(key="kind", header="rows", text=True),
        Column(key="n", header="n"),
        Column(key="mape", header="mean", **PERCENT),
        Column(key="inside", header="inside the 90% interval", **PERCENT),
    )
    note = "A row counts once in every set that has it. Goal: 80 to 97% inside."
    return Table("kinds", "Errors by distance from what was fitted", columns, pd.DataFrame(rows), (note,))


def worst_table(results: Sequence[Result]) -> Table:
    """Tabulate the rows that are missed most, each in the set that misses it most."""
    found = {}
    for result in results:
        whole = result.whole
        for row, seconds, off, is_inside in zip(whole.rows, whole.predicted, whole.off, whole.is_inside, strict=True):
            key, line = (row.file, row.name), {"set": result.case.what, "row": row.name, "measured": row.seconds}
            line |= {"predicted": seconds, "off": off, "inside": "yes" if is_inside else "no"}
            if key not in found or abs(off) > abs(found[key]["off"]):
                found[key] = line
    rows = sorted(found.values(), key=lambda line: -abs(line["off"]))[:WORST]
    columns = (
        *texts(set="set", row="row"),
        Column(key="measured", header="measured", unit="s", si="s", digits=4),
        Column(key="predicted", header="predicted", unit="s", si="s", digits=4),
        Column(key="off", header="error", **PERCENT),
        Column(key="inside", header="inside the 90% interval", text=True),
    )
    return Table("worst", "Where it is worst", columns, pd.DataFrame(rows))
