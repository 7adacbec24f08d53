"""Tokenizers: round trips, identity, and files that do not fit."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from impl.data.make_tokenizer import TokenizerSpec, parse
from impl.data.tokenizer import AMINO_ACIDS, END_OF_TEXT, Tokenizer
from impl.errors import InputError

TEXTS = ["the cat sat on the mat; it's the cat's mat\n\n", "ça va, 日本語 日本語 😀\n"] * 20
TRAINED = parse("bpe:320").build(TEXTS)
BYTES = parse("byte").build()
AMINO = parse("amino").build()
any_text = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("the cat\n  '\u00a0\u2028日"))


def gpt2_files(folder: Path, tokenizer: Tokenizer = TRAINED) -> tuple[Path, Path]:
    """A tokenizer's vocabulary and merges in GPT-2's two files."""
    tokenizer.save(folder)
    content = json.loads((folder / "tokenizer.json").read_bytes())
    vocab, merges = folder / "encoder.json", folder / "vocab.bpe"
    vocab.write_text(json.dumps(content["vocab"]))
    merges.write_text("#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in content["merges"]), "utf-8")
    return vocab, merges


@pytest.mark.parametrize("tokenizer", [BYTES, TRAINED], ids=["byte", "bpe"])
@given(any_text)
@example(f"a{END_OF_TEXT}b")
@example("\r\n\x00  \n")
def test_text_comes_back(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eot not in ids
    assert all(ids < tokenizer.vocab_size)


@pytest.mark.parametrize("tokenizer", [BYTES, TRAINED], ids=["byte", "bpe"])
def test_the_end_of_text_is_told(tokenizer: Tokenizer):
    ids = [*tokenizer.encode("é"), tokenizer.eot, *tokenizer.encode("b")]
    assert tokenizer.decode(ids) == f"é{END_OF_TEXT}b"
    assert tokenizer.decode([]) == ""


@given(st.text(AMINO_ACIDS))
def test_amino_acids_come_back(sequence: str):
    ids = AMINO.encode(sequence)
    assert AMINO.decode([*ids, AMINO.eot, *ids]) == f"{sequence}{END_OF_TEXT}{sequence}"
    assert all(ids < AMINO.eot)
    assert AMINO.decode([29, -1]) == ""


@pytest.mark.parametrize("text", ["ACJ", "AC D", "acd", "AC\n", "ACé", "*"])
def test_other_characters_are_no_amino_acids(text: str):
    with pytest.raises(InputError, match=r" is no amino acid; valid: ACDEFGHIKLMNPQRSTVWY, and B, O, U, X, Z"):
        AMINO.encode(text)


def test_training_on_a_text_without_spaces_ends():
    word = "abcdefghij" * 2**17  # untrained on parts, it would take hours
    assert parse("bpe:300").build([word]).encode(word).size < len(word) / 10


def test_bytes_are_the_ids_of_the_byte_tokenizer():
    assert (BYTES.vocab_size, BYTES.eot) == (257, 256)
    assert BYTES.encode("aé").tolist() == [97, 195, 169]
    assert BYTES.decode([97, 195]) == "a\ufffd"


def test_a_batch_is_each_text_alone():
    texts = ["", "the cat", " 日本"]
    for tokenizer in (BYTES, TRAINED):
        for ids, text in zip(tokenizer.encode_batch(texts), texts, strict=True):
            assert ids.tolist() == tokenizer.encode(text).tolist()


def test_training_merges_what_is_frequent():
    assert 257 < TRAINED.vocab_size <= 320
    assert len(TRAINED.encode(" the")) == 1
    assert len(TRAINED.encode(" 日本語")) < len(" 日本語".encode())
    assert 257 < parse("bpe:5000").build(["abc abc"]).vocab_size < 300, "a small text gives a small vocabulary"


def test_training_gives_the_same_in_any_order_and_process():
    program = "import sys\nfrom impl.data.make_tokenizer import parse\n"
    program += "print(parse('bpe:320').build(sys.argv[1:]).sha256)"
    done = subprocess.run([sys.executable, "-c", program, *reversed(TEXTS)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == TRAINED.sha256


@pytest.mark.parametrize("tokenizer", [BYTES, TRAINED, AMINO], ids=["byte", "bpe", "amino"])
def test_saved_is_loaded(tokenizer: Tokenizer, tmp_path: Path):
    tokenizer.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert (loaded.name, loaded.sha256) == (tokenizer.name, tokenizer.sha256)
    assert (loaded.vocab_size, loaded.eot) == (tokenizer.vocab_size, tokenizer.eot)
    text = "MKTZ" if tokenizer is AMINO else "the cat's 日"
    assert np.array_equal(loaded.encode(text), tokenizer.encode(text))


def test_gpt2_files_give_their_tokenizer(tmp_path: Path):
    vocab, merges = gpt2_files(tmp_path)
    tokenizer = parse(f"gpt2:{vocab},{merges}").build()
    assert tokenizer.name == "gpt2"
    assert tokenizer.eot == TRAINED.eot
    assert tokenizer.encode(TEXTS[0]).tolist() == TRAINED.encode(TEXTS[0]).tolist()


UNKNOWN = r"unknown; valid: byte, amino, gpt2:VOCAB,MERGES .*, hf:FOLDER .*, bpe:VOCAB_SIZE"


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ("|bytes|byte:1|amino:25|hf|hf:|gpt2|gpt2:a|gpt2:a,b,c|bpe|bpe:|bpe:1k|bpe:-1", UNKNOWN),
        ("bpe:256|bpe:99999999", "from 257 to 1048576 are valid"),
        (f"gpt2:{__file__},missing.bpe", r"no file missing\.bpe"),
        ("hf:gpt2", r"no file gpt2/tokenizer\.json; valid: .* \(with tokenizer\.json and tokenizer_config\.json"),
    ],
)
def test_specifications_that_are_refused(specs: str, message: str):
    for spec in specs.split("|"):
        with pytest.raises(InputError, match=message):
            parse(spec)


def test_damaged_gpt2_files_are_named(tmp_path: Path):
    vocab, merges = gpt2_files(tmp_path)
    spec: TokenizerSpec = parse(f"gpt2:{vocab},{merges}")
    good_vocab, good_merges = vocab.read_text(), merges.read_text("utf-8")
    lacking = {token: i for token, i in json.loads(good_vocab).items() if token != END_OF_TEXT}
    gap = {token: i + (i > 270) for token, i in json.loads(good_vocab).items()}
    cases = [
        ("{", good_merges, "encoder.json is not a JSON vocabulary"),
        ('{"a": "b"}', good_merges, "vocabulary (GPT-2's encoder.json): a: Input should be a valid integer"),
        (json.dumps(lacking), good_merges, "endoftext"),
        (json.dumps(gap), good_merges, f"not 0..{TRAINED.vocab_size - 1}"),
        (good_vocab, "#version\na\n", "vocab.bpe, line 2"),
        (good_vocab, "q x\n", "merges do not fit the vocabulary"),
    ]
    for vocab_text, merges_text, message in cases:
        vocab.write_text(vocab_text)
        merges.write_text(merges_text, "utf-8")
        with pytest.raises(InputError, match=re.escape(message)):
            spec.build()


@pytest.mark.parametrize(
    "content", [None, b"{", b"{}", b"[]", b"\xff", b'{"kind": "x", "name": "x", "vocab": {}, "merges": []}']
)
def test_a_damaged_or_missing_tokenizer_file_is_named(tmp_path: Path, content: bytes | None):
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(InputError, match=r"tokenizer\.json is (missing|not a tokenizer written by `prepare`)"):
        Tokenizer.load(tmp_path)
