"""Launcher of ranks on this machine: one process that forks a supervisor for each rank and waits for all of them.

It imports neither Slurm nor other engines.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

from harness.rank.failure import Failure, fail, signal_name
from harness.rank.heartbeat import read_alive
from harness.rank.job import adopt, keep
from harness.rank.orders import Orders
from harness.rank.results import result_of
from harness.rank.supervisor import GRACE_SECONDS, POLL_SECONDS, Supervisor, Task, python_path
from harness.rank.torchrun import others_run

SPARE_SECONDS = 300.0
"""Time beyond the attempt's limit, which supervisors keep, before supervisors themselves are killed."""
OTHERS_SECONDS = 60.0
"""Longest wait for the ends of ranks on other hosts, after that of rank 0."""


def start(attempt: Path, gpus: Sequence[str] = ()) -> str:
    """Start an attempt's ranks, which see only these GPUs, and return at once, with the launcher's process number."""
    orders, attempt = Orders.read(attempt), attempt.resolve()
    environment = os.environ | {"PYTHONPATH": python_path(orders.code, os.environ)}
    command = [sys.executable, "-m", "harness.rank.local", str(attempt), *gpus]
    with (attempt / "launcher.log").open("ab") as log:  # what a Ctrl-C makes processes print is not for the user
        launcher = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)
    keep(attempt, "local", str(launcher.pid), orders.time_limit_seconds + SPARE_SECONDS, gpus=gpus)
    return str(launcher.pid)


def main(attempt: Path, gpus: Sequence[str]) -> None:
    """Run the ranks of an attempt to their end."""
    orders = Orders.read(attempt)
    if not adopt(attempt, "local", str(os.getpid()), gpus):
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends after the supervisors, as on an interrupt
    fork = get_context("fork")  # supervisors share what is imported here
    started: dict[int, BaseProcess] = {}
    try:
        for rank in range(1 if orders.hosts else orders.ranks):
            started[rank] = fork.Process(target=_supervise, args=(attempt, orders, rank, gpus, os.getpid()))
            started[rank].start()
        _wait(attempt, dict(started), orders.time_limit_seconds + SPARE_SECONDS)
        _wait_for_others(attempt, orders)
    except KeyboardInterrupt:
        for process in started.values():
            if process.pid is not None:
                os.kill(process.pid, signal.SIGINT)
        for process in started.values():
            process.join(GRACE_SECONDS)
    finally:
        for process in started.values():
            process.kill()


def _wait(attempt: Path, running: dict[int, BaseProcess], seconds: float) -> None:
    """Wait for the end of all supervisors, for this time at most."""
    end = time.monotonic() + seconds
    while running and time.monotonic() < end:
        connection.wait([process.sentinel for process in running.values()], timeout=1.0)
        for rank in [rank for rank, process in running.items() if process.exitcode is not None]:
            _fail_if_vanished(attempt, rank, running.pop(rank).exitcode or 0)


def _wait_for_others(attempt: Path, orders: Orders) -> None:
    """Wait for the end of ranks that other hosts supervise: once rank 0 has ended, they notice a failure soon."""
    end = time.monotonic() + OTHERS_SECONDS
    while orders.hosts and others_run(attempt, orders.ranks) and time.monotonic() < end:
        time.sleep(POLL_SECONDS)


def _supervise(attempt: Path, orders: Orders, rank: int, gpus: Sequence[str], launcher: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with suppress(KeyboardInterrupt):
        task = Task(rank, orders.ranks, rank, attempt.name, orders.hosts or Task.hosts)
        Supervisor(attempt, orders, task, gpus=gpus, parent=launcher).run()


def _fail_if_vanished(attempt: Path, rank: int, code: int) -> None:
    """Write a rank's failure, which stops the others, if its supervisor is gone without having written its end.

    The rank dies with its supervisor, and others that wait for it, before they are connected, would see no error.
    """
    alive = read_alive(attempt, rank)
    has_ended = alive is not None and alive.ended != ""
    if code and not (has_ended or Failure.of_rank(attempt, rank) or result_of(attempt, rank)):
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with status {code}"
        fail(attempt, rank, "vanished", f"rank {rank} vanished without an exit status: its supervisor {how}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
