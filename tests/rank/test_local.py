"""Ranks of this machine: one launcher, a supervisor for each rank, and none that outlives the others."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness.rank import local
from harness.rank.collect import document_of
from harness.rank.failure import Failure
from harness.rank.heartbeat import read_alive
from harness.rank.job import job_of
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from tests.harness.made_up_orders import made_up
from tests.harness.small_runs import kill_all, processes, wait_until

RUN = Run(plan=Plan(dp=2), train=Recipe(global_batch=2, microbatch=1))


@pytest.fixture
def attempt(tmp_path: Path) -> Iterator[Path]:
    """The folder of an attempt whose two ranks work until they are ended."""
    folder = tmp_path.resolve() / "attempt"
    folder.mkdir()
    made_up(RUN, module="tests.harness.fake_rank", driver_pid=os.getpid()).write(folder)
    (folder / "act.json").write_text(json.dumps({"saved": 0}))
    yield folder
    kill_all(tmp_path)


def begun(attempt: Path) -> psutil.Process:
    """The launcher, once both ranks work."""
    launcher = psutil.Process(int(local.start(attempt)))
    logs = [attempt / f"rank-{rank}.log" for rank in range(2)]
    wait_until(lambda: all(log.exists() and log.stat().st_size for log in logs))
    return launcher


def test_the_launcher_adopts_the_attempt_and_ends_with_its_ranks(attempt: Path) -> None:
    (attempt / "act.json").write_text(json.dumps({"exit": 0}))
    launcher = begun(attempt)
    launcher.wait(timeout=60)
    assert [getattr(read_alive(attempt, rank), "ended", "") for rank in range(2)] == ["finished"] * 2
    job = job_of(attempt)
    assert job is not None
    assert (job.on, job.job) == ("local", str(launcher.pid))


def test_a_supervisor_that_is_killed_is_named_and_ends_the_other_ranks(attempt: Path) -> None:
    launcher = begun(attempt)
    [rank] = [one for one in processes(attempt.parent, "tests.harness.fake_rank") if one.cmdline()[-4] == "1"]
    psutil.Process(rank.ppid()).kill()
    launcher.wait(timeout=60)
    assert not processes(attempt.parent)
    failure = Failure.of_rank(attempt, 1)
    assert failure is not None
    assert (failure.cause, failure.reason) == (
        "vanished",
        "rank 1 vanished without an exit status: its supervisor was killed by SIGKILL",
    )
    record = document_of(attempt)
    assert (record["cause"], record["reason"]) == (failure.cause, failure.reason)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_the_launcher(attempt: Path, number: signal.Signals) -> None:
    launcher = begun(attempt)
    launcher.send_signal(number)
    wait_until(lambda: not processes(attempt.parent))
    assert Failure.of_rank(attempt, 0) is None


def test_local_runs_import_neither_slurm_nor_other_engines() -> None:
    light = ("pydantic", "impl.run", "torch", "submitit", "harness.rank.slurm_queue")
    heavy = ("impl.peers.ddp", "deepspeed", "submitit", "harness.rank.slurm_queue", "harness.launch")
    program = (
        "import sys, importlib\n"
        f"importlib.import_module('harness.rank.local')\nassert not set({light}) & set(sys.modules)\n"
        "for name in ('worker', 'collect'): importlib.import_module(f'harness.rank.{name}')\n"
        f"assert not set({heavy}) & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
