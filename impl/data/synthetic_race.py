"""Questions of RACE's form in the synthetic language, whose right option is how the passage goes on."""

import random
from collections.abc import Iterator

from impl.data.config import OPTIONS
from impl.data.synthetic import LETTERS, SyntheticConfig, make_source
from impl.seeding import derive

LEVELS = ("middle", "high")
SIZES = {"train": 4000, "dev": 200, "test": 800}
"""Questions of each part, half of each level."""
ARTICLE_WORDS, OPTION_WORDS = 4, 3
QUESTIONS = ("_", "next:")
"""With a blank for the option, and without."""


def made_up(seed: int, count: int) -> Iterator[tuple[str, str, tuple[str, ...], int, str]]:
    """Article, question, options, index of the right one and level of `count` questions, levels by turns.

    The right option goes on where the article ends. The others are, at `middle`, letters at random in words as long,
    and at `high` text from elsewhere with each word spelled backwards: the letters are those of the language.
    """
    config = SyntheticConfig()
    source, draw = make_source(config), random.Random(derive(config.seed, "race", seed))
    words = [word.decode() for word in source.words]
    length = ARTICLE_WORDS + OPTIONS * OPTION_WORDS
    chain = source.sample(derive(config.seed, "race", "text", seed), count * length).reshape(count, length)
    for number, row in enumerate(chain):
        text, level = [words[i] for i in row], LEVELS[number % len(LEVELS)]
        pieces = [text[at : at + OPTION_WORDS] for at in range(ARTICLE_WORDS, length, OPTION_WORDS)]
        wrong = [_spoiled(piece, level, draw) for piece in pieces[1:]]
        answer = int(draw.random() * OPTIONS)
        options = [*wrong[:answer], pieces[0], *wrong[answer:]]
        question = QUESTIONS[number // len(LEVELS) % len(QUESTIONS)]
        yield " ".join(text[:ARTICLE_WORDS]), question, tuple(map(" ".join, options)), answer, level


def _spoiled(piece: list[str], level: str, draw: random.Random) -> list[str]:
    if level == "middle":
        return ["".join(chr(LETTERS[int(draw.random() * len(LETTERS))]) for _ in word) for word in piece]
    return [word[::-1] for word in piece]
