"""Atomic writing of a token folder."""

import errno
import hashlib
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from impl.data.tokens import FOLDER_FILES, MANIFEST_FILE, Manifest, Split, SplitName, TokenFolder, read_manifest
from impl.errors import InputError
from impl.files import rename


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smaller of uint16 and uint32 that holds every id."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


class SplitWriter:
    """Writer of one split's token file, piece by piece, with hash and counts."""

    def __init__(self, folder: Path, split: SplitName, dtype: np.dtype) -> None:
        self._path = folder / f"{split}.bin"
        self._file = self._path.open("wb")
        self._dtype = dtype
        self._digest = hashlib.sha256()
        self._counts = Counter(tokens=0, bytes=0, words=0, documents=0)

    def add_tokens(self, ids: np.ndarray) -> None:
        content = ids.astype(self._dtype).tobytes()
        self._file.write(content)
        self._digest.update(content)
        self._counts["tokens"] += len(ids)

    def count_text(self, *, bytes: int, words: int, documents: int) -> None:
        """Count the original text that the tokens stand for."""
        self._counts.update(bytes=bytes, words=words, documents=documents)

    def close(self) -> Split:
        self._file.close()
        return Split(file=self._path.name, sha256=self._digest.hexdigest(), **self._counts)


def check_replaceable(out: Path) -> None:
    """Check that a token folder may be put at a path: new, empty, or holding a token folder and nothing else.

    Raises:
        InputError: the path holds something else, which would be lost.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise InputError(f"output {out} is a file; valid: a new or empty folder, or a token folder to replace")
    content = sorted(path.name for path in out.iterdir())
    if not content:
        return
    if foreign := [name for name in content if name not in FOLDER_FILES]:
        raise InputError(f"output {out} is not empty and holds {foreign[0]}; valid: a new, empty or token folder")
    try:
        read_manifest(out)
    except InputError:
        raise InputError(
            f"output {out} is not empty and no token folder; valid: a new, empty or token folder"
        ) from None


@contextmanager
def new_token_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `out` that replaces it when the block ends, and is removed when it raises.

    An equal and intact folder that is already there stays as it is.

    Raises:
        InputError: something else is at `out`, or the place cannot be written.
    """
    out = out.resolve()
    check_replaceable(out)
    building = out.parent / f".{out.name}.{secrets.token_hex(4)}.partial"
    try:
        building.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"output {out} cannot be written: {error.strerror}") from None
    try:
        yield building
        _put_in_place(building, out)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise InputError(f"output {out} cannot be written: {error.strerror}") from None
        raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest as the last file, which makes the folder a token folder."""
    (folder / MANIFEST_FILE).write_bytes(manifest.to_bytes())


def _put_in_place(building: Path, out: Path) -> None:
    if out.exists() and any(out.iterdir()):
        if _is_intact_copy(out, building):
            return
        check_replaceable(out)
        old = building.with_suffix(".old")
        rename(out, old)
        try:
            rename(building, out)
        except OSError:
            rename(old, out)
            raise
        shutil.rmtree(old, ignore_errors=True)
    else:
        rename(building, out)


def _is_intact_copy(out: Path, building: Path) -> bool:
    try:
        return TokenFolder.open(out, verify=True).sha256 == TokenFolder.open(building).sha256
    except InputError:
        return False
