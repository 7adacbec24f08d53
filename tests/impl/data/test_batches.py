"""Batches: pure functions of seed and sample indices, windows in a permuted order, BERT's pairs and masks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.data.batches import Batch, causal_batch, masked_batch, masked_positions, num_windows, window_permutation
from impl.errors import InputError

VOCAB = 1000
CLS, SEP, MASK = VOCAB, VOCAB + 1, VOCAB + 2
TOKENS = np.random.default_rng(0).integers(0, VOCAB, 4000).astype(np.uint16)


def make(family: str, indices: np.ndarray, seed: int = 0, seq_len: int = 32, tokens: np.ndarray = TOKENS) -> Batch:
    if family == "gpt":
        return causal_batch(tokens, indices, seq_len=seq_len, seed=seed)
    return masked_batch(tokens, indices, seq_len=seq_len, seed=seed, vocab_size=VOCAB)


def arrays(batch: Batch) -> list[np.ndarray]:
    return [array for array in vars(batch).values() if array is not None]


@given(st.integers(1, 3000), st.integers(0, 2**62), st.integers(0, 50))
def test_an_epoch_is_a_permutation_of_the_windows(count: int, seed: int, epoch: int):
    order = window_permutation(np.arange(count), count, seed, epoch)
    assert np.array_equal(np.sort(order), np.arange(count))


@given(st.integers(2, 10**12), st.integers(0, 99), st.sets(st.integers(0, 10**12), min_size=1, max_size=9))
def test_places_of_a_large_permutation_stay_apart(count: int, seed: int, places: set[int]):
    inside = sorted({place % count for place in places})
    order = window_permutation(np.array(inside), count, seed, 0).tolist()
    assert len(set(order)) == len(inside)
    assert all(0 <= window < count for window in order)


def test_permutations_differ_by_seed_and_epoch_and_move_windows_evenly():
    first = window_permutation(np.arange(500), 500, 0, 0)
    for seed, epoch in ((1, 0), (0, 1)):
        assert np.mean(window_permutation(np.arange(500), 500, seed, epoch) == first) < 0.05
    assert np.mean(np.diff(first) == 1) < 0.05
    where = [window_permutation(np.array([0, 4]), 5, seed, 0).tolist() for seed in range(2000)]
    counts = np.array([np.bincount(column, minlength=5) for column in np.transpose(where)])
    assert (abs(counts - 400) < 100).all()


@pytest.mark.parametrize("family", ["gpt", "bert"])
@given(st.integers(0, 2**60), st.integers(0, 2000), st.integers(1, 16), st.data())
def test_a_batch_does_not_depend_on_who_composes_it(family: str, seed: int, start: int, size: int, data: st.DataObject):
    """Splitting the samples over ranks or microbatches, or beginning at any of them, gives the same samples."""
    indices = np.arange(start, start + size)
    whole = arrays(make(family, indices, seed))
    cut = data.draw(st.integers(0, size))
    order = data.draw(st.permutations(range(size)))
    parts = zip(arrays(make(family, indices[:cut], seed)), arrays(make(family, indices[cut:], seed)), strict=True)
    shuffled = arrays(make(family, indices[order], seed))
    for array, (left, right), moved in zip(whole, parts, shuffled, strict=True):
        assert np.array_equal(array, np.concatenate([left, right]))
        assert np.array_equal(array[order], moved)


def test_an_epoch_reads_every_window_once_and_then_another_order():
    count = num_windows(TOKENS, 32)
    starts = {tuple(TOKENS[i * 32 :][:2]): i for i in range(count)}
    one, two = (
        [starts[tuple(row)] for row in make("gpt", np.arange(epoch * count, (epoch + 1) * count)).inputs[:, :2]]
        for epoch in (0, 1)
    )
    assert sorted(one) == sorted(two) == list(range(count))
    assert one != two


def test_causal_targets_are_the_next_tokens():
    batch = causal_batch(TOKENS, np.array([0, 3, 123]), seq_len=32, seed=None)
    assert batch.inputs.dtype == batch.targets.dtype == np.int64
    for row, window in enumerate([0, 3, 123]):
        assert batch.inputs[row].tolist() == TOKENS[window * 32 :][:32].tolist()
        assert batch.targets[row].tolist() == TOKENS[window * 32 + 1 :][:32].tolist()
    assert batch.positions is batch.token_types is batch.is_next is None
    with pytest.raises(IndexError, match="124 windows"):
        causal_batch(TOKENS, np.array([124]), seq_len=32, seed=None)


def restored(batch: Batch) -> np.ndarray:
    """The inputs before they were masked."""
    assert batch.positions is not None
    original = batch.inputs.copy()
    np.put_along_axis(original, batch.positions, batch.targets, axis=1)
    return original


@given(st.integers(0, 2**60), st.integers(5, 80), st.integers(0, 10**6))
def test_a_pair_is_text_between_special_tokens(seed: int, seq_len: int, start: int):
    tokens = np.arange(700)
    batch = masked_batch(tokens, np.arange(start, start + 8), seq_len=seq_len, seed=seed, vocab_size=VOCAB)
    k = masked_positions(seq_len)
    assert batch.positions is not None
    assert batch.token_types is not None
    assert batch.is_next is not None
    assert batch.positions.shape == batch.targets.shape == (8, k)
    assert (np.diff(batch.positions, axis=1) > 0).all()
    rows = zip(restored(batch), batch.token_types, batch.is_next, batch.inputs, strict=True)
    for row, types, is_next, masked in rows:
        seps = np.flatnonzero(row == SEP)
        assert (row[0], len(seps), seps[1], (row >= VOCAB).sum()) == (CLS, 2, seq_len - 1, 3)
        assert np.array_equal(types, np.arange(seq_len) > seps[0])
        first, second = row[1 : seps[0]], row[seps[0] + 1 : -1]
        for text in (first, second):
            assert len(text) >= 1
            assert (np.diff(text) == 1).all()
        assert first[0] % seq_len == 0
        assert (second[0] == first[-1] + 1) == is_next
        if not is_next:
            true_continuation = set(range(first[0], first[0] + seq_len - 3))
            assert not true_continuation & set(second.tolist())
        assert set(masked[row >= VOCAB].tolist()) == {CLS, SEP}


def test_masks_follow_the_paper_s_shares():
    batch = masked_batch(TOKENS, np.arange(4000), seq_len=64, seed=1, vocab_size=VOCAB)
    assert batch.positions is not None
    assert batch.is_next is not None
    assert batch.is_next.mean() == pytest.approx(0.5, abs=0.03)
    assert batch.positions.shape[1] == 10
    seen = np.take_along_axis(batch.inputs, batch.positions, 1)
    assert np.mean(seen == MASK) == pytest.approx(0.8, abs=0.01)
    kept = np.mean(seen == batch.targets)
    assert kept == pytest.approx(0.1 + 0.1 / VOCAB, abs=0.01)
    random = seen[(seen != MASK) & (seen != batch.targets)]
    assert 0 <= random.min() < 10
    assert VOCAB - 10 < random.max() < VOCAB
    counts = np.bincount(batch.positions.ravel(), minlength=64)
    assert counts[0] == counts[-1] == 0
    inner = counts[2:-2]
    assert inner.max() < 1.35 * inner.mean()
    assert (restored(batch) == batch.inputs).sum() == batch.inputs.size - (seen != batch.targets).sum()


def test_an_epoch_later_the_same_window_is_masked_otherwise():
    tokens = TOKENS[:65]
    batch = masked_batch(tokens, np.arange(20), seq_len=32, seed=0, vocab_size=VOCAB)
    assert batch.positions is not None
    assert len(np.unique(batch.positions, axis=0)) == 20


@pytest.mark.parametrize(("seq_len", "masked"), [(5, 1), (32, 5), (128, 19), (512, 77), (1024, 154)])
def test_the_number_of_masked_tokens(seq_len: int, masked: int):
    assert masked_positions(seq_len) == masked


@pytest.mark.parametrize(
    ("family", "tokens", "seq_len", "message"),
    [
        ("gpt", 32, 32, "has 32 tokens; a sequence of 32 needs 33"),
        ("bert", 64, 32, "has 64 tokens; sentence pairs of 32 need 65"),
        ("bert", 4000, 4, "sequence length 4 is too short .* valid: 5 and more"),
    ],
)
def test_too_short_texts_are_refused_with_their_lengths(family: str, tokens: int, seq_len: int, message: str):
    with pytest.raises(InputError, match=message):
        make(family, np.array([0]), seq_len=seq_len, tokens=TOKENS[:tokens])


def test_a_batch_is_the_same_forever():
    assert make("gpt", np.array([0, 200]), seed=7).inputs[:, 0].tolist() == TOKENS[[67 * 32, 25 * 32]].tolist()
    batch = make("bert", np.array([0, 200]), seed=7)
    assert batch.positions is not None
    assert batch.is_next is not None
    assert batch.positions.tolist() == [[3, 13, 25, 26, 30], [1, 11, 12, 18, 19]]
    assert batch.is_next.tolist() == [0, 1]
