"""Settings of Slurm at a site, in a small TOML file, of which nothing is executed."""

import dataclasses
import re
import reprlib
import tomllib
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from impl.errors import InputError, nearest
from impl.files import read_bytes

OURS = (
    *("array", "chdir", "error", "input", "job-name", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output"),
    *("parsable", "requeue", "no-requeue", "signal", "test-only", "time", "uid", "wait", "wrap"),
)
"""Options of sbatch that follow from the points, or by which the harness would lose its jobs."""
FILE_BYTES = 2**16
REPR = reprlib.Repr()
REPR.maxstring = REPR.maxother = 60


def _no_directive(lines: tuple[str, ...]) -> tuple[str, ...]:
    if any(line.strip().startswith("#") for line in lines):
        raise ValueError("a line must not begin with #, as options of sbatch do; those are in extra")
    return lines


def _options(extra: Mapping[str, Any]) -> Mapping[str, Any]:
    own = {one.name.replace("_", "-") for one in dataclasses.fields(Cluster)}
    for option, setting in extra.items():
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,39}", option):
            raise ValueError(f"{_shown(option)} must be a long option of sbatch, without dashes before it")
        if option in OURS:
            raise ValueError(f"{option} cannot be set by a site; not valid: {', '.join(OURS)}")
        if option in own:
            raise ValueError(f"{option} has a setting of its own, {option.replace('-', '_')}")
        if option == "cpus-per-task":
            raise ValueError(f"{option} has a setting of its own, cpus_per_rank, which srun is given as well")
        number = isinstance(setting, int) and not isinstance(setting, bool) and 0 <= setting <= 10**9
        word = isinstance(setting, str) and len(setting) <= 200 and re.fullmatch(r"[\w.,:@+/%=*-]+", setting, re.ASCII)
        if not (number or word or setting is True):
            raise ValueError(f"{option} must be a word, a whole number, or true")
    return extra


# A description completes the message that a value "must be ...".
def _word(pattern: str, description: str) -> Any:
    return Field(pattern=f"^(?:{pattern})$", max_length=200, description=description)


def _whole(least: int, most: int) -> Any:
    return Field(ge=least, le=most, description=f"a whole number from {least} to {most}")


def _words(what: str) -> Any:
    return Field(strict=False, description=f"a list of {what}, each of printable characters")


Name = Annotated[str | None, _word("[A-Za-z0-9_.,:@+][A-Za-z0-9_.,:@+-]*", "a name, or several with commas")]
Printable = Annotated[str, Field(pattern=r"^ *[^\p{C}\p{Z}]( |[^\p{C}\p{Z}])*$")]
"""Visible characters and spaces, at least one of them visible."""


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Cluster:
    """Settings of Slurm at a site, the fields of a site file.

    Raises:
        ValidationError: a field's value is not valid.
    """

    partition: Name = None
    account: Name = None
    qos: Name = None
    constraint: Annotated[
        str | None,
        _word(r"[A-Za-z0-9_.,:@+()\[\]][A-Za-z0-9_.,:@+()\[\]&|*!=-]*", "features, such as a100 or rack1|rack2"),
    ] = None
    reservation: Name = None
    ranks_per_node: Annotated[int, _whole(1, 4096)] = 8
    at_once: Annotated[int, _whole(0, 100_000)] = 0
    """Number of points of one shape that run at the same time; 0 for as many as the cluster takes."""
    setup: Annotated[tuple[Printable, ...], _words("lines"), AfterValidator(_no_directive)] = ()
    """Lines of shell that a job executes before its ranks start."""
    container: Annotated[tuple[Printable, ...], _words("words")] = ()
    """Words of a command that runs the command following it in a container."""
    interface: Annotated[str | None, _word("[A-Za-z0-9_][A-Za-z0-9_.:-]{0,14}", "a network interface, such as ib0")] = (
        None
    )
    """Network interface of the ranks."""
    memory_per_rank: Annotated[str | None, _word("[1-9][0-9]{0,5}[MG]", "a size such as 4G or 500M")] = None
    cpus_per_rank: Annotated[int | None, _whole(1, 4096)] = None
    signal_seconds: Annotated[int, _whole(1, 3600)] = 60
    """Seconds before a job's end at which its ranks receive a signal."""
    job_minutes: Annotated[int | None, _whole(1, 1_000_000)] = None
    """Time limit of a job, of which a longer run needs several; None for the partition's limit."""
    extra: Annotated[
        Mapping[str, Any],
        Field(description="a table of options of sbatch, such as {exclusive = true}"),
        AfterValidator(_options),
    ] = field(default_factory=dict, hash=False)
    """Further options of sbatch, such as exclusive = true."""


def read_cluster(path: Path | None = None, **given: str | int | None) -> Cluster:
    """Return the settings in a site file; values given as arguments, if not None, override them.

    Raises:
        InputError: no such file, or a field, of the file or given, that is not valid.
    """
    found: dict[str, Any] = {} if path is None else _read(path)
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    try:
        return Cluster(**found | options)
    except ValidationError as error:
        first = error.errors()[0]
    name, names = str(first["loc"][0]), [one.name for one in dataclasses.fields(Cluster)]
    if name not in names:
        hint = nearest(name, names)
        raise InputError(f"--site {path}: {_shown(name)} is no setting; {hint}valid: {', '.join(names)}")
    reason = first["msg"].removeprefix("Value error, ")
    if first["type"] != "value_error":
        reason = f"must be {Cluster.__pydantic_fields__[name].description}"  # type: ignore[attr-defined]
    if name in options:
        raise InputError(f"--{name.replace('_', '-')} {_shown(options[name])}: {reason}")
    raise InputError(f"--site {path}: {name} = {_shown(found[name])}: {reason}")


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_bytes(path, FILE_BYTES).decode())
    except OSError as error:
        raise InputError(f"--site {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # of TOML, of UTF-8, of a number or a nesting beyond all reason
        raise InputError(f"--site {path}: not a TOML file: {' '.join(str(error).split())[:200]}") from None


def _shown(value: object) -> str:
    try:
        return REPR.repr(value)
    except ValueError:  # a number of more digits than Python writes
        return "a number"
