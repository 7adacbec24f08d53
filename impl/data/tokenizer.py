"""Text to token ids and back: UTF-8 bytes, amino acids, or byte-level BPE."""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import from_json

from impl.errors import InputError
from impl.files import read_bytes

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWYBOUXZ"
"""One-letter codes (IUPAC-IUB 1983) of the 20 standard amino acids, then of B, O, U, X and Z, rare or not known."""

# No word of GPT-2's splitting crosses the border between a character that is not whitespace and a space or newline:
# all of them stop before whitespace, and none looks back. Trailing whitespace is not cut off: each piece has a word.
WORD_ENDS = re.compile(r"(?<=\S)(?=[ \n]\s*\S)")


class Tokenizer(ABC):
    """Reversible map of text to token ids; `<|endoftext|>` in a text is text: only `eot` itself ends a document."""

    name: str
    vocab_size: int
    eot: int
    cuts: re.Pattern[str] | None = WORD_ENDS
    """Where a text may be cut, so that its pieces encode one by one as the whole does; None: nowhere."""
    is_exact: bool = True
    """True if a text comes back as it was."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of each text, uint32."""

    @abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text; `eot` as its own name, U+FFFD for bytes that are not UTF-8, nothing for unknown ids."""

    @abstractmethod
    def _content(self) -> dict[str, Any]: ...

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of a text, uint32."""
        return self.encode_batch([text])[0]

    @property
    def sha256(self) -> str:
        """Hash of the file that `save` writes: of vocabulary and merges only, so of no library version."""
        return hashlib.sha256(self._file_bytes()).hexdigest()

    def save(self, folder: Path) -> None:
        (folder / TOKENIZER_FILE).write_bytes(self._file_bytes())

    def _file_bytes(self) -> bytes:
        return (json.dumps({"name": self.name, **self._content()}, indent=0) + "\n").encode()

    @staticmethod
    def load(folder: Path) -> "Tokenizer":
        """Return the tokenizer that `save` wrote.

        Raises:
            InputError: the file is missing or is not such a file.
        """
        path = folder / TOKENIZER_FILE
        try:
            content = from_json(read_bytes(path))
            if content["kind"] in ("byte", "amino"):
                return ByteTokenizer() if content["kind"] == "byte" else AminoTokenizer()
            if content["kind"] == "tokenizers":
                from impl.data.library_tokenizer import LibraryTokenizer  # for few texts

                return LibraryTokenizer(content["file"], content["end"])
            return BytePairTokenizer(content["name"], content["vocab"], [tuple(m) for m in content["merges"]])
        except FileNotFoundError:
            raise InputError(f"{path} is missing; a token folder holds its tokenizer") from None
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} is not a tokenizer written by `prepare`: {error!r}") from None


class ByteTokenizer(Tokenizer):
    """Tokenizer of UTF-8 bytes: the ids are 0..255; 256 ends a document."""

    name = "byte"
    vocab_size = 257
    eot = 256

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        array = np.asarray(ids, np.int64)
        documents = np.split(array, np.flatnonzero(array == self.eot))
        texts = [part[part < 256].astype(np.uint8).tobytes().decode("utf-8", "replace") for part in documents]
        return END_OF_TEXT.join(texts)

    def _content(self) -> dict[str, Any]:
        return {"kind": "byte"}


class AminoTokenizer(Tokenizer):
    """Tokenizer of proteins: the ids are the places in `AMINO_ACIDS`; 25 ends a sequence.

    Raises:
        InputError: while encoding: a character is none of these letters.
    """

    name = "amino"
    vocab_size = 26
    eot = 25

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        place = np.zeros(128, np.uint32)
        place[[*AMINO_ACIDS.encode()]] = np.arange(len(AMINO_ACIDS))
        for other in (one for text in texts if (one := no_amino_acid(text))):
            raise InputError(other)
        return [place[np.frombuffer(text.encode(), np.uint8)] for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        letters = [*AMINO_ACIDS, END_OF_TEXT]
        return "".join(letters[i] for i in ids if 0 <= i < len(letters))

    def _content(self) -> dict[str, Any]:
        return {"kind": "amino"}


def no_amino_acid(text: str) -> str | None:
    """Return in words which character is no amino acid's letter; None if all are."""
    other = min(set(text).difference(AMINO_ACIDS), default="", key=text.index)
    return f"{other!r} is no amino acid; valid: {AMINO_ACIDS[:20]}, and B, O, U, X, Z" if other else None


class EngineTokenizer(Tokenizer):
    """Tokenizer that an engine of the library `tokenizers` carries out."""

    _engine: Any

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._engine.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._engine.decode([int(i) for i in ids], skip_special_tokens=False)


class BytePairTokenizer(EngineTokenizer):
    """Byte-level byte-pair encoding with GPT-2's splitting into words (Radford et al. 2019, section 2.2).

    Raises:
        InputError: the vocabulary lacks a byte or the end of text, has gaps, or does not hold what a merge makes.
    """

    def __init__(self, name: str, vocab: dict[str, int], merges: list[tuple[str, str]]) -> None:
        from tokenizers import Tokenizer as Engine
        from tokenizers import decoders, models, pre_tokenizers

        if missing := [c for c in (*sorted(pre_tokenizers.ByteLevel.alphabet()), END_OF_TEXT) if c not in vocab]:
            raise InputError(f"tokenizer {name}: {missing[0]!r} is not in the vocabulary; valid: all bytes and the end")
        if sorted(vocab.values()) != list(range(len(vocab))):
            raise InputError(f"tokenizer {name}: ids of the vocabulary are not 0..{len(vocab) - 1}, each once")
        try:
            self._engine = Engine(models.BPE(vocab=vocab, merges=merges))
        except Exception as error:  # the library raises bare Exception
            raise InputError(f"tokenizer {name}: merges do not fit the vocabulary: {error}") from None
        self._engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        self._engine.decoder = decoders.ByteLevel()
        self._vocab, self._merges = vocab, merges
        self.name, self.vocab_size, self.eot = name, len(vocab), vocab[END_OF_TEXT]

    def _content(self) -> dict[str, Any]:
        vocab = dict(sorted(self._vocab.items(), key=lambda item: item[1]))
        return {"kind": "byte-level BPE", "vocab": vocab, "merges": [list(m) for m in self._merges]}
