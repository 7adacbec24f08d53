"""Starts the ranks of a run, here or on Slurm, and watches over each: the only code that touches the environment."""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import submitit
import submitit.helpers
from submitit.core.utils import FailedJobError

from harness.environment import gpu_count
from harness.store import write_atomically
from impl.errors import InputError

Where = Literal["local", "slurm"]
Device = Literal["cpu", "cuda"]
POLL_SECONDS = 0.2
STOP = "stop"
"""A file of this name in an attempt's folder ends its ranks: a signal may be ignored where the sweep was started."""
GRACE_SECONDS = 2.0
"""How long the other ranks may take to say what they saw after one has failed."""


@dataclass(frozen=True)
class Site:
    """Where ranks run: local processes, or a Slurm cluster and what it has to be told."""

    on: Where = "local"
    partition: str | None = None
    ranks_per_node: int = 8
    device: Device = "cpu"
    """cuda: one GPU for each rank."""
    allow_oom: bool = False
    """Start also what is predicted not to fit the memory that is there."""

    def require(self) -> None:
        """Check that the scheduler is there.

        Raises:
            InputError: it is not.
        """
        if self.on == "local":
            return
        if shutil.which("sbatch") is None:
            raise InputError("--on slurm: no sbatch on this machine; valid here: local")
        asked = subprocess.run(["sinfo", "--noheader"], capture_output=True, text=True, check=False)
        if asked.returncode:
            reason = (asked.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise InputError(f"--on slurm: no cluster answers ({reason}); valid here: local")

    def nodes(self, ranks: int) -> int:
        return 1 if self.on == "local" else -(-ranks // self.ranks_per_node)

    def why_invalid(self, ranks: int) -> str | None:
        """Why this many ranks cannot be laid out here, in one line; None: they can."""
        if self.on == "slurm":
            uneven = ranks % self.nodes(ranks)
            return (
                f"{ranks} ranks do not fill nodes of --ranks-per-node {self.ranks_per_node} evenly" if uneven else None
            )
        if self.device == "cuda" and ranks > gpu_count():
            return f"the plan needs {ranks} GPUs, this machine has {gpu_count()}; --device cpu runs it on processors"
        return None

    def submit(self, attempt: Path, ranks: int, time_limit_seconds: float) -> submitit.Job[None]:
        """Start one supervised worker per rank for the run in `attempt`; returns at once.

        Raises:
            InputError: the scheduler refuses it.
        """
        nodes = self.nodes(ranks)
        executor = submitit.AutoExecutor(folder=attempt / "submitit", cluster=self.on)
        executor.update_parameters(
            name=f"lmscale-{attempt.name}",
            nodes=nodes,
            tasks_per_node=ranks // nodes,
            gpus_per_node=ranks // nodes if self.device == "cuda" else 0,
            # the supervisor keeps the run's own limit; the scheduler's comes after it
            timeout_min=int(time_limit_seconds / 60) + 5,
        )
        if self.on == "slurm" and self.partition:
            executor.update_parameters(slurm_partition=self.partition)
        try:
            with _stderr_into(attempt / "launcher.log"):
                return executor.submit(supervise, str(attempt))
        except FailedJobError as error:
            raise InputError(f"--on slurm: the cluster refuses the job: {error}") from None


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


def supervise(folder: str) -> None:
    """Run this task's rank as a child process and write down how it ended; end it when another rank fails.

    A child's exit status is a fact that survives whatever killed it. The files it writes:
    `rank-R.failure.json` with status and reason if the rank failed by itself, nothing if it was stopped.
    """
    task = submitit.JobEnvironment()
    attempt, rank = Path(folder), task.global_rank
    spec = json.loads((attempt / "spec.json").read_text())
    ranks = [str(rank), str(task.local_rank), str(task.num_tasks)]
    command = [sys.executable, "-m", "harness.worker", folder, *ranks, _rendezvous(attempt, spec["on"])]
    deadline = time.monotonic() + spec["time_limit_seconds"]
    with open(attempt / f"rank-{rank}.log", "ab") as log:
        child = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env=_environment(spec, task),
            cwd=spec["folder"],
            preexec_fn=_die_with_parent(),
        )
        try:
            while (code := child.poll()) is None:
                if time.monotonic() > deadline:
                    fail(attempt, rank, "timeout", f"time limit of {spec['time_limit_seconds']:.0f} s reached")
                    return
                if (attempt / STOP).exists() or _orphaned(spec) or _another_failed(attempt, rank):
                    return
                time.sleep(POLL_SECONDS)
        finally:
            child.kill()
            child.wait()
    if code < 0:
        fail(attempt, rank, "failed", f"rank {rank} was killed by {signal.Signals(-code).name}{_stages(spec, rank)}")
    elif code and not (attempt / f"rank-{rank}.failure.json").exists():
        fail(attempt, rank, "failed", f"rank {rank} exited with status {code}")


def _stages(spec: dict[str, Any], rank: int) -> str:
    """Which stages of a pipeline the rank had, to be told behind its number; nothing without a pipeline."""
    from impl.pipeline.schedules import build  # only a supervisor that has lost its rank pays for it
    from impl.run import from_dict

    run = from_dict(spec["run"])
    plan, pp_rank = run.plan, rank // (run.plan.dp * run.plan.tp)
    if plan.pp == 1:
        return ""
    stages = build(plan.schedule, plan.pp, run.microbatches, plan.chunks).stages_of(pp_rank)
    return f" (pipeline rank {pp_rank}, stage {', '.join(map(str, stages))})"


def fail(attempt: Path, rank: int, status: str, reason: str) -> None:
    """Write down that this rank failed, with the end of its log."""
    log = attempt / f"rank-{rank}.log"
    tail = log.read_text(errors="replace").splitlines()[-20:] if log.exists() else []
    failure = {"status": status, "reason": reason, "rank": rank, "time": time.time(), "log": tail}
    write_atomically(attempt / f"rank-{rank}.failure.json", json.dumps(failure))


def _rendezvous(attempt: Path, on: Where) -> str:
    """Where the ranks meet: a file on one machine, the first node and a port from the job's id on a cluster."""
    if on == "local":
        return f"file://{attempt}/rendezvous"
    first = submitit.helpers.TorchDistributedEnvironment()
    return f"tcp://{first.master_addr}:{first.master_port}"


def _another_failed(attempt: Path, rank: int) -> bool:
    """Whether a rank has failed, and this one has had the grace to say so itself."""
    mine = attempt / f"rank-{rank}.failure.json"
    if not any(path != mine for path in attempt.glob("rank-*.failure.json")):
        return False
    time.sleep(GRACE_SECONDS)
    return True


def _orphaned(spec: dict[str, Any]) -> bool:
    """Whether the local process that asked for the run is gone, so that nobody would read the result."""
    driver = spec.get("driver_pid")
    if driver is None:
        return False
    try:
        return psutil.Process(driver).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _die_with_parent() -> Callable[[], None]:
    """What a rank does before its program starts: it leaves a Ctrl-C to the supervisor, and does not outlive it."""
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None  # found here: a forked child must not search
    pr_set_pdeathsig = 1

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if prctl is not None:
            prctl(pr_set_pdeathsig, signal.SIGKILL)

    return prepare


def _environment(spec: dict[str, Any], task: submitit.JobEnvironment) -> dict[str, str]:
    """The worker's environment: threads pinned to what the run says, packages found where the driver found them, and
    its place among the ranks for engines that read it there."""
    environment = dict(os.environ)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment[name] = str(spec["run"]["threads"])
    environment["PYTHONPATH"] = os.pathsep.join([spec["code"], environment.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment["PYTHONUNBUFFERED"] = "1"
    if spec["run"].get("engine") == "deepspeed":
        ranks = {"RANK": task.global_rank, "WORLD_SIZE": task.num_tasks, "LOCAL_RANK": task.local_rank}
        ranks["LOCAL_SIZE"] = task.num_tasks // task.num_nodes
        environment |= {name: str(number) for name, number in ranks.items()} | {"DS_ACCELERATOR": spec["device"]}
    return environment
