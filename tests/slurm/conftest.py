"""Fixtures of tests on a real Slurm; each file has its own, so that they can be tested at the same time."""

from collections.abc import Iterator

import pytest

from tests.slurm.two_nodes import TwoNodes, two_nodes


@pytest.fixture(scope="module")
def slurm() -> Iterator[TwoNodes]:
    with two_nodes() as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def asked_often(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("harness.launch.sweep.SCHEDULER_SECONDS", 1.0)
    monkeypatch.setattr("harness.launch.slurm.gpu_count", lambda: 0)
