"""Supervision of one rank: it starts the rank as a child process, ends it when it has to, and writes how it ended.

A child's exit status is a fact that remains whatever killed it. The files of a supervisor are `rank-R.alive.json`,
written every few seconds, and `rank-R.failure.json` with cause and reason if the rank failed by itself.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from harness.rank import addresses
from harness.rank.devices import restricted_to
from harness.rank.failure import Cause, Failure, fail, last_lines, of_exit
from harness.rank.heartbeat import EXIT_SAVED, Alive, Ended, Pulse, SharedMemory, places, read_alive, write_alive
from harness.rank.job import STOP
from harness.rank.json_files import read_as
from harness.rank.orders import ORDERS, WORKER, Orders

if TYPE_CHECKING:
    from impl.run import Run

POLL_SECONDS = 0.2
LOOK_SECONDS = {"local": 0.2, "slurm": 1.0}
"""Time between two looks at other ranks' files; a cluster's file system serves all of its ranks."""
GRACE_SECONDS = 2.0
"""Time that the other ranks have for writing their own failures after one has failed."""
ALIVE_SECONDS = 5.0
START_SECONDS = 60.0
"""Least time without progress that ends a rank at its start: it loads libraries, and waits for others to do so."""
PAUSE_SECONDS = 5.0
"""Gap between two looks after which the supervisor itself was stopped; that time does not count for the rank."""


@dataclass(frozen=True)
class Task:
    """Position of a rank in its job."""

    rank: int
    ranks: int
    local_rank: int
    job: str
    hosts: Sequence[str] = ("localhost",)
    node: int = 0


class Supervisor:
    """Supervisor of one rank in one start of a job; of a rank on this machine, as it is.

    Args:
        parent: process that started the supervisor and may be gone already; None: the present parent.
    """

    ignored: Sequence[int] = (signal.SIGINT,)
    """Signals to all processes of a job that the supervisor handles for its rank."""

    def __init__(
        self,
        attempt: Path,
        orders: Orders,
        task: Task,
        *,
        restart: int = 0,
        gpus: Sequence[str] = (),
        parent: int | None = None,
    ) -> None:
        self.attempt, self.orders, self.task, self.restart, self.gpus = attempt, orders, task, restart, gpus
        before = read_alive(attempt, task.rank)
        self.ran = before.ran if before is not None else 0.0
        self.begun, self.parent = time.monotonic(), parent or os.getppid()
        self.memory_kills = _memory_kills()
        self.memory = SharedMemory()
        self.pulse, self.moved, self.followed = Pulse(), self.begun, self.begun
        self.written = self.looked = 0.0
        self.child: subprocess.Popen[bytes] | None = None

    def run(self) -> Ended:
        """Start the rank, wait for its end, and write how it ended."""
        self._write_alive()
        with self.memory.file, open(self.attempt / f"rank-{self.task.rank}.log", "ab") as log:
            ended: Ended = ""
            try:
                self.child = child = subprocess.Popen(
                    self._command(),
                    stdin=self.memory.file,
                    stdout=log,
                    stderr=log,
                    env=_environment(self.orders, self.task, self.gpus),
                    cwd=self.orders.folder,
                    preexec_fn=_before_it_starts(self.ignored),
                )
            except OSError as error:
                why = f"{error.filename}: {error.strerror}" if error.filename else str(error)
                ended = self._fail("launch", f"rank {self.task.rank} could not be started: {why}")
                self._write_alive(ended)
                return ended
            try:
                while not ended and child.poll() is None:
                    now = time.monotonic()
                    self._follow(now)
                    if not (ended := self._why_end(child, now)):
                        self._prepare_end_of_job(now)
                        time.sleep(POLL_SECONDS)
            finally:
                child.kill()
                child.wait()
            self.pulse = self.memory.pulse()
            ended = ended or self._conclude(child.returncode)
        self._write_alive(ended)
        return ended

    def _command(self) -> list[str]:
        orders, task, attempt = self.orders, self.task, self.attempt
        is_job = orders.on == "slurm" or orders.hosts
        where = addresses.place(attempt, task.hosts, task.node, task.job if is_job else None)
        ranks = [str(number) for number in (task.rank, task.local_rank, task.ranks)]
        return [*orders.container, sys.executable, "-m", orders.module, str(attempt), *ranks, where]

    def _prepare_end_of_job(self, now: float) -> None:
        """React to the scheduler's announcement that the job will end; there is none on this machine."""

    def _follow(self, now: float) -> None:
        """Look for progress of the rank, and write its state from time to time."""
        if (gap := now - self.followed) > PAUSE_SECONDS:
            self.begun, self.moved = self.begun + gap, self.moved + gap
        self.followed = now
        pulse = self.memory.pulse()
        if pulse.progress != self.pulse.progress:
            self.moved = now
        self.pulse = pulse
        patience = self.orders.hang_seconds or ALIVE_SECONDS
        if now - self.written > min(ALIVE_SECONDS, patience / 4):
            self._write_alive()

    def _why_end(self, child: "subprocess.Popen[bytes]", now: float) -> Ended:
        """Return how the rank has to be ended now, "" if it may go on; the failure is written here."""
        limit, patience = self.orders.time_limit_seconds, self.orders.hang_seconds
        if patience and self.pulse.phase in ("", "start-up"):
            patience = max(patience, START_SECONDS)
        is_late, hangs = self.ran + now - self.begun > limit, patience and now - self.moved > patience
        if (is_late or hangs) and self._own_failure() is not None:
            return "failed"  # its failure is written, and it does not come to its end
        if is_late:
            return self._fail("time_limit", f"time limit of {limit:.0f} s reached")
        if hangs:
            self._write_alive()
            where = places(self.attempt, self.task.ranks)
            return self._fail("hang", f"no progress for {patience:.0f} s: {where}")
        if now - self.looked < LOOK_SECONDS[self.orders.on]:
            return ""
        self.looked = now
        if (self.attempt / STOP).exists() or self._is_unwanted():
            return "stopped"
        if self._another_failed():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(GRACE_SECONDS)
                return ""
            return "stopped"
        return ""

    def _is_unwanted(self) -> bool:
        """Return True if no process would read the result: the driver is gone, or the claim or attempt is lost."""
        claim, driver = self.orders.claim, self.orders.driver_pid
        is_alone = os.getppid() != self.parent or (driver is not None and _status(driver) == psutil.STATUS_ZOMBIE)
        is_lost = (claim is not None and not claim.is_dir()) or not (self.attempt / ORDERS).exists()
        return is_lost or (self.orders.on == "local" and is_alone)

    def _another_failed(self) -> bool:
        """Return True if another rank has failed in this start of the job."""
        failures = (read_as(Failure, path) for path in self.attempt.glob("rank-*.failure.json"))
        return any(f is not None and f.rank != self.task.rank and f.restart >= self.restart for f in failures)

    def _conclude(self, code: int) -> Ended:
        """Return how the rank ended by itself; write its failure if it has not done so."""
        if code in (0, EXIT_SAVED):
            return "saved" if code else "finished"
        kills = _memory_kills() - self.memory_kills
        has_begun = self.pulse.progress > 0 or self.orders.module != WORKER
        log, rank = last_lines(self.attempt, self.task.rank), self.task.rank
        cause, reason = of_exit(rank, code, log, has_begun=has_begun, memory_kills=kills)
        own = self._own_failure()
        if own is None or (code < 0 and own.is_consequence):
            self._fail(cause, f"{reason}{_stages(self.orders.run, rank)}" if code < 0 else reason)
        return "failed"

    def _own_failure(self) -> Failure | None:
        """Return the failure that the rank itself has written."""
        own = Failure.of_rank(self.attempt, self.task.rank)
        return own if own is not None and own.restart >= self.restart else None

    def _fail(self, cause: Cause, reason: str) -> Ended:
        fail(self.attempt, self.task.rank, cause, reason)
        return "failed"

    def _write_alive(self, ended: Ended = "") -> None:
        self.written = time.monotonic()
        ran = self.ran + self.written - self.begun
        is_stopped = self.child is not None and _status(self.child.pid) == psutil.STATUS_STOPPED
        pulse = replace(self.pulse, is_stopped=is_stopped)
        found = Alive(time.time(), socket.gethostname(), self.restart, ran, ended, pulse)
        write_alive(self.attempt, self.task.rank, found)


def _stages(run: "Run", rank: int) -> str:
    """Return the rank's stages of a pipeline, to be appended to its number; "" without a pipeline."""
    from impl.own_code import trust_code_of  # only needed after a rank was lost
    from impl.pipeline.schedules import build

    plan, pp_rank = run.plan, rank // (run.plan.world_size // run.plan.pp)
    if plan.pp == 1:
        return ""
    trust_code_of(run)  # its rank ran it
    stages = build(plan.schedule, plan.pp, run.microbatches, plan.chunks).stages_of(pp_rank)
    return f" (pipeline rank {pp_rank}, stage {', '.join(map(str, stages))})"


def _status(process: int) -> str:
    """Return the state of a process in psutil's words; a zombie's if it is gone."""
    try:
        return psutil.Process(process).status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def _before_it_starts(ignored: Sequence[int]) -> Callable[[], None]:
    """Return a function for the forked child: it ignores these signals, and dies with the supervisor."""
    prctl = ctypes.CDLL(None).prctl  # found here: a forked child must not search
    pr_set_pdeathsig, supervisor = 1, os.getpid()

    def prepare() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != supervisor:  # it was killed before the line above, which then has no effect
            os._exit(1)

    return prepare


def _memory_kills() -> int:
    """Return how many processes were killed for their memory, in this control group if known, else on the machine."""
    counters = [Path("/proc/vmstat")]
    with contextlib.suppress(OSError):
        group = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
        counters.insert(0, Path("/sys/fs/cgroup") / group / "memory.events")
    for counter in counters:
        with contextlib.suppress(OSError, KeyError, ValueError):
            counts = dict(line.split()[:2] for line in counter.read_text().splitlines())
            return int(counts["oom_kill"])
    return 0


def python_path(code: Path, environment: Mapping[str, str]) -> str:
    """Return a PYTHONPATH by which a process finds the project's code, and the packages that this one finds."""
    return os.pathsep.join([str(code), environment.get("PYTHONPATH", "")]).rstrip(os.pathsep)


def _environment(orders: Orders, task: Task, gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment of a rank: threads, packages, GPUs, network, and its position for engines that need it."""
    environment = dict(os.environ)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment[name] = str(orders.threads)
    environment["PYTHONPATH"] = python_path(orders.code, environment)
    environment["PYTHONUNBUFFERED"] = "1"
    if orders.on == "local":
        environment |= restricted_to(gpus)
    if orders.interface:
        environment |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), orders.interface)
    elif name := addresses.interface(task.hosts, task.node):
        environment.setdefault("GLOO_SOCKET_IFNAME", name)  # NCCL finds faster ones by itself
    if orders.engine == "deepspeed":
        ranks = {"RANK": task.rank, "WORLD_SIZE": task.ranks, "LOCAL_RANK": task.local_rank}
        ranks["LOCAL_SIZE"] = task.ranks // len(task.hosts)
        environment |= {name: str(number) for name, number in ranks.items()} | {"DS_ACCELERATOR": orders.device}
    return environment
