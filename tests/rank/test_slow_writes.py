"""A checkpoint that takes long to write is progress, as long as it is written."""

import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from harness.rank import resume
from impl import checkpoint
from impl.checkpoint import Checkpoints
from impl.run import Run
from tests.harness.small_runs import write_tokens
from tests.impl.on_ranks import trainer


def test_waiting_for_a_write_is_noted(
    tmp_path: Path, one_rank: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "LOOK_SECONDS", 0.001)
    noted, enough = list[int](), threading.Event()

    def note() -> None:
        noted.append(1)
        if len(noted) == 3:
            enough.set()

    def write() -> None:
        enough.wait(30)

    one = trainer(Run(), write_tokens(tmp_path))
    checkpoints = Checkpoints(tmp_path / "checkpoints", one, one_rank, on_wait=note)
    checkpoints._under_way = checkpoints._thread.submit(write)
    checkpoints.wait()
    assert len(noted) >= 3


def test_it_is_noted_until_nothing_has_been_written_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, written, noted = [0.0], [0], list[float]()
    monkeypatch.setattr(resume, "written_bytes", lambda: written[0])
    monkeypatch.setattr(resume.time, "monotonic", lambda: clock[0])
    writing = resume.Writing(lambda: noted.append(clock[0]), 10.0)
    for second in range(40):
        clock[0], written[0] = float(second), min(second, 15)
        writing()
    assert noted == [float(second) for second in range(25)]


def test_bytes_that_a_process_writes_are_counted_and_not_the_look_at_them(tmp_path: Path) -> None:
    before = resume.written_bytes()
    assert resume.written_bytes() == before
    (tmp_path / "file").write_bytes(bytes(10_000))
    assert before == 0 or resume.written_bytes() - before >= 10_000
