"""Reading documents: every form, and every fault with its place."""

import gzip
import hashlib
import json
import lzma
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.data.text import Sequences, TextFile, open_texts
from impl.errors import InputError

LINES = [{"text": "one\ntwo"}, {"text": "drei ä", "title": "t"}]
JSONL = "\n".join(json.dumps(line) for line in LINES)


def documents(spec: Path | str) -> list[str]:
    return [document for text in open_texts(str(spec)) for document in text.documents()]


@pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)])
def test_jsonl_has_a_document_a_line(tmp_path: Path, suffix: str, pack: Any):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(pack((JSONL + "\n\n" + '{"text": " "}\n').encode()))
    assert documents(path) == ["one\ntwo", "drei ä"]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)))
def test_jsonl_gives_back_what_was_written(tmp_path_factory: pytest.TempPathFactory, texts: list[str]):
    path = tmp_path_factory.mktemp("jsonl") / "a.jsonl"
    path.write_text(
        "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), "utf-8", newline=""
    )
    assert documents(path) == texts


def test_a_folder_is_its_text_files_sorted(tmp_path: Path):
    (tmp_path / "b.txt").write_bytes("é\r\n b\n".encode())
    (tmp_path / "c.jsonl.txt").write_text("not json")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.jsonl").write_text(JSONL)
    (tmp_path / "notes.md").write_text("no")
    assert documents(tmp_path) == ["one\ntwo", "drei ä", "é\r\n b\n", "not json"]
    texts = open_texts(str(tmp_path))
    assert [text.name for text in texts] == ["a/z.jsonl", "b.txt", "c.jsonl.txt"]
    assert texts[2].sha256() == hashlib.sha256(b"not json").hexdigest()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"ab\ncd\xff", "is not UTF-8: byte 5, line 2"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}', "is not UTF-8: byte 24, line 2"),
        ("a.jsonl", b'{"text": "a"}\n{"body": "b"}', "line 2: no text"),
        ("a.jsonl", b'{"text": 3}', "line 1: no text"),
        ("a.jsonl", b'"text"', "line 1: no text"),
        ("a.jsonl", b'\n{"text": "a"', "line 2: not JSON"),
        ("a.jsonl", b'{"text": "\\ud800"}', "line 1: not JSON: unexpected end of hex escape"),
        ("a.jsonl.gz", gzip.compress(JSONL.encode(), mtime=0)[:-9], "is a damaged archive"),
        ("a.jsonl.gz", b"plain", "is a damaged archive"),
        ("a.jsonl.xz", lzma.compress(JSONL.encode())[:-9], "is a damaged archive"),
        ("a.txt.xz", b"plain", "is a damaged archive"),
    ],
)
def test_faults_are_told_with_their_place(tmp_path: Path, name: str, content: bytes, message: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as error:
        documents(tmp_path / name)
    assert name in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_files_are_named(tmp_path: Path):
    with pytest.raises(InputError, match=r"no file or folder .*nowhere\.txt"):
        open_texts(str(tmp_path / "nowhere.txt"))
    with pytest.raises(InputError, match=r"holds no \.txt or \.jsonl file"):
        open_texts(str(tmp_path))
    with pytest.raises(InputError, match="cannot be read: No such file"):
        list(TextFile("a.txt", tmp_path / "a.txt").documents())


def unreachable(*_: Any, **__: Any) -> None:
    raise ConnectionError("no route\n  to host")


@pytest.mark.parametrize(
    ("package", "spec", "message"),
    [
        (None, "hf:some/name", r"hf:some/name needs the package datasets; .*lmscale\[hub\]"),
        (SimpleNamespace(load_dataset=unreachable), "hf:name", "could not be loaded .*offline.*: no route to host$"),
        (SimpleNamespace(load_dataset=unreachable), "hf:", "no dataset is named"),
        (SimpleNamespace(load_dataset=lambda *_, **__: [*LINES, {"label": 1}]), "hf:name", "hf:name, row 3: no text"),
    ],
)
def test_faults_of_the_hub(package: Any, spec: str, message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", package)
    with pytest.raises(InputError, match=message):
        documents(spec)


def test_the_hub_gives_rows(monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []

    def load_dataset(*args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        asked.append((args, kwargs))
        return [*LINES, {"text": ""}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    (text,) = open_texts("hf:some/name:config")
    assert asked == [(("some/name", "config"), {"split": "train"})]
    assert list(text.documents()) == list(text.documents()) == ["one\ntwo", "drei ä"]
    assert text.name == "hf:some/name:config"
    assert text.sha256() == hashlib.sha256("one\ntwo\0drei ä\0".encode()).hexdigest()


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (">one protein\nMKTA\nyiak\n\n>two\n>three\nACDBOUXZ", ["MKTAYIAK", "ACDBOUXZ"]),
        ("\n>one\r\nMK\r\nTA\r\n", ["MKTA"]),
        ("MKTA\n  \nyiak \n", ["MKTA", "YIAK"]),
    ],
    ids=["FASTA", "FASTA of Windows", "lines"],
)
def test_sequences_are_documents(tmp_path: Path, content: str, found: list[str]) -> None:
    (tmp_path / "a.fasta").write_bytes(content.encode())
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(content.encode()))
    for name in ("a.fasta", "a.txt.gz"):
        [text] = map(Sequences, open_texts(str(tmp_path / name)))
        assert list(text.documents()) == found
        assert (text.name, text.sha256()) == (name, open_texts(str(tmp_path / name))[0].sha256())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.fasta",
            ">one J\nMK\n\nTA*\n",
            r"a\.fasta, line 4: '\*' is no amino acid; valid: ACD.*, and B, O, U, X, Z$",
        ),
        ("a.txt", "MK\nMJ-\n>x\n", r"a\.txt, line 2: 'J' is"),
        ("a.txt", "MK\n>x\n", r"a\.txt, line 2: '>' is"),
        ("a.jsonl", '{"text": "MK"}\n{"text": "M\u00df"}\n', r"a\.jsonl, document 2, line 1: '\u00df' is"),
    ],
)
def test_what_is_no_amino_acid_is_named_with_its_line(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content, "utf-8")
    [text] = map(Sequences, open_texts(str(tmp_path / name)))
    with pytest.raises(InputError, match=message):
        list(text.documents())
