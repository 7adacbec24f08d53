"""A synthetic language whose entropy rate is known exactly: the floor of every perplexity on it.

Classes of words form a Markov chain; a class emits a word of its own lexicon, most often its first ones (Zipf).
A word belongs to one class, which its last letter marks, and is ended by one space. So the letters tell words and
classes without doubt, and the entropy of a letter is the entropy of a word over its mean length.
"""

import dataclasses
from dataclasses import dataclass as plain_dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from impl.data.tokenizer import ByteTokenizer
from impl.data.tokens import SPLITS, Entropy, Manifest
from impl.data.writing import new_token_folder
from impl.fields import CHECKED
from impl.seeding import derive

LETTERS = b"abcdefghijklmnopqrstuvwxyz"
SHORTEST, LONGEST = 2, 5
"""Fewest and most letters of a word."""
SUCCESSION_DECAY, SUCCESSION_FLOOR = 0.5, 0.02
"""Weight of the i-th word class that may follow one in the synthetic language: decay to the i, plus the floor."""


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class SyntheticConfig:
    """Parameters of a synthetic language and sizes of its texts."""

    seed: int = 0
    classes: int = Field(default=8, ge=2, le=26)
    words_per_class: int = Field(default=8, ge=1, le=256)
    train_tokens: int = Field(default=4_000_000, ge=1000)
    """Approximate tokens; a text ends with a whole word."""
    valid_tokens: int = Field(default=200_000, ge=1000)


@plain_dataclass(frozen=True)
class Source:
    """A Markov chain of word classes, each with a lexicon. Words are numbered class by class.

    Shapes: transitions [classes, classes], rows are the class before; emissions [classes, words per class].
    """

    transitions: np.ndarray
    emissions: np.ndarray
    words: tuple[bytes, ...]

    @property
    def stationary(self) -> np.ndarray:
        """Share of each class in a long text: the left eigenvector of the transitions for eigenvalue 1."""
        classes = len(self.transitions)
        equations = np.vstack([self.transitions.T - np.eye(classes), np.ones(classes)])
        return np.linalg.lstsq(equations, np.append(np.zeros(classes), 1.0), rcond=None)[0]

    @property
    def nats_per_word(self) -> float:
        """Entropy rate: of the next class given this one, plus of the word given its class."""
        return float(self.stationary @ (row_entropy(self.transitions) + row_entropy(self.emissions)))

    @property
    def letters_per_word(self) -> float:
        """Mean length of a word and its space."""
        lengths = np.array([len(word) + 1 for word in self.words]).reshape(self.emissions.shape)
        return float(self.stationary @ (self.emissions * lengths).sum(1))

    @property
    def nats_per_letter(self) -> float:
        return self.nats_per_word / self.letters_per_word

    def sample(self, seed: int, words: int) -> np.ndarray:
        """Return one stationary chain of word numbers."""
        draw = uniforms(seed, 2 * words)
        first, moves, choices = draw[:1], draw[1:words], draw[words:]
        start = int(inverse_cdf(self.stationary, first)[0])
        # of each class, in turn; bytes, since numbers as Python's own take longer to make than to be used
        successors = np.stack([inverse_cdf(row, moves).astype(np.uint8) for row in self.transitions], axis=1).tobytes()
        rows = range(0, len(successors), len(self.transitions))
        classes = np.array([*accumulate(rows, lambda state, row: successors[row + state], initial=start)])
        numbers = np.empty(words, np.int64)
        for index, row in enumerate(self.emissions):
            here = classes == index
            numbers[here] = index * len(row) + inverse_cdf(row, choices[here])
        return numbers

    def spell(self, numbers: np.ndarray) -> np.ndarray:
        """Return the letters of a chain of words, each word ended by a space, uint8."""
        lengths = np.array([len(word) + 1 for word in self.words])
        lexicon = np.frombuffer(b" ".join(self.words) + b" ", np.uint8)
        starts, sizes = (np.cumsum(lengths) - lengths)[numbers], lengths[numbers]
        ends = np.cumsum(sizes)
        return lexicon[np.repeat(starts - (ends - sizes), sizes) + np.arange(ends[-1])]


def make_source(config: SyntheticConfig) -> Source:
    """Return the language of a configuration; its seed fixes transitions and spelling."""
    classes, per_class = config.classes, config.words_per_class
    # A few likely successors for each class, in its own order, but never none
    weights = SUCCESSION_DECAY ** np.arange(classes) + SUCCESSION_FLOOR
    order = uniforms(derive(config.seed, "language", "order"), classes**2).reshape(classes, classes).argsort(1)
    zipf = 1.0 / np.arange(1, per_class + 1)
    return Source(
        transitions=weights[order] / weights.sum(),
        emissions=np.tile(zipf / zipf.sum(), (classes, 1)),
        words=_spelling(derive(config.seed, "language", "spelling"), classes, per_class),
    )


def code_length(source: Source, numbers: np.ndarray) -> tuple[float, float]:
    """Return nats per letter of a chain of words under its source, and the standard error around `nats_per_letter`.

    The error is that of a ratio estimator with means over batches, since neighbouring words depend on each other.
    """
    classes = numbers // source.emissions.shape[1]
    moves = np.append(source.stationary[classes[0]], source.transitions[classes[:-1], classes[1:]])
    nats = -np.log(moves * source.emissions.ravel()[numbers])
    letters = np.array([len(word) + 1 for word in source.words])[numbers]
    rate = nats.sum() / letters.sum()
    batches = max(2, int(len(numbers) ** 0.5))
    sums = np.array([part.sum() for part in np.array_split(nats - rate * letters, batches)])
    return float(rate), float(sums.std(ddof=1) * batches**0.5 / letters.sum())


def write_synthetic(folder: Path, config: SyntheticConfig) -> Manifest:
    """Write a token folder of bytes in the language, one chain a split, with its entropy in the manifest.

    Raises:
        InputError: `folder` holds something else.
        OSError: it cannot be written.
    """
    source, chains = make_source(config), {}
    with new_token_folder(folder, ByteTokenizer()) as writer:
        for name, tokens in zip(SPLITS, (config.train_tokens, config.valid_tokens), strict=True):
            words = max(2, round(tokens / source.letters_per_word))
            chains[name] = source.sample(derive(config.seed, name), words)
            letters = source.spell(chains[name])
            writer.splits[name].add_tokens(letters)
            writer.splits[name].count_document(bytes=len(letters), words=words)
        rate, (valid_rate, valid_error) = source.nats_per_letter, code_length(source, chains["valid"])
        entropy = Entropy(
            language=dataclasses.asdict(config),
            nats_per_token=rate,
            nats_per_word=source.nats_per_word,
            nats_per_byte=rate,
            valid_nats_per_token=valid_rate,
            valid_standard_error=valid_error,
        )
        return writer.finish("synthetic", entropy=entropy)


def row_entropy(rows: np.ndarray) -> np.ndarray:
    """Return the nats of each row of probabilities, all above zero."""
    return -(rows * np.log(rows)).sum(1)


def uniforms(seed: int, count: int) -> np.ndarray:
    """Return numbers in [0, 1), the same in every NumPy version: raw 53 bits of PCG64."""
    return (np.random.PCG64(seed).random_raw(count) >> np.uint64(11)) * 2.0**-53


def inverse_cdf(probabilities: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.cumsum(probabilities)[:-1], uniforms, side="right")


def _spelling(seed: int, classes: int, per_class: int) -> tuple[bytes, ...]:
    """Return different words, each of a random stem and its class's own last letter."""
    words: dict[bytes, None] = {}
    attempt = 0
    while len(words) < classes * per_class:
        length, *letters = uniforms(derive(seed, attempt), LONGEST)
        stem = [int(u * len(LETTERS)) for u in letters[: SHORTEST - 1 + int(length * (LONGEST - SHORTEST + 1))]]
        words[bytes(LETTERS[i] for i in (*stem, len(words) // per_class))] = None
        attempt += 1
    return tuple(words)
