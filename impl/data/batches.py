"""Batches as pure functions of (seed, sample indices): resuming is one integer, and no rank needs another's state.

Sample g of a run is window `window_permutation` puts at place g mod n of epoch g // n, for n windows.
"""

from dataclasses import dataclass

import numpy as np

from impl.errors import InputError
from impl.model.config import SPECIAL_TOKENS, ModelConfig
from impl.seeding import derive

MASKED_SHARE = 0.15
FEISTEL_ROUNDS = 6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of a model. Letters: b samples, s tokens of each, k masked ones; all int64.

    Shapes: inputs [b, s]; targets [b, s] for GPT, [b, k] for BERT; positions [b, k]; token_types [b, s]; is_next [b].
    """

    inputs: np.ndarray
    targets: np.ndarray
    """Tokens after the inputs (GPT), original tokens at `positions` (BERT), or the right option (RACE: [b / 4])."""
    positions: np.ndarray | None = None
    token_types: np.ndarray | None = None
    """0 in [CLS] A [SEP], 1 in B [SEP]."""
    is_next: np.ndarray | None = None
    """1: B is the text after A; 0: another place's."""

    @property
    def goals(self) -> list[np.ndarray]:
        """Return what the loss compares with predictions: targets and, for BERT, their positions and `is_next`."""
        return [goal for goal in (self.targets, self.positions, self.is_next) if goal is not None]


def num_windows(tokens: np.ndarray, seq_len: int) -> int:
    """Return the number of adjacent windows of seq_len tokens, each with one more token to predict.

    Raises:
        InputError: the text is shorter than one window.
    """
    if len(tokens) < seq_len + 1:
        raise InputError(f"the text has {len(tokens)} tokens; a sequence of {seq_len} needs {seq_len + 1} at least")
    return (len(tokens) - 1) // seq_len


def masked_positions(seq_len: int) -> int:
    """Return the tokens that BERT predicts in each sequence: 15%, at least one (Devlin et al. 2019, section 3.1)."""
    return max(1, round(MASKED_SHARE * seq_len))


def head_positions(model: ModelConfig) -> int:
    """Return the positions of a sequence that the output head scores: all of GPT's, the masked ones of BERT's."""
    return masked_positions(model.seq_len) if model.family == "bert" else model.seq_len


def causal_batch(tokens: np.ndarray, indices: np.ndarray, *, seq_len: int, seed: int | None) -> Batch:
    """Return windows of text as inputs, and the same shifted by one token as targets.

    With a seed the windows are drawn; seed None: window g for sample g, as validation reads them.

    Raises:
        InputError: the text is shorter than one window.
        IndexError: seed None and an index beyond the windows.
    """
    windows = windows_at(np.asarray(indices, np.int64), num_windows(tokens, seq_len), seed)
    text = np.asarray(tokens[windows[:, None] * seq_len + np.arange(seq_len + 1)], np.int64)
    return Batch(inputs=text[:, :-1], targets=text[:, 1:])


def masked_batch(tokens: np.ndarray, indices: np.ndarray, *, seq_len: int, seed: int, vocab_size: int) -> Batch:
    """Return sequences for BERT's two tasks: [CLS] A [SEP] B [SEP] with masked tokens, filled to seq_len.

    Source: Devlin et al. 2019, section 3.1.

    B is the text after A with probability 1/2, else text from anywhere that does not overlap A and what follows it.
    Of the masked tokens 80% become [MASK], 10% any token, 10% stay. `vocab_size` is the tokenizer's.

    Raises:
        InputError: seq_len is below 5, or the text shorter than two windows.
    """
    if seq_len < SPECIAL_TOKENS["bert"] + 2:
        raise InputError(f"sequence length {seq_len} is too short for BERT's sentence pairs; valid: 5 and more")
    indices, length = np.asarray(indices, np.int64), seq_len - SPECIAL_TOKENS["bert"]
    count = num_windows(tokens, seq_len)
    if count < 2:
        raise InputError(f"the text has {len(tokens)} tokens; sentence pairs of {seq_len} need {2 * seq_len + 1}")
    cls, sep, mask = vocab_size, vocab_size + 1, vocab_size + 2

    starts = windows_at(indices, count, seed) * seq_len
    draw = _uniforms(seed, "pair", indices, 3)
    first_len = 1 + (draw[:, 0] * (length - 1)).astype(np.int64)
    is_next = draw[:, 1] < 0.5
    elsewhere = _elsewhere(starts, length - first_len, length, len(tokens), draw[:, 2])

    # Place j of A and B together is text at starts + j, or, in a B from elsewhere, at elsewhere + (j - first_len)
    place = np.arange(length)
    in_second = place >= first_len[:, None]
    moved = in_second & ~is_next[:, None]
    source = np.where(moved, (elsewhere - first_len)[:, None], starts[:, None]) + place
    text = np.asarray(tokens[source], np.int64)

    rows, slots = np.arange(len(indices))[:, None], 1 + place + in_second
    inputs = np.full((len(indices), seq_len), sep, np.int64)
    inputs[:, 0] = cls
    inputs[rows, slots] = text
    chosen = np.sort(_uniforms(seed, "masked", indices, length).argsort(axis=1)[:, : masked_positions(seq_len)], axis=1)
    positions, targets = slots[rows, chosen], text[rows, chosen]
    fate, token = np.split(_uniforms(seed, "replaced", indices, 2 * chosen.shape[1]), 2, axis=1)
    other = (token * vocab_size).astype(np.int64)
    inputs[rows, positions] = np.select([fate < 0.8, fate < 0.9], [np.full_like(targets, mask), other], targets)
    types = (np.arange(seq_len) >= first_len[:, None] + 2).astype(np.int64)
    return Batch(inputs, targets, positions, types, is_next.astype(np.int64))


def window_permutation(places: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """Return the window at each place of an epoch: a pseudo-random permutation of 0..count-1, not stored.

    A Feistel network permutes the smallest power of four that holds `count`; places that land beyond are permuted
    again until they land inside (Black and Rogaway 2002, "Ciphers with arbitrary finite domains", cycle walking).
    """
    half = np.uint64(max(1, -(-(count - 1).bit_length() // 2)))
    low = np.uint64((1 << int(half)) - 1)
    keys = [np.uint64(derive(seed, "windows", epoch, i)) for i in range(FEISTEL_ROUNDS)]
    out = np.asarray(places).astype(np.uint64)
    walking = np.arange(out.size)
    while walking.size:
        left, right = out[walking] >> half, out[walking] & low
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & low)
        out[walking] = (left << half) | right
        walking = walking[out[walking] >= count]
    return out.astype(np.int64)


def windows_at(indices: np.ndarray, count: int, seed: int | None) -> np.ndarray:
    """Return the window of each sample; seed None: window g for sample g."""
    if seed is None:
        if indices.size and not 0 <= indices.min() <= indices.max() < count:
            raise IndexError(f"sample indices up to {indices.max()}, but the text has {count} windows")
        return indices
    epochs, places = np.divmod(indices, count)
    windows = np.empty_like(indices)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        windows[here] = window_permutation(places[here], count, seed, int(epoch))
    return windows


def _elsewhere(starts: np.ndarray, sizes: np.ndarray, length: int, total: int, draw: np.ndarray) -> np.ndarray:
    """Return starts of `sizes` tokens of text outside [starts, starts + length), all equally likely."""
    before = np.maximum(0, starts - sizes + 1)
    after = np.maximum(0, total - sizes - (starts + length) + 1)
    choice = (draw * (before + after)).astype(np.int64)
    return np.where(choice < before, choice, starts + length + choice - before)


def _uniforms(seed: int, purpose: str, indices: np.ndarray, count: int) -> np.ndarray:
    """Return numbers in [0, 1), [indices, count], that depend on seed, purpose and each index alone."""
    stream = _mix(np.uint64(derive(seed, purpose)) ^ indices.astype(np.uint64))
    bits = _mix(stream[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN)
    return (bits >> np.uint64(11)) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's finaliser (Steele, Lea and Flood 2014): each input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
