"""Folders that are written: whether one can be, before anything is computed for it, and whole or not at all."""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from impl.errors import InputError
from impl.files import rename


def require_writable(folder: Path) -> None:
    """Make a folder, and check that it can be written.

    Raises:
        InputError: it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"--out: {folder} cannot be written ({error.strerror}); give a folder that can") from error


@contextlib.contextmanager
def replaced(out: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `out` once it is written completely; until then `out` does not change.

    Raises:
        InputError: it cannot be written.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    except OSError as error:
        raise InputError(f"--out: {out} cannot be written ({error.strerror}); give a folder that can") from error
    old = new.with_name(f"{new.name}.old")
    try:
        yield new
        new.chmod(0o755)
        if out.exists():
            os.rename(out, old)
        rename(new, out)
    except BaseException:
        if old.exists() and not out.exists():
            os.rename(old, out)
        shutil.rmtree(new, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
    if old.exists():
        print(f"warning: {old} could not be removed", file=sys.stderr)
