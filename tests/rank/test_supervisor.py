"""How a supervisor ends its rank, and what it writes about the end."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from harness.rank import addresses, slurm_task
from harness.rank import supervisor as supervision
from harness.rank.failure import Failure, fail
from harness.rank.heartbeat import EXIT_SAVED, Alive, Pulse, read_alive, write_alive
from harness.rank.job import JOB, STOP, Job, keep
from harness.rank.orders import WORKER
from harness.rank.slurm_task import SlurmSupervisor
from harness.rank.supervisor import Supervisor, Task
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from tests.harness.made_up_orders import made_up

FAR = 1e6
"""Seconds."""
CHILD: Any = None
"""Stands for a process that is not waited for."""


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(supervision, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(supervision, "LOOK_SECONDS", {"local": 0.0, "slurm": 0.0})
    monkeypatch.setattr(supervision, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(slurm_task, "END_SECONDS", 0.0)
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR2, signal.SIGTERM)}
    (tmp_path / "attempt").mkdir()
    yield tmp_path / "attempt"
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def requeued(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Jobs that were put back into the queue."""
    found: list[str] = []
    monkeypatch.setattr(slurm_task, "requeue", found.append)
    return found


def supervisor(
    attempt: Path, rank: int = 0, restart: int = 0, act: Any = None, run: Run | None = None, **changes: Any
) -> Any:
    orders = made_up(run, **{"module": "tests.harness.fake_rank", "time_limit_seconds": FAR} | changes)
    orders.write(attempt)
    (attempt / "act.json").write_text(json.dumps(act or {"saved": EXIT_SAVED}))
    kind = SlurmSupervisor if orders.on == "slurm" else Supervisor
    return kind(attempt, orders, Task(rank, 2, rank, "12_3"), restart=restart)


def ended(attempt: Path, rank: int = 0) -> str:
    """How a rank ended, as its supervisor has written it."""
    alive = read_alive(attempt, rank)
    assert alive is not None
    return alive.ended


def failure_of(attempt: Path, rank: int = 0) -> Failure:
    failure = Failure.of_rank(attempt, rank)
    assert failure is not None
    return failure


def is_stopped(attempt: Path, rank: int = 0) -> bool:
    return ended(attempt, rank) == "stopped" and Failure.of_rank(attempt, rank) is None


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
    alive = read_alive(attempt, 0)
    assert alive is not None
    assert (alive.ended, alive.pulse) == ("finished", Pulse(2, "training", 5, "0F1"))
    assert Failure.of_rank(attempt, 0) is None


@pytest.mark.parametrize(
    ("act", "cause", "reason"),
    [
        ({"kill": signal.SIGTERM}, "killed", "rank 1 was killed by SIGTERM (pipeline rank 1, stage 1)"),
        ({"exit": 3}, "error", "rank 1 exited with status 3"),
    ],
)
def test_the_supervisor_writes_the_failure_of_a_rank_that_writes_none(
    attempt: Path, act: Any, cause: str, reason: str
) -> None:
    run = Run(plan=Plan(pp=2), train=Recipe(global_batch=2, microbatch=1))
    supervisor(attempt, rank=1, restart=4, act=act, run=run).run()
    assert ended(attempt, 1) == "failed"
    failure = failure_of(attempt, 1)
    assert (failure.cause, failure.reason, failure.restart) == (cause, reason, 4)
    assert failure.log == ("a line of its log",)


def test_a_program_that_cannot_start_is_a_launch_that_failed(attempt: Path) -> None:
    supervisor(attempt, module="no.such.module").run()
    assert failure_of(attempt).cause == "error", "of another program it is not known whether it has begun"
    (attempt / "rank-0.failure.json").unlink()
    assert supervisor(attempt, module=WORKER)._conclude(1) == "failed"
    assert failure_of(attempt).cause == "launch"


def test_a_ranks_own_failure_is_kept_unless_it_follows_from_its_death(attempt: Path) -> None:
    one = supervisor(attempt)
    one._write_alive()
    fail(attempt, 0, "oom", "rank 0: OutOfMemoryError: no")
    later = one.begun + 2 * FAR
    assert one._conclude(1) == one._conclude(-signal.SIGABRT) == one._why_end(CHILD, later) == "failed"
    assert failure_of(attempt).cause == "oom"
    fail(attempt, 0, "error", "rank 0: RuntimeError: Connection closed by peer")
    assert one._conclude(1) == "failed"
    assert "closed by peer" in failure_of(attempt).reason
    one._conclude(-signal.SIGKILL)
    assert "killed by SIGKILL" in failure_of(attempt).reason


def test_a_process_killed_for_its_memory_is_out_of_memory(attempt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert supervision._memory_kills() >= 0
    counts = iter([2, 3])
    monkeypatch.setattr(supervision, "_memory_kills", lambda: next(counts))
    supervisor(attempt, act={"kill": signal.SIGKILL}).run()
    failure = failure_of(attempt)
    assert (failure.cause, failure.reason) == ("oom", "rank 0 was killed by SIGKILL: out of memory")


# Is ended -----------------------------------------------------------------------------------------------------------


def test_another_ranks_failure_ends_a_rank_and_one_of_an_earlier_start_does_not(attempt: Path) -> None:
    write_alive(attempt, 1, Alive(restart=1))
    fail(attempt, 1, "error", "rank 1: ValueError: before")
    one = supervisor(attempt, restart=2)
    once_it_trains(attempt, lambda: (write_alive(attempt, 1, Alive(restart=2)), fail(attempt, 1, "error", "now")))
    one.run()
    assert is_stopped(attempt)
    assert failure_of(attempt, 1).reason == "now"


@pytest.mark.parametrize("what", ["stop", "claim", "attempt"])
def test_a_rank_whose_result_is_not_wanted_any_more_is_stopped(attempt: Path, tmp_path: Path, what: str) -> None:
    claim = tmp_path / "claim"
    claim.mkdir()
    act: dict[str, Callable[[], object]] = {
        "stop": (attempt / STOP).touch,
        "claim": claim.rmdir,
        "attempt": (attempt / "spec.json").unlink,
    }
    once_it_trains(attempt, act[what])
    supervisor(attempt, claim=claim).run()
    assert is_stopped(attempt)


def test_a_rank_whose_launcher_was_killed_before_its_supervisor_began_is_stopped(attempt: Path) -> None:
    orders = made_up(Run())
    orders.write(attempt)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    late = Supervisor(attempt, orders, Task(0, 1, 0, str(gone.pid)), parent=gone.pid)
    assert late._is_unwanted()
    assert not Supervisor(attempt, orders, Task(0, 1, 0, "1"), parent=os.getppid())._is_unwanted()


def test_a_rank_whose_supervisor_was_killed_before_it_began_never_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = supervision._before_it_starts(())
    touch = [sys.executable, "-c", f"open({str(tmp_path / 'began')!r}, 'w')"]
    assert subprocess.run(touch, preexec_fn=prepare, check=False).returncode == 0
    (tmp_path / "began").unlink()
    monkeypatch.setattr(os, "getppid", lambda: 1)  # what a child finds whose parent is gone
    assert subprocess.run(touch, preexec_fn=prepare, check=False).returncode == 1
    assert not (tmp_path / "began").exists()


def test_a_rank_whose_driver_is_gone_is_stopped_here_and_goes_on_in_a_cluster(attempt: Path) -> None:
    gone = subprocess.Popen(["true"])
    while gone.poll() is None:
        time.sleep(0.01)
    assert supervisor(attempt, driver_pid=gone.pid)._is_unwanted()
    assert not supervisor(attempt, driver_pid=os.getpid())._is_unwanted()
    for on in ("local", "slurm"):
        one = supervisor(attempt, on=on)
        one.parent = -1
        assert one._is_unwanted() == (on == "local")


def test_the_time_limit_is_that_of_all_starts_together(attempt: Path) -> None:
    write_alive(attempt, 0, Alive(ran=90.0))
    one = supervisor(attempt, restart=1, time_limit_seconds=100.0)
    assert one._why_end(CHILD, one.begun + 9.0) == ""
    assert one._why_end(CHILD, one.begun + 11.0) == "failed"
    failure = failure_of(attempt)
    assert (failure.cause, failure.reason) == ("time_limit", "time limit of 100 s reached")


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_rank_that_stands_still_is_ended_with_each_ranks_last_action(attempt: Path, is_stopped: bool) -> None:
    write_alive(attempt, 1, Alive(pulse=Pulse(7, "training", 5, "all_reduce(dp)")))
    one = supervisor(attempt, hang_seconds=0.5)
    if is_stopped:
        once_it_trains(attempt, lambda: one.child.send_signal(signal.SIGSTOP))
    one.run()
    stopped = ", stopped by a signal" if is_stopped else ""
    assert ended(attempt) == "failed"
    assert failure_of(attempt).cause == "hang"
    assert failure_of(attempt).reason == (
        f"no progress for 0 s: rank 0 in step 5 at 0F1{stopped}, rank 1 in step 5 at all_reduce(dp)"
    )


def test_every_note_counts_as_progress(attempt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = supervisor(attempt, hang_seconds=10.0)
    monkeypatch.setattr(supervision, "PAUSE_SECONDS", FAR)
    starting, trains = Pulse(1, "start-up"), Pulse(2, "training")
    found = []
    for seconds, pulse in ((9, starting), (60, starting), (65, trains), (74, trains), (76, trains)):
        monkeypatch.setattr(one.memory, "pulse", lambda pulse=pulse: pulse)
        one._follow(one.begun + seconds)
        found.append(one._why_end(CHILD, one.begun + seconds))
    assert found == ["", "", "", "", "failed"]


def test_time_in_which_all_was_stopped_does_not_count(attempt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = supervisor(attempt, hang_seconds=10.0, time_limit_seconds=100.0)
    monkeypatch.setattr(one.memory, "pulse", lambda: Pulse(0, "training"))
    begun = one.begun
    for seconds in (1.0, *range(5000, 5011)):
        one._follow(begun + seconds)
        assert one._why_end(CHILD, begun + seconds) == ("failed" if seconds == 5010 else "")
    assert "no progress for 10 s" in failure_of(attempt).reason


def test_a_rank_that_cannot_be_started_says_of_which_program(attempt: Path) -> None:
    supervisor(attempt, container=("/nowhere/apptainer", "exec")).run()
    assert (failure_of(attempt).cause, ended(attempt)) == ("launch", "failed")
    assert failure_of(attempt).reason == "rank 0 could not be started: /nowhere/apptainer: No such file or directory"


@pytest.mark.parametrize(("set_up", "is_over"), [(0, False), (100, True)])
def test_the_time_of_a_job_begins_before_its_set_up(attempt: Path, set_up: int, is_over: bool) -> None:
    one = supervisor(attempt, on="slurm", signal_seconds=60)
    keep(attempt, "slurm", "12_3", seconds=600.0)
    one.set_up = float(set_up)
    assert one._is_time_over(one.begun + 400) is is_over


# The scheduler ------------------------------------------------------------------------------------------------------


def test_a_task_starts_its_rank_unless_the_attempt_is_over_or_another_jobs(
    attempt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor(attempt, ranks=2, on="slurm")

    class Environment:
        global_rank, num_tasks, local_rank, job_id, hostnames, node = 0, 2, 3, "12_3", ["node1"], 0

    monkeypatch.setattr("submitit.JobEnvironment", Environment)
    started: list[tuple[int, int]] = []
    monkeypatch.setattr(SlurmSupervisor, "run", lambda self: started.append((self.restart, self.task.local_rank)))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    for rank in range(2):
        slurm_task.supervise(str(attempt))
        result = {"status": "ok", "seconds": {}, "evaluations": [], "rank": {"rank": rank}}
        (attempt / f"rank-{rank}.json").write_text(json.dumps(result))
    assert started == [(1, 3)] * 2
    slurm_task.supervise(str(attempt))
    assert len(started) == 2, "it came to its end as it was requeued"
    (attempt / "rank-0.json").unlink()
    keep(attempt, "slurm", "4711")
    slurm_task.supervise(str(attempt))
    assert len(started) == 2


def test_a_job_that_is_to_end_saves_and_goes_back_into_the_queue(attempt: Path, requeued: list[str]) -> None:
    one = supervisor(attempt, on="slurm", checkpoint_every=5)
    once_it_trains(attempt, lambda: os.kill(os.getpid(), signal.SIGUSR2))
    one.run()
    assert requeued == ["12_3"]
    assert failure_of(attempt).reason.endswith("was not requeued: Slurm did not end the job"), "the job was not ended"


def test_only_the_first_ranks_supervisor_reacts(attempt: Path, requeued: list[str]) -> None:
    one = supervisor(attempt, rank=1, on="slurm", checkpoint_every=5)
    one._announce()
    one._prepare_end_of_job(one.begun)
    assert not one.has_reacted
    once_it_trains(attempt, one.memory.request_end, rank=1)
    one.run()
    assert (requeued, ended(attempt, 1)) == ([], "saved")


@pytest.mark.parametrize(("seconds", "goes_back"), [(0.0, True), (3600.0, True), (100.0, False)])
def test_without_checkpoints_a_preempted_job_is_requeued_and_one_whose_time_is_over_is_not(
    attempt: Path, requeued: list[str], seconds: float, goes_back: bool
) -> None:
    one, cancelled = supervisor(attempt, on="slurm"), supervisor(attempt, on="slurm")
    (attempt / JOB).write_text(json.dumps(asdict(Job("slurm", "12_3", "node1", 0.0, seconds))))
    one._prepare_end_of_job(one.begun)
    cancelled._terminate()
    cancelled._prepare_end_of_job(one.begun)
    assert not requeued
    one._terminate()
    one._announce()  # some sites send SIGTERM along with it
    one._prepare_end_of_job(one.begun)
    one._prepare_end_of_job(one.begun)
    assert requeued == ["12_3"] * goes_back


def test_a_job_is_requeued_so_often_and_no_more(attempt: Path, requeued: list[str]) -> None:
    one = supervisor(attempt, on="slurm", restart=3, checkpoint_every=5, requeues=3)
    once_it_trains(attempt, one._announce)
    one.run()
    assert requeued == []
    failure = failure_of(attempt)
    assert (failure.cause, failure.restart) == ("preempted", 3)
    assert "requeued 3 times, which is the limit" in failure.reason


def test_the_reason_of_a_refused_requeue_is_returned(attempt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(attempt))
    program = attempt / "scontrol"
    program.write_text("#!/bin/sh\necho 'slurm_requeue error: Requested operation is presently disabled' >&2\nexit 1\n")
    program.chmod(0o755)
    assert slurm_task.requeue("7") == "slurm_requeue error: Requested operation is presently disabled"
    program.write_text('#!/bin/sh\n[ "$*" = "requeue 7" ]\n')
    assert slurm_task.requeue("7") is None
    program.unlink()
    assert "scontrol" in (slurm_task.requeue("7") or "")


def test_a_full_disk_ends_no_supervisor(attempt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(attempt)
    attempt.write_text("no folder")
    fail(attempt, 0, "error", "rank 0: OSError: No space left on device")
    assert "could not be written down" in capsys.readouterr().err


def test_the_ranks_environment_has_the_network_of_the_job(attempt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    task = Task(0, 2, 0, "1")
    orders = supervisor(attempt).orders
    found = supervision._environment(orders, task, ())
    assert found.get("GLOO_SOCKET_IFNAME") == addresses.interface(["localhost"], 0)
    assert "NCCL_SOCKET_IFNAME" not in found
    assert found["OMP_NUM_THREADS"] == str(Run().threads)
    found = supervision._environment(replace(orders, interface="ib0"), task, ())
    assert found["GLOO_SOCKET_IFNAME"] == found["NCCL_SOCKET_IFNAME"] == "ib0"
    command = supervisor(attempt, container=("apptainer", "exec", "image.sif"))._command()
    assert command[:4] == ["apptainer", "exec", "image.sif", sys.executable]
