"""A store for runs that really train."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.records.store import Store
from tests.harness.small_runs import kill_all


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store on a machine without GPUs; no process that works in it outlives the test."""
    monkeypatch.setattr("harness.launch.slurm.gpu_count", lambda: 0)
    yield Store(tmp_path / "results", "made_up", "smoke")
    kill_all(tmp_path)
