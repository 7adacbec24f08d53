"""Labels of runs among others: a configuration's fields, and those that distinguish the runs."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from impl.model.config import ModelConfig
from impl.pipeline.schedules import short
from impl.run import Run, to_dict

FIELDS = tuple(
    f"{name}.{inner}" if inner else name
    for name, value in to_dict(Run()).items()
    for inner in (value if isinstance(value, dict) else ("",))
)
"""Dotted names of all fields of a run."""
VALUES = attrgetter(*FIELDS)
DEFAULTS = dict(zip(FIELDS, VALUES(Run()), strict=True))
RUN_ID = re.compile(r"[0-9a-f]{12}")
NOT_PART_OF_A_POINT = ("seed", "repeat")
SHAPE = ("model.family", "model.num_layers", "model.hidden_size", "model.num_heads")
"""Fields that a model's name stands for; the parameter count differs slightly between norm placements."""
PIPELINE = ("plan.pp", "plan.schedule", "plan.chunks")
TELLING = (
    *("model.norm_placement", "train.lr", "plan.dp", "plan.cp", "plan.tp", *PIPELINE),
    *("train.global_batch", "precision", "engine"),
)  # fmt: skip
"""Fields preferred in labels where several distinguish the same points."""
ALWAYS_NAMED = ("plan.cp", "plan.tp", *PIPELINE, "engine")
"""Fields named wherever they vary: with them a point's numbers are one rank's share, or those of another engine."""
UNSAID = {"plan.sequence_parallel": False, "plan.overlap_input_grad_reduce": True, "plan.scatter_gather": True}
"""Usual values of tensor-parallel and pipeline options, which labels leave out."""
SHORT = {
    "model.norm_placement": "norm", "model.num_layers": "layers", "model.hidden_size": "hidden",
    "model.num_heads": "heads", "model.norm": "kind", "model.seq_len": "seq", "model.vocab_size": "vocab",
    "data.dataset": "data", "train.global_batch": "batch", "plan.overlap_grad_reduce": "overlap",
    "plan.overlap_input_grad_reduce": "input_overlap",
}  # fmt: skip


def fields(run: Run) -> dict[str, Any]:
    """Return all fields of a run by their dotted names."""
    return dict(zip(FIELDS, VALUES(run), strict=True))


def sized(model: ModelConfig) -> frozenset[str]:
    """Return the fields of a run that a model's size gives: all, except a vocabulary and a dropout that it lacks."""
    return frozenset(f"model.{name}" for name, value in vars(model).items() if value not in (None, 0.0))


def differing(runs: Iterable[Run]) -> list[str]:
    """Return the dotted names of all fields in which runs differ."""
    columns = zip(FIELDS, zip(*map(VALUES, runs), strict=True), strict=False)  # no columns without runs
    return [name for name, column in columns if len(set(column)) > 1]


def varying(runs: Iterable[Run], shown: Iterable[str] = ()) -> list[str]:
    """Return the dotted names of the fewest fields that distinguish the runs, those of TELLING first.

    `seed`, `repeat` and the fields that are `shown` elsewhere are left out, and so is a field whose value follows from
    those named before it, unless it is in ALWAYS_NAMED.
    """
    columns = dict(zip(FIELDS, zip(*map(VALUES, runs), strict=True), strict=False))  # no columns without runs
    differing = [name for name, column in columns.items() if len(set(column)) > 1 and name not in NOT_PART_OF_A_POINT]
    order = [name for name in dict.fromkeys((*SHAPE, *TELLING, *FIELDS)) if name in differing]
    shown, kept, groups, count = set(shown), [], itertools.repeat(0), 1
    for name in sorted(order, key=lambda name: name not in shown):
        found: dict[tuple[int, Any], int] = {}
        finer = [found.setdefault(pair, len(found)) for pair in zip(groups, columns[name], strict=False)]
        if name in ALWAYS_NAMED or len(found) > count:
            groups, count = finer, len(found)
            kept += [] if name in shown else [name]
    return kept


def labels(points: Sequence[Run], skip: Iterable[str] = ()) -> list[str]:
    """Return the label of each point among the others; empty if it has usual values only and nothing else differs."""
    return labels_by(points, varying(points, skip))


def labels_by(runs: Sequence[Run], names: Sequence[str], unsaid: Mapping[str, Any] = UNSAID) -> list[str]:
    """Return these fields of each run under short names, as `tp=2 overlap=off`, without those at their `unsaid` value.

    Texts are made once per value of a field: a sweep has thousands of runs, and few values of each field.
    """
    last = [name.rpartition(".")[2] for name in names]
    found = [""] * len(runs)
    for name, end in zip(names, last, strict=True):
        short, column = SHORT.get(name, name if last.count(end) > 1 else end), list(map(attrgetter(name), runs))
        texts = {value: f"{short}={_value(value)} " for value in set(column)}
        if name == "start" and _tell_apart(runs):
            texts |= {value: f"{short}=pretrained " for value in texts if value and RUN_ID.fullmatch(value)}
        if name in unsaid:
            texts[unsaid[name]] = ""
        found = [text + texts[value] for text, value in zip(found, column, strict=True)]
    return [text[:-1] for text in found]


def _tell_apart(runs: Sequence[Run]) -> bool:
    """Return whether runs that start from others' ends differ in more than these others' ids."""
    started = [run for run in set(runs) if run.start and RUN_ID.fullmatch(run.start)]
    return len({replace(run, start=None) for run in started}) == len(started)


def _value(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "on", False: "off", None: "none"}[value]
    if isinstance(value, tuple):
        return "+".join(map(_value, value)) or "none"
    if isinstance(value, float):
        return f"{value:g}"
    return short(str(value)).rstrip("/").rpartition("/")[2]
