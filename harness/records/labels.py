"""What a run is called among others: its configuration's fields, and which of them tell it apart."""

import itertools
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from harness.records.cache import once
from impl.pipeline.schedules import is_trusted
from impl.run import Run, to_dict

Record = Mapping[str, Any]

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


@once
def fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """All fields of a configuration under dotted names."""
    return _DEFAULT_FIELDS | _dotted(config)


def _dotted(config: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in config.items():
        within = {f"{name}.{inner}": of for inner, of in value.items()} if isinstance(value, dict) else {name: value}
        for dotted, field in within.items():
            out[sys.intern(dotted)] = tuple(field) if isinstance(field, list) else field
    return out


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with the fields that are newer than it, at their defaults: what every run did before."""
    nested = {name: {**defaults, **config.get(name, {})} for name, defaults in _NESTED.items()}
    return {**_DEFAULTS, **config, **nested}


def has_trusted_schedule(config: Mapping[str, Any]) -> bool:
    """Whether the schedule of a run may be built: not where a record alone names the function that makes it."""
    return is_trusted(config["plan"].get("schedule", _DEFAULTS["plan"]["schedule"]))


_DEFAULTS = to_dict(Run())
_NESTED = {name: value for name, value in _DEFAULTS.items() if isinstance(value, dict)}
_DEFAULT_FIELDS = _dotted(_DEFAULTS)


@once
def point(config: Mapping[str, Any]) -> str:
    """What repeats and seeds have in common: the configuration without `seed` and `repeat`, as canonical JSON."""
    return json.dumps({k: v for k, v in complete(config).items() if k not in NOT_PART_OF_A_POINT}, sort_keys=True)


def varying(configs: Iterable[Mapping[str, Any]], shown: Iterable[str] = ()) -> list[str]:
    """Dotted names of the fewest fields, the telling ones first, that tell the configurations apart.

    `seed` and `repeat` are not among them, nor the fields that are `shown` beside; a field that only follows from those
    named before it says nothing new, unless it is in ALWAYS_NAMED.
    """
    return telling([fields(config) for config in configs], shown)


def telling(rows: Sequence[Mapping[str, Any]], shown: Iterable[str] = ()) -> list[str]:
    """The same of configurations whose fields are under dotted names already."""
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


def label(config: Mapping[str, Any], configs: Iterable[Mapping[str, Any]], skip: Iterable[str] = ()) -> str:
    """What tells a configuration from the others, as `norm=pre lr=0.001`; empty where nothing does."""
    values, names = fields(config), varying(configs, skip)
    return label_of(values, names) or label_of(values, names, unsaid={})


def labels(points: Sequence[str], records: Iterable[Record], skip: Iterable[str] = ()) -> list[str]:
    """The label of each point among those of the records; empty where layers work as usual and nothing else tells."""
    configs = {point(record["config"]): record["config"] for record in records}
    names = varying((configs[key] for key in dict.fromkeys(points)), skip)
    return [label_of(fields(configs[key]), names) for key in points]


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
