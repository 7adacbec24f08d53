"""Conversion of text to a token folder, in bounded memory."""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from impl.data.text import Text, open_texts
from impl.data.tokenizer import Tokenizer, parse
from impl.data.tokens import SPLITS, Manifest, SourceText, SplitName
from impl.data.writing import SplitWriter, check_replaceable, new_token_folder, token_dtype, write_manifest
from impl.errors import InputError

PIECE_CHARS = 2**15
BATCH_CHARS = 2**21
PIECE_COST = 64
"""Characters added to the cost of each piece, so that memory stays bounded for many short documents too."""

# No word of GPT-2's splitting crosses the border between a character that is not whitespace and a space or newline:
# all of them stop before whitespace, and none looks back. So pieces encode as the whole text does.
# Trailing whitespace is not cut off: each piece has a word.
_CUT = re.compile(r"(?<=\S)(?=[ \n]\s*\S)")

Documents = Callable[[], Iterator[tuple[SplitName, str]]]


def prepare(
    text: str,
    tokenizer: str,
    out: Path,
    valid: str | None = None,
    valid_fraction: float = 0.05,
    progress: Callable[[int, int], None] | None = None,
) -> Manifest:
    """Write the token folder `out` from a text: every document's tokens, each followed by the end of text.

    A BPE is trained on the training split alone. `progress` is called with (bytes done, total bytes) of the text.

    Raises:
        InputError: text, tokenizer or output are not usable; nothing is written then.
    """
    spec = parse(tokenizer)
    check_replaceable(out)
    if not 0.0 < valid_fraction <= 0.5:
        raise InputError(f"validation fraction {valid_fraction} is out of range; valid: above 0, at most 0.5")
    texts = open_texts(text)
    if valid is not None:
        valid_texts = open_texts(valid)
        rule, documents = "file", _given_split(texts, valid_texts)
        sources = [*_sources(texts, "train"), *_sources(valid_texts, "valid")]
    else:
        rule, documents = f"tail:{valid_fraction}", _tail_split(texts, valid_fraction)
        sources = _sources(texts, "both")
    sizes = _check_sizes(documents, text, valid)
    tally = _Tally(progress, sizes["train"] * (1 + spec.is_trained) + sizes["valid"])
    training_pieces = (piece for split, document in documents() if split == "train" for piece in pieces(document))
    encoder = spec.build(tally.through(training_pieces))
    with new_token_folder(out) as building:
        dtype = token_dtype(encoder.vocab_size)
        writers: dict[SplitName, SplitWriter] = {s: SplitWriter(building, s, dtype) for s in SPLITS}
        _encode(documents(), encoder, writers, tally)
        encoder.save(building)
        manifest = Manifest(
            tokenizer=encoder.name,
            tokenizer_sha256=encoder.sha256,
            vocab_size=encoder.vocab_size,
            eot=encoder.eot,
            dtype="uint16" if dtype == np.uint16 else "uint32",
            train=writers["train"].close(),
            valid=writers["valid"].close(),
            split_rule=rule,
            sources=tuple(sources),
        )
        write_manifest(building, manifest)
    return manifest


def pieces(document: str, chars: int = PIECE_CHARS) -> Iterator[str]:
    """Yield the document in pieces of at least `chars` characters, cut only where a word of GPT-2's splitting ends.

    A cut lies between a character that is not whitespace and a space or newline after it. Joined, the pieces are
    the document; encoded one by one and joined, they are its tokens.
    """
    start = 0
    while start < len(document):
        cut = _CUT.search(document, start + chars)
        end = cut.start() if cut else len(document)
        yield document[start:end]
        start = end


class _Tally:
    """Counter of bytes done, which reports progress."""

    def __init__(self, progress: Callable[[int, int], None] | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def add(self, size: int) -> None:
        self._done += size
        if self._progress is not None:
            self._progress(self._done, self._total)

    def through(self, texts: Iterable[str]) -> Iterator[str]:
        """Yield the texts, counting each when the next is requested."""
        for text in texts:
            yield text
            self.add(len(text.encode()))


def _encode(
    documents: Iterable[tuple[SplitName, str]],
    encoder: Tokenizer,
    writers: dict[SplitName, SplitWriter],
    tally: _Tally,
) -> None:
    """Encode and write document after document, some megabytes of pieces at a time, on all cores."""
    end = np.array([encoder.eot], np.uint32)
    batch: list[tuple[SplitName, str | None]] = []  # None: the end of a document
    weight = 0

    def flush() -> None:
        encoded = iter(encoder.encode_batch([piece for _, piece in batch if piece is not None]))
        for split, piece in batch:
            writers[split].add_tokens(end if piece is None else next(encoded))
        batch.clear()

    for split, document in documents:
        size = len(document.encode())
        writers[split].count_text(bytes=size, words=len(document.split()), documents=1)
        for piece in pieces(document):
            batch.append((split, piece))
            weight += len(piece) + PIECE_COST
            if weight >= BATCH_CHARS:
                flush()
                weight = 0
        batch.append((split, None))
        tally.add(size)
    flush()


def _given_split(train: list[Text], valid: list[Text]) -> Documents:
    def documents() -> Iterator[tuple[SplitName, str]]:
        for document in _all_documents(train):
            yield "train", document
        for document in _all_documents(valid):
            yield "valid", document

    return documents


def _tail_split(texts: list[Text], fraction: float) -> Documents:
    """Split off the last fraction of the documents, or of the text if there are fewer than 2/fraction documents."""
    lengths = np.array([len(document) for document in _all_documents(texts)], np.int64)
    count, kept = len(lengths), len(lengths) - round(fraction * len(lengths))
    by_document = count * fraction >= 2
    cut_at = int(lengths.sum() * (1 - fraction))

    def documents() -> Iterator[tuple[SplitName, str]]:
        start = 0
        for index, document in enumerate(_all_documents(texts)):
            if by_document:
                yield "train" if index < kept else "valid", document
                continue
            at, is_first = cut_at - start, start == 0
            start += len(document)
            cut = whitespace_cut(document, at) if 0 < at < len(document) else None
            if cut is not None:
                yield "train", document[:cut]
                yield "valid", document[cut:]
            else:
                yield "train" if is_first or at >= len(document) else "valid", document

    return documents


def whitespace_cut(document: str, at: int) -> int | None:
    """Return the first position from `at` on (else the last before) where a document may be cut; None: one word."""
    if after := _CUT.search(document, at):
        return after.start()
    before = [cut.start() for cut in _CUT.finditer(document)]
    return before[-1] if before else None


def _check_sizes(documents: Documents, text: str, valid: str | None) -> dict[SplitName, int]:
    """Return the UTF-8 bytes of each split, after checking that both hold a word."""
    sizes: dict[SplitName, int] = {"train": 0, "valid": 0}
    has_words: dict[SplitName, bool] = {"train": False, "valid": False}
    for split, document in documents():
        sizes[split] += len(document.encode())
        has_words[split] |= not document.isspace()
    if valid is not None and has_words["train"] and not has_words["valid"]:
        raise InputError(f"{valid} is empty: it holds no document with any text in it")
    if valid is None and any(has_words.values()) and not all(has_words.values()):
        raise InputError(
            f"{text} has too little text ({sum(sizes.values())} bytes) to leave some for validation; "
            "valid: more text, or a validation text of its own"
        )
    if not all(has_words.values()):
        raise InputError(f"{text} is empty: it holds no document with any text in it")
    return sizes


def _all_documents(texts: Iterable[Text]) -> Iterator[str]:
    return (document for text in texts for document in text.documents())


def _sources(texts: Iterable[Text], split: Literal["train", "valid", "both"]) -> list[SourceText]:
    return [SourceText(split=split, name=text.name, sha256=text.sha256()) for text in texts]
