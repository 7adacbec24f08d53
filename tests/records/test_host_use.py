"""What others take of the processors while a run trains: measured by ranks, summed by host, marked in tables."""

import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.analysis.tables import throughput_table
from harness.rank.host_use import HostUse as Clock
from harness.records.parts import HostUse, others_share
from tests.harness.made_up_records import changed, record


def use(local_rank: int = 0, *, own: float, busy: float, stolen: float = 0.0, core: int = 0) -> HostUse:
    of_core = {"core": core, "cores": 2, "seconds": 10.0}
    return HostUse(local_rank=local_rank, own=own, busy=busy, stolen=stolen, **of_core)


@pytest.mark.parametrize(
    ("uses", "share"),
    [
        ([use(own=10, busy=10)], 0.0),
        ([use(own=10, busy=15)], 0.25),
        ([use(own=10, busy=9.9)], 0.0),  # clocks are of different grain
        ([use(own=9, busy=18), use(1, own=9, busy=18)], 0.0),
        ([use(own=9, busy=20), use(1, own=7, busy=20)], 0.2),
        ([use(own=10, busy=10, stolen=4)], 0.2),
        ([use(own=9, busy=9), use(own=9, busy=19)], 0.5),  # two hosts: the worse one
        ([use(own=9, busy=9), use(1, own=9, busy=13, core=2)], 0.2),  # each rank has cores of its own
    ],
)
def test_shares_of_the_processors_time(uses: list[HostUse], share: float) -> None:
    assert others_share(uses) == pytest.approx(share)


def test_what_no_rank_measured_is_unknown_and_not_marked() -> None:
    assert math.isnan(others_share([]))
    assert math.isnan(others_share([use(own=1, busy=1), None]))
    assert not record().is_disturbed
    assert "‡" not in str(throughput_table([record()]).cells)


def test_a_run_that_others_disturbed_is_marked_with_a_note() -> None:
    host = {"local_rank": 0, "core": 0, "cores": 2, "seconds": 10.0, "own": 10.0, "busy": 13.0, "stolen": 0.0}
    disturbed = changed(record(), ranks=[{"rank": 0, "host": host}])
    assert disturbed.is_disturbed
    table = throughput_table([disturbed])
    assert any("‡" in row for row in table.cells)
    assert any(note.startswith("‡ ") for note in table.notes)


def test_processors_have_the_numbers_of_the_system_where_some_are_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle, busy = "0 0 0 100 0 0 0 0 0 0", "200 0 0 100 0 0 0 0 0 0"
    lines = [f"cpu  {busy}", *(f"cpu{core} {busy if core == 8 else idle}" for core in (0, 4, 8))]
    (tmp_path / "stat").write_text("\n".join([*lines, "btime 1"]) + "\n")
    monkeypatch.setattr("psutil.PROCFS_PATH", str(tmp_path))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {8})
    assert Clock(local_rank=0).begun["busy"] > 1


def test_a_rank_tells_its_own_time_from_that_of_another_program() -> None:
    clock = Clock(local_rank=3)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        while (found := clock.so_far())["seconds"] < 1.0 or found["busy"] < found["own"] + 0.3:
            assert found["seconds"] < 60, found
            end = time.process_time() + 0.1
            while time.process_time() < end:
                pass
        other.kill()
    assert found["own"] >= 0.1
    assert (found["local_rank"], found["cores"] >= 1) == (3, True)
    assert HostUse(**found).stolen >= 0
