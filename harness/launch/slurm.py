"""Where ranks run: processes of this machine, or a Slurm cluster as a small file describes it; and how they start."""

import contextlib
import io
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedSubmissionError, UncompletedJobError

from harness.launch.site_file import Cluster
from harness.rank import jobs
from harness.rank.devices import Device, gpu_count, visible_gpus
from harness.rank.jobs import Where
from harness.rank.orders import Orders
from harness.rank.supervisor import supervise
from harness.records.environment import CODE
from impl.errors import InputError

ARRAY = 1000
"""Jobs in one array; Slurm refuses more unless it was told otherwise (MaxArraySize 1001)."""
SPARE_MINUTES = 5
"""The ranks' supervisors keep the run's own limit; the scheduler's comes after it."""
BUSY = ("Unable to contact", "Socket timed out", "Connection refused", "Communication connection failure", "try again")
"""What sbatch says while the controller restarts or has too much to do."""
TRIES, PAUSE_SECONDS = 6, 10.0
OF_CLUSTER = {"SLURM_CONF", "SLURM_CLUSTERS"}
"""Variables of Slurm's that are about no job."""


@dataclass(frozen=True)
class Site:
    """Where ranks run: local processes, or a Slurm cluster and what it has to be told."""

    on: Where = "local"
    device: Device = "cpu"
    """cuda: one GPU for each rank."""
    allow_oom: bool = False
    """Start also what is predicted not to fit the memory that is there."""
    cluster: Cluster = field(default_factory=Cluster)

    def require(self) -> None:
        """Check that the scheduler is there.

        Raises:
            InputError: it is not.
        """
        if self.on == "local":
            return
        if shutil.which("sbatch") is None:
            raise InputError("--on slurm: no sbatch on this machine; valid here: local")
        try:
            asked = subprocess.run(["sinfo", "--noheader"], capture_output=True, text=True, timeout=jobs.ASK_SECONDS)
            reason = (asked.stderr.strip().splitlines() or ["no reason given"])[-1] if asked.returncode else None
        except subprocess.TimeoutExpired:
            reason = f"not within {jobs.ASK_SECONDS:.0f} s"
        if reason is not None:
            raise InputError(f"--on slurm: no cluster answers ({reason}); valid here: local")

    def nodes(self, ranks: int) -> int:
        return 1 if self.on == "local" else -(-ranks // self.cluster.ranks_per_node)

    def why_invalid(self, ranks: int) -> str | None:
        """Why this many ranks cannot be laid out here, in one line; None: they can."""
        if self.on == "slurm":
            per_node, uneven = self.cluster.ranks_per_node, ranks % self.nodes(ranks)
            return f"{ranks} ranks do not fill nodes of --ranks-per-node {per_node} evenly" if uneven else None
        if self.device == "cuda" and ranks > gpu_count():
            return f"the plan needs {ranks} GPUs, PyTorch sees {gpu_count()} here; --device cpu runs it on processors"
        return None

    def submit(self, attempts: Sequence[Path], ranks: int, seconds: float, at_once: int = 0) -> list[str]:
        """Start one supervised worker per rank for the run in each attempt; returns at once, with the jobs' numbers.

        On Slurm the attempts are one array, of which `at_once` run at the same time (0: as many as there is room for).
        Each attempt's folder says which job it has as soon as it has one.

        Raises:
            InputError: the scheduler refuses it; the attempts it has accepted before have a job.
        """
        if self.on == "local":
            return [self._start(attempt, ranks, seconds) for attempt in attempts]
        arrays = [attempts[i : i + ARRAY] for i in range(0, len(attempts), ARRAY)]
        share = -(-at_once // len(arrays)) if arrays else 0
        return [job for array in arrays for job in self._submit(array, ranks, seconds, share)]

    def script(
        self, ranks: int, seconds: float, points: int = 1, at_once: int = 0, folder: Path = Path(), threads: int = 1
    ) -> str:
        """What `submit` hands to sbatch for this many points of one shape; `folder` holds their attempts."""
        executor = self._executor(jobs.submissions(folder / "attempt") / "NAME", ranks, threads, seconds, at_once)
        return executor.script(min(points, ARRAY))

    def job_minutes(self, seconds: float) -> int:
        """How long a job may last whose run may take this long: the site's limit, or its partition's, goes before."""
        needed = _minutes(seconds)
        return min(needed, self.cluster.job_minutes or longest(self.cluster.partition) or needed)

    def _start(self, attempt: Path, ranks: int, seconds: float) -> str:
        executor = submitit.AutoExecutor(folder=attempt / "submitit", cluster="local")
        minutes = _minutes(seconds)
        gpus = self._gpus(attempt, ranks)
        # submitit would number GPUs from 0, whatever this process may use: supervisors choose them
        executor.update_parameters(nodes=1, tasks_per_node=ranks, gpus_per_node=0, timeout_min=minutes)
        with _stderr_into(attempt / "launcher.log"):
            job = executor.submit(supervise, str(attempt), gpus).job_id
        jobs.keep(attempt, "local", job, minutes * 60.0, gpus=gpus)
        return job

    def _gpus(self, attempt: Path, ranks: int) -> list[str]:
        """Choose GPUs for the ranks of an attempt, those first that the fewest other attempts use."""
        if self.device == "cpu":
            return []
        in_use = jobs.gpus_in_use(attempt.parent)
        return sorted(visible_gpus(), key=in_use.count)[:ranks]

    def _submit(self, attempts: Sequence[Path], ranks: int, seconds: float, at_once: int) -> list[str]:
        root = jobs.submissions(attempts[0])
        if "%" in str(root):
            raise InputError(f"--on slurm: {root} has a %, which Slurm reads as a pattern; give another --out")
        root.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=root))
        executor = self._executor(folder, ranks, _threads(attempts[0]), seconds, at_once)
        try:
            found = [job.job_id for job in _accepted(executor, attempts)]
        except BaseException:
            shutil.rmtree(executor.folder, ignore_errors=True)  # a job without its files ends by itself, and soon
            raise
        for attempt, job in zip(attempts, found, strict=True):
            jobs.keep(attempt, "slurm", job, executor.parameters["time"] * 60.0, str(executor.folder / job))
        return found

    def _executor(self, folder: Path, ranks: int, threads: int, seconds: float, at_once: int) -> "SlurmExecutor":
        """What submits jobs of this shape; its files lie in the folder, which all nodes see."""
        nodes, site = self.nodes(ranks), self.cluster
        given: dict[str, Any] = {name: getattr(site, name) for name in ("partition", "account", "qos", "constraint")}
        cpus = given["cpus_per_task"] = site.cpus_per_rank or (threads if threads > 1 else None)
        if site.memory_per_rank:
            size, unit = int(site.memory_per_rank[:-1]), site.memory_per_rank[-1]
            given["mem"] = f"{ranks // nodes * size}{unit}"
        # a site that has its own words for GPUs says so by them
        if self.device == "cuda" and not any(o == "gres" or o.startswith("gpus") for o in site.extra):
            given["gpus_per_node"] = ranks // nodes
        extra = {option.replace("-", "_"): setting for option, setting in site.extra.items()}
        extra |= {"reservation": site.reservation} if site.reservation else {}
        executor = SlurmExecutor(folder, python=PYTHON)
        executor.update_parameters(
            job_name="lmscale",
            nodes=nodes,
            ntasks_per_node=ranks // nodes,
            time=self.job_minutes(seconds),
            signal_delay_s=site.signal_seconds,
            array_parallelism=at_once or ARRAY,
            setup=[f"export PYTHONPATH={shlex.quote(str(CODE))}${{PYTHONPATH:+:$PYTHONPATH}}", *site.setup],
            # srun does not take the processors from sbatch; a supervisor exits otherwise only when it was killed
            srun_args=["--kill-on-bad-exit=1", *([f"--cpus-per-task={cpus}"] if cpus else [])],
            additional_parameters={"requeue": True, **extra},
            **{name: value for name, value in given.items() if value is not None},
        )
        return executor


# Told before its Python can listen, a task would be dead: it ignores the signal until it says what it does about it.
PYTHON = f"""bash -c 'trap "" USR2; exec "$0" "$@"' {shlex.quote(sys.executable)}"""


class SlurmExecutor(submitit.SlurmExecutor):
    """submitit's, which can also be asked what it would submit, on a machine without Slurm too."""

    @classmethod
    def affinity(cls) -> int:
        return 2

    def script(self, points: int) -> str:
        """What sbatch would be given: a job, or an array of several."""
        one = SlurmExecutor(self.folder, python=self.python)
        one.update_parameters(**self.parameters)
        one.parameters |= {"map_count": points} if points > 1 else {}
        return one._make_submission_file_text(self._submitit_command_str, "")


def _accepted(executor: SlurmExecutor, attempts: Sequence[Path]) -> list[submitit.Job[None]]:
    """Submit them, in several tries if the controller does not answer.

    A try of which nobody knows whether it was heard does no harm: submitit's job without its files ends in a minute.
    """
    for left in reversed(range(TRIES)):
        try:
            with contextlib.redirect_stderr(io.StringIO()), _outside_of_jobs():  # submitit prints what it then raises
                return executor.map_array(supervise, [str(attempt) for attempt in attempts])
        except (UncompletedJobError, FailedSubmissionError) as error:
            if not left or not any(text in str(error) for text in BUSY):
                raise InputError(
                    f"--on slurm: the cluster refuses the job: {' '.join(str(error).split())[:300]}"
                ) from None
        time.sleep(PAUSE_SECONDS)
    raise AssertionError("the last try returns or raises")


def _threads(attempt: Path) -> int:
    """Of each rank of the run in an attempt."""
    orders = Orders.found(attempt)
    return orders.threads if orders is not None else 1


def _minutes(seconds: float) -> int:
    """How long what starts the ranks of a run may last that ends by itself after this time; two years at most."""
    return min(math.ceil(seconds / 60), 10**6) + SPARE_MINUTES


@contextlib.contextmanager
def _outside_of_jobs() -> Iterator[None]:
    """Whoever submits from within a job does not hand that job's shape on to the new one."""
    kept = dict(os.environ)
    if "SLURM_JOB_ID" in kept:
        for name in kept.keys() - OF_CLUSTER:
            if name.startswith(("SLURM_", "SRUN_")):
                del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(kept)


def longest(partition: str | None) -> int | None:
    """Minutes that a job may last there, in the least of several partitions; None: no limit, or nobody says."""
    chosen = [f"--partition={partition}"] if partition else []
    try:
        asked = subprocess.run(
            ["sinfo", "--noheader", "--format=%P %l", *chosen],
            capture_output=True,
            text=True,
            timeout=jobs.ASK_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    # without a name it is the one with a star
    rows = [row for row in map(str.split, asked.stdout.splitlines()) if len(row) == 2]
    limits = [minutes(limit) for name, limit in rows if partition or name.endswith("*")]
    return min((limit for limit in limits if limit is not None), default=None)


def minutes(text: str) -> int | None:
    """Of a time as Slurm writes it: minutes:seconds, hours:minutes:seconds, days-hours:...; None: none is meant."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if found is None:
        return None
    days, hours, mins, _ = (int(part or 0) for part in found.groups())
    return (days * 24 + hours) * 60 + mins or None


@contextlib.contextmanager
def _stderr_into(path: Path) -> Iterator[None]:
    """Programs started inside write their standard error to a file: what they say on a Ctrl-C is not for the user."""
    kept = os.dup(2)
    try:
        with path.open("ab") as log:
            os.dup2(log.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
