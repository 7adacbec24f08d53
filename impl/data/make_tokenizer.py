"""Make the tokenizer that a specification names: bytes, amino acids, that of weights, or a BPE trained on a text."""

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from impl.data.library_tokenizer import LibraryTokenizer
from impl.data.tokenizer import (
    END_OF_TEXT,
    TOKENIZER_FILE,
    AminoTokenizer,
    BytePairTokenizer,
    ByteTokenizer,
    Tokenizer,
)
from impl.errors import InputError, in_one_line
from impl.files import read_bytes, read_text

VALID_SPECS = (
    "byte, amino, gpt2:VOCAB,MERGES (GPT-2's encoder.json and vocab.bpe), hf:FOLDER (with tokenizer.json and "
    "tokenizer_config.json, as transformers saves them), bpe:VOCAB_SIZE"
)
HF_FILES = TOKENIZER_FILE, "tokenizer_config.json"
SMALLEST_BPE = 257
LARGEST_BPE = 2**20
LONGEST_WORD = 2**13
"""Bytes of a word that training takes as a whole: its time is quadratic in them. Longer ones are cut."""


class TokenizerSpec(NamedTuple):
    """Tokenizer to be built by `build`, to which training passes texts, read once.

    Equal texts, in any order, give an equal tokenizer.
    """

    build: Callable[..., Tokenizer]
    is_trained: bool = False
    of_sequences: bool = False
    """Whether a document is one sequence of amino acids."""


def parse(spec: str) -> TokenizerSpec:
    """Parse `byte`, `amino`, `gpt2:VOCAB,MERGES`, `hf:FOLDER` or `bpe:VOCAB_SIZE`.

    Raises:
        InputError: another kind, a missing file, or a vocabulary size out of range.
    """
    kind, _, value = spec.partition(":")
    if spec == "byte":
        return TokenizerSpec(lambda texts=(): ByteTokenizer())
    if spec == "amino":
        return TokenizerSpec(lambda texts=(): AminoTokenizer(), of_sequences=True)
    is_gpt2 = kind == "gpt2" and value.count(",") == 1 and all(value.split(","))
    if is_gpt2 or (kind == "hf" and value):
        first, second = map(Path, value.split(",")) if is_gpt2 else (Path(value) / name for name in HF_FILES)
        for path in (first, second):
            if not path.is_file():
                raise InputError(f"tokenizer {spec}: no file {path}; valid: {VALID_SPECS}")
        return TokenizerSpec(lambda texts=(): (_read_gpt2 if is_gpt2 else _read_hf)(first, second))
    if kind == "bpe" and value.isdecimal() and len(value) < 20:
        if not SMALLEST_BPE <= int(value) <= LARGEST_BPE:
            raise InputError(f"tokenizer {spec}: vocabulary sizes from {SMALLEST_BPE} to {LARGEST_BPE} are valid")
        return TokenizerSpec(partial(_train, int(value)), is_trained=True)
    raise InputError(f"tokenizer {spec!r} is unknown; valid: {VALID_SPECS}")


def _read_gpt2(vocab_file: Path, merges_file: Path) -> Tokenizer:
    vocab = read_json(vocab_file, dict[str, int], "not a JSON vocabulary (GPT-2's encoder.json)")
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


def _read_hf(described: Path, config: Path) -> Tokenizer:
    """Return the tokenizer of a folder that transformers wrote; its end of text, or of a sentence, ends documents."""
    end = (content := read_json(config)).get("eos_token") or content.get("sep_token")
    if isinstance(end, dict):  # with how it is matched
        end = end.get("content")
    if not isinstance(end, str):
        raise InputError(f"{config} has no eos_token and no sep_token; valid: one, which ends documents")
    try:
        return LibraryTokenizer(read_json(described), end)
    except InputError as error:
        raise InputError(f"{described.parent}: {error}") from None


def read_json(path: Path, kind: Any = dict[str, Any], otherwise: str = "no JSON object") -> Any:
    """Return the JSON value of a file. Raises InputError: it is not of this kind, or no JSON at all."""
    try:
        return TypeAdapter(kind).validate_json(read_bytes(path), strict=True)
    except ValidationError as error:
        raise InputError(f"{path} is {otherwise}: {in_one_line(error)}") from None


def _train(vocab_size: int, texts: Iterable[str] = ()) -> Tokenizer:
    from tokenizers import Tokenizer as Engine
    from tokenizers import models, pre_tokenizers, trainers

    engine = Engine(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    engine.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.FixedLength(LONGEST_WORD)])  # pyright: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer)
    model = json.loads(engine.to_str())["model"]
    return BytePairTokenizer(f"bpe:{vocab_size}", model["vocab"], [(left, right) for left, right in model["merges"]])
