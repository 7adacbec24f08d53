"""What watches over a rank: how it ends it, and what it then says."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from harness.rank import jobs
from harness.rank import supervisor as launch
from harness.rank.failure import Failure
from harness.rank.heartbeat import Alive, Pulse, alive, tell_alive
from harness.rank.orders import WORKER
from harness.rank.supervisor import Supervisor, fail
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from tests.harness.made_up_orders import made_up

FAR = 1e6
"""Seconds."""


@dataclass
class Task:
    """What the scheduler tells a task about itself."""

    global_rank: int = 0
    num_tasks: int = 2
    job_id: str = "12_3"
    hostname: str = "node1"
    hostnames: list[str] = field(default_factory=lambda: ["node1"])
    node: int = 0
    num_nodes: int = 1

    @property
    def local_rank(self) -> int:
        return self.global_rank


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(launch, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(launch, "LOOK_SECONDS", {"local": 0.0, "slurm": 0.0})
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(launch, "END_SECONDS", 0.0)
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR2, signal.SIGTERM)}
    (tmp_path / "attempt").mkdir()
    yield tmp_path / "attempt"
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def requeued(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Jobs that were put back into the queue."""
    found: list[str] = []
    monkeypatch.setattr(launch, "_requeue", found.append)
    return found


def supervisor(
    attempt: Path, rank: int = 0, restart: int = 0, act: Any = None, run: Run | None = None, **told: Any
) -> Supervisor:
    orders = made_up(run, **{"module": "tests.harness.fake_rank", "time_limit_seconds": FAR} | told)
    orders.write(attempt)
    (attempt / "act.json").write_text(json.dumps(act or {"told": launch.TOLD}))
    return Supervisor(attempt, orders, Task(rank), restart)  # type: ignore[arg-type]


def ended(attempt: Path, rank: int = 0) -> tuple[str, Failure | None]:
    """What is said of a rank that has ended."""
    told, path = alive(attempt, rank), attempt / f"rank-{rank}.failure.json"
    assert told is not None
    return told.ended, Failure.read(json.loads(path.read_text())) if path.exists() else None


def once_it_trains(attempt: Path, action: Callable[[], object], rank: int = 0) -> None:
    """Do something while the rank works."""

    def wait() -> None:
        log = attempt / f"rank-{rank}.log"
        while not (log.exists() and log.stat().st_size):
            time.sleep(0.01)
        action()

    threading.Thread(target=wait, daemon=True).start()


# Ends ---------------------------------------------------------------------------------------------------------------


def test_a_rank_that_comes_to_its_end_leaves_no_failure(attempt: Path) -> None:
    supervisor(attempt, act={"exit": 0}).run()
    assert ended(attempt) == ("finished", None)
    told = alive(attempt, 0)
    assert told is not None
    assert told.pulse == Pulse(2, "training", 5, "0F1")
    assert told.host == "node1"


@pytest.mark.parametrize(
    ("act", "cause", "reason"),
    [
        ({"kill": signal.SIGKILL}, "killed", "rank 1 was killed by SIGKILL (pipeline rank 1, stage 1)"),
        ({"kill": signal.SIGTERM}, "killed", "rank 1 was killed by SIGTERM (pipeline rank 1, stage 1)"),
        ({"exit": 3}, "error", "rank 1 exited with status 3"),
    ],
)
def test_a_rank_that_says_nothing_is_spoken_for(attempt: Path, act: Any, cause: str, reason: str) -> None:
    run = Run(plan=Plan(pp=2), train=Recipe(global_batch=2, microbatch=1))
    supervisor(attempt, rank=1, restart=4, act=act, run=run).run()
    how, failure = ended(attempt, 1)
    assert how == "failed"
    assert failure is not None
    assert (failure.cause, failure.reason, failure.restart) == (cause, reason, 4)
    assert failure.log == ("a line of its log",)


def test_a_program_that_cannot_start_is_a_launch_that_failed(attempt: Path) -> None:
    supervisor(attempt, module="no.such.module").run()
    _, failure = ended(attempt)
    assert failure is not None
    assert failure.cause == "error"  # of a program that is not ours, nobody knows whether it has begun
    one = supervisor(attempt, module=WORKER)
    assert one._conclude(1) == "failed"
    (attempt / "rank-0.failure.json").unlink()
    one._conclude(1)
    _, failure = ended(attempt)
    assert failure is not None
    assert failure.cause == "launch"


def test_what_a_rank_says_itself_stays(attempt: Path) -> None:
    one = supervisor(attempt)
    one._tell_alive()
    fail(attempt, 0, "oom", "rank 0: OutOfMemoryError: no")
    later = one.begun + 2 * FAR
    assert one._conclude(1) == one._conclude(-signal.SIGABRT) == one._why_end(None, later) == "failed"  # type: ignore[arg-type]
    assert json.loads((attempt / "rank-0.failure.json").read_text())["status"] == "oom"
    fail(attempt, 0, "error", "rank 0: RuntimeError: Connection closed by peer")
    assert one._conclude(1) == "failed"
    assert "closed by peer" in (attempt / "rank-0.failure.json").read_text()
    one._conclude(-signal.SIGKILL)
    assert "killed by SIGKILL" in (attempt / "rank-0.failure.json").read_text()


def test_a_process_killed_for_its_memory_is_out_of_memory(attempt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([2, 3])
    monkeypatch.setattr(launch, "_memory_kills", lambda: next(counts))
    supervisor(attempt, act={"kill": signal.SIGKILL}).run()
    _, failure = ended(attempt)
    assert failure is not None
    assert (failure.cause, failure.reason) == ("oom", "rank 0 was killed by SIGKILL: out of memory")


def test_the_system_counts_whom_it_kills_for_memory() -> None:
    assert launch._memory_kills() >= 0


# Is ended -----------------------------------------------------------------------------------------------------------


def test_another_ranks_failure_ends_a_rank_and_one_of_an_earlier_start_does_not(attempt: Path) -> None:
    tell_alive(attempt, 1, Alive(restart=1))
    fail(attempt, 1, "error", "rank 1: ValueError: before")
    one = supervisor(attempt, restart=2)
    once_it_trains(attempt, lambda: (tell_alive(attempt, 1, Alive(restart=2)), fail(attempt, 1, "error", "now")))
    one.run()
    assert ended(attempt) == ("stopped", None)
    assert "now" in (attempt / "rank-1.failure.json").read_text()


@pytest.mark.parametrize("what", ["stop", "claim", "attempt"])
def test_a_rank_that_nobody_wants_any_more_is_stopped(attempt: Path, tmp_path: Path, what: str) -> None:
    claim = tmp_path / "claim"
    claim.mkdir()
    act: dict[str, Callable[[], object]] = {
        "stop": (attempt / jobs.STOP).touch,
        "claim": claim.rmdir,
        "attempt": (attempt / "spec.json").unlink,
    }
    once_it_trains(attempt, act[what])
    supervisor(attempt, claim=claim).run()
    assert ended(attempt) == ("stopped", None)


def test_a_rank_whose_driver_is_gone_is_stopped_here_and_goes_on_in_a_cluster(attempt: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])  # dead soon, and not buried
    while gone.poll() is None:
        time.sleep(0.01)
    assert supervisor(attempt, driver_pid=gone.pid)._is_unwanted()
    assert not supervisor(attempt, driver_pid=os.getpid())._is_unwanted()
    one = supervisor(attempt)
    one.parent = -1
    assert one._is_unwanted()
    one = supervisor(attempt, on="slurm")
    one.parent = -1
    assert not one._is_unwanted()


def test_the_time_limit_is_that_of_all_starts_together(attempt: Path) -> None:
    tell_alive(attempt, 0, Alive(ran=90.0))
    one = supervisor(attempt, restart=1, time_limit_seconds=100.0)
    assert one._why_end(None, one.begun + 9.0) == ""  # type: ignore[arg-type]
    assert one._why_end(None, one.begun + 11.0) == "failed"  # type: ignore[arg-type]
    failure = Failure.read(json.loads((attempt / "rank-0.failure.json").read_text()))
    assert failure is not None
    assert (failure.cause, failure.reason) == ("time_limit", "time limit of 100 s reached")


def test_a_rank_that_stands_still_is_ended_with_each_ranks_last_action(attempt: Path) -> None:
    tell_alive(attempt, 1, Alive(pulse=Pulse(7, "training", 5, "all_reduce(dp)")))
    supervisor(attempt, hang_seconds=0.5).run()
    how, failure = ended(attempt)
    assert how == "failed"
    assert failure is not None
    assert failure.cause == "hang"
    assert failure.reason == "no progress for 0 s: rank 0 in step 5 at 0F1, rank 1 in step 5 at all_reduce(dp)"
    assert json.loads((attempt / "rank-0.failure.json").read_text())["status"] == "timeout"


def test_a_rank_that_a_signal_stopped_is_told_apart(attempt: Path) -> None:
    tell_alive(attempt, 1, Alive(pulse=Pulse(7, "training", 5, "all_reduce(dp)")))
    one = supervisor(attempt, hang_seconds=0.5)
    once_it_trains(attempt, lambda: one.child and one.child.send_signal(signal.SIGSTOP))
    one.run()
    _, failure = ended(attempt)
    assert failure is not None
    assert "rank 0 in step 5 at 0F1, stopped by a signal, rank 1 in step 5" in failure.reason


def test_every_note_counts_as_progress(attempt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = supervisor(attempt, hang_seconds=10.0)
    monkeypatch.setattr(one, "_tell_alive", lambda: None)
    monkeypatch.setattr(launch, "PAUSE_SECONDS", FAR)
    starting, trains = Pulse(1, "start-up"), Pulse(2, "training")
    found = []
    for seconds, pulse in ((9, starting), (60, starting), (65, trains), (74, trains), (76, trains)):
        monkeypatch.setattr(one.watched, "pulse", lambda pulse=pulse: pulse)
        one._follow(one.begun + seconds)
        found.append(one._why_end(None, one.begun + seconds))  # type: ignore[arg-type]
    assert found == ["", "", "", "", "failed"]


def test_time_in_which_all_was_stopped_does_not_count(attempt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = supervisor(attempt, hang_seconds=10.0, time_limit_seconds=100.0)
    monkeypatch.setattr(one.watched, "pulse", lambda: Pulse(0, "training"))
    begun = one.begun
    one._follow(begun + 1.0)
    one._follow(begun + 5000.0)
    assert one._why_end(None, begun + 5000.0) == ""  # type: ignore[arg-type]
    for seconds in range(5000, 5012):
        one._follow(begun + seconds)
    assert one._why_end(None, begun + 5011.0) == "failed"  # type: ignore[arg-type]
    assert "no progress for 10 s" in (attempt / "rank-0.failure.json").read_text()


def test_a_job_that_came_to_its_end_as_it_was_requeued_does_nothing(
    attempt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor(attempt, ranks=2)
    monkeypatch.setattr("submitit.JobEnvironment", Task)
    started: list[int] = []
    monkeypatch.setattr(Supervisor, "run", lambda self: started.append(self.restart))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    for rank in range(2):
        launch.supervise(str(attempt))
        result = {"status": "ok", "seconds": {}, "evaluations": [], "rank": {"rank": rank}}
        (attempt / f"rank-{rank}.json").write_text(json.dumps(result))
    assert started == [1, 1]
    launch.supervise(str(attempt))
    assert started == [1, 1]


def test_a_job_leaves_an_attempt_alone_that_another_one_has(attempt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor(attempt, ranks=2)
    monkeypatch.setattr("submitit.JobEnvironment", Task)
    monkeypatch.setattr(Supervisor, "run", lambda self: pytest.fail("it was started"))
    jobs.keep(attempt, "local", "4711")
    launch.supervise(str(attempt))


# The scheduler ------------------------------------------------------------------------------------------------------


def test_a_job_that_is_to_end_saves_and_goes_back_into_the_queue(attempt: Path, requeued: list[str]) -> None:
    one = supervisor(attempt, on="slurm", checkpoint_every=5)
    once_it_trains(attempt, lambda: os.kill(os.getpid(), signal.SIGUSR2))
    one.run()
    assert requeued == ["12_3"]
    assert ended(attempt)[0] == "told"


def test_other_ranks_leave_that_to_the_first(attempt: Path, requeued: list[str]) -> None:
    one = supervisor(attempt, rank=1, on="slurm", checkpoint_every=5)
    one._notice()
    one._heed(one.begun)
    assert not one.has_told
    once_it_trains(attempt, one.watched.tell, rank=1)
    one.run()
    assert (requeued, ended(attempt, 1)) == ([], ("told", None))


@pytest.mark.parametrize(("seconds", "goes_back"), [(0.0, True), (3600.0, True), (100.0, False)])
def test_without_checkpoints_a_preempted_job_begins_anew_and_one_whose_time_is_over_does_not(
    attempt: Path, requeued: list[str], seconds: float, goes_back: bool
) -> None:
    one = supervisor(attempt, on="slurm")
    (attempt / jobs.JOB).write_text(json.dumps(asdict(jobs.Job("slurm", "12_3", "node1", 0.0, seconds))))
    one._heed(one.begun)
    assert not requeued
    one._notice()
    one._heed(one.begun)
    one._heed(one.begun)
    assert requeued == ["12_3"] * goes_back


def test_a_job_that_may_be_cancelled_is_not_requeued(attempt: Path, requeued: list[str]) -> None:
    one = supervisor(attempt, on="slurm")
    one._terminate()
    one._heed(one.begun)
    assert not requeued
    one._notice()
    assert not one.is_terminated, "SIGTERM came with the signal of a preemption"


def test_a_job_is_requeued_so_often_and_no_more(attempt: Path, requeued: list[str]) -> None:
    one = supervisor(attempt, on="slurm", restart=3, checkpoint_every=5, requeues=3)
    once_it_trains(attempt, one._notice)
    one.run()
    assert requeued == []
    _, failure = ended(attempt)
    assert failure is not None
    assert (failure.cause, failure.restart) == ("preempted", 3)
    assert "requeued 3 times, which is the most" in failure.reason


def test_a_requeue_that_is_refused_says_why(attempt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(attempt))
    program = attempt / "scontrol"
    program.write_text("#!/bin/sh\necho 'slurm_requeue error: Requested operation is presently disabled' >&2\nexit 1\n")
    program.chmod(0o755)
    assert launch._requeue("7") == "slurm_requeue error: Requested operation is presently disabled"
    program.write_text('#!/bin/sh\n[ "$*" = "requeue 7" ]\n')
    assert launch._requeue("7") is None
    program.unlink()
    assert "scontrol" in (launch._requeue("7") or "")


def test_a_disk_that_is_full_ends_no_supervisor(attempt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(attempt)
    attempt.write_text("no folder")
    fail(attempt, 0, "error", "rank 0: OSError: No space left on device")
    assert "could not be written down" in capsys.readouterr().err


def test_the_ranks_environment_has_the_network_of_the_job(attempt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    task: Any = Task()
    orders = supervisor(attempt).orders
    found = launch._environment(orders, task, ())
    assert found.get("GLOO_SOCKET_IFNAME") == launch.rendezvous.interface(["node1"], 0)
    assert "NCCL_SOCKET_IFNAME" not in found
    assert found["OMP_NUM_THREADS"] == str(Run().threads)
    found = launch._environment(replace(orders, interface="ib0"), task, ())
    assert found["GLOO_SOCKET_IFNAME"] == found["NCCL_SOCKET_IFNAME"] == "ib0"
    command = supervisor(attempt, container=("apptainer", "exec", "image.sif"))._command()
    assert command[:3] == ["apptainer", "exec", "image.sif"]
    assert command[3] == sys.executable
