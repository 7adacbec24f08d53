"""The synthetic language: its entropy against brute force and against what its own samples cost."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impl.data.synthetic import Source, SyntheticConfig, code_length, make_source, write_synthetic
from impl.data.tokens import TokenFolder

TINY = Source(
    transitions=np.array([[0.9, 0.1], [0.4, 0.6]]),
    emissions=np.array([[0.75, 0.25], [0.5, 0.5]]),
    words=(b"ab", b"cdb", b"a", b"bbba"),
)


def chain_probability(source: Source, chain: tuple[int, ...]) -> float:
    """Of a chain of words, one factor after the other."""
    per_class = source.emissions.shape[1]
    p = float(source.stationary[chain[0] // per_class])
    for word, following in itertools.pairwise(chain):
        p *= float(source.transitions[word // per_class, following // per_class])
    return p * math.prod(float(source.emissions[word // per_class, word % per_class]) for word in chain)


def block_entropy(source: Source, words: int) -> float:
    """Nats of a chain of so many words, by enumeration of them all."""
    chains = itertools.product(range(len(source.words)), repeat=words)
    return -sum(p * math.log(p) for chain in chains if (p := chain_probability(source, chain)) > 0)


def test_a_tiny_source_by_hand():
    # flow 0 -> 1 equals flow 1 -> 0: 0.1 x 0.8 = 0.4 x 0.2
    assert TINY.stationary == pytest.approx([0.8, 0.2])
    assert TINY.letters_per_word == pytest.approx(0.8 * (0.75 * 3 + 0.25 * 4) + 0.2 * (0.5 * 2 + 0.5 * 5))


def test_the_rate_is_the_growth_of_the_enumerated_entropy():
    for words in (1, 2, 4):
        growth = block_entropy(TINY, words + 1) - block_entropy(TINY, words)
        assert TINY.nats_per_word == pytest.approx(growth, rel=1e-12)


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(2, 10), st.integers(1, 12))
def test_a_sample_costs_the_entropy_rate(seed: int, classes: int, words_per_class: int):
    source = make_source(SyntheticConfig(seed=seed, classes=classes, words_per_class=words_per_class))
    rate, error = code_length(source, source.sample(seed, 20_000))
    assert 0 < error < 0.03 * source.nats_per_letter
    assert abs(rate - source.nats_per_letter) < 4 * error


def test_the_standard_error_is_the_spread_of_samples():
    rates, errors = zip(*(code_length(TINY, TINY.sample(seed, 2000)) for seed in range(300)), strict=True)
    assert np.mean(errors) == pytest.approx(np.std(rates), rel=0.15)


@given(st.integers(0, 2**60), st.integers(2, 1200))
def test_a_sample_is_one_chain_of_words(seed: int, words: int):
    numbers = TINY.sample(seed, words)
    assert len(numbers) == words
    assert TINY.spell(numbers).tobytes() == b"".join(TINY.words[i] + b" " for i in numbers)
    expected, letters = -math.log(chain_probability(TINY, tuple(numbers[:20]))), len(TINY.spell(numbers[:20]))
    assert code_length(TINY, numbers[:20])[0] * letters == pytest.approx(expected)


@given(st.integers(0, 10**6), st.integers(2, 26), st.integers(1, 20))
def test_a_language_is_decodable_and_never_stuck(seed: int, classes: int, words_per_class: int):
    source = make_source(SyntheticConfig(seed=seed, classes=classes, words_per_class=words_per_class))
    assert len(set(source.words)) == classes * words_per_class
    # letters end at a space, so that they tell the words, and cost what these cost
    assert all(word.isalpha() and word.islower() and 2 <= len(word) <= 5 for word in source.words)
    assert np.allclose(source.transitions.sum(1), 1)
    assert np.allclose(source.emissions.sum(1), 1)
    assert (source.transitions > 0).all()
    assert np.allclose(source.stationary @ source.transitions, source.stationary)


def test_the_folder_says_what_its_text_costs(tmp_path: Path):
    config = SyntheticConfig(train_tokens=30_000, valid_tokens=20_000)
    manifest = write_synthetic(tmp_path / "out", config)
    folder = TokenFolder.open(tmp_path / "out", verify=True)
    entropy, source = folder.manifest.entropy, make_source(config)
    assert entropy is not None
    assert folder.manifest == manifest
    assert entropy.nats_per_token == entropy.nats_per_byte == pytest.approx(source.nats_per_letter)
    assert entropy.nats_per_word == pytest.approx(source.nats_per_word)
    assert abs(entropy.valid_nats_per_token - entropy.nats_per_token) < 4 * entropy.valid_standard_error

    text = folder.tokens("valid").astype(np.uint8).tobytes()
    number = {word: i for i, word in enumerate(source.words)}
    chain = np.array([number[word] for word in text.split()])
    assert code_length(source, chain)[0] == pytest.approx(entropy.valid_nats_per_token)
    assert (manifest.valid.words, manifest.valid.bytes, manifest.valid.tokens) == (len(chain), len(text), len(text))
    assert abs(len(text) - config.valid_tokens) < 0.05 * config.valid_tokens
    assert folder.tokenizer.decode(folder.tokens("valid")).encode() == text
    assert not np.array_equal(folder.tokens("train")[:1000], folder.tokens("valid")[:1000])


def test_the_default_language_stays_the_same(tmp_path: Path):
    manifest = write_synthetic(tmp_path / "out", SyntheticConfig(train_tokens=30_000, valid_tokens=20_000))
    assert manifest.entropy is not None
    assert manifest.entropy.nats_per_token == pytest.approx(0.6822178138, abs=1e-9)
    assert manifest.valid.sha256.startswith("233d5c79b47d08a7")
