"""Settings of Slurm at a site, in a small TOML file, of which nothing is executed."""

import difflib
import re
import reprlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from impl.errors import InputError

WORD = r"[A-Za-z0-9_.,:@+][A-Za-z0-9_.,:@+-]*"
SETTINGS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("partition", "account", "qos", "reservation"), (WORD, "a name, or several with commas")),
    "constraint": (r"[A-Za-z0-9_.,:@+()\[\]][A-Za-z0-9_.,:@+()\[\]&|*!=-]*", "features, such as a100 or rack1|rack2"),
    "interface": (r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,14}", "a network interface, such as ib0"),
    "memory_per_rank": (r"[1-9][0-9]{0,5}[MG]", "a size such as 4G or 500M"),
}
"""Fields that are one word, with the pattern and its description."""
COUNTS = {
    "ranks_per_node": (1, 4096),
    "at_once": (0, 100_000),
    "cpus_per_rank": (1, 4096),
    "signal_seconds": (1, 3600),
    "job_minutes": (1, 1_000_000),
}
"""Fields that are whole numbers, with the least and largest value."""
OURS = (
    *("array", "chdir", "error", "input", "job-name", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output"),
    *("parsable", "requeue", "no-requeue", "signal", "test-only", "time", "uid", "wait", "wrap"),
)
"""Options of sbatch that follow from the points, or by which the harness would lose its jobs."""
FILE_BYTES = 2**16
REPR = reprlib.Repr()
REPR.maxstring = REPR.maxother = 60


@dataclass(frozen=True)
class Cluster:
    """Settings of Slurm at a site, the fields of a site file.

    Raises:
        InputError: a field's value is not valid.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    ranks_per_node: int = 8
    at_once: int = 0
    """Number of points of one shape that run at the same time; 0 for as many as the cluster takes."""
    setup: tuple[str, ...] = ()
    """Lines of shell that a job executes before its ranks start."""
    container: tuple[str, ...] = ()
    """Words of a command that runs the command following it in a container."""
    interface: str | None = None
    """Network interface of the ranks."""
    memory_per_rank: str | None = None
    cpus_per_rank: int | None = None
    signal_seconds: int = 60
    """Seconds before a job's end at which its ranks receive a signal."""
    job_minutes: int | None = None
    """Time limit of a job, of which a longer run needs several; None for the partition's limit."""
    extra: Mapping[str, str | int | bool] = field(default_factory=dict, hash=False)
    """Further options of sbatch, such as exclusive = true."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value != one.default and (reason := _why_wrong(one.name, value)):
                raise InputError(f"{one.name} {_shown(value)}: {reason}")


def read_cluster(path: Path | None = None, **given: Any) -> Cluster:
    """Return the settings in a site file; values given as arguments, if not None, override them.

    Raises:
        InputError: no such file, or a field, of the file or given, that is not valid.
    """
    cluster = _from_file(path) if path is not None else Cluster()
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if reason := _why_wrong(name, value):
            raise InputError(f"--{name.replace('_', '-')} {_shown(value)}: {reason}")
    return replace(cluster, **given)


def _from_file(path: Path) -> Cluster:
    names = [one.name for one in fields(Cluster)]
    try:
        if not path.is_file():  # not a pipe either, which is waited for, nor a device, which may have no end
            raise InputError(f"--site {path}: no such file")
        with path.open("rb") as file:
            data = file.read(FILE_BYTES + 1)
        if len(data) > FILE_BYTES:
            raise InputError(f"--site {path}: over {FILE_BYTES} bytes; a site file has a line or two for each setting")
        found = tomllib.loads(data.decode())
    except OSError as error:
        raise InputError(f"--site {path}: {error.strerror or error}") from None
    except InputError:
        raise
    except (ValueError, RecursionError) as error:  # of TOML, of UTF-8, of a number or a nesting beyond all reason
        raise InputError(f"--site {path}: not a TOML file: {_one_line(str(error))}") from None
    for name, value in found.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise InputError(f"--site {path}: {_shown(name)} is no setting; {hint}valid: {', '.join(names)}")
        if reason := _why_wrong(name, value):
            raise InputError(f"--site {path}: {name} = {_shown(value)}: {reason}")
    settings: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in found.items()}
    return Cluster(**settings)


def _why_wrong(name: str, value: object) -> str | None:
    """Return why a field cannot have this value, and what is valid; None if it can."""
    if name in SETTINGS:
        pattern, words = SETTINGS[name]
        right = isinstance(value, str) and len(value) <= 200 and re.fullmatch(pattern, value)
        return None if right else f"must be {words}"
    if name in COUNTS:
        least, most = COUNTS[name]
        right = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        return None if right else f"must be a whole number from {least} to {most}"
    if name in ("setup", "container"):
        words = value if isinstance(value, list | tuple) else None
        if words is None or not all(isinstance(word, str) and word.strip() and word.isprintable() for word in words):
            return f"must be a list of {'lines' if name == 'setup' else 'words'}, each of printable characters"
        if name == "setup" and any(line.strip().startswith("#") for line in words):
            return "a line must not begin with #, as options of sbatch do; those are in extra"
        return None
    return _why_wrong_extra(value)


def _why_wrong_extra(value: object) -> str | None:
    if not isinstance(value, Mapping):
        return "must be a table of options of sbatch, such as {exclusive = true}"
    names = {one.name.replace("_", "-") for one in fields(Cluster)}
    for option, setting in value.items():
        if not isinstance(option, str) or not re.fullmatch(r"[a-z][a-z0-9-]{0,39}", option):
            return f"{_shown(option)} must be a long option of sbatch, without dashes before it"
        if option in OURS:
            return f"{option} is not for a site to say; not valid: {', '.join(OURS)}"
        if option in names:
            return f"{option} has a setting of its own, {option.replace('-', '_')}"
        number = isinstance(setting, int) and not isinstance(setting, bool) and 0 <= setting <= 10**9
        word = isinstance(setting, str) and len(setting) <= 200 and re.fullmatch(r"[\w.,:@+/%=*-]+", setting, re.ASCII)
        if not (number or word or setting is True):
            return f"{option} must be a word, a whole number, or true"
    return None


def _shown(value: object) -> str:
    try:
        return REPR.repr(value)
    except ValueError:  # a number of more digits than Python writes
        return "a number"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]
