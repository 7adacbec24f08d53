"""Where a rank is, seen from outside its process."""

import mmap
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from harness.rank.heartbeat import (
    SIZE,
    Alive,
    Heartbeat,
    Pulse,
    SharedMemory,
    is_alive,
    places,
    read_alive,
    write_alive,
)
from impl.collectives import all_reduce_sum, broadcast, observed
from tests.ranks import run_ranks


def shared() -> tuple[SharedMemory, Heartbeat]:
    watched = SharedMemory()
    return watched, Heartbeat(mmap.mmap(watched.file.fileno(), SIZE))


def test_a_supervisor_reads_what_a_rank_notes() -> None:
    watched, heart = shared()
    with watched.file:
        assert watched.pulse() == Pulse()
        heart.enter("start-up", action="rendezvous")
        assert watched.pulse() == Pulse(1, "start-up", 0, "rendezvous")
        heart.enter("training", 12)
        heart.begin("1F3")
        assert watched.pulse() == Pulse(3, "training", 12, "1F3")
        heart.end("1F3")
        assert watched.pulse().action == "after 1F3"
        heart.begin("x" * 500)
        assert watched.pulse().action == "x" * 48
        assert not heart.is_end_requested()
        watched.request_end()
        assert heart.is_end_requested()


def test_a_process_notes_into_its_standard_input() -> None:
    code = (
        "from harness.rank.heartbeat import Heartbeat;"
        "h = Heartbeat.of_this_rank(); h.enter('training', 7); h.begin('0B1');"
        "print(h.is_end_requested())"
    )
    watched = SharedMemory()
    with watched.file:
        watched.request_end()
        done = subprocess.run([sys.executable, "-c", code], stdin=watched.file, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
        assert watched.pulse() == Pulse(2, "training", 7, "0B1")


def reduced(axis: str) -> list[str]:
    """What a supervisor sees after each of a few collectives, on a rank."""
    watched, heart = shared()
    group = dist.group.WORLD
    assert group is not None
    heart.name_groups({str(group.group_name): axis})
    seen = []
    with watched.file, observed(heart.began):
        heart.enter("training", 3)
        for action in (
            lambda: all_reduce_sum(torch.ones(1), group),
            lambda: heart.begin("0F0"),
            lambda: broadcast(torch.ones(1), 0, group),
            lambda: heart.end("0F0"),
            lambda: heart.enter("evaluation", 4),
        ):
            action()
            seen.append(str(watched.pulse()))
    return seen


def test_collectives_are_told_with_the_axis_of_their_group() -> None:
    expected = [
        "in step 3 at all_reduce(dp)",
        "in step 3 at 0F0",
        "in step 3 at broadcast(dp) (0F0)",
        "in step 3 after 0F0",
        "evaluating after 4 steps",
    ]
    assert run_ranks(2, reduced, "dp") == [expected] * 2


def test_over_one_rank_a_broadcast_counts_as_progress_and_is_no_action(one_rank: dist.ProcessGroup) -> None:
    watched, heart = shared()
    heart.name_groups({str(one_rank.group_name): None})
    with watched.file, observed(heart.began):
        heart.begin("0F0")
        all_reduce_sum(torch.ones(1), one_rank)
        assert watched.pulse() == Pulse(1, "", 0, "0F0")
        broadcast(torch.ones(1), 0, one_rank)
        assert watched.pulse() == Pulse(2, "", 0, "0F0")
    broadcast(torch.ones(1), 0, one_rank)
    assert heart.shared.notes == 2


# The file -----------------------------------------------------------------------------------------------------------


def test_the_last_sign_of_life_is_read_back(tmp_path: Path) -> None:
    told = Alive(1e9, "node1", 2, 3.5, "stopped", Pulse(9, "training", 4, "0F1"))
    write_alive(tmp_path, 1, told)
    assert read_alive(tmp_path, 1) == told
    assert [path.name for path in tmp_path.iterdir()] == ["rank-1.alive.json"]
    assert read_alive(tmp_path, 0) is None


@pytest.mark.parametrize("text", ["", "[]", "null", '{"time": "x", "host": 3, "progress": []}', '{"ended": {}}', "{"])
def test_a_file_that_holds_no_sign_of_life_harms_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / "rank-0.alive.json").write_text(text)
    assert read_alive(tmp_path, 0) in (None, Alive())


def test_a_clock_that_is_set_makes_no_rank_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = tmp_path / "id-1"
    attempt.mkdir()
    write_alive(attempt, 0, Alive())
    assert is_alive(attempt, 60)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600)  # of this host; the file system has a server's clock
    assert is_alive(attempt, 60)


def test_no_disk_no_harm(tmp_path: Path) -> None:
    write_alive(tmp_path / "nowhere", 0, Alive())


def test_ranks_at_the_same_place_are_told_together(tmp_path: Path) -> None:
    for rank, pulse in enumerate([Pulse(1, "training", 12, "all_reduce(dp)")] * 3 + [Pulse(1, "training", 11, "1F3")]):
        write_alive(tmp_path, rank, Alive(pulse=pulse))
    write_alive(tmp_path, 5, Alive(pulse=Pulse(1, "training", 12, "all_reduce(dp)")))
    own = Pulse(4, "evaluation", 12, "after 0F0")
    write_alive(tmp_path, 7, Alive(pulse=own))
    assert places(tmp_path, 8) == (
        "ranks 0-2, 5 in step 12 at all_reduce(dp), rank 3 in step 11 at 1F3, ranks 4, 6 not heard of, "
        "rank 7 evaluating after 12 steps after 0F0"
    )
    for rank in range(30):
        write_alive(tmp_path, rank, Alive(pulse=Pulse(1, "training", rank, "")))
    assert places(tmp_path, 30).endswith("rank 7 in step 7, 22 more places")
