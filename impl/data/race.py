"""RACE: passages with questions of four options each, from its own files, from the hub, or synthetic."""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from pydantic import BaseModel

from impl.data import synthetic
from impl.data.batches import Batch, windows_at
from impl.data.config import OPTIONS, SYNTHETIC
from impl.data.text import HUB_PREFIX, NEEDS_HUB, load_hub
from impl.data.tokenizer import Tokenizer
from impl.errors import InputError, in_one_line
from impl.files import read_bytes
from impl.model.config import SPECIAL_TOKENS
from impl.seeding import derive

RacePart = Literal["train", "dev", "test"]
PARTS: tuple[RacePart, ...] = get_args(RacePart)
LEVELS = ("middle", "high")
"""Schools that the questions are from."""
BLANK = "_"
LETTERS = "ABCD"
LAYOUT = "valid: a folder with {train,dev,test}/{middle,high}/*.txt as RACE has them, hf:NAME[:CONFIG], or synthetic"
LONGEST_ASKED = 128
"""Most tokens of a question with an option, which may also fill half of the sequence; the passage has the rest."""

SYNTHETIC_SIZES = {"train": 4000, "dev": 200, "test": 800}
"""Synthetic questions of each part, half of each level."""
ARTICLE_WORDS, OPTION_WORDS = 4, 3
SYNTHETIC_QUESTIONS = (BLANK, "next:")


class Question(NamedTuple):
    """Question on a passage; `answer` is the right option's index, `level` one of `LEVELS`."""

    article: str
    question: str
    options: tuple[str, ...]
    answer: int
    level: str

    @property
    def asked(self) -> list[str]:
        """The question with each option: in place of the blank if there is one, else after the question."""
        if BLANK in self.question:
            return [self.question.replace(BLANK, option) for option in self.options]
        return [f"{self.question} {option}".strip() for option in self.options]


def read_race(spec: str, part: RacePart) -> list[Question]:
    """Read a part of RACE from a folder in its own layout (Lai et al. 2017), from the hub, or synthetic (`synthetic`).

    Raises:
        InputError: missing, or not of RACE's form; names the file or row, and what is wrong with it.
    """
    if spec == SYNTHETIC:
        return list(_synthetic(PARTS.index(part), SYNTHETIC_SIZES[part]))
    if spec.startswith(HUB_PREFIX):
        rows = load_hub(spec, {"dev": "validation"}.get(part, part))
        return [q for number, row in enumerate(rows, 1) for q in _from_row(row, f"{spec}, {part}, row {number}")]
    return [question for path, level in _files(Path(spec), part) for question in _from_file(path, level)]


def why_no_race(spec: str) -> str | None:
    """Return what is missing before RACE can be read, in one line; None if nothing is found without reading it."""
    if spec == SYNTHETIC:
        return None
    if spec.startswith(HUB_PREFIX):
        return None if find_spec("datasets") else f"{spec} {NEEDS_HUB}"
    try:
        for part in PARTS:
            _files(Path(spec), part)
    except InputError as error:
        return str(error)
    return None


def _files(folder: Path, part: RacePart) -> list[tuple[Path, str]]:
    found = [(path, level) for level in LEVELS for path in sorted((folder / part / level).glob("*.txt"))]
    if not found:
        raise InputError(f"data.race {folder}: no {part}/{'|'.join(LEVELS)}/*.txt; {LAYOUT}")
    return found


class _Passage(BaseModel):
    """Content of one of RACE's files: lists with an entry for each question."""

    article: str
    questions: list[str]
    options: list[tuple[str, str, str, str]]
    answers: list[Literal["A", "B", "C", "D"]]

    def of(self, level: str) -> list[Question]:
        if not len(self.questions) == len(self.options) == len(self.answers):
            raise ValueError("questions, options and answers are not equally many")
        rows = zip(self.questions, self.options, self.answers, strict=True)
        return [Question(self.article, text, options, LETTERS.index(answer), level) for text, options, answer in rows]


def _from_file(path: Path, level: str) -> list[Question]:
    try:
        return _Passage.model_validate_json(read_bytes(path)).of(level)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a passage of RACE: {in_one_line(error)}") from None


def _from_row(row: Any, where: str) -> list[Question]:
    """Return the question in a row of the hub's copies; the passage's id begins with the level."""
    level = "middle" if str(row.get("example_id", "")).startswith("middle") else "high"
    lists = {"questions": [row.get("question")], "options": [row.get("options")], "answers": [row.get("answer")]}
    try:
        return _Passage.model_validate({"article": row.get("article"), **lists}).of(level)
    except ValueError as error:
        raise InputError(f"{where} is not a question of RACE: {in_one_line(error)}") from None


def _synthetic(seed: int, count: int) -> Iterator[Question]:
    """Yield questions in the synthetic language whose right option is how the passage goes on, levels by turns.

    The other options are, at `middle`, letters at random in words as long, and at `high` text from elsewhere with each
    word spelled backwards: the letters are those of the language.
    """
    config = synthetic.SyntheticConfig()
    source, draw = synthetic.make_source(config), random.Random(derive(config.seed, "race", seed))
    words = [word.decode() for word in source.words]
    length = ARTICLE_WORDS + OPTIONS * OPTION_WORDS
    chain = source.sample(derive(config.seed, "race", "text", seed), count * length).reshape(count, length)
    for number, row in enumerate(chain):
        text, level = [words[i] for i in row], LEVELS[number % len(LEVELS)]
        pieces = [text[at : at + OPTION_WORDS] for at in range(ARTICLE_WORDS, length, OPTION_WORDS)]
        options = [_spoiled(piece, level, draw) for piece in pieces[1:]]
        answer = int(draw.random() * OPTIONS)
        options.insert(answer, pieces[0])
        question = SYNTHETIC_QUESTIONS[number // len(LEVELS) % len(SYNTHETIC_QUESTIONS)]
        yield Question(" ".join(text[:ARTICLE_WORDS]), question, tuple(map(" ".join, options)), answer, level)


def _spoiled(piece: list[str], level: str, draw: random.Random) -> list[str]:
    letters = synthetic.LETTERS.decode()
    if level == "middle":
        return ["".join(letters[int(draw.random() * len(letters))] for _ in word) for word in piece]
    return [word[::-1] for word in piece]


@dataclass(frozen=True)
class Questions:
    """Questions as token ids; passages that several questions share are kept once."""

    articles: list[np.ndarray]
    article_of: np.ndarray
    """Index of each question's passage. Shapes: [n]."""
    asked: list[np.ndarray]
    """Each question with each of its options, `OPTIONS` to a question."""
    answers: np.ndarray
    """Index of the right option. Shapes: [n]."""
    levels: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.answers)


def encoded(questions: Sequence[Question], tokenizer: Tokenizer) -> Questions:
    """Return the questions as ids of a tokenizer."""
    articles = {article: i for i, article in enumerate(dict.fromkeys(q.article for q in questions))}
    return Questions(
        tokenizer.encode_batch(list(articles)),
        np.array([articles[q.article] for q in questions], np.int64),
        tokenizer.encode_batch([text for q in questions for text in q.asked]),
        np.array([q.answer for q in questions], np.int64),
        tuple(q.level for q in questions),
    )


@lru_cache(maxsize=len(PARTS))
def race_part(spec: str, part: RacePart, tokenizer: Tokenizer) -> Questions:
    """Return a part of RACE as ids of a tokenizer, cached. Raises: as `read_race`."""
    return encoded(read_race(spec, part), tokenizer)


@lru_cache(maxsize=1)
def race_sha256(spec: str) -> str:
    """Return the identity of all questions, independent of their source and of the order of files."""
    digest = hashlib.sha256()
    for part in PARTS:
        lines = sorted(json.dumps([part, *question]) for question in read_race(spec, part))
        digest.update("\n".join(lines).encode())
    return digest.hexdigest()


def choice_batch(
    questions: Questions, indices: np.ndarray, *, seq_len: int, seed: int | None, vocab_size: int
) -> Batch:
    """Return a sequence for each option: [CLS] passage [SEP] question with the option [SEP], filled with [SEP].

    What is too long is cut at its end. seed None: question g for sample g. `vocab_size` is the tokenizer's.

    Source: Megatron-LM 2019, section 5.4, which follows Liu et al. 2019 (RoBERTa), section 5.
    Shapes: indices [b / 4].
    """
    cls, sep = vocab_size, vocab_size + 1
    picks = windows_at(np.asarray(indices, np.int64), len(questions), seed)
    inputs, types = np.full((2, len(picks) * OPTIONS, seq_len), sep, np.int64)
    inputs[:, 0], types[:] = cls, 0
    room = seq_len - SPECIAL_TOKENS["bert"]
    for row, (pick, option) in enumerate((pick, option) for pick in picks for option in range(OPTIONS)):
        asked = questions.asked[pick * OPTIONS + option][: min(LONGEST_ASKED, room // 2)]
        article = questions.articles[questions.article_of[pick]][: room - len(asked)]
        second = 2 + len(article)
        inputs[row, 1 : second - 1] = article
        inputs[row, second : second + len(asked)] = asked
        types[row, second:] = 1
    return Batch(inputs, questions.answers[picks], token_types=types)
