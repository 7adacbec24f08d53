"""Data for trainers of the tests in this folder."""

from pathlib import Path

import pytest

from impl.data.synthetic import SyntheticConfig, write_synthetic


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token folder of bytes: 257 tokens in the vocabulary."""
    folder = tmp_path_factory.mktemp("tokens") / "synthetic"
    write_synthetic(folder, SyntheticConfig(train_tokens=20_000, valid_tokens=2_000))
    return folder
