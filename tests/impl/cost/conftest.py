"""Synthetic tokens for trainers whose memory and traffic are measured."""

from pathlib import Path

import pytest

from impl.data.synthetic import SyntheticConfig, write_synthetic


@pytest.fixture(scope="package")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens") / "synthetic"
    write_synthetic(folder, SyntheticConfig(train_tokens=20_000, valid_tokens=2_000))
    return folder
