"""What became of a job: by what Slurm's commands say, by the processes of this machine, and when nobody answers."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.rank import jobs, slurm_queue
from harness.rank.job import ABSENT, BEHIND, ELSEWHERE, JOB, SILENT, STOP, JobState, adopt, job_of, keep
from harness.rank.jobs import states
from harness.rank.slurm_queue import in_accounts, in_queue

QUEUE = """\
6_2      PENDING        0     JobArrayTaskLimit
6_0      RUNNING        2     None
6_1      COMPLETING     0     NonZeroExitCode
7        COMPLETED      0     None
8        PENDING        1     BeginTime
9        NODE_FAIL      0     None
10       CANCELLED      0     None
11       OUT_OF_MEMORY  0     OutOfMemory
12       INVENTED       0     None
"""
"""As squeue of Slurm 22.05 writes it, with narrower columns; its last word is nobody's."""

ACCOUNTS = """\
1|COMPLETED
3|FAILED
4|RUNNING
7|CANCELLED by 0
8_[0-2,5%2]|CANCELLED by 1000
11_[0,2-3]|CANCELLED by 0
12_0|TIMEOUT
12_1|PREEMPTED
13|NODE_FAIL
14|CANCELLED+
"""
"""As sacct of Slurm 22.05 writes it; of array 11, task 1 was cancelled alone before it could start."""


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    folder = tmp_path.resolve() / "attempts" / "id-1"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """Makes Slurm's commands answer this; returns the list of what they are asked."""

    def answer(**answers: str | None) -> list[list[str]]:
        asked: list[list[str]] = []

        def ask(command: list[str], no_answer: Any = ()) -> str | None:
            asked.append(command)
            return answers[command[0]]

        monkeypatch.setattr(slurm_queue, "_ask", ask)
        return asked

    return answer


def attempts_of(folder: Path, *numbers: str) -> dict[str, Path]:
    found = {number: folder / f"id-{number}" for number in numbers}
    for number, path in found.items():
        path.mkdir(parents=True)
        keep(path, "slurm", number)
    return found


# Slurm's words ------------------------------------------------------------------------------------------------------


def test_the_queue_is_read():
    assert in_queue(QUEUE) == {
        "6_2": JobState("pending", "PENDING", 0, "JobArrayTaskLimit"),
        "6_0": JobState("running", "RUNNING", 2),
        "6_1": JobState("running", "COMPLETING", 0),
        "7": JobState("ended", "COMPLETED", 0),
        "8": JobState("pending", "PENDING", 1, "BeginTime"),
        "9": JobState("ended", "NODE_FAIL", 0),
        "10": JobState("ended", "CANCELLED", 0),
        "11": JobState("ended", "OUT_OF_MEMORY", 0),
        "12": JobState("unknown", "INVENTED", 0),
    }


def test_the_accounts_are_read():
    ends = {
        "1": "COMPLETED", "3": "FAILED", "7": "CANCELLED by 0", "8_0": "CANCELLED by 1000",
        "8_2": "CANCELLED by 1000", "8_5": "CANCELLED by 1000", "8_3": "CANCELLED", "11_1": "CANCELLED",
        "11_3": "CANCELLED by 0", "12_0": "TIMEOUT", "12_1": "PREEMPTED", "13": "NODE_FAIL", "14": "CANCELLED+",
        "99": None,
    }  # fmt: skip
    found = in_accounts(ACCOUNTS, [*ends, "4"])
    assert found.pop("4") == BEHIND, "the queue knows that it does not run"
    assert found == {number: JobState("ended", word) for number, word in ends.items()}


def test_junk_from_the_scheduler_is_no_end():
    assert in_queue("slurm_load_jobs error\n\n  \n6_0 RUNNING\n") == {}
    assert in_accounts("||\n|\n5_[9-3,x-y,-]|FAILED\n5|\n", ["5"]) == {"5": BEHIND}


def test_all_jobs_are_asked_for_at_once(slurm: Callable[..., list[list[str]]], tmp_path: Path):
    asked = slurm(squeue=QUEUE, sacct=ACCOUNTS)
    expected = {"6_0": "running", "6_2": "pending", "7": "ended", "3": "ended", "8_5": "ended", "12_0": "ended"}
    of = attempts_of(tmp_path, *expected)
    none = tmp_path / "id-none"
    none.mkdir()
    found = states([*of.values(), none])
    assert {number: found[path].name for number, path in of.items()} == expected
    assert none not in found
    assert [command[0] for command in asked] == ["squeue", "sacct"]
    assert "--jobs=12,3,6,7,8" in asked[0]
    states([of["6_0"], of["7"]])
    assert [command[0] for command in asked[2:]] == ["squeue"], "what is in the queue needs no accounts"


@pytest.mark.parametrize(
    ("answers", "name"),
    [
        ({"squeue": None}, "unknown"),
        ({"squeue": "", "sacct": None}, "unknown"),
        ({"squeue": "", "sacct": "5_0|RUNNING"}, "unknown"),
        ({"squeue": "", "sacct": slurm_queue.NO_ACCOUNTING[0]}, "ended"),
        ({"squeue": slurm_queue.NO_SUCH_JOB, "sacct": "5_0|COMPLETED"}, "ended"),
    ],
)
def test_a_scheduler_that_does_not_answer_ends_no_job(
    slurm: Callable[..., list[list[str]]], tmp_path: Path, answers: dict[str, str | None], name: str
):
    slurm(**answers)
    slurm_queue._behind.clear()
    [state] = states(list(attempts_of(tmp_path, "5_0").values())).values()
    assert state.name == name


def test_a_cluster_without_sacct_has_no_accounts_and_a_machine_without_squeue_no_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    [attempt] = attempts_of(tmp_path, "5").values()
    assert states([attempt]) == {attempt: ABSENT}
    (programs / "squeue").write_text("#!/bin/sh\n")
    (programs / "squeue").chmod(0o755)
    assert states([attempt]) == {attempt: JobState("ended")}


def test_accounts_that_missed_the_end_of_a_job_do_not_keep_it_for_ever(
    slurm: Callable[..., list[list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    slurm(squeue="", sacct="5_0|RUNNING")
    monkeypatch.setattr(slurm_queue, "_behind", {})
    [attempt] = attempts_of(tmp_path, "5_0").values()
    assert states([attempt])[attempt].name == "unknown"
    monkeypatch.setattr(slurm_queue, "BEHIND_SECONDS", 0.0)
    assert states([attempt])[attempt] == JobState("ended")
    slurm(squeue="", sacct=None)
    assert states([attempt])[attempt] == SILENT


def test_commands_that_fail_hang_or_are_not_there_have_no_answer(monkeypatch: pytest.MonkeyPatch):
    assert slurm_queue._ask(["echo", "yes"]) == "yes\n"
    assert slurm_queue._ask(["false"]) is None
    assert slurm_queue._ask(["no such command"]) is None
    none = slurm_queue._ask(["sh", "-c", "echo there is none >&2; exit 1"], no_answer=("there is none",))
    assert none == "there is none"
    monkeypatch.setattr(slurm_queue, "ASK_SECONDS", 0.05)
    assert slurm_queue._ask(["sleep", "60"]) is None


def test_options_of_the_users_own_hide_no_job(monkeypatch: pytest.MonkeyPatch):
    for name in ("SQUEUE_PARTITION", "SACCT_FORMAT", "SINFO_PARTITION", "SCANCEL_STATE", "SLURM_CONF"):
        monkeypatch.setenv(name, "debug")
    given = slurm_queue.ask("env")[1].splitlines()
    assert [line for line in given if line.endswith("=debug")] == ["SLURM_CONF=debug"]


# This machine's processes -------------------------------------------------------------------------------------------


@pytest.fixture
def process(attempt: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A module, so to speak, that works on the attempt until it finds its file; it may have to ignore a Ctrl-C."""
    program = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.02)"
    found = subprocess.Popen([sys.executable, "-c", program, str(attempt / STOP), "-m"])
    yield found
    found.kill()
    found.wait()


def test_a_process_runs_until_it_is_cancelled(attempt: Path, process: "subprocess.Popen[bytes]"):
    keep(attempt, "local", str(process.pid))
    assert states([attempt])[attempt].name == "running"
    jobs.cancel([attempt])
    assert (attempt / STOP).exists()
    assert states([attempt])[attempt].name == "ended"


def test_ranks_that_outlive_what_started_them_are_not_over(attempt: Path, process: "subprocess.Popen[bytes]"):
    gone = subprocess.Popen(["true"])
    keep(attempt, "local", str(gone.pid))
    assert states([attempt])[attempt].name == "running"
    process.kill()
    process.wait()
    assert states([attempt])[attempt].name == "ended"
    gone.wait()


def test_another_process_of_the_same_number_is_not_the_job(attempt: Path):
    keep(attempt, "local", str(os.getpid()))
    assert states([attempt])[attempt].name == "ended"
    jobs.cancel([attempt])  # it interrupts nobody


def test_of_another_machine_nothing_is_known(attempt: Path, process: "subprocess.Popen[bytes]"):
    keep(attempt, "local", str(process.pid))
    document = json.loads((attempt / JOB).read_text())
    (attempt / JOB).write_text(json.dumps(document | {"host": f"not-{socket.gethostname()}"}))
    assert states([attempt])[attempt].name == "running", "this machine has another name since"
    process.kill()
    process.wait()
    assert states([attempt])[attempt] == ELSEWHERE


# What is kept of them -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        *({"job": damage} for damage in ("--user=root", "1 2", "١٢", "1\n", 12)),
        *({"on": "moon"}, {"on": ["slurm"]}, {"host": None}, {"submitted": "yesterday"}),
    ],
)
def test_a_job_is_data_and_nothing_is_made_of_what_describes_none(attempt: Path, damage: dict[str, Any]):
    keep(attempt, "slurm", "12_3")
    found = job_of(attempt)
    assert found is not None
    assert (found.on, found.job) == ("slurm", "12_3")
    document = json.loads((attempt / JOB).read_text())
    (attempt / JOB).write_text(json.dumps(document | damage))
    assert job_of(attempt) is None
    assert states([attempt]) == {}


def test_a_job_adopts_an_attempt_that_has_none_and_no_other(attempt: Path):
    assert adopt(attempt, "slurm", "12_3")
    assert adopt(attempt, "slurm", "12_3")
    assert not adopt(attempt, "slurm", "13_3")
    assert not adopt(attempt, "local", "12")
    found = job_of(attempt)
    assert found is not None
    assert found.job == "12_3"


def test_cancelling_slurm_jobs_takes_one_command(slurm: Callable[..., list[list[str]]], tmp_path: Path):
    asked = slurm(squeue="", sacct="5_0|CANCELLED by 0\n5_1|CANCELLED by 0", scancel="")
    of = attempts_of(tmp_path, "5_0", "5_1")
    jobs.cancel([*of.values(), tmp_path / "gone"])
    assert asked[0] == ["scancel", "5_0", "5_1"]
    assert all((path / STOP).exists() for path in of.values())
    assert not (tmp_path / "gone").exists()


def submitted(attempt: Path, *files: str) -> Path:
    """The folder of a submission, with these files in it; the attempt is its job 12_3."""
    folder = slurm_queue.submissions(attempt) / "abc"
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).touch()
    keep(attempt, "slurm", "12_3", log=str(folder / "12_3"))
    return folder


def test_what_slurm_said_is_found(attempt: Path):
    folder = submitted(attempt, "12_30_0_log.err")
    (folder / "12_30_0_log.err").write_text("slurmstepd: another job's\n")
    (folder / "12_3_0_log.out").write_text("slurmstepd: not an error\n")
    lines = ["slurmstepd-node1: error: Exceeded job memory limit", "srun: error: node1: task 0: Killed"]
    (folder / "12_3_1_log.err").write_text("\n".join(["Traceback", *lines, lines[0], "srun stops"]))
    assert slurm_queue.log_lines(attempt) == lines


def test_files_of_a_submission_are_removed_with_its_last_attempt(attempt: Path):
    mine, others = ("12_3_submitted.pkl", "12_3_0_log.out"), ("12_30_submitted.pkl", "12_submission.sh")
    folder = submitted(attempt, *mine, *others)
    slurm_queue.forget(attempt)
    assert sorted(path.name for path in folder.iterdir()) == sorted(others)
    other = attempt.with_name("id-2")
    keep(other, "slurm", "12_30", log=str(folder / "12_30"))
    slurm_queue.forget(other)
    assert not folder.exists()


def test_nothing_is_removed_elsewhere(attempt: Path, tmp_path: Path):
    elsewhere = tmp_path / "precious" / "12_3_0_log.err"
    elsewhere.parent.mkdir()
    elsewhere.touch()
    for log in (tmp_path / "precious" / "12_3", attempt / ".." / ".submit" / ".." / ".." / "precious" / "12_3", "\0"):
        keep(attempt, "slurm", "12_3", log=str(log))
        slurm_queue.forget(attempt)
        assert slurm_queue.log_lines(attempt) == []
    assert elsewhere.exists()
