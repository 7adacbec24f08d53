"""Watches over one rank of a run, wherever it was started: the only code that touches the environment."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import submitit

from harness.rank import jobs, rendezvous
from harness.rank.collect import has_results
from harness.rank.devices import restricted_to
from harness.rank.failure import Cause, Failure, of_exit, status_of
from harness.rank.heartbeat import Alive, Ended, Pulse, Watched, alive, places, tell_alive
from harness.rank.orders import ORDERS, WORKER, Orders
from harness.rank.siblings import Siblings
from harness.records.store import read_json, write_atomically

if TYPE_CHECKING:
    from impl.run import Run

POLL_SECONDS = 0.2
LOOK_SECONDS = {"local": 0.2, "slurm": 1.0}
"""Between two looks at what other ranks wrote: a cluster's file system has all its ranks to serve."""
GRACE_SECONDS = 2.0
"""How long the other ranks may take to say what they saw after one has failed."""
ALIVE_SECONDS = 5.0
START_SECONDS = 60.0
"""A rank that starts may stand still for so long at least: it loads its libraries, and waits for others to do so."""
PAUSE_SECONDS = 5.0
"""Who has not looked for longer was stopped himself, a suspended job or machine: that time is not the rank's."""
SIGNAL_SPREAD_SECONDS = 90.0
"""A signal before a job's end comes up to a minute early, and the scheduler looks at its clock every half minute."""
END_SECONDS = 900.0
"""How long a scheduler that has sent SIGTERM may take to end the job; GraceTime of a partition is shorter."""
TOLD = 75
"""Exit status of a rank that saved a checkpoint and ended, since it was told to (sysexits.h: try again)."""
LOG_LINES, LOG_BYTES = 20, 2**16
"""Of a rank's log, what is kept of its end."""


def supervise(folder: str, gpus: Sequence[str] = ()) -> None:
    """Run this task's rank as a child process and write down how it ended; end it when another rank fails.

    On this machine the ranks see these GPUs and no others; on a cluster the scheduler has chosen them.

    A child's exit status is a fact that survives whatever killed it. The files it writes: `rank-R.alive.json` every few
    seconds, and `rank-R.failure.json` with cause and reason if the rank failed by itself, nothing if it was stopped.
    """
    task, attempt = submitit.JobEnvironment(), Path(folder)
    orders = Orders.read(attempt)
    restart = int(os.environ.get("SLURM_RESTART_COUNT", 0))
    if restart and has_results(attempt):
        return  # it came to its end just when it was put back into the queue
    if jobs.adopt(attempt, orders.on, task.job_id, gpus):
        Supervisor(attempt, orders, task, restart, gpus).run()


class Supervisor:
    """One rank of one start of a job; a requeued job has the same attempt, and goes on from its checkpoints.

    On Slurm it hears what the scheduler has to say. SIGUSR2 announces the end of the job, by a job that goes before it
    or by its time limit: all ranks save, and the first one's supervisor puts the job back into the queue. SIGTERM may
    be that too, where the scheduler then requeues the job by itself, or somebody cancels it: ranks save, and nothing
    is requeued.
    """

    def __init__(
        self, attempt: Path, orders: Orders, task: submitit.JobEnvironment, restart: int = 0, gpus: Sequence[str] = ()
    ) -> None:
        self.attempt, self.orders, self.task, self.restart, self.gpus = attempt, orders, task, restart, gpus
        self.rank = task.global_rank
        before = alive(attempt, self.rank)
        self.ran = before.ran if before is not None else 0.0
        self.begun, self.parent = time.monotonic(), os.getppid()
        self.memory_kills = _memory_kills()
        self.watched = Watched()
        self.pulse, self.moved, self.followed = Pulse(), self.begun, self.begun
        self.told_alive = self.looked = 0.0
        self.child: subprocess.Popen[bytes] | None = None
        self.siblings = Siblings(attempt, self.rank, task.num_tasks)
        self.is_noticed = self.is_terminated = self.has_told = False

    def run(self) -> None:
        """Until the rank has ended, and all that is to be said about it is written."""
        if self.orders.on == "slurm":  # in place of submitit's, which knows no ranks
            signal.signal(signal.SIGUSR2, self._notice)
            signal.signal(signal.SIGTERM, self._terminate)
        self._tell_alive()
        with self.watched, open(self.attempt / f"rank-{self.rank}.log", "ab") as log:
            self.child = child = subprocess.Popen(
                self._command(),
                stdin=self.watched.file,
                stdout=log,
                stderr=log,
                env=_environment(self.orders, self.task, self.gpus),
                cwd=self.orders.folder,
                preexec_fn=_before_it_starts(ignored=_IGNORED[self.orders.on]),
            )
            try:
                ended = self._watch(child)
            finally:
                child.kill()
                child.wait()
            self.pulse = self.watched.pulse()
            ended = ended or self._conclude(child.returncode)
        self._tell_alive(ended)
        if ended == "told" and self.rank == 0:
            self._leave_the_node()

    def _command(self) -> list[str]:
        orders, task, attempt = self.orders, self.task, self.attempt
        job = task.job_id if orders.on == "slurm" else None
        where = rendezvous.rendezvous_of(attempt, task.hostnames, task.node, job)
        ranks = [str(number) for number in (self.rank, task.local_rank, task.num_tasks)]
        return [*orders.container, sys.executable, "-m", orders.module, str(attempt), *ranks, where]

    def _watch(self, child: "subprocess.Popen[bytes]") -> Ended:
        """Wait for the rank's end; how it was ended, if it had to be."""
        while child.poll() is None:
            now = time.monotonic()
            self._follow(now)
            if (ended := self._why_end(child, now)) != "":
                return ended
            self._heed(now)
            time.sleep(POLL_SECONDS)
        return ""

    def _follow(self, now: float) -> None:
        """See whether the rank goes on, and tell everybody from time to time."""
        if (gap := now - self.followed) > PAUSE_SECONDS:
            self.begun, self.moved = self.begun + gap, self.moved + gap
        self.followed = now
        pulse = self.watched.pulse()
        if pulse.progress != self.pulse.progress:
            self.moved = now
        self.pulse = pulse
        patience = self.orders.hang_seconds or ALIVE_SECONDS
        if now - self.told_alive > min(ALIVE_SECONDS, patience / 4):
            self._tell_alive()

    def _why_end(self, child: "subprocess.Popen[bytes]", now: float) -> Ended:
        """Whether the rank is to end now, for what is written down here or elsewhere."""
        limit, patience = self.orders.time_limit_seconds, self.orders.hang_seconds
        if patience and self.pulse.phase in ("", "start-up"):
            patience = max(patience, START_SECONDS)
        is_late, hangs = self.ran + now - self.begun > limit, patience and now - self.moved > patience
        if (is_late or hangs) and self._said() is not None:
            return "failed"  # it has said why, and does not come to its end
        if is_late:
            self._fail("time_limit", f"time limit of {limit:.0f} s reached")
            return "failed"
        if hangs:
            where = places(self.attempt, self.task.num_tasks, (self.rank, self._pulse()))
            self._fail("hang", f"no progress for {patience:.0f} s: {where}")
            return "failed"
        if now - self.looked < LOOK_SECONDS[self.orders.on]:
            return ""
        self.looked = now
        if (self.attempt / jobs.STOP).exists() or self._is_unwanted():
            return "stopped"
        if self._another_failed() or self.siblings.vanished(now) is not None:
            _wait_for(child, GRACE_SECONDS)
            return "stopped" if child.poll() is None else ""
        return ""

    def _is_unwanted(self) -> bool:
        """Whether nobody would read the result: who asked for it is gone, or somebody else has taken its place."""
        orders = self.orders
        if orders.on == "local" and (os.getppid() != self.parent or _is_gone(orders.driver_pid)):
            return True
        is_claimed = orders.claim is None or orders.claim.is_dir()
        return not (is_claimed and (self.attempt / ORDERS).exists())

    def _another_failed(self) -> bool:
        mine = f"rank-{self.rank}.failure.json"
        paths = (path for path in self.attempt.glob("rank-*.failure.json") if path.name != mine)
        failures = (Failure.read(read_json(path)) for path in paths)
        return any(failure is not None and failure.restart >= self.restart for failure in failures)

    def _conclude(self, code: int) -> Ended:
        """How the rank ended by itself; written down, if it has not done so."""
        if code in (0, TOLD):
            return "told" if code else "finished"
        kills = _memory_kills() - self.memory_kills
        has_begun = self.pulse.progress > 0 or self.orders.module != WORKER
        log = _last_lines(self.attempt, self.rank)
        cause, reason = of_exit(self.rank, code, log, has_begun=has_begun, memory_kills=kills)
        said = self._said()
        if said is None or (code < 0 and said.is_consequence):
            self._fail(cause, f"{reason}{_stages(self.orders.run, self.rank)}" if code < 0 else reason)
        return "failed"

    def _said(self) -> Failure | None:
        """What the rank itself has written down about its end."""
        said = Failure.read(read_json(self.attempt / f"rank-{self.rank}.failure.json"))
        return said if said is not None and said.restart >= self.restart else None

    def _fail(self, cause: Cause, reason: str) -> None:
        fail(self.attempt, self.rank, cause, reason)

    def _tell_alive(self, ended: Ended = "") -> None:
        self.told_alive = time.monotonic()
        ran = self.ran + self.told_alive - self.begun
        found = Alive(time.time(), self.task.hostname, self.restart, ran, ended, self._pulse())
        tell_alive(self.attempt, self.rank, found)

    def _pulse(self) -> Pulse:
        """Where the rank is, and whether a signal keeps it there."""
        if self.child is not None and self.child.returncode is None:
            with contextlib.suppress(psutil.Error):
                return self.pulse._replace(is_stopped=psutil.Process(self.child.pid).status() == psutil.STATUS_STOPPED)
        return self.pulse

    # What the scheduler says ----------------------------------------------------------------------------------------

    def _notice(self, *_: object) -> None:
        self.is_noticed, self.is_terminated = True, False  # some sites send SIGTERM, and SIGUSR2 with it

    def _terminate(self, *_: object) -> None:
        self.is_terminated = True

    def _heed(self, now: float) -> None:
        """Tell the rank that the job's end is near; without checkpoints it begins anew, unless its time is over."""
        if self.rank or self.has_told or not (self.is_noticed or self.is_terminated):
            return
        self.has_told = True
        if self.orders.checkpoint_every:
            self.watched.tell()
        elif not self.is_terminated and not self._is_time_over(now) and self.restart < self.orders.requeues:
            _requeue(self.task.job_id)  # where it is refused, the rank goes on for as long as it may

    def _leave_the_node(self) -> None:
        """A checkpoint is there: put the job back into the queue, and wait for the end that this brings."""
        if self.is_terminated:
            time.sleep(END_SECONDS)  # a job that ends by itself now would be over, and not be requeued
        if self.restart >= self.orders.requeues:
            refused = f"it was requeued {self.restart} times, which is the most"
        else:
            refused = _requeue(self.task.job_id)
        if refused is None:
            time.sleep(END_SECONDS)
        is_limit = self._is_time_over(time.monotonic())
        cause, why = ("time_limit", "its job's time limit") if is_limit else ("preempted", "another job")
        self._fail(
            cause, f"rank 0 saved a checkpoint for {why}, and was not requeued: {refused or 'nothing came of it'}"
        )

    def _is_time_over(self, now: float) -> bool:
        """Whether a signal that comes now is about the job's time limit."""
        job = jobs.job_of(self.attempt)
        if job is None or not job.seconds:
            return False
        spread = self.orders.signal_seconds + SIGNAL_SPREAD_SECONDS
        return now - self.begun > job.seconds - spread


def fail(attempt: Path, rank: int, cause: Cause, reason: str) -> None:
    """Write down that this rank failed, with the end of its log; a disk that is full may leave no word of it."""
    before = alive(attempt, rank)
    failure = {
        "status": status_of(cause),
        "cause": cause,
        "reason": reason,
        "rank": rank,
        "restart": before.restart if before is not None else 0,
        "time": time.time(),
        "log": _last_lines(attempt, rank),
    }
    try:
        write_atomically(attempt / f"rank-{rank}.failure.json", json.dumps(failure))
    except OSError as error:
        print(f"rank {rank}: {reason}; this could not be written down: {error}", file=sys.stderr)


def _last_lines(attempt: Path, rank: int) -> list[str]:
    try:
        with open(attempt / f"rank-{rank}.log", "rb") as log:
            log.seek(-min(LOG_BYTES, log.seek(0, os.SEEK_END)), os.SEEK_END)
            return log.read().decode(errors="replace").splitlines()[-LOG_LINES:]
    except OSError:
        return []


def _stages(run: "Run", rank: int) -> str:
    """Which stages of a pipeline the rank had, to be told behind its number; nothing without a pipeline."""
    from impl.pipeline.schedules import build, trust  # only a supervisor that has lost its rank pays for it

    plan, pp_rank = run.plan, rank // (run.plan.dp * run.plan.tp)
    if plan.pp == 1:
        return ""
    trust(plan.schedule)  # its rank ran it
    stages = build(plan.schedule, plan.pp, run.microbatches, plan.chunks).stages_of(pp_rank)
    return f" (pipeline rank {pp_rank}, stage {', '.join(map(str, stages))})"


def _requeue(job: str) -> str | None:
    """Put a job that runs back into the queue; why it is not there, if it is refused."""
    try:
        asked = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=jobs.ASK_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return (
        ((asked.stderr or asked.stdout).strip().splitlines() or ["no reason given"])[-1] if asked.returncode else None
    )


def _wait_for(child: "subprocess.Popen[bytes]", seconds: float) -> None:
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def _is_gone(process: int | None) -> bool:
    """Whether a process is dead, be it that nobody has buried it yet."""
    if process is None:
        return False
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


_IGNORED = {"local": (signal.SIGINT,), "slurm": (signal.SIGINT, signal.SIGUSR2, signal.SIGTERM)}
"""Signals that go to all processes of a job, and that the supervisor answers for its rank."""


def _before_it_starts(ignored: Sequence[int]) -> Callable[[], None]:
    """What a rank does before its program starts: it leaves signals to the supervisor, and does not outlive it."""
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None  # found here: a forked child must not search
    pr_set_pdeathsig = 1

    def prepare() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        if prctl is not None:
            prctl(pr_set_pdeathsig, signal.SIGKILL)

    return prepare


def _memory_kills() -> int:
    """How many processes the system has killed for their memory: in this one's control group, else on the machine."""
    counters = [Path("/proc/vmstat")]
    try:
        group = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
        counters.insert(0, Path("/sys/fs/cgroup") / group / "memory.events")
    except OSError:
        pass
    for counter in counters:
        try:
            counts = dict(line.split()[:2] for line in counter.read_text().splitlines())
            return int(counts["oom_kill"])
        except (OSError, KeyError, ValueError):
            continue
    return 0


def _environment(orders: Orders, task: submitit.JobEnvironment, gpus: Sequence[str]) -> dict[str, str]:
    """The worker's environment: threads pinned to what the run says, packages found where the driver found them, the
    network that ranks are to use, and its place among the ranks for engines that read it there."""
    environment = dict(os.environ)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment[name] = str(orders.threads)
    others = environment.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = os.pathsep.join([str(orders.code), others]).rstrip(os.pathsep)
    environment["PYTHONUNBUFFERED"] = "1"
    if orders.on == "local":
        environment |= restricted_to(gpus)
    if orders.interface:
        environment |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), orders.interface)
    elif name := rendezvous.interface(task.hostnames, task.node):
        environment.setdefault("GLOO_SOCKET_IFNAME", name)  # NCCL knows faster ones
    if orders.engine == "deepspeed":
        ranks = {"RANK": task.global_rank, "WORLD_SIZE": task.num_tasks, "LOCAL_RANK": task.local_rank}
        ranks["LOCAL_SIZE"] = task.num_tasks // task.num_nodes
        environment |= {name: str(number) for name, number in ranks.items()} | {"DS_ACCELERATOR": orders.device}
    return environment
