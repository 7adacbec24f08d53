"""Where `make bench` leaves what it measured."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from _pytest.capture import CaptureManager

from harness.environment import host_environment
from harness.store import write_atomically
from impl.data.synthetic import SyntheticConfig, write_synthetic

Publish = Callable[[str, str, Mapping[str, Any] | None], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--keep", type=Path, default=None, help="folder for the side-by-side tables; none: they are shown")


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens") / "synthetic"
    write_synthetic(folder, SyntheticConfig(train_tokens=200_000, valid_tokens=2_000))
    return folder


@pytest.fixture(scope="session")
def publish(request: pytest.FixtureRequest) -> Publish:
    """Shows a text, and keeps it with the measurements it was made from if a folder is given; None: not all are there.

    Arguments: stem of the files, the text in Markdown, what was measured.
    """

    def show_and_keep(name: str, text: str, measured: Mapping[str, Any] | None) -> None:
        capture = request.config.pluginmanager.getplugin("capturemanager")
        assert isinstance(capture, CaptureManager)
        with capture.global_and_fixture_disabled():
            print(f"\n\n{text}")
        folder = request.config.getoption("--keep", default=None)
        if folder is not None and measured is not None:
            document = {"environment": host_environment(["make", "bench"]), **measured}
            write_atomically(folder / f"{name}.json", json.dumps(document, indent=1) + "\n")
            write_atomically(folder / f"{name}.md", text)

    return show_and_keep
