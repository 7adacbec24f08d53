"""The verb `new`: files of one's own that run as they are, and are to be changed."""

import importlib.util
import keyword
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal, NamedTuple

import tyro

from harness.experiment.loading import experiment_ids
from harness.predict.systems import FOLDER
from harness.predict.systems import names as systems
from harness.records.store import write_atomically
from impl.errors import InputError
from impl.model.norm_placement import PLACEMENTS
from impl.pipeline.schedules import SCHEDULES

TEMPLATES = Path(__file__).parent / "templates"


class Kind(NamedTuple):
    """Kind of file."""

    template: Path
    suffix: str
    taken: Callable[[], Collection[str]]
    """Names that are there already."""
    commands: tuple[str, ...]
    """Commands that use the file."""


KINDS = {
    "experiment": Kind(
        TEMPLATES / "experiment.py.txt", ".py", experiment_ids,
        ("run NAME.py  # a minute, 2 CPU cores", "claims NAME.py", "table NAME.py"),
    ),
    "schedule": Kind(
        TEMPLATES / "schedule.py.txt", ".py", lambda: SCHEDULES,
        (
            "timeline --plan.pp 4 --plan.schedule NAME:NAME",
            "train --model gpt-0.5m --plan.pp 2 --plan.schedule NAME:NAME --train.microbatch 2 --train.steps 20",
        ),
    ),
    "placement": Kind(
        TEMPLATES / "placement.py.txt", ".py", lambda: PLACEMENTS,
        (
            "train --model gpt-0.5m --model.norm-placement NAME.py:NAME --plan.tp 2 --plan.pp 2 --train.steps 20",
            "memory --model gpt-2.5b --model.norm-placement NAME.py:NAME --plan.tp 2",
        ),
    ),
    "system": Kind(
        FOLDER / "h100.yaml", ".yaml", systems,
        ("predict --system NAME.yaml --model gpt-2.5b --plan.tp 2", "calibrate --out here.yaml  # of this machine"),
    ),
}  # fmt: skip


def new(
    kind: tyro.conf.Positional[Literal["experiment", "schedule", "placement", "system"]],
    name: tyro.conf.Positional[str],
    /,
) -> int:
    """Write a file of your own that runs as it is: an experiment, a schedule, a norm placement or a system.

    Args:
        kind: What it is.
        name: The file is NAME.py, or NAME.yaml for a system, in the working directory.
    """
    found = KINDS[kind]
    path = Path(f"{name}{found.suffix}")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise InputError(f"{name!r} cannot be a name in Python; valid: letters, digits and _, no digit first")
    if path.exists() or path.is_symlink():
        raise InputError(f"{path} is there already; valid: a name that no file has")
    if name in found.taken() or (kind == "schedule" and importlib.util.find_spec(name)):
        raise InputError(f"{name!r} is the name of another {kind} or module; valid: one of its own")
    text = found.template.read_text(encoding="utf-8").replace("NAME", name)
    write_atomically(
        path, re.sub("^name: .*$", f"name: {name}", text, flags=re.MULTILINE) if kind == "system" else text
    )
    print(
        f"written: {path}", "next:", *(f"  lmscale {each.replace('NAME', name)}" for each in found.commands), sep="\n"
    )
    return 0
