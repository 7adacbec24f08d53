"""Options of commands on where and how points run."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.launch.site_file import Cluster, read_cluster
from harness.rank import torchrun
from harness.rank.job import Where
from harness.terminal import Flag
from impl.errors import InputError
from impl.run import Run

DeviceChoice = Literal["auto", "cpu", "cuda"]
Retry = Literal["again", "all"]


@dataclass(frozen=True)
class Saving:
    """Output of a sweep's points besides their measurements: checkpoints, certificates and trackers."""

    checkpoint_every: int = 0
    """Steps between checkpoints, from the last of which an interrupted or failed point resumes; 0 for none."""
    keep_checkpoints: Flag = False
    """Keep the checkpoints of finished points, too."""
    certify: Flag = False
    """Record hashes of every step, for the verb `certify`; not timed, so --out names a folder of its own."""
    track: str = ""
    """Trackers that follow training, in `tracked` of the records: tensorboard, wandb, mlflow, several with commas."""
    html: Path | None = None
    """A page of points as they train: losses, throughput, states, logs. It reloads itself, and is new every 5 s."""

    def require(self, out: Path | None, default: Path | None = None, *, profile: bool = False) -> None:
        """Check that the options make sense with this folder for records, or the one that is used without.

        Raises:
            InputError: they do not.
        """
        every = self.checkpoint_every
        if self.track:
            from harness.launch.trackers import tracker_names  # for few runs

            tracker_names(self.track)
        if every < 0:
            raise InputError(f"--checkpoint-every {every}: must be a number of steps, or 0 for no checkpoints")
        if self.keep_checkpoints and not every:
            raise InputError("--keep-checkpoints: none are written; --checkpoint-every says after how many steps")
        if every and (out or default) is None:
            raise InputError(f"--checkpoint-every {every}: needs --out, where the same command finds them again")
        if self.track and (out or default) is None:
            raise InputError(f"--track {self.track}: needs --out, the folder that trackers write into")
        if self.certify and out is None:
            raise InputError("--certify: needs --out, a folder of its own: certified runs are not timed")
        if self.certify and profile:
            raise InputError("--profile: a run with --certify is not timed; valid: one of them")

    def why_invalid(self, run: Run) -> str | None:
        """Return why this run cannot leave what is asked for, in one line; None if it can."""
        if run.engine == "native" or not (self.checkpoint_every or self.certify):
            return None
        asked = "--certify" if self.certify else f"--checkpoint-every {self.checkpoint_every}"
        return f"{asked}: the {run.engine} engine cannot do that here; valid with native"


@dataclass(frozen=True)
class Place:
    """Where points run."""

    on: Where | Literal["torchrun"] = "local"
    """Where ranks run: local processes, a Slurm cluster, or the processes of this command that torchrun has started."""
    site: Path | None = None
    """Site file (TOML) with the settings of Slurm here; the options below override it."""
    partition: str | None = None
    """Slurm partition."""
    account: str | None = None
    """Slurm account."""
    ranks_per_node: int | None = None
    """Ranks on one node of the cluster."""
    device: DeviceChoice = "auto"
    """cpu, or cuda with one GPU per rank; auto is cuda if this machine has a GPU for every rank."""
    allow_oom: Flag = False
    """Start also points that are predicted not to fit the memory of this machine."""

    def cluster(self) -> Cluster:
        """Return the settings of Slurm.

        Raises:
            InputError: the site file or an option is not valid.
        """
        given = {"partition": self.partition, "account": self.account, "ranks_per_node": self.ranks_per_node}
        return read_cluster(self.site, **given)

    def follows_torchrun(self) -> bool:
        """Return True in a process of torchrun but the first one, after it has followed that one to its end.

        Raises:
            InputError: torchrun has not started this process.
        """
        return self.on == "torchrun" and torchrun.join() is None


@dataclass(frozen=True)
class Trying:
    """Limits of an attempt at a point, and when there is another attempt."""

    time_limit: float = 24 * 3600.0
    """Longest duration of a point, in seconds."""
    hang_seconds: float = 600.0
    """Seconds without progress of a rank after which its run is ended."""
    retries: int = 2
    """Number of further attempts at a point at once after a fault of the infrastructure."""
    retry: Retry = "again"
    """again: points that a later attempt may finish; all: also those that failed or had no room with the same code."""

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
