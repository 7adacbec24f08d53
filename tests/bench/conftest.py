"""Where `make bench` leaves what it measured."""

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--keep", type=Path, default=None, help="folder for the side-by-side tables; none: they are shown")
