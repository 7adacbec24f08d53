"""What a run is called among others: its configuration's fields, and which of them tell it apart."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import PurePath
from typing import Any

from impl.run import Run, to_dict, with_fields

FIELDS = tuple(
    f"{name}.{inner}" if inner else name
    for name, value in to_dict(Run()).items()
    for inner in (value if isinstance(value, dict) else ("",))
)
"""Dotted names of all fields of a run."""
VALUES = attrgetter(*FIELDS)
DEFAULTS = dict(zip(FIELDS, VALUES(Run()), strict=True))
NOT_PART_OF_A_POINT = ("seed", "repeat")
SHAPE = ("model.family", "model.num_layers", "model.hidden_size", "model.num_heads")
"""What a model's name stands for; the number of parameters differs a little between norm placements."""
PIPELINE = ("plan.pp", "plan.schedule", "plan.chunks")
TELLING = (
    "model.norm_placement", "train.lr", "plan.dp", "plan.tp", *PIPELINE, "train.global_batch", "precision", "engine",
)  # fmt: skip
"""Fields that name a point best, of several that tell the same points apart."""
ALWAYS_NAMED = ("plan.tp", *PIPELINE, "engine")
"""Named wherever they vary, even where others say as much: the numbers of a point are one rank's part, or are another
engine's."""
UNSAID = {"plan.sequence_parallel": False, "plan.overlap_input_grad_reduce": True, "plan.scatter_gather": True}
"""How tensor-parallel layers and pipelines usually work: fields that a label leaves out at this value."""
SHORT = {
    "model.norm_placement": "norm", "model.num_layers": "layers", "model.hidden_size": "hidden",
    "model.num_heads": "heads", "model.seq_len": "seq", "model.vocab_size": "vocab", "data.dataset": "data",
    "train.global_batch": "batch", "plan.overlap_grad_reduce": "overlap",
    "plan.overlap_input_grad_reduce": "input_overlap",
}  # fmt: skip


def fields(run: Run) -> dict[str, Any]:
    """Return all fields of a run by their dotted names."""
    return dict(zip(FIELDS, VALUES(run), strict=True))


def apart_from(run: Run, *names: str) -> Run:
    """Return the run with these fields, by dotted name, at their defaults: what runs that differ in them share."""
    return with_fields(run, {name: DEFAULTS[name] for name in names}) if names else run


def varying(runs: Iterable[Run], shown: Iterable[str] = ()) -> list[str]:
    """Dotted names of the fewest fields, the telling ones first, that tell the runs apart.

    `seed` and `repeat` are not among them, nor the fields that are `shown` beside; a field that only follows from those
    named before it says nothing new, unless it is in ALWAYS_NAMED.
    """
    return telling([fields(run) for run in runs], shown)


def telling(rows: Sequence[Mapping[str, Any]], shown: Iterable[str] = ()) -> list[str]:
    """The same of runs whose fields are under dotted names already."""
    order = dict.fromkeys((*SHAPE, *TELLING, *itertools.chain.from_iterable(rows)))
    shown, kept, groups, count = set(shown), [], [0] * len(rows), 1
    for name in sorted(order, key=lambda name: name not in shown):
        column = [row.get(name) for row in rows]
        if name in NOT_PART_OF_A_POINT or len(set(column)) < 2:
            continue
        found: dict[tuple[int, Any], int] = {}
        finer = [found.setdefault(pair, len(found)) for pair in zip(groups, column, strict=True)]
        if name in ALWAYS_NAMED or len(found) > count:
            groups, count = finer, len(found)
            kept += [] if name in shown else [name]
    return kept


def label(run: Run, runs: Iterable[Run], skip: Iterable[str] = ()) -> str:
    """What tells a run from the others, as `norm=pre lr=0.001`; empty where nothing does."""
    values, names = fields(run), varying(runs, skip)
    return label_of(values, names) or label_of(values, names, unsaid={})


def labels(points: Sequence[Run], skip: Iterable[str] = ()) -> list[str]:
    """The label of each point among the others; empty where layers work as usual and nothing else tells."""
    names = varying(dict.fromkeys(points), skip)
    return [label_of(fields(point), names) for point in points]


def label_of(values: Mapping[str, Any], names: Sequence[str], unsaid: Mapping[str, Any] = UNSAID) -> str:
    """What these fields say, under short names, as `tp=2 overlap=off`; those of an unsaid value are left out."""
    last = [name.rpartition(".")[2] for name in names]
    short = {n: SHORT.get(n, n if last.count(end) > 1 else end) for n, end in zip(names, last, strict=True)}
    said = [name for name in names if name in values and not (name in unsaid and values[name] == unsaid[name])]
    return " ".join(f"{short[name]}={_value(values[name])}" for name in said)


def _value(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "on", False: "off", None: "none"}[value]
    if isinstance(value, tuple):
        return "+".join(map(_value, value)) or "none"
    if isinstance(value, float):
        return f"{value:g}"
    return PurePath(text).name if "/" in (text := str(value)) else text
