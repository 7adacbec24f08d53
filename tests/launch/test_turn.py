"""Commands that wait until no other one trains on this machine."""

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from harness.launch.attempt import Options
from harness.launch.turn import Turn
from harness.records.store import Store
from tests.harness.fake_site import FakeSite
from tests.harness.small_runs import Told, small, sweep, write_tokens


def options(jobs: int | None) -> Options:
    return Options(site=FakeSite(), jobs=jobs)  # type: ignore[arg-type]


@pytest.fixture
def other(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Another process that has its turn, with so many jobs, until it is killed."""
    monkeypatch.setenv("LMSCALE_TURNS", str(tmp_path))
    reading, writing = os.pipe()
    if not (child := os.fork()):
        turn = Turn(options(request.param), "timed, smoke tier", print)
        os.write(writing, b"1" if turn.take() else b"0")
        signal.pause()
    assert os.read(reading, 1) == b"1"
    yield child
    end(child)


def end(child: int) -> None:
    try:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


@pytest.mark.parametrize(
    ("other", "jobs", "waits"), [(None, None, True), (1, 2, True), (3, 1, True), (2, 3, False)], indirect=["other"]
)
def test_only_commands_that_time_nothing_train_together(other: int, jobs: int | None, waits: bool) -> None:
    told: list[str] = []
    with closing(Turn(options(jobs), "mine", told.append)) as turn:
        assert [turn.take(), turn.take()] == [not waits] * 2
        said = f"process {other} (timed, smoke tier) trains on this machine; waiting, as both would be slower"
        assert told == [said] * waits, "once"
        end(other)
        assert turn.take(), "the system ends the turn of a process that is killed"


class Killing(Told):
    """Display that ends another process when it hears of it."""

    def __init__(self, other: int) -> None:
        super().__init__()
        self.other = other

    def message(self, text: str) -> None:
        super().message(text)
        end(self.other)


@pytest.mark.parametrize("other", [1], indirect=True)
@pytest.mark.parametrize("on", ["local", "slurm"])
def test_a_sweep_here_waits_for_another_and_one_on_a_cluster_does_not(other: int, on: str, tmp_path: Path) -> None:
    store, run = Store(tmp_path / "out", "made_up", "smoke"), small(write_tokens(tmp_path / "tokens"))
    told = sweep(store, [run], site=FakeSite(on=on), told=Killing(other))
    assert told.ends == [(run.id, "ok")]
    assert [f"process {other} " in message for message in told.messages] == [True] * (on == "local")


def test_where_nothing_can_be_locked_nothing_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMSCALE_TURNS", str(tmp_path / "nowhere"))
    assert Turn(options(1), "mine", print).take()
