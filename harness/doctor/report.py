"""Programs of ranks that measure instead of training: their reports, and how they begin and end.

The launcher starts such a program like a worker. It imports no PyTorch, so that the reports can be read without it.
"""

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from harness.rank.failure import fail, one_line
from harness.rank.json_files import write_as
from harness.rank.orders import Orders

if TYPE_CHECKING:
    import torch


@dataclass(kw_only=True)
class Report:
    """Progress of a rank."""

    rank: int
    at: str = "starting"
    """Part that the rank is at; "" after the last one."""
    done: int = 0
    of: int = 0


@dataclass
class Timing:
    """Median time of a message."""

    bytes: int
    seconds: float


@dataclass
class Transfer:
    """Messages of rank 0 to another rank and back, by size."""

    peer: int
    sizes: tuple[Timing, ...]


@dataclass(kw_only=True)
class HostReport(Report):
    """Report of a rank of `doctor`; results of parts that it has not reached are None or empty."""

    local_rank: int
    host: str
    process: int
    device: str
    """Name of the GPU; none if there should be one."""
    python: str
    torch: str
    backend: str
    has_backend: bool
    cores: int
    core_set: list[int]
    """Processors that the rank may use."""
    threads: int
    memory_bytes: int
    met_seconds: float | None = None
    """Time from the orders until all ranks had joined."""
    place: dict[str, int] = field(default_factory=dict)
    """Coordinates in the mesh, by axis."""
    axes: dict[str, float] = field(default_factory=dict)
    """Seconds of the first all-reduce over the ranks of each axis of the mesh."""
    clock_seconds: float | None = None
    """Seconds that the clock is ahead of rank 0's."""
    all_reduce: tuple[Timing, ...] = ()
    transfers: tuple[Transfer, ...] = ()


class Rank:
    """A rank of a program, which writes its report as every part begins: that of a rank that hangs names the part."""

    def __init__(self, attempt: Path, rank: int, local_rank: int, world_size: int, rendezvous: str) -> None:
        self.attempt, self.rank, self.local_rank = attempt, rank, local_rank
        self.world_size, self.rendezvous = world_size, rendezvous
        self.report = Report(rank=rank)

    def begin(self, part: str) -> None:
        """Write the report, with the part that begins; "" at the end."""
        self.report.at = part
        write_as(report_of(self.attempt, self.rank), self.report)

    def join(self, orders: Orders) -> "torch.device":
        """Join the other ranks; return the rank's device."""
        from harness.rank.rendezvous import join

        return join(orders, self.rank, self.local_rank, self.world_size, self.rendezvous)[0]


def report_of(attempt: Path, rank: int) -> Path:
    """Return the file of a rank's report."""
    return attempt / f"rank-{rank}.json"


def execute(measure: Callable[[Rank], None]) -> NoReturn:
    """Measure on the rank that the command line names, and end the process; a failure file names the part."""
    rank = Rank(Path(sys.argv[1]), *map(int, sys.argv[2:5]), rendezvous=sys.argv[5])
    status = 0
    try:
        measure(rank)
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        fail(rank.attempt, rank.rank, "error", f"rank {rank.rank}, {rank.report.at}: {one_line(error)}")
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # like a worker: everything is written
