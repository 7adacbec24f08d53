"""Where and how points run, as a command's options say it."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from harness.launch.site_file import Cluster, read_cluster
from harness.rank.jobs import Where
from harness.terminal import Flag
from impl.errors import InputError
from impl.run import Run

DeviceChoice = Literal["auto", "cpu", "cuda"]
Retry = Literal["again", "all"]


@dataclass(frozen=True)
class Saving:
    """Checkpoints of the points of a sweep."""

    checkpoint_every: int = 0
    """Steps between checkpoints; what was interrupted or failed goes on from its last one. 0: none are written."""
    keep_checkpoints: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Keep the checkpoints of what is finished, too."""

    def require(self, out: Path | None) -> None:
        """Check that it makes sense with this folder for records.

        Raises:
            InputError: it does not.
        """
        every = self.checkpoint_every
        if every < 0:
            raise InputError(f"--checkpoint-every {every}: must be a number of steps, or 0 for no checkpoints")
        if self.keep_checkpoints and not every:
            raise InputError("--keep-checkpoints: none are written; --checkpoint-every says after how many steps")
        if every and out is None:
            raise InputError(f"--checkpoint-every {every}: needs --out, where the same command finds them again")

    def why_invalid(self, run: Run) -> str | None:
        """Why no checkpoints of this run can be saved, in one line; None: they can, or need not."""
        if not self.checkpoint_every or run.engine == "native":
            return None
        return f"--checkpoint-every {self.checkpoint_every}: the {run.engine} engine saves none here; valid with native"


@dataclass(frozen=True)
class Place:
    """Where points run."""

    on: Where = "local"
    """Local processes, or a Slurm cluster."""
    site: Path | None = None
    """Site file (TOML): what Slurm has to be told here; the options below go before it."""
    partition: str | None = None
    """Slurm partition."""
    account: str | None = None
    """Slurm account."""
    ranks_per_node: int | None = None
    """Ranks on one node of the cluster."""
    device: DeviceChoice = "auto"
    """cpu, or cuda with one GPU per rank; auto is cuda where this machine has a GPU for every rank."""
    allow_oom: Flag = False
    """Start also what is predicted not to fit the memory of this machine."""

    def cluster(self) -> Cluster:
        """What Slurm has to be told.

        Raises:
            InputError: the site file or an option is not valid.
        """
        given = {"partition": self.partition, "account": self.account, "ranks_per_node": self.ranks_per_node}
        return read_cluster(self.site, **given)


@dataclass(frozen=True)
class Trying:
    """How long a try at a point may take, and when there is another one."""

    time_limit: float = 24 * 3600.0
    """Seconds a point may take."""
    hang_seconds: float = 600.0
    """Seconds without any progress of a rank that end its run."""
    retries: int = 2
    """How often a point is tried again at once after a fault of the infrastructure."""
    retry: Retry = "again"
    """again: run what a later try may bring to an end; all: also what failed or needed too much memory, by the very
    same code."""

    def require(self) -> None:
        """Check the numbers.

        Raises:
            InputError: one makes no sense.
        """
        require_positive(time_limit=self.time_limit, hang_seconds=self.hang_seconds)
        if self.retries < 0:
            raise InputError(f"--retries {self.retries}: must be 0 or more")


def require_positive(**values: float) -> None:
    """Check that options are numbers above 0.

    Raises:
        InputError: one is not.
    """
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise InputError(f"--{name.replace('_', '-')} {value}: must be more than 0, and finite")
