"""Where benchmarks find data and a terminal, and where they leave what they measured."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from _pytest.capture import CaptureManager

from harness.records.environment import host_environment
from harness.records.store import write_atomically
from impl.data.synthetic import SyntheticConfig, write_synthetic
from tests.bench.screen import Screen

COMMAND = ["python", "-m", "harness", "bench"]
running: set[str] = set()
"""Tests that have begun and not ended."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--keep", type=Path, default=None, help="folder for the side-by-side tables; none: they are shown")


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    machine_info["environment"] = host_environment(COMMAND)


def pytest_runtest_logstart(nodeid: str) -> None:
    running.add(nodeid)


def pytest_runtest_logfinish(nodeid: str) -> None:
    running.discard(nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_benchmark_generate_json(benchmarks: list[Any]) -> None:
    """Leave out what was interrupted: it has too few rounds, or none, over which the report would fail."""
    benchmarks[:] = [one for one in benchmarks if one.stats.data and one.fullname not in running]


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens") / "synthetic"
    write_synthetic(folder, SyntheticConfig(train_tokens=1_000_000, valid_tokens=10_000))
    return folder


@pytest.fixture(scope="session")
def uncaptured(request: pytest.FixtureRequest) -> CaptureManager:
    capture = request.config.pluginmanager.getplugin("capturemanager")
    assert isinstance(capture, CaptureManager)
    return capture


@pytest.fixture(scope="session")
def screen(uncaptured: CaptureManager) -> Iterator[Screen]:
    """Standard error as the terminal has it."""
    with uncaptured.global_and_fixture_disabled():
        file = os.dup(2)
    yield Screen(file)
    os.close(file)


@pytest.fixture(scope="session")
def publish(
    request: pytest.FixtureRequest, uncaptured: CaptureManager
) -> Callable[[str, str, Mapping[str, Any] | None], None]:
    """Shows a text, and keeps it with the measurements it was made from if a folder is given; None: not all are there.

    Arguments: stem of the files, the text in Markdown, what was measured.
    """

    def show_and_keep(name: str, text: str, measured: Mapping[str, Any] | None) -> None:
        with uncaptured.global_and_fixture_disabled():
            print(f"\n\n{text}")
        folder = request.config.getoption("--keep", default=None)
        if folder is not None and measured is not None:
            document = {"environment": host_environment(COMMAND), **measured}
            write_atomically(folder / f"{name}.json", json.dumps(document, indent=1) + "\n")
            write_atomically(folder / f"{name}.md", text)

    return show_and_keep
