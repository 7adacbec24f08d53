"""Orders of the ranks of an attempt: a file in its folder, written before they start."""

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

from harness.rank.devices import DeviceKind
from harness.rank.job import Where
from harness.rank.json_files import from_document
from harness.records.store import Document, read_json, write_atomically

if TYPE_CHECKING:  # supervisors read orders, and start faster without the class of runs
    from impl.run import Run

ORDERS = "spec.json"
WORKER = "harness.rank.worker"


class UnreadableError(Exception):
    """Unusable file of an attempt; the message names it."""


@dataclass(frozen=True, kw_only=True)
class Orders:
    """Orders common to all programs of ranks, read by ranks, launcher and supervisor.

    A field that is added needs a default: attempts of an earlier version are still read.
    """

    config: Document
    """Fields of `run` as a JSON object, equal to the record's; named "run" in the file."""
    module: str = WORKER
    """Python module that each rank executes."""
    ranks: int
    on: Where
    device: DeviceKind
    code: Path
    """Folder in which Python finds this project."""
    folder: Path
    """Working folder of the ranks."""
    container: tuple[str, ...] = ()
    """Words in front of a rank's command that run it in a container."""
    hosts: tuple[str, ...] = ()
    """Hosts of the ranks where torchrun has started them; () for those of this machine, or of a scheduler's job."""
    interface: str | None = None
    """Network interface of the ranks; None for the one on the route to the other hosts."""
    token: str
    """Secret by which the ranks of one attempt recognise each other."""
    submitted: float
    """Time at which the orders were written, in seconds since 1970."""
    time_limit_seconds: float
    """Longest total duration of all starts of the attempt."""
    hang_seconds: float
    """Seconds without progress after which a rank is ended; 0 if the program reports no progress."""
    collective_timeout_seconds: float
    """Longest time that ranks wait for each other."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 for none at all, not even before a preemption."""
    requeues: int = 20
    """Number of times that a job may put itself back into the queue."""
    signal_seconds: int = 60
    """Seconds before a job's end at which the scheduler announces it."""
    driver_pid: int | None = None
    """Process whose end stops ranks of this machine; None if they run on without it."""
    claim: Path | None = None
    """Folder of a claim whose loss stops ranks of this machine; None if they need none."""

    @cached_property
    def run(self) -> "Run":
        """Configuration of the run.

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
        """Name of the engine that trains."""
        return self.config.get("engine", "native")

    @classmethod
    def read(cls, attempt: Path) -> Self:
        """Return the orders in an attempt's folder; other fields of the file are ignored.

        Raises:
            UnreadableError: the file is missing, damaged, or of a version with other orders.
        """
        path = attempt / ORDERS
        document = read_json(path)
        try:
            if not isinstance(document, dict):
                raise TypeError("missing, or not a JSON object")
            return from_document(cls, document | {"config": document.get("run")})
        except TypeError as error:
            raise UnreadableError(f"{path} is not a file of orders: {error}") from None

    @classmethod
    def found(cls, attempt: Path) -> Self | None:
        """Return the orders in an attempt's folder; None if there are none that can be read."""
        with suppress(UnreadableError):
            return cls.read(attempt)

    def write(self, attempt: Path) -> None:
        """Write the orders into an attempt's folder."""
        document = asdict(self)
        document["run"] = document.pop("config")
        write_atomically(attempt / ORDERS, json.dumps(document, default=os.fspath))


@dataclass(frozen=True, kw_only=True)
class TrainingOrders(Orders):
    """Orders of the worker, with JSON objects that are copied into the record."""

    id: str
    experiment: str
    tier: str
    data: Path
    """Folder of tokens."""
    data_summary: Document
    environment: Document
    """Environment of the host that submitted the attempt, as its record has it: commit, packages, processor."""
    forecast: Document | None = None
    """Seconds of a step that were predicted before the attempt; None if none were."""
    loss_forecast: Document | None = None
    """Final loss that was predicted before the attempt; None if none was."""
    tries: list[Document] = field(default_factory=list)
    """Outcomes of earlier attempts, from their records."""
    start: Path | None = None
    """Folder of the checkpoint whose weights training starts from; None for initial weights."""
    checkpoints: Path
    """Folder of the run's own checkpoints."""
    keep_checkpoints: bool = False
    """True if they are kept after the run's end."""
    certify: bool = False
    """True if losses, gradients and weights of every step are hashed; its seconds are no measurement then."""
    profile: bool = False
    """True if one more step is profiled after the timed ones."""
