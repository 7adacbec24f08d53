"""Renames on a file system that fails for a moment."""

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from impl import files
from impl.files import PAUSES, rename, sync


@pytest.fixture(autouse=True)
def paused(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that were waited, so to speak."""
    found: list[float] = []
    monkeypatch.setattr("impl.files.time.sleep", found.append)
    return found


@pytest.fixture(params=["file", "folder"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.touch() if request.param == "file" else path.mkdir()
    return path


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes renames fail with these errors, one after another; `done`: what fails first is carried out all the same."""
    replace = os.replace

    def put(numbers: Sequence[int], done: bool = False) -> None:
        left = list(numbers)

        def instead(source: Any, target: Any) -> None:
            if done and len(left) == len(numbers):
                replace(source, target)
            if left:
                number = left.pop(0)
                raise OSError(number, os.strerror(number))
            replace(source, target)

        monkeypatch.setattr(files.os, "replace", instead)

    return put


@pytest.mark.parametrize(
    ("errors", "done"),
    [
        ([], False),
        ([errno.EIO], False),
        ([errno.ESTALE, errno.EIO], False),
        ([errno.EIO] * len(PAUSES), False),
        ([errno.ENOENT], True),
        ([errno.EIO], True),
        ([errno.ESTALE, errno.ESTALE], True),
    ],
)
def test_what_passes_is_tried_again_and_a_rename_that_was_carried_out_is_done(
    source: Path, tmp_path: Path, failing: Callable[..., None], paused: list[float], errors: list[int], done: bool
) -> None:
    failing(errors, done)
    rename(source, tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert done or tuple(paused) == PAUSES[: len(errors)]


ONCE = [errno.ENOSPC, errno.EACCES, errno.ENOENT, errno.ENOTEMPTY]


@pytest.mark.parametrize("errors", [*([number] for number in ONCE), [errno.EIO] * (len(PAUSES) + 1)])
def test_what_does_not_pass_is_raised(
    source: Path, tmp_path: Path, failing: Callable[..., None], paused: list[float], errors: list[int]
) -> None:
    failing(errors)
    with pytest.raises(OSError, match=os.strerror(errors[0])):
        rename(source, tmp_path / "target")
    assert (len(paused), source.exists()) == (len(errors) - 1, True)


def test_another_file_at_the_target_is_no_sign_that_it_was_carried_out(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("another's")
    with pytest.raises(FileNotFoundError):
        rename(tmp_path / "none", tmp_path / "target")


def test_a_file_system_that_flushes_no_folder_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(number: int) -> Callable[[int], None]:
        def flush(_: int) -> None:
            raise OSError(number, os.strerror(number))

        return flush

    monkeypatch.setattr(files.os, "fsync", refusing(errno.EINVAL))
    sync(tmp_path)
    monkeypatch.setattr(files.os, "fsync", refusing(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        sync(tmp_path)
