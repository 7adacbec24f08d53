"""Whether a supervisor that was killed is seen by those of the other ranks."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.rank.heartbeat import Alive, tell_alive
from harness.rank.siblings import MISSING_SECONDS, RANK, Siblings
from tests.harness.small_runs import wait_until


@pytest.fixture
def supervisors(monkeypatch: pytest.MonkeyPatch) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """What stands for the supervisors of ranks 0 and 1; this process takes itself for the first of them."""
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    found = [subprocess.Popen(command, env=os.environ | {RANK: str(rank)}) for rank in range(2)]
    monkeypatch.setattr(os, "getppid", os.getpid)
    monkeypatch.setenv(RANK, "0")
    yield found
    for process in found:
        process.kill()
        process.wait()


def seen(attempt: Path, ranks: int = 2) -> Siblings:
    """Looked at as soon as all are there."""
    one = Siblings(attempt, 0, ranks)
    wait_until(lambda: (one.vanished(one.looked + 2), len(one.found))[1] == 2)
    return one


def test_a_supervisor_that_is_killed_is_missed(supervisors: list["subprocess.Popen[bytes]"], tmp_path: Path) -> None:
    one = seen(tmp_path)
    assert one.vanished(one.looked + 2) is None
    supervisors[1].kill()
    wait_until(lambda: one.vanished(one.looked + 2) == 1)  # as a zombie
    supervisors[1].wait()
    assert one.vanished(one.looked + 2) == 1
    assert one.vanished(one.looked + 0.1) is None, "it looks once in a while"


@pytest.mark.parametrize("word", ["alive", "failure", "result"])
def test_one_that_has_told_its_end_is_not(
    supervisors: list["subprocess.Popen[bytes]"], tmp_path: Path, word: str
) -> None:
    one = seen(tmp_path)
    supervisors[1].kill()
    supervisors[1].wait()
    if word == "alive":
        tell_alive(tmp_path, 1, Alive(ended="stopped"))
    elif word == "failure":
        (tmp_path / "rank-1.failure.json").write_text("{}")
    else:
        (tmp_path / "rank-1.json").write_text('{"status": "ok", "seconds": {}, "evaluations": [], "rank": {}}')
    assert one.vanished(one.looked + 2) is None


def test_one_that_was_killed_before_it_was_seen_is_missed_too(
    supervisors: list["subprocess.Popen[bytes]"], tmp_path: Path
) -> None:
    one = seen(tmp_path, ranks=3)
    assert one.vanished(one.begun + MISSING_SECONDS - 0.1) is None, "it may be about to start"
    assert one.vanished(one.begun + MISSING_SECONDS + 2) == 2


def test_nothing_is_missed_where_nothing_can_be_seen(
    supervisors: list["subprocess.Popen[bytes]"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Siblings(tmp_path, 0, 2)
    monkeypatch.setattr("psutil.Process.environ", lambda self: {})
    assert one.vanished(one.begun + 100) is None
    monkeypatch.delenv(RANK)
    assert one.vanished(one.begun + 200) is None
