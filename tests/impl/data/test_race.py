"""RACE: its own layout, the hub's, made-up questions, bad files, and the sequences that are made of questions."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from impl.data.batches import Batch
from impl.data.config import OPTIONS
from impl.data.race import (
    LONGEST_ASKED,
    PARTS,
    Question,
    Questions,
    choice_batch,
    encoded,
    race_sha256,
    read_race,
    why_no_race,
)  # fmt: skip
from impl.data.synthetic import SyntheticConfig, make_source
from impl.data.tokenizer import ByteTokenizer
from impl.errors import InputError
from tests.impl.data.race_files import QUESTIONS, write_hub, write_race

TOKENIZER = ByteTokenizer()
CLS, SEP = TOKENIZER.vocab_size, TOKENIZER.vocab_size + 1


def batch(questions: Questions, indices: list[int], seq_len: int = 64, seed: int | None = None) -> Batch:
    return choice_batch(questions, np.array(indices), seq_len=seq_len, seed=seed, vocab_size=TOKENIZER.vocab_size)


@pytest.mark.skipif(find_spec("datasets") is None, reason="the extra `hub` is not installed")
def test_the_hubs_layout_is_read_by_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    spec = f"hf:{write_hub(tmp_path / 'race')}"
    assert why_no_race(spec) is None
    for part in PARTS:
        assert read_race(spec, part) == QUESTIONS[part]
    assert race_sha256(spec) == race_sha256(str(write_race(tmp_path / "own")))


def test_its_own_layout_is_read_and_the_identity_is_that_of_the_questions(tmp_path: Path) -> None:
    own = str(write_race(tmp_path / "a"))
    assert why_no_race(own) is None
    for part in PARTS:
        assert sorted(read_race(own, part)) == sorted(QUESTIONS[part])
    same = race_sha256(own)
    assert race_sha256(str(write_race(tmp_path / "b"))) == same
    changed = {**QUESTIONS, "train": [QUESTIONS["train"][0]._replace(answer=2), *QUESTIONS["train"][1:]]}
    assert race_sha256(str(write_race(tmp_path / "c", changed))) != same


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not a passage of RACE: Invalid JSON"),
        ("[]", "is not a passage of RACE: Input should be an object"),
        ('{"article": "a", "questions": ["q"], "options": [], "answers": ["A"]}', "not equally many"),
        (
            '{"article": "a", "questions": ["q"], "options": [["a", "b"]], "answers": ["A"]}',
            "options.0.2: Field required",
        ),
        ('{"questions": ["q"], "options": [["a", "b", "c", "d"]], "answers": ["A"]}', "article: Field required"),
        (
            '{"article": "a", "questions": ["q"], "options": [["a", "b", "c", "d"]], "answers": ["E"]}',
            "answers.0: Input should be 'A', 'B', 'C' or 'D'",
        ),
    ],
)
def test_a_file_that_is_none_is_named_in_one_line(tmp_path: Path, content: str, says: str) -> None:
    write_race(tmp_path)
    (tmp_path / "dev" / "high" / "9.txt").write_text(content)
    with pytest.raises(InputError, match=r"9\.txt") as error:
        read_race(str(tmp_path), "dev")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_missing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_race(tmp_path, {"train": QUESTIONS["train"], "test": QUESTIONS["test"]})
    assert "no dev/middle|high/*.txt; valid: a folder with" in str(why_no_race(str(tmp_path)))
    assert why_no_race("synthetic") is None
    monkeypatch.setattr("impl.data.race.find_spec", lambda _: None)
    assert "install the extra" in str(why_no_race("hf:some/race"))
    monkeypatch.setattr("impl.data.race.load_hub", lambda *_: [{"article": "a"}])
    with pytest.raises(InputError, match=r"hf:some/race, dev, row 1 is not a question of RACE: questions\.0: Input"):
        read_race("hf:some/race", "dev")


def test_made_up_questions_go_on_where_the_passage_ends() -> None:
    words = {word.decode() for word in make_source(SyntheticConfig()).words}
    questions = read_race("synthetic", "test")
    assert questions == read_race("synthetic", "test")
    assert questions[0] not in read_race("synthetic", "train")
    shares = np.bincount([one.answer for one in questions]) / len(questions)
    assert (abs(shares - 1 / OPTIONS) < 0.06).all()
    for one in questions:
        right = one.options[one.answer].split()
        assert set(right) | set(one.article.split()) <= words
        for option in {*one.options} - {one.options[one.answer]}:
            backwards = {word[::-1] for word in option.split()}
            assert (backwards <= words) is (one.level == "high")


def test_a_sequence_for_each_option() -> None:
    first, second, _ = QUESTIONS["dev"]
    assert first.asked[1] == "What does it do? snow"
    assert second.asked == ["It snows .", "It rains .", "It shines .", "It blows ."]
    questions = encoded(QUESTIONS["dev"], TOKENIZER)
    assert len(questions.articles) == 2
    made = batch(questions, [1, 0])
    assert made.inputs.shape == (2 * OPTIONS, 64)
    assert made.targets.tolist() == [1, 0]
    assert made.token_types is not None
    for row, types, asked in zip(made.inputs, made.token_types, second.asked, strict=False):
        article = second.article.encode()
        expected = [CLS, *article, SEP, *asked.encode()]
        assert row.tolist() == expected + [SEP] * (64 - len(expected))
        assert types.tolist() == [0] * (len(article) + 2) + [1] * (62 - len(article))


@pytest.mark.parametrize("seq_len", [8, 21, 600])
def test_what_is_too_long_is_cut_at_its_end(seq_len: int) -> None:
    long = Question("p" * 1000, "q" * 500, ("a", "b", "c", "d"), 2, "high")
    row = batch(encoded([long], TOKENIZER), [0], seq_len).inputs[0]
    room = seq_len - 3
    asked = min(LONGEST_ASKED, room // 2)
    assert row.tolist() == [CLS, *b"p" * (room - asked), SEP, *b"q" * asked, SEP]


def test_questions_come_in_an_order_that_the_seed_gives() -> None:
    questions = encoded(read_race("synthetic", "dev"), TOKENIZER)
    whole = batch(questions, list(range(len(questions))), 56, seed=3)
    assert sorted(whole.targets.tolist()) == sorted(questions.answers.tolist())
    part = batch(questions, [5, 6], 56, seed=3)
    np.testing.assert_array_equal(part.inputs, whole.inputs[5 * OPTIONS : 7 * OPTIONS])
    assert not np.array_equal(whole.inputs, batch(questions, list(range(len(questions))), 56, seed=4).inputs)
