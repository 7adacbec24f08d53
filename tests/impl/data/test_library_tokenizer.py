"""Tokenizers that a file of the library `tokenizers` describes: ids, ends of documents, and where texts are cut."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.data.make_tokenizer import parse
from impl.data.prepare import pieces, prepare
from impl.data.tokenizer import Tokenizer
from impl.data.tokens import TokenFolder
from impl.errors import InputError
from tests.impl.data.library_files import WORDS, library_files

TEXT = "".join(WORDS)

KINDS = ("llama-3", "llama-2", "gpt-neox", "bert")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folders = {kind: library_files(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}
    return {kind: parse(f"hf:{folder}").build() for kind, folder in folders.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_the_library_gives_the_ids_of_transformers(kind: str, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    folder = library_files(tmp_path, kind)
    ours = parse(f"hf:{folder}").build()
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), split_special_tokens=True
    )
    assert ours.encode(TEXT).tolist() == theirs.encode(TEXT, add_special_tokens=False)
    assert ours.eot == theirs.convert_tokens_to_ids("[SEP]" if kind == "bert" else "</s>")
    assert ours.vocab_size == len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])


@pytest.mark.parametrize("kind", KINDS)
@given(st.lists(st.sampled_from(WORDS), max_size=12).map("".join), st.integers(1, 20))
def test_texts_of_such_tokenizers_come_back_and_may_be_cut(
    libraries: dict[str, Tokenizer], kind: str, text: str, chars: int
):
    tokenizer = libraries[kind]
    ids = tokenizer.encode(text).tolist()
    assert tokenizer.eot not in ids
    if kind != "bert":
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([*ids, tokenizer.eot]).removeprefix(text) == "</s>"
    parts = list(pieces(text, chars, tokenizer.cuts))
    assert "".join(parts) == text
    assert [one for part in tokenizer.encode_batch(parts) for one in part.tolist()] == ids


def test_where_texts_of_such_tokenizers_may_be_cut(libraries: dict[str, Tokenizer]):
    """Llama 2's begins every text with a space of its own, so that pieces would have more."""
    assert {kind: one.cuts is not None for kind, one in libraries.items()} == {
        **{"llama-3": True, "llama-2": False, "gpt-neox": True, "bert": True}
    }


def test_saved_files_of_the_library_are_loaded(libraries: dict[str, Tokenizer], tmp_path: Path):
    for tokenizer in libraries.values():
        tokenizer.save(tmp_path)
        loaded = Tokenizer.load(tmp_path)
        assert (loaded.name, loaded.sha256, loaded.eot) == (tokenizer.name, tokenizer.sha256, tokenizer.eot)
        assert loaded.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()


def test_damaged_files_of_the_library_are_named(tmp_path: Path):
    folder = library_files(tmp_path, "gpt-neox")
    spec = parse(f"hf:{folder}")
    good = (folder / "tokenizer.json").read_text()
    cases = [
        ("{", "{}", "tokenizer_config.json has no eos_token and no sep_token"),
        ("{", '{"eos_token": "</s>"}', "tokenizer.json is no JSON object"),
        ("{}", '{"eos_token": "</s>"}', "tokenizer.json describes no tokenizer"),
        (good, '{"eos_token": "<end>"}', "'<end>', which is to end documents, is not in the vocabulary"),
        (good, "[]", "tokenizer_config.json is no JSON object"),
    ]
    for described, config, message in cases:
        (folder / "tokenizer.json").write_text(described)
        (folder / "tokenizer_config.json").write_text(config)
        with pytest.raises(InputError, match=re.escape(message)):
            spec.build()


@pytest.mark.parametrize("kind", KINDS)
def test_documents_are_prepared_as_they_are_encoded(libraries: dict[str, Tokenizer], kind: str, tmp_path: Path):
    tokenizer, documents = libraries[kind], [TEXT * 2, "x </s> [SEP]", TEXT]
    lines = tmp_path / "text.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    folder = library_files(tmp_path / "files", kind)
    manifest = prepare(str(lines), f"hf:{folder}", tmp_path / "out", valid=str(lines))
    found = TokenFolder.open(tmp_path / "out", verify=True)
    wanted = [one for text in documents for one in [*tokenizer.encode(text).tolist(), tokenizer.eot]]
    assert found.tokens("train").tolist() == found.tokens("valid").tolist() == wanted
    assert manifest.tokenizer == {"bert": "WordPiece"}.get(kind, "BPE")
