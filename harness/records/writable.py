"""Whether a folder of records can be written, before anything is computed for it."""

import tempfile

from harness.records.store import Store
from impl.errors import InputError


def require_writable(store: Store) -> None:
    """Make the store's folder, and check that it can be written.

    Raises:
        InputError: it cannot be made or written.
    """
    try:
        store.recorded.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=store.folder):
            pass
    except OSError as error:
        raise InputError(
            f"--out: {store.folder} cannot be written ({error.strerror}); give a folder that can"
        ) from error
