"""Renaming on file systems that fail for a moment, as network file systems do."""

import contextlib
import errno
import os
import time
from pathlib import Path

PASSING = (errno.EIO, errno.ESTALE)
"""Errors of a network file system that another try may not meet."""
PAUSES = (0.05, 0.2, 0.5, 1.0)
"""Seconds before each further try."""


def rename(source: Path | str, target: Path | str) -> None:
    """Rename a file or folder, in several tries where the file system fails for a moment.

    NFS may carry a rename out, lose the answer, and find no source when it asks again: that rename is done.

    Raises:
        OSError: every try failed, or it failed in another way.
    """
    moved = _identity(source)
    for pause in (*PAUSES, None):
        try:
            os.replace(source, target)
            return
        except OSError as error:
            if error.errno == errno.ENOENT and moved is not None and _identity(target) == moved:
                return
            if error.errno not in PASSING or pause is None:
                raise
        time.sleep(pause)


def _identity(path: Path | str) -> tuple[int, int] | None:
    """Device and inode of what lies at a path; None: nothing, or they cannot be read."""
    with contextlib.suppress(OSError):
        found = os.lstat(path)
        return found.st_dev, found.st_ino
    return None
