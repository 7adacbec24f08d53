"""Preparing: the folder holds the text, split by its rule; bad input writes nothing."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.data import prepare as prepare_module
from impl.data.make_tokenizer import parse
from impl.data.prepare import pieces, prepare, whitespace_cut
from impl.data.tokens import SplitName, TokenFolder
from impl.errors import InputError

TRAINED = parse("bpe:400").build(["it's the cat's  mat\n\n they're 12 34, ça va 日本語\t\n"] * 50)
spaced_text = st.lists(
    st.sampled_from(["it's", " cat", " ", "\n", "\t", "\u00a0", "\u2028", "'re", "1", " 日", "ab", ","])
)


def write_jsonl(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def write_text(path: Path, text: str) -> str:
    path.write_bytes(text.encode())
    return str(path)


def documents(folder: TokenFolder, split: SplitName) -> list[str]:
    """The documents as decoded from the tokens; each must be ended."""
    tokens = np.asarray(folder.tokens(split))
    ends = np.flatnonzero(tokens == folder.manifest.eot)
    assert ends[-1] == len(tokens) - 1
    return [folder.tokenizer.decode(part[part != folder.manifest.eot]) for part in np.split(tokens, ends)[:-1]]


@pytest.mark.parametrize("tokenizer", ["byte", "bpe:300"])
def test_documents_come_back_with_their_counts(tmp_path: Path, tokenizer: str):
    train, valid = ["a cat ça va ", "two\nlines <|endoftext|> here"], ["the mat"]
    told: list[tuple[int, int]] = []
    manifest = prepare(
        write_jsonl(tmp_path / "t.jsonl", train),
        tokenizer,
        tmp_path / "out",
        valid=write_text(tmp_path / "v.txt", valid[0]),
        progress=lambda done, total: told.append((done, total)),
    )
    folder = TokenFolder.open(tmp_path / "out", verify=True)
    assert folder.manifest == manifest
    assert documents(folder, "train") == train
    assert documents(folder, "valid") == valid
    assert (manifest.train.documents, manifest.train.words, manifest.train.bytes) == (2, 8, 13 + 28)
    assert manifest.train.tokens == len(folder.tokens("train"))
    assert (manifest.split_rule, manifest.dtype, manifest.entropy) == ("file", "uint16", None)
    assert [(s.split, s.name) for s in manifest.sources] == [("train", "t.jsonl"), ("valid", "v.txt")]
    assert told[-1][0] == told[-1][1] > 0
    assert str(tmp_path) not in (tmp_path / "out" / "manifest.json").read_text()


def test_each_sequence_of_a_fasta_file_is_a_document(tmp_path: Path):
    fasta = "".join(f">protein {i}\nMKT{'AV' * i}\ngla\n" for i in range(1, 41))
    prepare(write_text(tmp_path / "a.fasta", fasta), "amino", tmp_path / "out")
    folder = TokenFolder.open(tmp_path / "out", verify=True)
    both = documents(folder, "train") + documents(folder, "valid")
    assert both == [f"MKT{'AV' * i}GLA" for i in range(1, 41)]
    assert (folder.manifest.valid.documents, folder.manifest.vocab_size) == (2, 26)


MANY = [f"document {i}" for i in range(40)]
FEW = ["one two three four five six seven eight", "nine ten"]


@pytest.mark.parametrize(
    ("texts", "fraction", "train", "valid"),
    [(MANY, 0.05, MANY[:38], MANY[38:]), (FEW, 0.4, ["one two three four five six seven"], [" eight", "nine ten"])],
    ids=["documents", "text"],
)
def test_the_tail_validates(tmp_path: Path, texts: list[str], fraction: float, train: list[str], valid: list[str]):
    manifest = prepare(write_jsonl(tmp_path / "t.jsonl", texts), "byte", tmp_path / "out", valid_fraction=fraction)
    assert manifest.split_rule == f"tail:{fraction}"
    folder = TokenFolder.open(tmp_path / "out")
    assert (documents(folder, "train"), documents(folder, "valid")) == (train, valid)


@given(st.lists(spaced_text.map("".join).filter(str.strip), min_size=1, max_size=5), st.floats(0.05, 0.5))
def test_both_splits_together_are_the_text(tmp_path_factory: pytest.TempPathFactory, texts: list[str], fraction: float):
    home = tmp_path_factory.mktemp("split")
    try:
        manifest = prepare(write_jsonl(home / "t.jsonl", texts), "byte", home / "out", valid_fraction=fraction)
    except InputError:
        assert len(texts) == 1
        assert whitespace_cut(texts[0], 0) is None
        assert not (home / "out").exists()
        return
    folder = TokenFolder.open(home / "out", verify=True)
    assert "".join(documents(folder, "train") + documents(folder, "valid")) == "".join(texts)
    assert manifest.train.words + manifest.valid.words == sum(len(text.split()) for text in texts)
    assert manifest.train.bytes + manifest.valid.bytes == sum(len(text.encode()) for text in texts)


@given(spaced_text.map("".join), st.integers(1, 20))
def test_pieces_encode_as_the_whole(text: str, chars: int):
    parts = list(pieces(text, chars))
    assert "".join(parts) == text
    assert max(map(len, pieces("ab " * 50, chars))) <= chars + 3
    encoded = [token for ids in TRAINED.encode_batch(parts) for token in ids.tolist()]
    assert encoded == TRAINED.encode(text).tolist()


def test_batches_of_any_size_give_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = write_jsonl(tmp_path / "t.jsonl", ["some words of text " * 40, "b c", "d e f " * 30])
    whole = prepare(text, "bpe:300", tmp_path / "a")
    monkeypatch.setattr(prepare_module, "BATCH_CHARS", 1)
    monkeypatch.setattr(prepare_module, "pieces", partial(pieces, chars=7))
    assert prepare(text, "bpe:300", tmp_path / "b") == whole


LITTLE = "to leave some for validation; valid: more text, or a validation text of its own"


@pytest.mark.parametrize(
    ("text", "tokenizer", "options", "message"),
    [
        ("empty.txt", "bpe:300", {}, "empty.txt is empty"),
        ("spaces.txt", "bpe:300", {}, "spaces.txt is empty"),
        ("word.txt", "bpe:300", {}, f"word.txt has too little text .8 bytes. {LITTLE}"),
        ("good.txt", "byte", {"valid": "empty.txt"}, "empty.txt is empty"),
        ("empty.txt", "byte", {"valid": "good.txt"}, "empty.txt is empty"),
        ("missing.txt", "byte", {}, "no file or folder"),
        ("bad.jsonl", "bpe:300", {}, "bad.jsonl is not UTF-8"),
        ("good.txt", "byte", {"valid": "missing.txt"}, "no file or folder"),
        ("good.txt", "byte", {"valid": "bad.jsonl"}, "bad.jsonl is not UTF-8"),
        ("good.txt", "words", {}, "tokenizer 'words' is unknown"),
        ("good.txt", "amino", {}, "^good.txt, line 1: ' ' is no amino acid"),
        ("good.txt", "byte", {"valid_fraction": 0.0}, "validation fraction 0.0 is out of range"),
        ("good.txt", "byte", {"valid_fraction": 0.6}, "validation fraction 0.6 is out of range"),
        ("good.txt", "byte", {"valid_fraction": float("nan")}, "validation fraction nan is out of range"),
    ],
)
def test_bad_input_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, tokenizer: str, options: dict[str, Any], message: str
):
    texts = {"empty.txt": "", "spaces.txt": " \n\n", "word.txt": "word    ", "good.txt": "some good text " * 10}
    for name, content in texts.items():
        write_text(tmp_path / name, content)
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "fine here"}\n' * 9 + b'{"text": "\xff"}\n')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message) as error:
        prepare(text, tokenizer, tmp_path / "deep" / "out", **options)
    assert "\n" not in str(error.value)
    assert {path.name for path in tmp_path.iterdir()} == {*texts, "bad.jsonl"}


def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = write_text(tmp_path / "t.txt", "ab cd ef gh " * 9)
    monkeypatch.setattr("impl.data.tokenizer.ByteTokenizer.vocab_size", 2**16)
    assert prepare(text, "byte", tmp_path / "out").dtype == "uint16"
    monkeypatch.setattr("impl.data.tokenizer.ByteTokenizer.vocab_size", 2**16 + 1)
    manifest = prepare(text, "byte", tmp_path / "out")
    folder = TokenFolder.open(tmp_path / "out", verify=True)
    assert manifest.dtype == "uint32"
    assert folder.tokens("train")[:3].tolist() == [97, 98, 32]
