"""The doctor's judgements, of facts and of captured texts; and once for real, with two ranks."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.doctor import checks
from harness.doctor.checks import Check, Partition, partitions, requeue
from harness.doctor.doctor import layout
from harness.doctor.ranks import of_ranks, rank_table, time_table
from harness.doctor.report import HostReport, Timing, Transfer
from harness.rank import slurm_queue
from harness.rank.failure import Failure
from impl.plan import Plan
from tests.harness.calls import call, document, refused

GIB = 2**30


def grades(lines: Any) -> dict[str, str]:
    return {line.what: line.grade for line in lines}


@pytest.mark.parametrize(
    ("ranks", "degrees"),
    [(1, (1, 1, 1)), (2, (2, 1, 1)), (4, (2, 2, 1)), (6, (3, 2, 1)), (7, (7, 1, 1)), (12, (3, 2, 2)), (64, (4, 4, 4))],
)
def test_a_mesh_has_as_many_axes_above_one_as_its_ranks_allow(ranks: int, degrees: tuple[int, int, int]) -> None:
    plan = layout(ranks)
    assert (plan.dp, plan.tp, plan.pp) == degrees


# This machine -------------------------------------------------------------------------------------------------------


def test_packages_are_compared_with_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "requirements.lock"
    assert "is missing" in checks.packages(lock).found
    lock.write_text("# comment\ntorch==2.13.0\nNumPy==2.4.1 # why\nruff==0.17.0 ; python_version > '3'\n\njupyter==1\n")
    installed = dict.fromkeys(checks.REQUIRED, "1") | {"torch": "2.13.0+cpu", "NumPy": "2.4.1"}
    monkeypatch.setattr(checks, "version_of", installed.get)
    assert checks.packages(lock) == Check("packages", "ok", "2 installed, at the lock's versions")
    installed |= {"torch": "2.12.0", "ruff": "0.16"}
    older = "not the lock's: torch 2.12.0 (lock: 2.13.0), ruff 0.16 (lock: 0.17.0)"
    assert checks.packages(lock) == Check("packages", "warning", older, checks.INSTALL)
    del installed["submitit"]
    assert checks.packages(lock) == Check("packages", "failed", "submitit: not installed", checks.INSTALL)


@pytest.mark.parametrize(
    ("what", "amounts"),
    [("memory", {"failed": 0.5, "warning": 1.0, "ok": 4.0}), ("disk", {"failed": 0.5, "warning": 5, "ok": 50})],
)
def test_memory_and_disk_have_room(
    what: str, amounts: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for grade, gib in amounts.items():
        monkeypatch.setattr(checks.psutil, "virtual_memory", lambda gib=gib: SimpleNamespace(available=gib * GIB))
        monkeypatch.setattr(checks.shutil, "disk_usage", lambda _, gib=gib: SimpleNamespace(free=gib * GIB))
        [line] = [line for line in [*checks.machine(2, "cpu"), *checks.files(tmp_path)] if line.what == what]
        assert (line.grade, bool(line.mend)) == (grade, grade != "ok")


@pytest.mark.parametrize(
    ("ranks", "device", "expected"),
    [
        (2, "cpu", {"devices": "ok", "cores": "ok", "shared memory": "ok"}),
        (4, "cpu", {"devices": "ok", "cores": "warning", "shared memory": "ok"}),
        (2, "cuda", {"devices": "failed", "cores": "ok", "shared memory": "warning"}),
    ],
)
def test_there_are_enough_cores_gpus_and_shared_memory(
    ranks: int, device: str, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "gpu_count", lambda: 1)
    monkeypatch.setattr(checks.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(checks.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**26))  # docker's default
    found = grades(checks.machine(ranks, device))
    assert {what: found[what] for what in expected} == expected


def test_a_folder_is_checked_and_left_as_it_was(tmp_path: Path) -> None:
    assert set(grades(checks.files(tmp_path))) == {"disk", "renames", "file times"}
    assert grades(checks.files(tmp_path / "new" / "folder"))["renames"] == "ok"
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_with_wrong_renames_or_another_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.os, "rename", lambda old, new: (new / "owner").write_text("mine"))
    assert checks.renames(tmp_path).grade == "failed"
    monkeypatch.setattr(checks.time, "time", lambda: 0.0)
    assert checks.clock_of_files(tmp_path).grade == "warning"


# The scheduler ------------------------------------------------------------------------------------------------------

SINFO = """main*|up|infinite|1|idle
main*|up|infinite|2|mix
main*|up|infinite|1|down*
short|up|1:00|2|idle
long|up|2-00:00:00|1|alloc
off|down|1-00:00:00|4|idle
drained|up|1-00:00:00|4|drain
garbage
"""


def test_what_sinfo_says_of_partitions() -> None:
    found = partitions(SINFO)
    assert found["main"] == Partition(True, True, None, 4, 3)
    assert found["short"] == Partition(False, True, 1, 2, 2)
    assert found["long"].minutes == 2 * 24 * 60
    assert not found["off"].is_up
    assert found["drained"].usable == 0
    assert partitions("") == {}
    assert partitions("gpu*|up|2-00:00:00|4|plnd\n")["gpu"].usable == 4


@pytest.mark.parametrize(
    ("name", "nodes", "expected"),
    [
        (None, 2, {"partition": "ok"}),
        ("main", 4, {"partition": "warning"}),
        ("main", 5, {"partition": "failed"}),
        ("short", 1, {"partition": "ok", "time limit": "warning"}),
        ("off", 1, {"partition": "failed", "time limit": "warning"}),
        ("drained", 1, {"partition": "warning", "time limit": "warning"}),
        ("nowhere", 1, {"partition": "failed"}),
        ("main,nowhere", 1, {"partition": "failed"}),
    ],
)
def test_a_partition_has_to_be_there_and_up_with_nodes_and_time(
    name: str | None, nodes: int, expected: dict[str, str]
) -> None:
    lines = list(checks.of_partition(partitions(SINFO), name, nodes))
    assert grades(lines) == expected
    assert all(line.mend for line in lines if line.grade != "ok")
    [line] = checks.of_partition(partitions("a|up|infinite|1|idle\n"), None, 1)
    assert (line.grade, line.found) == ("failed", "none is the default")


def test_whether_preempted_jobs_are_requeued() -> None:
    assert requeue("JobRequeue              = 1\nMaxArraySize            = 1001\n").grade == "ok"
    assert requeue("JobRequeue              = 0\n").grade == "warning"


def test_a_scheduler_that_is_not_there_or_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    [line] = checks.scheduler(None, 1)
    assert (line.grade, line.found) == ("failed", "sinfo: no sinfo on this machine")
    answers = {"sinfo": "echo 'main*|up|infinite|2|idle'", "sacct": "echo 'no accounts' >&2; exit 1", "scontrol": ":"}
    for name, answer in answers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / name).chmod(0o755)
    assert grades(checks.scheduler("main", 2)) == {
        "scheduler": "ok", "partition": "ok", "accounting": "warning", "requeue": "ok",
    }  # fmt: skip

    def slow(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("sinfo", 20)

    monkeypatch.setattr(slurm_queue.subprocess, "run", slow)
    assert "no answer within 30 s" in slurm_queue.ask("sinfo")[1]


# The ranks ----------------------------------------------------------------------------------------------------------


def rank(number: int, **changed: Any) -> HostReport:
    """What a rank reports that has found nothing wrong."""
    timed = (Timing(2**20, 1e-3), Timing(2**24, 1e-2))
    return HostReport(**{
        "rank": number, "local_rank": number % 2, "host": f"node{number // 2}", "process": 100 + number,
        "device": "cpu", "python": "3.12.1", "torch": "2.13.0", "backend": "gloo", "has_backend": True, "cores": 2,
        "core_set": [0, 1], "threads": 1, "memory_bytes": 2**33, "met_seconds": 3.0,
        "place": {"pp": 0, "dp": number // 2, "tp": number % 2}, "axes": {"dp": 1e-3, "tp": 1e-3},
        "clock_seconds": 0.001 * number, "all_reduce": timed,
        "transfers": (Transfer(1, timed), Transfer(2, timed)), "at": "",
    } | changed)  # fmt: skip


def judged(
    ranks: list[HostReport], failure: Failure | None = None, state: str = "ended", log: Any = ()
) -> dict[str, Check]:
    return {line.what: line for line in of_ranks(Plan(dp=2, tp=2), ranks, failure, state, log)}


FOUR = [rank(number) for number in range(4)]
FAILURE = Failure(3, "error", "rank 3, all-reduce over tp: RuntimeError: Timed out", 1.0, ("end",))
DUPLICATE = replace(FAILURE, reason="Duplicate GPU detected : rank 3 and rank 2 both on CUDA device 0")


def test_ranks_that_have_found_nothing_wrong() -> None:
    found = judged(FOUR)
    assert {line.grade for line in found.values()} == {"ok"}
    assert found["ranks"].found == "4 on node0 (2), node1 (2)"
    assert found["all-reduce tp"].found.startswith("groups of 2")
    assert "all-reduce pp" not in found
    assert found["p2p"].found == "rank 0 to 1: 3.36 GB/s"  # 16 MiB there and back in 10 ms
    assert found["all-reduce"].found == "4 ranks: 2.52 GB/s sent by each"  # of 16 MiB 3/2
    assert found["p2p hosts"].found == "rank 0 to 2: 3.36 GB/s"
    assert rank_table(FOUR).row_count == 4
    assert time_table(FOUR).row_count == 6


SLOW = (Timing(2**24, 10.0),)
STUCK = [rank(number, axes={"dp": 1e-3}, at="all-reduce over tp") for number in (2, 3)]


@pytest.mark.parametrize(
    ("ranks", "others", "what", "grade", "words"),
    [
        (FOUR[:3], (None, "pending (Resources)"), "ranks", "failed", "from rank 3: the job is pending (Resources)"),
        (FOUR[:3], (None, "pending"), "ranks", "failed", "a longer --wait"),
        (FOUR[:3], (None, "ended", ["exceeded memory limit"]), "ranks", "failed", "ended: exceeded memory limit"),
        (FOUR[:3], (FAILURE,), "ranks", "failed", "rank 3, all-reduce over tp: RuntimeError: Timed out (end)"),
        ([*FOUR[:3], rank(3, met_seconds=None)], (FAILURE,), "meeting", "failed", "`interface` in the site file"),
        ([*FOUR[:2], *STUCK], (FAILURE,), "all-reduce dp", "ok", "groups of 2"),
        ([*FOUR[:2], *STUCK], (FAILURE,), "all-reduce tp", "failed", "rank 2, 3 did not return from it"),
        ([*FOUR[:2], *STUCK], (DUPLICATE,), "all-reduce tp", "failed", "a GPU for each rank"),
        ([*FOUR[:3], rank(3, at="timing transfers")], (FAILURE,), "end", "failed", "rank 3 timing transfers"),
        ([*FOUR[:3], rank(3, torch="2.12.0")], (), "torch", "warning", "2.13.0 (3), 2.12.0 (1)"),
        ([rank(n, device="none") for n in range(4)], (), "device of ranks", "failed", "none (4)"),
        ([rank(n, has_backend=False) for n in range(4)], (), "backend", "failed", "no gloo"),
        ([rank(n, core_set=[0]) for n in range(4)], (), "cores of ranks", "warning", "node0 gives 1 to 2 ranks"),
        ([*FOUR[:3], rank(3, clock_seconds=-40.0)], (), "clocks", "warning", "40.0 s apart, node1 most"),
        ([rank(0, transfers=(Transfer(2, SLOW),)), *FOUR[1:]], (), "p2p hosts", "warning", "slow for a cluster"),
        # within a host it shows the machine, not a network
        ([rank(0, transfers=(Transfer(1, SLOW),)), *FOUR[1:]], (), "p2p", "ok", "rank 0 to 1: 0.00 GB/s"),
    ],
)
def test_what_is_wrong_with_ranks_is_named(
    ranks: list[HostReport], others: tuple[Any, ...], what: str, grade: str, words: str
) -> None:
    line = judged(ranks, *others)[what]
    assert line.grade == grade
    assert words in f"{line.found}; {line.mend}"


# The verb -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--ranks 0", "--ranks 0"),
        ("--ranks many", "'many'"),
        ("--wait 0", "--wait"),
        ("--wait nan", "--wait"),
        ("--site nowhere.toml", "nowhere.toml"),
        ("--on slurm --ranks 9 --ranks-per-node 8", "9 ranks"),
        ("--on moon", "moon"),
    ],
)
def test_bad_input_is_a_line(arguments: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in refused("doctor", *arguments.split())
    assert list(tmp_path.iterdir()) == []


def test_what_has_failed_before_keeps_the_ranks_from_being_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("harness.doctor.doctor._with_ranks", lambda *_: pytest.fail("ranks were started"))
    (tmp_path / "file").write_text("mine")
    answer = call("doctor", "--out", "file", "--json", "--device", "cpu")
    assert (answer.status, answer.errors) == (1, "")
    lines = {line["what"]: line for line in document(answer.output)["checks"]}
    assert lines["files"]["grade"] == "failed"
    assert lines["files"]["mend"]
    assert "mend first" in lines["ranks"]["mend"]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("gpus", "device", "ranks"), [(0, "auto", 2), (1, "auto", 1), (1, "cuda", 1), (8, "auto", 8), (1, "cpu", 2)]
)
def test_a_rank_for_each_gpu_or_two(
    gpus: int, device: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    monkeypatch.setattr("harness.doctor.doctor.gpu_count", lambda: gpus)
    monkeypatch.setattr("harness.doctor.doctor._before", lambda *_: iter(()))
    monkeypatch.setattr("harness.doctor.doctor._with_ranks", lambda _, count, *__: started.append(count) or [])
    assert call("doctor", "--device", device, "--out", str(tmp_path)).status == 0
    assert started == [ranks]


def test_two_ranks_meet_measure_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("harness.doctor.measuring.COLLECTIVE_SECONDS", 120.0)  # machines that run tests are shared
    answer = call("doctor", "--out", "results/new", "--json", "--device", "cpu", "--ranks", "2")
    found = document(answer.output)
    lines = {line["what"]: line for line in found["checks"]}
    assert lines["meeting"]["grade"] == lines["all-reduce dp"]["grade"] == "ok", lines
    assert lines["clocks"]["grade"] == "ok"
    assert "GB/s" in lines["p2p"]["found"]
    assert answer.status == int("failed" in found["counts"])
    places = [{"pp": 0, "dp": dp, "cp": 0, "tp": 0} for dp in (0, 1)]
    assert [one["place"] for one in found["ranks"]] == places
    assert json.dumps(found).count(str(tmp_path)) <= 1  # the folder whose disk was looked at
    assert list(tmp_path.iterdir()) == []
