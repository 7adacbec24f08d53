"""Files that others wrote, read within bounds: regular ones only, and no more bytes or nesting than there should be."""

import errno
import io
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MOST_BYTES = 2**26
"""Of a file that is read as a whole: a table of rows, a tokenizer, a manifest."""


def open_regular(path: Path) -> io.BufferedReader:
    """Open a file for reading; not a pipe, which is waited for, nor a device, which may have no end.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a file", str(path))
    return file


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file of at most so many bytes.

    Raises:
        OSError: it cannot be read, is no regular file, or is longer.
    """
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"too long; valid: up to {most:,} bytes", str(path))
    return content


def read_text(path: Path, most: int = MOST_BYTES, encoding: str = "utf-8") -> str:
    """Return the text of a regular file of at most so many bytes, its lines ended by a newline each.

    Raises:
        OSError: as `read_bytes`.
        UnicodeDecodeError: it is no such text.
    """
    return io.TextIOWrapper(io.BytesIO(read_bytes(path, most)), encoding).read()


def from_json(text: str | bytes) -> Any:
    """Return the document in a text.

    Raises:
        ValueError: it is no JSON, or nested too deeply to be read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an error of the system that names no file, such as that of a full disk, this file's name."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
