"""Conversion of text to a token folder, in bounded memory."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from impl.data.make_tokenizer import parse
from impl.data.text import Sequences, Text, open_texts
from impl.data.tokenizer import WORD_ENDS, Tokenizer
from impl.data.tokens import SPLITS, Manifest, SourceText, SplitName
from impl.data.writing import SplitWriter, check_replaceable, new_token_folder
from impl.errors import InputError

PIECE_CHARS = 2**15
BATCH_CHARS = 2**21
PIECE_COST = 64
"""Characters added to the cost of each piece, so that memory stays bounded for many short documents too."""

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
    opened = lambda path: [Sequences(one) if spec.of_sequences else one for one in open_texts(path)]
    texts = opened(text)
    if valid is None:
        rule, documents, sources = f"tail:{valid_fraction}", _tail_split(texts, valid_fraction), _sources(texts, "both")
    else:
        valid_texts = opened(valid)
        rule, documents = "file", partial(_given_split, texts, valid_texts)
        sources = [*_sources(texts, "train"), *_sources(valid_texts, "valid")]
    sizes = _check_sizes(documents, text, valid)
    total, done = sizes["train"] * (1 + spec.is_trained) + sizes["valid"], 0

    def counted(content: str) -> str:
        nonlocal done
        done += len(content.encode())
        if progress is not None:
            progress(done, total)
        return content

    training_pieces = (piece for split, document in documents() if split == "train" for piece in pieces(document))
    encoder = spec.build(map(counted, training_pieces))
    with new_token_folder(out, encoder) as writer:
        _encode(((split, counted(document)) for split, document in documents()), encoder, writer.splits)
        return writer.finish(rule, sources)


def pieces(document: str, chars: int = PIECE_CHARS, cuts: re.Pattern[str] | None = WORD_ENDS) -> Iterator[str]:
    """Yield the document in pieces of at least `chars` characters, cut only where a tokenizer allows it: see `cuts`.

    Joined, the pieces are the document; encoded one by one and joined, they are its tokens.
    """
    start = 0
    while start < len(document):
        cut = cuts.search(document, start + chars) if cuts else None
        end = cut.start() if cut else len(document)
        yield document[start:end]
        start = end


def _encode(
    documents: Iterable[tuple[SplitName, str]], encoder: Tokenizer, writers: Mapping[SplitName, SplitWriter]
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
        writers[split].count_document(bytes=len(document.encode()), words=len(document.split()))
        for piece in pieces(document, cuts=encoder.cuts):
            batch.append((split, piece))
            weight += len(piece) + PIECE_COST
            if weight >= BATCH_CHARS:
                flush()
                weight = 0
        batch.append((split, None))
    flush()


def _given_split(train: list[Text], valid: list[Text]) -> Iterator[tuple[SplitName, str]]:
    for split, texts in zip(SPLITS, (train, valid), strict=True):
        for document in _all_documents(texts):
            yield split, document


def _tail_split(texts: list[Text], fraction: float) -> Documents:
    """Split off the last fraction of the documents, or of the text if there are fewer than 2/fraction documents."""
    ends = np.cumsum([len(document) for document in _all_documents(texts)], dtype=np.int64)
    if len(ends) * fraction >= 2:
        first, at = len(ends) - round(fraction * len(ends)), 0
    else:  # the document that is cut, and where
        cut_at = int(ends[-1] * (1 - fraction)) if len(ends) else 0
        first = int(np.searchsorted(ends, cut_at, side="right"))
        at = cut_at - int(ends[first - 1]) if first else cut_at

    def documents() -> Iterator[tuple[SplitName, str]]:
        for index, document in enumerate(_all_documents(texts)):
            if index == first and at > 0 and (cut := whitespace_cut(document, at)):
                yield "train", document[:cut]
                yield "valid", document[cut:]
            else:
                yield "train" if index < max(first, 1) else "valid", document

    return documents


def whitespace_cut(document: str, at: int) -> int | None:
    """Return the first position from `at` on (else the last before) where a document may be cut; None: one word."""
    if after := WORD_ENDS.search(document, at):
        return after.start()
    return max((cut.start() for cut in WORD_ENDS.finditer(document)), default=None)


def _check_sizes(documents: Documents, text: str, valid: str | None) -> dict[SplitName, int]:
    """Return the UTF-8 bytes of each split, after checking that both hold a word."""
    sizes: dict[SplitName, int] = dict.fromkeys(SPLITS, 0)
    with_words: set[SplitName] = set()
    for split, document in documents():
        sizes[split] += len(document.encode())
        if not document.isspace():
            with_words.add(split)
    if valid is None and len(with_words) == 1:
        raise InputError(
            f"{text} has too little text ({sum(sizes.values())} bytes) to leave some for validation; "
            "valid: more text, or a validation text of its own"
        )
    if len(with_words) < 2:
        empty = valid if with_words == {"train"} else text
        raise InputError(f"{empty} is empty: it holds no document with any text in it")
    return sizes


def _all_documents(texts: Iterable[Text]) -> Iterator[str]:
    return (document for text in texts for document in text.documents())


def _sources(texts: Iterable[Text], split: Literal["train", "valid", "both"]) -> list[SourceText]:
    return [SourceText(split=split, name=text.name, sha256=text.sha256()) for text in texts]
