"""Text to token ids and back: UTF-8 bytes, GPT-2's byte-level BPE, or a byte-level BPE trained on a text."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from impl.errors import InputError, in_one_line
from impl.files import read_bytes, read_text

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
VALID_SPECS = "byte, gpt2:VOCAB,MERGES (GPT-2's encoder.json and vocab.bpe), bpe:VOCAB_SIZE"
SMALLEST_BPE = 257
LARGEST_BPE = 2**20


class Tokenizer(ABC):
    """Reversible map of text to token ids; `<|endoftext|>` in a text is text: only `eot` itself ends a document."""

    name: str
    vocab_size: int
    eot: int

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of each text, uint32."""

    @abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text; `<|endoftext|>` for `eot`, U+FFFD for bytes that are not UTF-8, nothing for unknown ids."""

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
            if content["kind"] == "byte":
                return ByteTokenizer()
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


class BytePairTokenizer(Tokenizer):
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
        self._engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # pyright: ignore
        self._engine.decoder = decoders.ByteLevel()  # pyright: ignore
        self._vocab, self._merges = vocab, merges
        self.name, self.vocab_size, self.eot = name, len(vocab), vocab[END_OF_TEXT]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._engine.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._engine.decode([int(i) for i in ids], skip_special_tokens=False)

    def _content(self) -> dict[str, Any]:
        vocab = dict(sorted(self._vocab.items(), key=lambda item: item[1]))
        return {"kind": "byte-level BPE", "vocab": vocab, "merges": [list(m) for m in self._merges]}


class TokenizerSpec(NamedTuple):
    """Tokenizer to be built by `build`, to which training passes texts, read once.

    Equal texts, in any order, give an equal tokenizer.
    """

    build: Callable[..., Tokenizer]
    is_trained: bool = False


def parse(spec: str) -> TokenizerSpec:
    """Parse `byte`, `gpt2:VOCAB,MERGES` or `bpe:VOCAB_SIZE`.

    Raises:
        InputError: another kind, a missing file, or a vocabulary size out of range.
    """
    kind, _, value = spec.partition(":")
    if spec == "byte":
        return TokenizerSpec(lambda texts=(): ByteTokenizer())
    if kind == "gpt2" and value.count(",") == 1 and all(value.split(",")):
        vocab, merges = (Path(part) for part in value.split(","))
        for path in (vocab, merges):
            if not path.is_file():
                raise InputError(f"tokenizer {spec}: no file {path}; valid: gpt2:VOCAB,MERGES")
        return TokenizerSpec(lambda texts=(): _read_gpt2(vocab, merges))
    if kind == "bpe" and value.isdecimal() and len(value) < 20:
        if not SMALLEST_BPE <= int(value) <= LARGEST_BPE:
            raise InputError(f"tokenizer {spec}: vocabulary sizes from {SMALLEST_BPE} to {LARGEST_BPE} are valid")
        return TokenizerSpec(partial(_train, int(value)), is_trained=True)
    raise InputError(f"tokenizer {spec!r} is unknown; valid: {VALID_SPECS}")


def _read_gpt2(vocab_file: Path, merges_file: Path) -> Tokenizer:
    try:
        vocab = TypeAdapter(dict[str, int]).validate_json(read_bytes(vocab_file), strict=True)
    except ValidationError as error:
        why = in_one_line(error)
        raise InputError(f"{vocab_file} is not a JSON vocabulary (GPT-2's encoder.json): {why}") from None
    try:
        lines = read_text(merges_file).split("\n")
    except UnicodeDecodeError:
        raise InputError(f"{merges_file} is not UTF-8; valid: GPT-2's vocab.bpe") from None
    merges: list[tuple[str, str]] = []
    for number, line in enumerate(lines, 1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        match line.split(" "):
            case [left, right] if left and right:
                merges.append((left, right))
            case _:
                raise InputError(f"{merges_file}, line {number}: not two tokens with a space between them")
    return BytePairTokenizer("gpt2", vocab, merges)


def _train(vocab_size: int, texts: Iterable[str] = ()) -> Tokenizer:
    from tokenizers import Tokenizer as Engine
    from tokenizers import models, pre_tokenizers, trainers

    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # pyright: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer)
    model = json.loads(engine.to_str())["model"]
    return BytePairTokenizer(f"bpe:{vocab_size}", model["vocab"], [(left, right) for left, right in model["merges"]])
