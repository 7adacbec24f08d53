"""Atomic writing of a token folder."""

import hashlib
import secrets
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np

from impl.data.tokenizer import Tokenizer
from impl.data.tokens import (
    FOLDER_FILES,
    MANIFEST_FILE,
    SPLITS,
    Entropy,
    Manifest,
    SourceText,
    Split,
    SplitName,
    TokenFolder,
    read_manifest,
)
from impl.errors import InputError
from impl.files import rename


class SplitWriter:
    """Writer of one split's token file, piece by piece, with hash and counts."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._path, self._file, self._dtype = path, path.open("wb"), dtype
        self._digest = hashlib.sha256()
        self._counts = Counter(tokens=0, bytes=0, words=0, documents=0)

    def add_tokens(self, ids: np.ndarray) -> None:
        content = ids.astype(self._dtype).tobytes()
        self._file.write(content)
        self._digest.update(content)
        self._counts["tokens"] += len(ids)

    def count_document(self, *, bytes: int, words: int) -> None:
        """Count the original text of a document, whose tokens are added apart."""
        self._counts.update(bytes=bytes, words=words, documents=1)

    def close(self) -> Split:
        self._file.close()
        return Split(file=self._path.name, sha256=self._digest.hexdigest(), **self._counts)


class FolderWriter:
    """Writer of the files of a token folder: a split is added to by name, `finish` writes the manifest."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self.folder, self.tokenizer = folder, tokenizer
        self._dtype: Literal["uint16", "uint32"] = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
        self.splits: dict[SplitName, SplitWriter] = {
            name: SplitWriter(folder / f"{name}.bin", self._dtype) for name in SPLITS
        }

    def finish(self, split_rule: str, sources: Iterable[SourceText] = (), entropy: Entropy | None = None) -> Manifest:
        """Write the manifest as the last file, which makes the folder a token folder."""
        self.tokenizer.save(self.folder)
        manifest = Manifest(
            tokenizer=self.tokenizer.name,
            tokenizer_sha256=self.tokenizer.sha256,
            vocab_size=self.tokenizer.vocab_size,
            eot=self.tokenizer.eot,
            dtype=self._dtype,
            train=self.splits["train"].close(),
            valid=self.splits["valid"].close(),
            split_rule=split_rule,
            sources=tuple(sources),
            entropy=entropy,
        )
        (self.folder / MANIFEST_FILE).write_bytes(manifest.to_bytes())
        return manifest


def check_replaceable(out: Path) -> None:
    """Check that a token folder may be put at a path: new, empty, or holding a token folder and nothing else.

    Raises:
        InputError: the path holds something else, which would be lost.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise InputError(f"output {out} is a file; valid: a new or empty folder, or a token folder to replace")
    content = {path.name for path in out.iterdir()}
    if foreign := sorted(content - FOLDER_FILES):
        raise InputError(f"output {out} is not empty and holds {foreign[0]}; valid: a new, empty or token folder")
    try:
        if content:
            read_manifest(out)
    except InputError:
        raise InputError(f"output {out} is not empty and no token folder; valid: a new or a token folder") from None


@contextmanager
def new_token_folder(out: Path, tokenizer: Tokenizer) -> Iterator[FolderWriter]:
    """Yield the writer of a folder that replaces `out` when the block ends, and is removed when it raises.

    An equal and intact folder that is already there stays as it is.

    Raises:
        InputError: something else is at `out`.
        OSError: the place cannot be written.
    """
    out = out.resolve()
    check_replaceable(out)
    building = out.parent / f".{out.name}.{secrets.token_hex(4)}.partial"
    try:
        building.mkdir(parents=True)
        yield FolderWriter(building, tokenizer)
        _put_in_place(building, out)
    except OSError as error:
        error.filename = str(error.filename or out).replace(str(building), str(out))
        raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _put_in_place(building: Path, out: Path) -> None:
    if not out.exists() or not any(out.iterdir()):
        rename(building, out)
        return
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


def _is_intact_copy(out: Path, building: Path) -> bool:
    try:
        return TokenFolder.open(out, verify=True).sha256 == TokenFolder.open(building).sha256
    except InputError:
        return False
