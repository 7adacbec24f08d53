"""Whether a folder can be written, before anything is computed for it."""

import tempfile
from pathlib import Path

from impl.errors import InputError


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
