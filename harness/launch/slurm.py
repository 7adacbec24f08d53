"""Site of ranks: processes of this machine, or a Slurm cluster described by a small file; and how ranks start."""

import contextlib
import io
import math
import os
import re
import secrets
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedSubmissionError, UncompletedJobError

from harness.launch.site_file import Cluster
from harness.rank import jobs, local
from harness.rank.devices import DeviceKind, gpu_count, visible_gpus
from harness.rank.job import Where, keep
from harness.rank.orders import Orders
from harness.rank.slurm_queue import NO_ANSWER, NOT_THERE, ask, submissions
from harness.rank.slurm_task import BEGAN, supervise
from harness.rank.torchrun import Agents
from harness.records.environment import CODE
from impl.errors import InputError
from impl.run import Run, to_dict

ARRAY = 1000
"""Jobs in one array; Slurm refuses more by default (MaxArraySize 1001)."""
SPARE_MINUTES = 5
"""Time of a job beyond the run's own limit, which the ranks' supervisors keep."""
MOST_MINUTES = 10**6
"""Longest limit of a run that is passed on to Slurm: two years."""
BUSY = (
    *("Unable to contact", "Socket timed out", "Connection refused", "Communication connection failure", "try again"),
    NO_ANSWER,
)
"""Messages of Slurm's commands while the controller restarts or is overloaded."""
TRIES, PAUSE_SECONDS = 12, 10.0
OF_CLUSTER = {"SLURM_CONF", "SLURM_CLUSTERS"}
"""Slurm's variables that are about no job."""
SET_BY_ALL = (
    *("array_inx", "error", "gpus_per_node", "job_name", "no_requeue", "open_mode", "output", "requeue", "signal"),
    *("timelimit", "wait"),
)
"""Options that each script sets, or that no job may have, as a user's shell names the variables that override it."""
SET_BY_SITE = ("account", "constraint", "partition", "qos", "reservation")
"""Options that a script sets if its site does; a user's shell may otherwise."""


@dataclass(frozen=True)
class Site:
    """Where ranks run: local processes, or a Slurm cluster with its settings."""

    on: Where = "local"
    device: DeviceKind = "cpu"
    """Device of a rank; cuda: one GPU for each."""
    allow_oom: bool = False
    """True to start also runs that are predicted not to fit the memory."""
    cluster: Cluster = field(default_factory=Cluster)
    agents: Agents | None = None
    """Nodes that torchrun has started; None without."""
    announce: Callable[[str], None] = lambda _: None
    """Passes an attempt on to torchrun's other processes."""

    def require(self) -> None:
        """Check that the scheduler answers.

        Raises:
            InputError: it does not.
        """
        if self.on == "local":
            return
        if shutil.which("sbatch") is None:
            raise InputError("--on slurm: no sbatch on this machine; valid here: local")
        status, answer = ask("sinfo", "--noheader")
        if status:
            raise InputError(f"--on slurm: no cluster answers ({answer}); valid here: local")

    def nodes(self, ranks: int) -> int:
        """Return the number of nodes for this many ranks."""
        return 1 if self.on == "local" else -(-ranks // self.cluster.ranks_per_node)

    def why_invalid(self, ranks: int) -> str | None:
        """Return why this many ranks cannot be placed here, in one line; None if they can."""
        if self.on == "slurm":
            per_node, uneven = self.cluster.ranks_per_node, ranks % self.nodes(ranks)
            return f"{ranks} ranks do not fill nodes of --ranks-per-node {per_node} evenly" if uneven else None
        if self.agents is not None:
            return self.agents.why_invalid(ranks)
        if self.device == "cuda" and ranks > gpu_count():
            return f"the plan needs {ranks} GPUs, PyTorch sees {gpu_count()} here; --device cpu runs it on processors"
        return None

    def submit(self, attempts: Sequence[Path], ranks: int, seconds: float, at_once: int = 0) -> list[str]:
        """Start the ranks of each attempt, and return at once, with the jobs' numbers.

        On Slurm the attempts are one array, of which `at_once` run at the same time (0: as many as there is room for);
        of several arrays, of ARRAY attempts each, at least one.
        The file of an attempt's job is written as soon as there is one.

        Raises:
            InputError: the scheduler refuses it; the attempts it has accepted before have a job.
        """
        if self.on == "local":
            started = [local.start(attempt, self._gpus(attempt, ranks)) for attempt in attempts]
            for attempt in attempts:
                self.announce(str(attempt.resolve()))
            return started
        arrays = [attempts[i : i + ARRAY] for i in range(0, len(attempts), ARRAY)]
        least, more = divmod(at_once, len(arrays) or 1)
        shares = [max(least + (i < more), at_once > 0) for i in range(len(arrays))]
        parts = zip(arrays, shares, strict=True)
        return [job for array, share in parts for job in self._submit(array, ranks, seconds, share)]

    def script(
        self, ranks: int, seconds: float, points: int = 1, at_once: int = 0, folder: Path = Path(), threads: int = 1
    ) -> str:
        """Return the script for sbatch by `submit` for this many points of one shape, with attempts in `folder`."""
        root, limit = _readable(submissions(folder / "attempt")) / "NAME", _minutes(seconds)
        with contextlib.suppress(FailedSubmissionError):  # before anything is submitted no cluster has to answer
            limit = self.job_minutes(seconds)
        executor = self._executor(root, ranks, threads, limit, at_once)
        executor.parameters |= {"map_count": min(points, ARRAY)} if points > 1 else {}
        return executor._make_submission_file_text(executor._submitit_command_str, "")

    def job_minutes(self, seconds: float) -> int:
        """Return the time limit of a job for a run of this duration, at most the site's or its partition's limit.

        Raises:
            FailedSubmissionError: as `longest`.
        """
        needed = _minutes(seconds)
        return min(needed, self.cluster.job_minutes or longest(self.cluster.partition) or needed)

    def _gpus(self, attempt: Path, ranks: int) -> list[str]:
        """Choose GPUs for the ranks of an attempt, those first that the fewest other attempts use."""
        if self.device == "cpu":
            return []
        if self.agents is not None:
            return [*visible_gpus()]
        in_use = jobs.gpus_in_use(attempt.parent)
        return sorted(visible_gpus(), key=in_use.count)[:ranks]

    def _submit(self, attempts: Sequence[Path], ranks: int, seconds: float, at_once: int) -> list[str]:
        """Submit the attempts as one array, again while the controller does not answer; return the jobs' numbers."""
        root = _readable(submissions(attempts[0]))
        root.mkdir(parents=True, exist_ok=True)
        orders = Orders.found(attempts[0])
        threads = orders.threads if orders is not None else 1
        tries, submitted = 0, list[submitit.Job[None]]()
        while True:
            # a folder for each try: what was accepted without an answer, or by a harness then killed, finds none
            tries, folder = tries + 1, Path(tempfile.mkdtemp(prefix=f"{attempts[0].name}-", dir=root))
            try:
                limit = self.job_minutes(seconds)
                executor = self._executor(folder, ranks, threads, limit, at_once)
                # submitit prints what it then raises
                with contextlib.redirect_stderr(io.StringIO()), _clean_shell(self.cluster):
                    submitted = executor.map_array(supervise, [str(attempt) for attempt in attempts])
                break
            except (UncompletedJobError, FailedSubmissionError) as error:
                why = " ".join(str(error).split())
                if tries == TRIES or not any(text in why for text in BUSY):
                    raise InputError(f"--on slurm: the cluster refuses the job: {why[:300]}") from None
            finally:
                if not submitted:
                    shutil.rmtree(folder, ignore_errors=True)
            time.sleep(PAUSE_SECONDS)
        for attempt, job in zip(attempts, submitted, strict=True):
            keep(attempt, "slurm", job.job_id, limit * 60.0, str(folder / job.job_id))
        return [job.job_id for job in submitted]

    def _executor(self, folder: Path, ranks: int, threads: int, limit: int, at_once: int) -> "SlurmExecutor":
        """Return an executor for jobs of this shape; its files are in the folder, which all nodes see."""
        site, nodes = self.cluster, self.nodes(ranks)
        per_node, cpus = ranks // nodes, site.cpus_per_rank or (threads if threads > 1 else None)
        memory = None
        if site.memory_per_rank:
            memory = f"{per_node * int(site.memory_per_rank[:-1])}{site.memory_per_rank[-1]}"
        # a site with its own options for GPUs needs no others
        asks_itself = any(option == "gres" or option.startswith("gpus") for option in site.extra)
        extra = {option.replace("-", "_"): setting for option, setting in site.extra.items()}
        extra |= {"reservation": site.reservation} if site.reservation else {}
        executor = SlurmExecutor(folder, python=PYTHON)
        executor.update_parameters(
            job_name="lmscale",
            partition=site.partition,
            account=site.account,
            qos=site.qos,
            constraint=site.constraint,
            nodes=nodes,
            ntasks_per_node=per_node,
            cpus_per_task=cpus,
            gpus_per_node=per_node if self.device == "cuda" and not asks_itself else None,
            mem=memory,
            time=limit,
            signal_delay_s=site.signal_seconds,
            array_parallelism=at_once or ARRAY,
            setup=[
                f"export {BEGAN}=$(date +%s)",
                f"export PYTHONPATH={shlex.quote(str(CODE))}${{PYTHONPATH:+:$PYTHONPATH}}",
                *site.setup,
            ],
            # srun does not take the processors from sbatch, but SBATCH_EXPORT=NONE, under which a task has no setup;
            # a supervisor exits otherwise only when it was killed
            srun_args=["--kill-on-bad-exit=1", "--export=ALL", *([f"--cpus-per-task={cpus}"] if cpus else [])],
            additional_parameters={"requeue": True, **extra},
        )
        return executor


def orders_at(site: Site, run: Run) -> dict[str, Any]:
    """Return the fields of orders that every program of a run's ranks has at a site; an attempt begins now."""
    return {
        "config": to_dict(run),
        "ranks": run.plan.world_size,
        "on": site.on,
        "device": site.device,
        "code": CODE,
        "folder": Path.cwd(),
        "container": tuple(site.cluster.container),
        "hosts": site.agents.of_ranks(run.plan.world_size) if site.agents else (),
        "interface": site.cluster.interface,
        "token": secrets.token_hex(16),
        "submitted": time.time(),
        "signal_seconds": site.cluster.signal_seconds,
        # ranks of this machine end with the harness that reads what they write
        "driver_pid": os.getpid() if site.on == "local" else None,
    }


# A signal before Python has installed a handler would kill the task, so it is ignored until then.
PYTHON = f"""bash -c 'trap "" USR2; exec "$0" "$@"' {shlex.quote(sys.executable)}"""


class SlurmExecutor(submitit.SlurmExecutor):
    """submitit's executor, which also shows what it would submit on a machine without Slurm."""

    @classmethod
    def affinity(cls) -> int:
        """Return submitit's mark of an executor that can be used."""
        return 2


def _readable(folder: Path) -> Path:
    """Return a folder whose name Slurm reads as it is: % begins a pattern, and a line break ends an option's line."""
    if "%" in str(folder) or not str(folder).isprintable():
        raise InputError(f"--on slurm: {str(folder)!r} has a % or a control character; give another --out")
    return folder


@contextlib.contextmanager
def _clean_shell(site: Cluster) -> Iterator[None]:
    """Hide variables of a surrounding job, whose shape a new one would inherit, and those that override a script."""
    kept = dict(os.environ)
    options = (*SET_BY_ALL, *(name for name in SET_BY_SITE if getattr(site, name)), *site.extra)
    hidden = {f"SBATCH_{name.upper().replace('-', '_')}" for name in options}
    if site.memory_per_rank:
        hidden |= {"SBATCH_MEM_PER_NODE", "SBATCH_MEM_PER_CPU", "SBATCH_MEM_PER_GPU"}
    if "SLURM_JOB_ID" in kept:
        hidden |= {name for name in kept.keys() - OF_CLUSTER if name.startswith(("SLURM_", "SRUN_"))}
    for name in hidden & kept.keys():
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(kept)


def _minutes(seconds: float) -> int:
    """Return the time of a job that a run of this duration needs."""
    return min(math.ceil(seconds / 60), MOST_MINUTES) + SPARE_MINUTES


def longest(partition: str | None) -> int | None:
    """Return the time limit of a partition, the least of several, in minutes; None if there is none, or no Slurm.

    Raises:
        FailedSubmissionError: the controller does not answer. A job that asked for more would wait without end.
    """
    chosen = [f"--partition={partition}"] if partition else []
    status, answer = ask("sinfo", "--noheader", "--format=%P %l", *chosen)
    if status == NOT_THERE:
        return None
    if status:
        raise FailedSubmissionError(answer)
    # without a name it is the one with a star
    rows = [row for row in map(str.split, answer.splitlines()) if len(row) == 2]
    limits = [minutes(limit) for name, limit in rows if partition or name.endswith("*")]
    return min((limit for limit in limits if limit is not None), default=None)


def minutes(text: str) -> int | None:
    """Return the minutes in a time as Slurm writes it: [days-][hours:]minutes:seconds; None if there is no limit."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if found is None:
        return None
    days, hours, mins, _ = (int(part or 0) for part in found.groups())
    return (days * 24 + hours) * 60 + mins or None
