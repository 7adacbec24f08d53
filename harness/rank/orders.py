"""Orders of the ranks of an attempt: a file in its folder, written before they start."""

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Self, get_args, get_origin, get_type_hints

from harness.rank.devices import Device
from harness.rank.jobs import Where
from harness.records.store import read_json, write_atomically

if TYPE_CHECKING:  # what watches over ranks reads their orders, and starts faster without the class of runs
    from impl.run import Run

ORDERS = "spec.json"
WORKER = "harness.rank.worker"


class UnreadableError(Exception):
    """Unusable file of an attempt; the message names it."""


@dataclass(frozen=True, kw_only=True)
class Orders:
    """Orders that all programs of ranks have in common, read by ranks, launcher and supervisor.

    A field that is added needs a default: attempts of an earlier version are still read.
    """

    config: dict[str, Any]
    """Fields of `run` as a JSON object, equal to the record's; named "run" in the file."""
    module: str = WORKER
    """The program of a rank, a Python module."""
    ranks: int
    """Number of ranks."""
    on: Where
    """Processes of this machine, or a Slurm job."""
    device: Device
    """Device of a rank; cuda: one GPU for each."""
    code: Path
    """The folder that Python finds this project in."""
    folder: Path
    """The working folder of the ranks."""
    container: tuple[str, ...] = ()
    """The words in front of a rank's command that run it in a container."""
    interface: str | None = None
    """The network interface that ranks use; None: the one on the way to the other hosts."""
    token: str
    """The secret by which ranks of one attempt know each other."""
    submitted: float
    """Time at which the orders were written, in seconds since 1970."""
    time_limit_seconds: float
    """Seconds that all starts of the attempt may last together."""
    hang_seconds: float
    """Seconds without any progress of a rank that end it; 0: it gives no sign of progress."""
    collective_timeout_seconds: float
    """Seconds that ranks wait for each other."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: none are written, not even when a rank is asked to end."""
    requeues: int = 20
    """Number of times that a job may put itself back into the queue."""
    signal_seconds: int = 60
    """Seconds before a job's end at which the scheduler announces it."""
    driver_pid: int | None = None
    """The process that ranks of this machine end with; None: they outlive who started them."""
    claim: Path | None = None
    """The folder of the claim that ranks of this machine end with; None: they need none."""

    @cached_property
    def run(self) -> "Run":
        """What is trained and how.

        Raises:
            pydantic.ValidationError: `config` describes no run of this version.
        """
        from impl.run import from_dict

        return from_dict(self.config)

    @property
    def threads(self) -> int:
        """CPU threads of one rank."""
        return self.config.get("threads", 1)

    @property
    def engine(self) -> str:
        """Whose implementation trains."""
        return self.config.get("engine", "native")

    @classmethod
    def read(cls, attempt: Path) -> Self:
        """The orders in an attempt's folder; what else the file says is left alone.

        Raises:
            UnreadableError: the file is missing, damaged, or of a version with other orders.
        """
        path = attempt / ORDERS
        document = read_json(path)
        if not isinstance(document, dict):
            raise UnreadableError(f"{path} does not say what was run: it is no JSON object, or not there")
        given = document | {"config": document.get("run")}
        try:
            return cls(**{name: _as(kind, given[name]) for name, kind in get_type_hints(cls).items() if name in given})
        except TypeError as error:
            raise UnreadableError(f"{path} does not say what was run: {error}") from None

    @classmethod
    def found(cls, attempt: Path) -> Self | None:
        """The orders in an attempt's folder; None: there are none that can be read."""
        with suppress(UnreadableError):
            return cls.read(attempt)

    def write(self, attempt: Path) -> None:
        """Put them into an attempt's folder."""
        document = asdict(self)
        document["run"] = document.pop("config")
        write_atomically(attempt / ORDERS, json.dumps(document, default=os.fspath))


@dataclass(frozen=True, kw_only=True)
class TrainingOrders(Orders):
    """What the worker needs besides, and what the collector puts into the record."""

    id: str
    """The run's."""
    experiment: str
    """The experiment that the record belongs to."""
    tier: str
    """The tier of it."""
    data: Path
    """The folder of tokens."""
    data_summary: dict[str, Any]
    """What the record says of the data: a JSON object, since nothing between its writer and the record reads it."""
    environment: dict[str, Any]
    """What the record says of the submitting host: a JSON object for the same reason."""
    tries: list[dict[str, Any]] = field(default_factory=list)
    """What came of earlier tries, from their records: JSON objects for the same reason."""
    start: Path | None = None
    """The folder of the checkpoint whose weights training starts from; None: initial weights."""
    checkpoints: Path
    """The folder of the run's own checkpoints."""
    keep_checkpoints: bool = False
    """Whether they outlive the run's end."""
    profile: bool = False
    """Whether to look where a step's time goes, after what is timed."""


def _as(kind: Any, found: Any) -> Any:
    """The value of a field of this kind, from what JSON makes of it.

    Raises:
        TypeError: it is of another kind.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if found is None else _as(inner[0], found)
    if origin is tuple and isinstance(found, list):
        return tuple(_as(inner[0], one) for one in found)
    if kind is Path and isinstance(found, str):
        return Path(found)
    plain = (int, float) if kind is float else origin or kind
    if found not in inner if origin is Literal else not isinstance(found, plain):
        raise TypeError(f"{found!r:.60} is no {kind}")
    return found
