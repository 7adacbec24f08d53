"""Sliding windows, and the text that a part of them scores."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.data.make_tokenizer import parse
from impl.data.tokenizer import ByteTokenizer, Tokenizer
from impl.evaluate import Windows, text_counts

TRAINED = parse("bpe:300").build(["the cat sat on the mat, ça va, 日本語 日本語 😀\n" * 20])


@st.composite
def windows(draw: st.DrawFn) -> Windows:
    seq_len = draw(st.integers(2, 12))
    length = draw(st.integers(1, 60))
    return Windows(
        np.arange(100, 100 + length), 7, seq_len, draw(st.integers(0, seq_len - 1)), draw(st.integers(0, 12))
    )


@given(windows())
def test_every_target_is_scored_once_with_its_context(w: Windows) -> None:
    inputs, targets, is_scored = w.cut(np.arange(w.count))
    assert targets[is_scored].tolist() == list(range(100, 100 + w.covered))
    assert w.limit or w.covered == len(w.tokens)
    stream = [7, *w.tokens]
    for row, (ins, outs, scored) in enumerate(zip(inputs, targets, is_scored, strict=True)):
        real = min(w.seq_len, len(w.tokens) - row * w.stride)
        assert ins[:real].tolist() == stream[row * w.stride : row * w.stride + real]
        assert outs[:real].tolist() == stream[row * w.stride + 1 : row * w.stride + real + 1]
        assert scored.any()
        if row:
            assert scored.argmax() == w.overlap


def test_the_paper_scores_the_last_32_of_1024() -> None:
    w = Windows(np.zeros(1024 + 10 * 32, np.uint16), 0, 1024, overlap=1024 - 32)
    assert (w.stride, w.count) == (32, 11)
    _, _, is_scored = w.cut(np.array([0, 1, 10]))
    assert is_scored.sum(axis=1).tolist() == [1024, 32, 32]


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), TRAINED], ids=["byte", "bpe"])
@given(st.lists(st.text("ab é日😀\ufffd\n", max_size=12), min_size=1, max_size=4), st.integers(1, 20))
def test_counts_of_a_part_are_those_of_its_whole_characters(tokenizer: Tokenizer, texts: list[str], limit: int) -> None:
    ids = np.concatenate([np.append(ids, tokenizer.eot) for ids in tokenizer.encode_batch(texts)])
    w = Windows(ids, tokenizer.eot, 2, limit=limit)
    part = bytes_of(tokenizer, ids[: w.covered])
    whole = [document.decode("utf-8", "ignore") for document in part]
    expected = sum(len(text.split()) for text in whole), sum(len(text.encode()) for text in whole)
    assert text_counts(tokenizer, w) == expected


def bytes_of(tokenizer: Tokenizer, ids: np.ndarray) -> list[bytes]:
    """The documents' bytes, cut where the ids end."""
    documents, byte_of = [b""], {c: bytes([b]) for b, c in byte_characters().items()}
    for i in ids:
        if i == tokenizer.eot:
            documents.append(b"")
        elif isinstance(tokenizer, ByteTokenizer):
            documents[-1] += bytes([i])
        else:
            token = next(t for t, j in tokenizer._content()["vocab"].items() if j == i)
            documents[-1] += b"".join(byte_of[c] for c in token)
    return documents


def byte_characters() -> dict[int, str]:
    """GPT-2's character of each byte: itself where it is printable Latin-1, else the next one from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
