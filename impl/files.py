"""Files that others wrote, read within bounds, and renaming on file systems that fail for a moment."""

import contextlib
import errno
import io
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

MOST_BYTES = 2**26
"""Of a file that is read as a whole: a table of rows, a tokenizer, a manifest."""
PASSING = (errno.EIO, errno.ESTALE)
"""Errors of a network file system that another try may not meet."""
PAUSES = (0.05, 0.2, 0.5, 1.0)
"""Seconds before each further try."""


def open_regular(path: Path) -> io.BufferedReader:
    """Open a file for reading; not a pipe, which is waited for, nor a device, which may have no end.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a file", str(path))
    return file


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file whose size is at most a limit in bytes.

    Raises: OSError where it cannot be read, is no regular file, or is longer.
    """
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"too long; valid: up to {most:,} bytes", str(path))
    return content


def read_text(path: Path, most: int = MOST_BYTES, encoding: str = "utf-8") -> str:
    """Return the text of a regular file whose size is at most a limit in bytes, each line ended by a newline.

    Raises: as `read_bytes`, and UnicodeDecodeError where it is no such text.
    """
    return io.TextIOWrapper(io.BytesIO(read_bytes(path, most)), encoding).read()


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an OSError raised inside this file's name, in place of none, as on a full disk, or of a temporary one's."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


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


def sync(folder: Path) -> None:
    """Flush the names in a folder to disk, so that a rename outlives a machine's failure; not all file systems can."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # so answer file systems that flush files alone
            raise
    finally:
        os.close(handle)


def _identity(path: Path | str) -> tuple[int, int] | None:
    """Device and inode of what lies at a path; None: nothing, or they cannot be read."""
    with contextlib.suppress(OSError):
        found = os.lstat(path)
        return found.st_dev, found.st_ino
    return None
