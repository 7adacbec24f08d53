"""Machines to predict for: the packaged files, one per system, and files of the form that `calibrate` writes."""

import re
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from impl.errors import InputError, nearest
from impl.files import read_text
from impl.own_code import offered
from impl.simulator.system import System

FOLDER = Path(__file__).with_name("systems")
SUFFIXES = (".yaml", ".yml")
MOST_BYTES = 2**20


class _Loader(yaml.SafeLoader):
    """Loader that reads 312e12 as a number, as YAML 1.2 does; version 1.1 requires 3.12e+14.

    Duplicate keys are refused, and aliases, a few of which nested in each other can exceed any memory.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.MarkedYAMLError(None, None, f"alias *{event.anchor:.60}; valid: none", event.start_mark)
        return super().compose_node(parent, index)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError):  # from a tag such as !!timestamp
            what = f"{node.value!r:.60} is no {node.tag.rpartition(':')[2]:.60}"
            raise yaml.constructor.ConstructorError(None, None, what, node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        for (key, _), name in zip(node.value, names, strict=True):
            if isinstance(name, str) and names.count(name) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{name!r:.60} is there twice", key.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def names() -> list[str]:
    """Return the names of the packaged systems."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def path_of(name: str) -> Path:
    """Return the file of a packaged system, or of one that an installed package offers, or the given file.

    An entry point of the group `lmscale.systems` names a package and a file in it, as `package:file.yaml`.

    Raises:
        InputError: the name is none of these.
    """
    if Path(name).suffix in SUFFIXES or "/" in name:
        return Path(name)
    if name in names():
        return FOLDER / f"{name}.yaml"
    if (entry := offered("systems").get(name)) is not None:
        try:
            return Path(str(files(entry.module) / entry.attr))
        except (Exception, SystemExit) as error:  # of the package, which this imports
            raise InputError(f"system {name!r:.80} of {entry.value}: {' '.join(str(error).split()):.200}") from None
    every = [*names(), *offered("systems")]
    what = f"system {name!r:.80} does not exist; {nearest(name, every)}"
    raise InputError(f"{what}valid: {', '.join(every)}, or a YAML file as `calibrate` writes")


@lru_cache(maxsize=64)  # a search or a table compares all of the packaged ones
def _parsed(text: str) -> Any:
    return yaml.load(text, _Loader)


def load_system(name: str) -> System:
    """Return the system with this name, or the one that a file describes.

    Raises:
        InputError: one line with the file, the field, its value and what would be valid.
    """
    path = path_of(name)
    try:
        document = _parsed(read_text(path, MOST_BYTES))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; valid: {', '.join(names())}, or a YAML file") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        why = getattr(error, "problem", None) or " ".join(str(error).split())[:200]
        raise InputError(f"{path}{line}: no YAML: {why}") from None
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise InputError(f"{path}: describes no system; valid: the fields of {FOLDER / 'selene.yaml'}")
    try:
        return System.from_dict({"name": path.stem, **document})
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
