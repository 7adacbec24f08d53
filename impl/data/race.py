"""RACE: passages with questions of four options each, from its own files, from the hub, or synthetic."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from impl.data.config import OPTIONS, SYNTHETIC
from impl.data.synthetic_race import LEVELS, SIZES, made_up
from impl.data.text import HUB_PREFIX, NEEDS_HUB, load_hub
from impl.data.tokenizer import Tokenizer
from impl.errors import InputError
from impl.files import from_json, read_text

RacePart = Literal["train", "dev", "test"]
PARTS: tuple[RacePart, ...] = get_args(RacePart)
BLANK = "_"
LETTERS = "ABCD"
LAYOUT = "valid: a folder with {train,dev,test}/{middle,high}/*.txt as RACE has them, hf:NAME[:CONFIG], or synthetic"


class Question(NamedTuple):
    """Question on a passage; `answer` is the right option's index."""

    article: str
    question: str
    options: tuple[str, ...]
    answer: int
    level: str
    """`middle` or `high`: the school that the question is from."""

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
        return [Question(*fields) for fields in made_up(PARTS.index(part), SIZES[part])]
    if spec.startswith(HUB_PREFIX):
        rows = load_hub(spec, {"dev": "validation"}.get(part, part))
        return [_from_row(row, f"{spec}, {part}, row {number}") for number, row in enumerate(rows, 1)]
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


def _from_file(path: Path, level: str) -> Iterator[Question]:
    """Yield the questions on one passage, from a JSON object with parallel lists."""
    try:
        content = from_json(read_text(path))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a passage of RACE: {' '.join(str(error).split())}") from None
    found = [content.get(name) for name in ("questions", "options", "answers")] if isinstance(content, dict) else []
    lists = [one for one in found if isinstance(one, list)]
    if len(lists) < 3 or len(set(map(len, lists))) > 1:
        raise InputError(f"{path} is not a passage of RACE; valid: article, and questions, options, answers as long")
    for number, fields in enumerate(zip(*lists, strict=True), 1):
        question, options, answer = fields
        yield _checked(content.get("article"), question, options, answer, level, f"{path}, question {number}")


def _from_row(row: Any, where: str) -> Question:
    """Return the question in a row of the hub's copies; the passage's id begins with the level."""
    row = row if isinstance(row, dict) else {}
    level = "middle" if str(row.get("example_id", "")).startswith("middle") else "high"
    return _checked(row.get("article"), row.get("question"), row.get("options"), row.get("answer"), level, where)


def _checked(article: Any, question: Any, options: Any, answer: Any, level: str, where: str) -> Question:
    is_texts = isinstance(options, list) and len(options) == OPTIONS and all(isinstance(o, str) for o in options)
    if not (isinstance(article, str) and isinstance(question, str) and is_texts):
        raise InputError(f"{where}: valid are a text as article and question, and {OPTIONS} texts as options")
    if answer not in tuple(LETTERS):
        raise InputError(f"{where}: answer {answer!r:.20}; valid: {', '.join(LETTERS)}")
    return Question(article, question, tuple(options), LETTERS.index(answer), level)


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

    @staticmethod
    def encoded(questions: Sequence[Question], tokenizer: Tokenizer) -> "Questions":
        """Return the questions as ids of a tokenizer."""
        articles = {article: i for i, article in enumerate(dict.fromkeys(q.article for q in questions))}
        return Questions(
            tokenizer.encode_batch(list(articles)),
            np.array([articles[q.article] for q in questions], np.int64),
            tokenizer.encode_batch([text for q in questions for text in q.asked]),
            np.array([q.answer for q in questions], np.int64),
            tuple(q.level for q in questions),
        )


@dataclass(frozen=True)
class Race:
    """RACE for one tokenizer; a part is read at first use."""

    spec: str
    tokenizer: Tokenizer
    _known: dict[RacePart, Questions] = field(default_factory=dict, repr=False, compare=False)

    def part(self, name: RacePart) -> Questions:
        if name not in self._known:
            self._known[name] = Questions.encoded(read_race(self.spec, name), self.tokenizer)
        return self._known[name]

    @cached_property
    def sha256(self) -> str:
        """Identity of all questions, independent of their source and of the order of files."""
        digest = hashlib.sha256()
        for part in PARTS:
            lines = sorted(json.dumps([part, *question]) for question in read_race(self.spec, part))
            digest.update("\n".join(lines).encode())
        return digest.hexdigest()
