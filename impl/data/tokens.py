"""The token folder: token files of a training and a validation text, their tokenizer, and a manifest."""

import dataclasses
import hashlib
import json
from dataclasses import field
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from impl.data.tokenizer import TOKENIZER_FILE, Tokenizer
from impl.errors import InputError, in_one_line
from impl.fields import CHECKED
from impl.files import read_bytes

MANIFEST_FILE = "manifest.json"
HOW_TO_MAKE = "make one: lmscale prepare --text FILE|DIR|hf:NAME --tokenizer byte|amino|gpt2:...|hf:...|bpe:N --out DIR"

SplitName = Literal["train", "valid"]
SPLITS: tuple[SplitName, ...] = ("train", "valid")
FOLDER_FILES = frozenset({MANIFEST_FILE, TOKENIZER_FILE, *(f"{split}.bin" for split in SPLITS)})


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class Split:
    """Token file and its origin."""

    file: str = Field(pattern=r"^[\w.-]+$")
    sha256: str
    tokens: int = Field(ge=1)
    """Tokens of all documents, each with the end of text after it."""
    bytes: int
    """UTF-8 bytes of the original text."""
    words: int
    """Words of the original text, separated by whitespace."""
    documents: int


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class SourceText:
    """Text that was read, by name and content."""

    split: Literal["train", "valid", "both"]
    name: str
    sha256: str


Rounded = Annotated[float, AfterValidator(partial(round, ndigits=10))]
"""Number without its last bits: they are the linear algebra library's, and the manifest is the data's identity."""


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class Entropy:
    """Lowest cross-entropy that any model can reach on a synthetic text, in nats."""

    language: dict[str, Any]
    nats_per_token: Rounded
    """Exact entropy rate of the source; of protein families, a lower bound: that of sequences of known families."""
    nats_per_word: Rounded
    nats_per_byte: Rounded
    valid_nats_per_token: Rounded
    """Code length of the validation text itself under its true source."""
    valid_standard_error: Rounded
    """Standard error of `valid_nats_per_token` as an estimate of the source's."""


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class Manifest:
    """Content of a token folder; equal manifests mean equal data, since no path and no date enters."""

    format: Literal[1] = 1
    tokenizer: str
    tokenizer_sha256: str
    vocab_size: int
    eot: int
    dtype: Literal["uint16", "uint32"]
    train: Split
    valid: Split
    split_rule: str
    """Origin of the validation text.

    `file`: a validation text was given; `tail:FRACTION`: the last part of the text; `synthetic`: two samples.
    """
    sources: tuple[SourceText, ...] = field(default=())
    entropy: Entropy | None = None

    def split(self, name: SplitName) -> Split:
        return self.train if name == "train" else self.valid

    def to_bytes(self) -> bytes:
        """Return the content of the manifest file."""
        return (json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n").encode()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a token folder.

    Raises:
        InputError: no folder, no manifest in it (unfinished or something else), or a format of another version.
    """
    path = folder / MANIFEST_FILE
    if not folder.is_dir():
        raise InputError(f"no token folder {folder}; {HOW_TO_MAKE}")
    if not path.is_file():
        raise InputError(f"{folder} is not a token folder, or an unfinished one: no {MANIFEST_FILE}; {HOW_TO_MAKE}")
    try:
        return TypeAdapter(Manifest).validate_json(read_bytes(path))
    except ValidationError as error:
        raise InputError(f"{path} is not a manifest: {in_one_line(error)}; {HOW_TO_MAKE}") from None


class TokenFolder:
    """Opened token folder; `open` checks it."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest

    @staticmethod
    def open(path: str | Path, verify: bool = False) -> "TokenFolder":
        """Open a folder after checking that its files exist and are complete; `verify` also checks their hashes.

        Raises:
            InputError: a file is missing, truncated, or not the one that the manifest names.
        """
        folder = TokenFolder(Path(path), read_manifest(Path(path)))
        for name in SPLITS:
            folder._check(folder.manifest.split(name), verify)
        if not (folder.path / TOKENIZER_FILE).is_file():
            raise InputError(f"{folder.path / TOKENIZER_FILE} is missing; {HOW_TO_MAKE}")
        if verify:
            folder.tokenizer  # noqa: B018  (checks its hash)
        return folder

    @property
    def sha256(self) -> str:
        """Identity of the data: the hash of the manifest, which holds the hashes of the files."""
        return hashlib.sha256(self.manifest.to_bytes()).hexdigest()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer.load(self.path)
        _require_hash(self.path / TOKENIZER_FILE, self.manifest.tokenizer_sha256, tokenizer.sha256)
        return tokenizer

    def tokens(self, split: SplitName) -> np.memmap:
        """Return the token ids of a split as one read-only array mapped into memory."""
        return np.memmap(self.path / self.manifest.split(split).file, np.dtype(self.manifest.dtype), "r")

    def _check(self, split: Split, verify: bool) -> None:
        path = self.path / split.file
        expected = split.tokens * np.dtype(self.manifest.dtype).itemsize
        if not path.is_file():
            raise InputError(f"{path} is missing; {HOW_TO_MAKE}")
        if (found := path.stat().st_size) != expected:
            state = "truncated" if found < expected else "too long"
            raise InputError(f"{path} is {state}: {found} bytes, expected {expected}; {HOW_TO_MAKE}")
        if verify:
            with path.open("rb") as file:
                _require_hash(path, split.sha256, hashlib.file_digest(file, "sha256").hexdigest())


def _require_hash(path: Path, expected: str, found: str) -> None:
    if found != expected:
        raise InputError(f"{path} has sha256 {found[:12]}..., the manifest says {expected[:12]}...; {HOW_TO_MAKE}")
