"""Renames on a file system that fails for a moment."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from impl import files
from impl.files import PAUSES, rename


@pytest.fixture(autouse=True)
def paused(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that were waited, so to speak."""
    found: list[float] = []
    monkeypatch.setattr("impl.files.time.sleep", found.append)
    return found


@pytest.fixture(params=["file", "folder"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "source"
    if request.param == "file":
        path.write_text("new")
    else:
        path.mkdir()
    return path


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes renames fail with these errors, one after another; `done`: what fails first is carried out all the same."""
    replace = os.replace

    def put(*numbers: int, done: bool = False) -> None:
        left = list(numbers)

        def instead(source: Any, target: Any) -> None:
            if done and len(left) == len(numbers):
                replace(source, target)
            if left:
                number = left.pop(0)
                raise OSError(number, os.strerror(number))
            replace(source, target)

        monkeypatch.setattr(files.os, "replace", instead)

    yield put
    monkeypatch.undo()


@pytest.mark.parametrize("errors", [(), (errno.EIO,), (errno.ESTALE, errno.EIO), (errno.EIO,) * len(PAUSES)])
def test_what_passes_is_tried_again(
    source: Path, tmp_path: Path, failing: Callable[..., None], paused: list[float], errors: tuple[int, ...]
) -> None:
    failing(*errors)
    rename(source, tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert tuple(paused) == PAUSES[: len(errors)]


@pytest.mark.parametrize("errors", [(errno.ENOENT,), (errno.EIO,), (errno.ESTALE, errno.ESTALE)])
def test_a_rename_that_was_carried_out_is_done_whatever_was_answered(
    source: Path, tmp_path: Path, failing: Callable[..., None], errors: tuple[int, ...]
) -> None:
    failing(*errors, done=True)
    rename(source, tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.ENOENT, errno.ENOTEMPTY])
def test_what_does_not_pass_is_raised_at_once(
    source: Path, tmp_path: Path, failing: Callable[..., None], paused: list[float], number: int
) -> None:
    failing(number)
    with pytest.raises(OSError, match=os.strerror(number)):
        rename(source, tmp_path / "target")
    assert (paused, source.exists()) == ([], True)


def test_what_does_not_end_is_raised_in_the_end(source: Path, tmp_path: Path, failing: Callable[..., None]) -> None:
    failing(*(errno.EIO,) * (len(PAUSES) + 1))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        rename(source, tmp_path / "target")
    assert source.exists()


def test_another_file_at_the_target_is_no_sign_that_it_was_carried_out(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("another's")
    with pytest.raises(FileNotFoundError):
        rename(tmp_path / "none", tmp_path / "target")
