"""Synthetic protein families: their code length by brute force, and what their samples cost."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.launch.preflight import Datasets, summary
from harness.predict.memory import tokenizer_size
from impl.data.config import PROTEINS, DataConfig
from impl.data.proteins import BLOSUM62, FREQUENCIES, KINDS, Families, ProteinConfig, make_families, write_proteins
from impl.data.tokenizer import AMINO_ACIDS
from impl.data.tokens import TokenFolder
from impl.run import Run

TINY = Families(
    ancestors=np.array([[0, 1, 1], [1, 0, 0], [0, 0, 1]]),
    shares=np.array([0.5, 0.3, 0.2]),
    copies=np.array([[0.8, 0.2], [0.1, 0.9]]),
)
EVERY = np.array(list(itertools.product(range(2), repeat=3)))


def probability(of: Families, sequence: np.ndarray) -> float:
    """Of a sequence, family by family and one amino acid after the other."""
    total = 0.0
    for share, ancestor in zip(of.shares, of.ancestors, strict=True):
        p = float(share)
        for before, now in zip(ancestor, sequence, strict=True):
            p *= float(of.copies[before, now])
        total += p
    return total


def test_the_code_length_is_that_of_the_summed_families() -> None:
    found = np.exp(-TINY.nats(EVERY))
    assert found.sum() == pytest.approx(1.0)
    assert found == pytest.approx([probability(TINY, one) for one in EVERY])


def test_the_bound_is_below_what_any_context_leaves() -> None:
    """By enumeration: the entropy of a place, given all others, and that of a sequence over its length."""
    p = np.exp(-TINY.nats(EVERY)).reshape(2, 2, 2)
    whole = -(p * np.log(p)).sum()
    given_others = [whole + (p.sum(place) * np.log(p.sum(place))).sum() for place in range(3)]
    by_hand = sum(
        share * -sum(q * np.log(q) for q in TINY.copies[before]) / 3
        for share, ancestor in zip(TINY.shares, TINY.ancestors, strict=True)
        for before in ancestor
    )
    assert TINY.nats_of_known == pytest.approx(by_hand)
    assert 0 < TINY.nats_of_known < np.mean(given_others) < whole / 3
    assert TINY.nats_per_token == pytest.approx(by_hand * 3 / 4)


def test_frequencies_of_a_sample_are_its_probabilities() -> None:
    sample = TINY.sample(1, 40_000)
    found = np.bincount(sample @ [4, 2, 1], minlength=8) / len(sample)
    assert found == pytest.approx([probability(TINY, one) for one in EVERY], abs=0.01)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 30), st.floats(0.01, 1.0))
def test_families_are_probabilities_and_sample_only_standard_amino_acids(
    seed: int, families: int, length: int, exchanged: float
) -> None:
    of = make_families(ProteinConfig(seed=seed, families=families, length=length, exchanged=exchanged))
    assert np.allclose(of.copies.sum(1), 1)
    assert (of.copies > 0).all()
    assert of.shares.sum() == pytest.approx(1)
    assert (np.diff(of.shares) < 0).all()
    sample = of.sample(seed, 50)
    assert sample.shape == (50, length)
    assert sample.max() < KINDS
    assert (of.nats(sample) > 0).all()


def test_exchanges_are_blosums() -> None:
    """Exchanged by chance alone, two amino acids are relatives 2 to the (score / 2) times as often as strangers."""
    of = make_families(ProteinConfig(exchanged=1.0))
    background = np.array(FREQUENCIES) / sum(FREQUENCIES)
    a, w, i, v = map(AMINO_ACIDS.index, "AWIV")
    assert len(BLOSUM62.split()) == KINDS * (KINDS + 1) // 2
    odds = of.copies / background
    assert odds[w, w] / odds[w, a] == pytest.approx(2 ** ((11 - -3) / 2))
    assert odds[i, v] / odds[i, i] == pytest.approx(2 ** ((3 - 4) / 2))


def test_the_folder_says_what_its_sequences_cost(tmp_path: Path) -> None:
    config = ProteinConfig(families=20, length=10, train_sequences=300, valid_sequences=400)
    manifest = write_proteins(tmp_path / "out", config)
    folder, of = TokenFolder.open(tmp_path / "out", verify=True), make_families(config)
    ids = folder.tokens("valid").reshape(-1, 11)
    assert (ids[:, 10] == folder.manifest.eot).all()
    assert (manifest.valid.documents, manifest.valid.bytes, manifest.valid.tokens) == (400, 4000, 4400)
    entropy = manifest.entropy
    assert entropy is not None
    assert entropy.valid_nats_per_token == pytest.approx(float(of.nats(ids[:, :10]).sum()) / 4400)
    assert entropy.nats_per_token == pytest.approx(of.nats_per_token)
    assert entropy.nats_per_token < entropy.valid_nats_per_token
    assert entropy.nats_per_token == pytest.approx(entropy.nats_per_byte * 10 / 11)
    # a second sample costs as much
    other = of.nats(of.sample(5, 4000)).mean() / 11
    assert abs(other - entropy.valid_nats_per_token) < 4 * entropy.valid_standard_error
    assert set(folder.tokenizer.decode(ids[0, :10])) <= set(AMINO_ACIDS[:20])


def test_the_default_families_stay_the_same(tmp_path: Path) -> None:
    manifest = write_proteins(tmp_path / "out", ProteinConfig(train_sequences=1000))
    assert manifest.entropy is not None
    assert manifest.entropy.valid_nats_per_token == pytest.approx(0.5285802639, abs=1e-9)
    assert manifest.valid.sha256.startswith("29f7d19ad4fd4e09")


def test_runs_find_the_embedded_families_and_write_them_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ProteinConfig(families=3, length=10, train_sequences=50, valid_sequences=20)
    monkeypatch.setattr("harness.launch.preflight.ProteinConfig", lambda: small)
    first = Datasets(tmp_path).open(PROTEINS)
    assert (first.manifest.tokenizer, first.manifest.train.tokens) == ("amino", 550)
    written = (first.path / "train.bin").stat().st_mtime_ns
    assert Datasets(tmp_path).open(PROTEINS).sha256 == first.sha256
    assert (first.path / "train.bin").stat().st_mtime_ns == written
    other = ProteinConfig(families=3, length=10, train_sequences=50, valid_sequences=20, exchanged=0.5)
    monkeypatch.setattr("harness.launch.preflight.ProteinConfig", lambda: other)
    assert Datasets(tmp_path).open(PROTEINS).sha256 != first.sha256, "constants that have changed make another language"
    assert summary(first, PROTEINS)["name"] == PROTEINS
    run = Run(data=DataConfig(dataset=PROTEINS))
    assert tokenizer_size(run) == 26
