"""The folder of the report, which is replaced as a whole or not at all."""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from harness.records.store import read_json
from harness.report.pages import KIND, MANIFEST
from impl.errors import InputError


def require_replaceable(out: Path) -> None:
    """Check that the path is free, an empty folder, or an earlier report.

    Raises:
        InputError: it is not.
    """
    if not out.exists() and not out.is_symlink():
        return
    is_empty = out.is_dir() and not any(out.iterdir())
    if not is_empty and not ((found := read_json(out / MANIFEST)) and isinstance(found, dict) and KIND in found):
        raise InputError(f"--out {out}: is no report; valid: a folder that is new, empty, or an earlier report")


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
        os.rename(new, out)
    except BaseException:
        if old.exists() and not out.exists():
            os.rename(old, out)
        shutil.rmtree(new, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
    if old.exists():
        print(f"warning: {old} could not be removed", file=sys.stderr)
