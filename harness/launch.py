"""Starts the ranks of a run, here or on Slurm, and watches over each: the only code that touches the environment."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import submitit

from harness.store import write_atomically
from impl.errors import InputError

Where = Literal["local", "slurm"]
POLL_SECONDS = 0.2
GRACE_SECONDS = 2.0
"""How long the other ranks may take to say what they saw after one has failed."""


def submit(
    attempt: Path, *, ranks: int, on: Where, gpus: bool, slurm: dict[str, Any] | None = None
) -> submitit.Job[None]:
    """Start one supervised worker per rank for the run in `attempt`; returns at once.

    Raises:
        InputError: the scheduler is not there.
    """
    try:
        executor = submitit.AutoExecutor(folder=attempt / "submitit", cluster=on)
    except RuntimeError as error:
        raise InputError(f"--on {on}: {on} does not answer on this machine; valid here: local") from error
    executor.update_parameters(
        name=attempt.name,
        tasks_per_node=ranks,
        nodes=1,
        gpus_per_node=ranks if gpus else 0,
        timeout_min=60 * 24 * 365 if on == "local" else 60 * 24,  # the supervisor keeps the run's own limit
        **{f"slurm_{key}": value for key, value in (slurm or {}).items() if on == "slurm"},
    )
    return executor.submit(supervise, str(attempt))


def supervise(folder: str) -> None:
    """Run this task's rank as a child process and write down how it ended; end it when another rank fails.

    A child's exit status is a fact that survives whatever killed it. The files it writes:
    `rank-R.failure.json` with status and reason if the rank failed by itself, nothing if it was stopped.
    """
    task = submitit.JobEnvironment()
    attempt, rank = Path(folder), task.global_rank
    spec = json.loads((attempt / "spec.json").read_text())
    command = [sys.executable, "-m", "harness.worker", folder, str(rank), str(task.local_rank), str(task.num_tasks)]
    deadline = time.monotonic() + spec["time_limit_seconds"]
    with open(attempt / f"rank-{rank}.log", "ab") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log, env=_environment(spec), cwd=spec["folder"])
        try:
            while (code := child.poll()) is None:
                if time.monotonic() > deadline:
                    fail(attempt, rank, "timeout", f"time limit of {spec['time_limit_seconds']:.0f} s reached")
                    return
                if _orphaned(spec) or _another_failed(attempt, rank):
                    return
                time.sleep(POLL_SECONDS)
        finally:
            child.kill()
            child.wait()
    if code < 0:
        fail(attempt, rank, "failed", f"rank {rank} was killed by {signal.Signals(-code).name}")
    elif code and not (attempt / f"rank-{rank}.failure.json").exists():
        fail(attempt, rank, "failed", f"rank {rank} exited with status {code}")


def fail(attempt: Path, rank: int, status: str, reason: str) -> None:
    """Write down that this rank failed, with the end of its log."""
    log = attempt / f"rank-{rank}.log"
    tail = log.read_text(errors="replace").splitlines()[-20:] if log.exists() else []
    failure = {"status": status, "reason": reason, "rank": rank, "time": time.time(), "log": tail}
    write_atomically(attempt / f"rank-{rank}.failure.json", json.dumps(failure))


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
        os.kill(driver, 0)
    except ProcessLookupError:
        return True
    return False


def _environment(spec: dict[str, Any]) -> dict[str, str]:
    """The worker's environment: threads pinned to what the run says, and the packages found where the driver found them."""
    environment = dict(os.environ)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment[name] = str(spec["run"]["threads"])
    environment["PYTHONPATH"] = os.pathsep.join([spec["code"], environment.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment["PYTHONUNBUFFERED"] = "1"
    return environment
