"""Documents read from files, folders and the hub, and sequences of amino acids in them."""

import gzip
import hashlib
import lzma
import re
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from impl.data.tokenizer import no_amino_acid
from impl.errors import InputError, in_one_line
from impl.files import open_regular

HUB_PREFIX = "hf:"
NEEDS_HUB = "needs the package datasets; install the extra: pip install 'lmscale[hub]'"
FOLDER_PATTERNS = ("*.txt", "*.txt.gz", "*.txt.xz", "*.jsonl", "*.jsonl.gz", "*.jsonl.xz")


def open_texts(spec: str) -> "list[Text]":
    """Return the texts of a file, a folder (its .txt and .jsonl files, packed ones too, sorted) or `hf:NAME[:CONFIG]`.

    Raises:
        InputError: missing, without such files, or on the hub when `datasets` is not installed or cannot reach it.
    """
    if spec.startswith(HUB_PREFIX):
        return [HubText(spec, load_hub(spec))]
    path = Path(spec)
    if path.is_dir():
        files = sorted(file for pattern in FOLDER_PATTERNS for file in path.rglob(pattern) if file.is_file())
        if not files:
            raise InputError(f"{path} holds no .txt or .jsonl file (.gz and .xz are read too)")
        return [TextFile(file.relative_to(path).as_posix(), file) for file in files]
    if not path.is_file():
        raise InputError(f"no file or folder {path}; valid: a text file, a .jsonl file, a folder of them, hf:NAME")
    return [TextFile(path.name, path)]


@dataclass(frozen=True)
class TextFile:
    """Plain text file (one document), or .jsonl file (one document a line, in its field `text`); .gz or .xz too.

    Raises:
        InputError: while reading: not UTF-8, a line without text, a damaged archive; names file and line.
    """

    name: str
    """Name without the folders above it."""
    path: Path

    def sha256(self) -> str:
        with open_regular(self.path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def documents(self) -> Iterator[str]:
        """Yield the documents in order, without those of whitespace only."""
        unpack = {".gz": gzip.open, ".xz": lzma.open}.get(self.path.suffix, nullcontext)
        try:
            with open_regular(self.path) as packed, unpack(packed) as file:
                yield from (document for document in self._decoded(file) if document and not document.isspace())
        except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
            raise InputError(f"{self.path} is a damaged archive: {error}") from None
        except OSError as error:
            raise InputError(f"{self.path} cannot be read: {error.strerror or error}") from None
        except MemoryError:
            raise InputError(f"{self.path} has a document that the memory here has no room for") from None

    def _decoded(self, file: Any) -> Iterator[str]:
        has_lines = self.path.name.removesuffix(".gz").removesuffix(".xz").endswith(".jsonl")
        offset = 0
        for number, content in enumerate(file if has_lines else [file.read()], 1):
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError as error:
                line = number + content.count(b"\n", 0, error.start)
                raise InputError(f"{self.path} is not UTF-8: byte {offset + error.start}, line {line}") from None
            offset += len(content)
            if not has_lines:
                yield text
            elif text.strip():
                where = f"{self.path}, line {number}"
                try:
                    row = from_json(text)
                except ValueError as error:
                    raise InputError(f"{where}: not JSON: {error}") from None
                yield _text_of(row, where)


@dataclass(frozen=True)
class HubText:
    """Training split of a dataset on the hub, one document a row."""

    name: str
    rows: Any

    def sha256(self) -> str:
        """Return the hash of the documents, each ended by a zero byte."""
        digest = hashlib.sha256()
        for document in self.documents():
            digest.update(document.encode() + b"\0")
        return digest.hexdigest()

    def documents(self) -> Iterator[str]:
        texts = (_text_of(row, f"{self.name}, row {number}") for number, row in enumerate(self.rows, 1))
        return (text for text in texts if text and not text.isspace())


@dataclass(frozen=True)
class Sequences:
    """Sequences of amino acids in a text, each a document: FASTA's entries, or a line each where no line begins with >.

    Small letters count as capital ones.

    Raises:
        InputError: while reading: a line has another character; names document and line.
    """

    text: "Text"

    @property
    def name(self) -> str:
        return self.text.name

    def sha256(self) -> str:
        return self.text.sha256()

    def documents(self) -> Iterator[str]:
        for number, document in enumerate(self.text.documents(), 1):
            yield from self._of(document, self.name + (f", document {number}" if number > 1 else ""))

    def _of(self, document: str, where: str) -> Iterator[str]:
        is_fasta = document.lstrip().startswith(">")
        parts: list[str] = []
        for number, found in enumerate(re.finditer(r"[^\n]*\n?", document), 1):
            line = found[0].strip()
            line = line.upper() if line.isascii() else line
            if parts and (line.startswith(">") or not is_fasta):
                yield "".join(parts)
                parts.clear()
            if line and not (is_fasta and line.startswith(">")):
                if other := no_amino_acid(line):
                    raise InputError(f"{where}, line {number}: {other}")
                parts.append(line)
        if parts:
            yield "".join(parts)


Text = TextFile | HubText | Sequences


def _text_of(row: Any, where: str) -> str:
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise InputError(f'{where}: no text; valid: {{"text": "..."}}')
    return text


def load_hub(spec: str, split: str = "train") -> Any:
    """Return the rows of a dataset on the hub, or of files in the hub's layout: `hf:NAME` or `hf:NAME:CONFIG`.

    Raises:
        InputError: the dataset, or the package that reads it, is missing.
    """
    name, _, config = spec.removeprefix(HUB_PREFIX).partition(":")
    if not name:
        raise InputError(f"{spec}: no dataset is named; valid: hf:NAME or hf:NAME:CONFIG")
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise InputError(f"{spec} {NEEDS_HUB}") from None
    try:
        return datasets.load_dataset(name, config or None, split=split)
    except Exception as error:  # whatever the client raises: offline, unknown name, no such configuration
        reason = in_one_line(error) or type(error).__name__
        raise InputError(f"{spec} could not be loaded from the hub (offline, or no such dataset?): {reason}") from None
