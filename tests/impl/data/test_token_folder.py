"""Token folders: whole or not at all, and what is told of one that is damaged."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from impl.data.synthetic import SyntheticConfig, write_synthetic
from impl.data.tokenizer import ByteTokenizer
from impl.data.tokens import TokenFolder
from impl.data.writing import new_token_folder
from impl.errors import InputError

SMALL = SyntheticConfig(train_tokens=3000, valid_tokens=1000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_synthetic(tmp_path / "tokens", SMALL)
    return tmp_path / "tokens"


def change_manifest(folder: Path, **fields: object) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_an_opened_folder_gives_tokens_tokenizer_and_identity(folder: Path, tmp_path: Path):
    opened = TokenFolder.open(folder, verify=True)
    train = opened.tokens("train")
    assert train.dtype == np.uint16
    assert len(train) == opened.manifest.train.tokens
    assert not train.flags.writeable
    assert len(opened.tokenizer.decode(train).split()) == opened.manifest.train.words
    write_synthetic(tmp_path / "again", SMALL)
    write_synthetic(tmp_path / "other", SyntheticConfig(seed=1, train_tokens=3000, valid_tokens=1000))
    assert TokenFolder.open(tmp_path / "again").sha256 == opened.sha256
    assert TokenFolder.open(str(tmp_path / "other")).sha256 != opened.sha256


def changed(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


truncate = changed("train.bin", lambda content: content[:-6])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"train\.bin is truncated: \d+ bytes, expected \d+"),
        (changed("valid.bin", lambda content: content + b"xy"), r"valid\.bin is too long: \d+ bytes, expected \d+"),
        (lambda f: (f / "train.bin").unlink(), r"train\.bin is missing"),
        (lambda f: (f / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
        (lambda f: (f / "manifest.json").unlink(), r"not a token folder, or an unfinished one: no manifest\.json"),
        (shutil.rmtree, r"no token folder .*; make one: lmscale prepare --text .* --out DIR"),
        (lambda f: (f / "manifest.json").write_text("{"), "is not a manifest: Invalid JSON"),
        (lambda f: (f / "manifest.json").write_text("[]"), "is not a manifest: Input should be an object"),
        (lambda f: change_manifest(f, format=2), "format: Input should be 1"),
        (lambda f: change_manifest(f, dtype="int8"), "manifest: dtype: "),
        (lambda f: change_manifest(f, extra=1), "manifest: extra: "),
    ],
)
def test_damage_is_told_at_opening(folder: Path, damage: Callable[[Path], object], message: str):
    damage(folder)
    with pytest.raises(InputError, match=message) as error:
        TokenFolder.open(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (changed("valid.bin", lambda content: content[:-1] + b"!"), r"valid\.bin has sha256 .*the manifest says"),
        (
            lambda f: change_manifest(f, tokenizer_sha256="0" * 64),
            r"tokenizer\.json has sha256 .*the manifest says 0000",
        ),
    ],
)
def test_wrong_hashes_are_found_when_verifying(folder: Path, damage: Callable[[Path], object], message: str):
    damage(folder)
    TokenFolder.open(folder)
    with pytest.raises(InputError, match=message):
        TokenFolder.open(folder, verify=True)


def test_nothing_is_left_when_writing_fails(tmp_path: Path):
    def interrupted() -> None:
        with new_token_folder(tmp_path / "out", ByteTokenizer()) as writer:
            writer.splits["train"].add_tokens(np.arange(5))
            with pytest.raises(InputError, match="unfinished"):
                TokenFolder.open(writer.folder)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_a_token_folder_is_replaced_a_damaged_one_too(folder: Path):
    truncate(folder)
    write_synthetic(folder, SMALL)
    assert TokenFolder.open(folder, verify=True).manifest.entropy is not None
    other = write_synthetic(folder, SyntheticConfig(seed=3, train_tokens=3000, valid_tokens=1000))
    assert TokenFolder.open(folder, verify=True).manifest == other
    assert list(folder.parent.iterdir()) == [folder]


def test_an_equal_folder_stays_as_it_is_and_so_does_an_old_one_when_writing_fails(folder: Path):
    before = (folder / "train.bin").stat().st_ino
    write_synthetic(folder, SMALL)
    with pytest.raises(KeyboardInterrupt), new_token_folder(folder, ByteTokenizer()):
        raise KeyboardInterrupt
    assert (folder / "train.bin").stat().st_ino == before
    assert list(folder.parent.iterdir()) == [folder]


def test_other_peoples_files_are_never_replaced(folder: Path, tmp_path: Path):
    (folder / "thesis.tex").write_text("precious")
    with pytest.raises(InputError, match=r"holds thesis\.tex"):
        write_synthetic(folder, SMALL)
    assert (folder / "thesis.tex").read_text() == "precious"
    web = tmp_path / "web"
    web.mkdir()
    (web / "manifest.json").write_text('{"name": "a web page"}')
    with pytest.raises(InputError, match="no token folder"):
        write_synthetic(web, SMALL)


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="is a file"):
        write_synthetic(tmp_path / "file", SMALL)
    with pytest.raises(NotADirectoryError, match=r"Not a directory: '.*/file/out'"):
        write_synthetic(tmp_path / "file" / "out", SMALL)
