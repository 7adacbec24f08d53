"""Evaluation of a trained model: how much is added up over all ranks, and validation on the held-out text."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from impl.collectives import all_reduce_sum
from impl.data.batches import Batch, masked_batch, num_windows
from impl.data.tokenizer import Tokenizer
from impl.data.tokens import TokenFolder
from impl.run import Run

MASK_SEED = 0
"""Seed of BERT's validation sequences and masked positions, the same for every run."""


class Scorer(Protocol):
    """Model that scores tokens; called without gradients and dropout, equally often on every rank."""

    def next_token(self, inputs: np.ndarray, targets: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return -log p(target | inputs so far) in nats, and whether the target is likeliest, both on the CPU.

        Shapes: int64 [b, s], [b, s] -> float32 [b, s], bool [b, s]; b and s differ from call to call.
        """
        ...


@runtime_checkable
class BatchScorer(Scorer, Protocol):
    """Model that sees both sides: it recovers masked tokens, or answers RACE's questions."""

    def nats(self, batch: Batch) -> Tensor:
        """Return -log p of each masked token, or of each option of each question, on the CPU.

        Shapes: float32 [b, k], or [b / 4, 4].
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Sums over all predictions of one evaluation; None where a count has no meaning."""

    name: str
    kind: Literal["causal", "masked", "words", "last_word", "choice"]
    nats: float
    tokens: int
    """Number of predicted tokens."""
    words: int | None = None
    """Words that word perplexity is normalised by; of kind `words`: words of the file and one end of each line."""
    bytes: int | None = None
    """UTF-8 bytes of the original text."""
    correct: int | None = None
    total: int | None = None
    key: dict[str, str | int | bool]
    """Properties that must be equal for two values to be in one table."""

    @property
    def word_perplexity(self) -> float | None:
        """exp(nats / T_o), comparable between tokenizers (Megatron-LM 2019, appendix E.1)."""
        try:
            return math.exp(self.nats / self.words) if self.words else None
        except OverflowError:
            return math.inf

    @property
    def accuracy(self) -> float | None:
        return self.correct / self.total if self.correct is not None and self.total else None


def evaluate(
    run: Run, data: TokenFolder, scorer: Scorer, group: dist.ProcessGroup, *, final: bool, batch: int
) -> list[Evaluation]:
    """Run validation, and if `final` the run's texts, LAMBADA and RACE's test; results are equal on every rank.

    Each rank scores every n-th piece. All ranks of the group make equally many forward passes, which may therefore be
    collectives.

    Communication: one all-reduce of three float64 numbers for each evaluation, together.

    Raises:
        InputError: as `impl.downstream.missing_inputs`; or BERT's validation text is shorter than two sequences.
    """
    work = Work(scorer, batch, group.rank(), group.size())
    parts: list[Evaluation] = []
    if run.data.race is None and run.evaluation.sequences is not None:
        parts.append(validation(run, data, work))
    if run.data.race or (final and (run.evaluation.texts or run.evaluation.lambada)):
        from impl.downstream import downstream  # reads texts and questions, which few runs have

        parts += downstream(run, data, work, final=final)
    if not parts:
        return []
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    sums = torch.tensor([[p.nats, p.tokens, p.correct or 0] for p in parts], dtype=torch.float64, device=device)
    return [
        replace(p, nats=nats, tokens=round(tokens), correct=None if p.correct is None else round(correct))
        for p, (nats, tokens, correct) in zip(parts, all_reduce_sum(sums, group).tolist(), strict=True)
    ]


@dataclass(frozen=True)
class Windows:
    """Windows of `seq_len` targets over a text, in order; each but the first repeats `overlap` of them as context only.

    Every target is scored once; the first is predicted from the end of text that precedes any text. The last window is
    padded on the right. Only the first `limit` windows count; 0: all.

    Source: Megatron-LM 2019, appendix E.1; its o = 32 is what a window advances by, hence `overlap` = 1024 - 32 here.
    """

    tokens: np.ndarray
    eot: int
    seq_len: int
    overlap: int = 0
    limit: int = 0

    @property
    def stride(self) -> int:
        return self.seq_len - self.overlap

    @property
    def count(self) -> int:
        every = 1 + max(0, -(-(len(self.tokens) - self.seq_len) // self.stride))
        return min(every, self.limit) if self.limit else every

    @property
    def covered(self) -> int:
        """Tokens that are scored, from the first."""
        return min(len(self.tokens), self.seq_len + (self.count - 1) * self.stride)

    def cut(self, picks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return inputs, targets and which targets are scored, of the picked windows. Shapes: [b] -> [b, s] each."""
        column = np.arange(self.seq_len)
        at = picks[:, None] * self.stride + column
        is_scored = (at < len(self.tokens)) & ((picks[:, None] == 0) | (column >= self.overlap))
        at = np.minimum(at, len(self.tokens) - 1)
        inputs = np.where(at > 0, self.tokens[at - 1], self.eot)
        return inputs.astype(np.int64), np.asarray(self.tokens[at], np.int64), is_scored


@dataclass(frozen=True)
class Work:
    """Share of one rank: every `ranks`-th piece, `batch` at once."""

    scorer: Scorer
    batch: int
    rank: int
    ranks: int

    def batches(self, count: int) -> Iterator[tuple[np.ndarray, bool]]:
        """Yield indices of pieces to score, and whether they count.

        Every rank gets as many batches as the rank with most pieces; one with fewer scores piece 0 and discards it.
        """
        mine, most = np.arange(self.rank, count, self.ranks), -(-count // self.ranks)
        for start in range(0, most, self.batch):
            picks = mine[start : start + self.batch]
            yield (picks, True) if len(picks) else (np.zeros(1, np.int64), False)

    def total(self, count: int, score: Callable[[np.ndarray], tuple[Tensor, int]]) -> tuple[float, int, int]:
        """Return nats, number of predictions, and right ones, of this rank's part of `count` pieces.

        Args:
            score: given indices of pieces, returns the nats of each prediction and how many pieces are right.
        """
        nats, predictions, correct = 0.0, 0, 0
        for picks, counts in self.batches(count):
            losses, right = score(picks)
            if counts:
                nats += losses.double().sum().item()
                predictions += losses.numel()
                correct += right
        return nats, predictions, correct

    def score(self, windows: Windows) -> tuple[float, int]:
        """Return nats and number of the targets in this rank's windows."""

        def score(picks: np.ndarray) -> tuple[Tensor, int]:
            inputs, targets, is_scored = windows.cut(picks)
            return self.scorer.next_token(inputs, targets)[0][torch.from_numpy(is_scored)], 0

        return self.total(windows.count, score)[:2]


def text_counts(tokenizer: Tokenizer, windows: Windows) -> tuple[int, int]:
    """Return the words and UTF-8 bytes of the text that the windows score, which begins where the whole text does.

    A word that the last window cuts counts as a word; a character that it cuts counts neither as a word nor in bytes.
    """
    ids, end = np.asarray(windows.tokens), windows.covered
    edges = [0, *(np.flatnonzero(ids[:end] == windows.eot) + 1), end]
    texts = [tokenizer.decode(ids[a:b][ids[a:b] != windows.eot]) for a, b in pairwise(edges)]
    if texts[-1].endswith("\ufffd"):  # the text's own, or a cut character, which the next three tokens complete
        rest = ids[end : end + 3]
        both = ids[edges[-2] : end + 3]
        if len(tokenizer.decode(both)) < len(texts[-1]) + len(tokenizer.decode(rest)):
            texts[-1] = texts[-1][:-1]
    return sum(len(text.split()) for text in texts), sum(len(text.encode()) for text in texts)


def validation(run: Run, data: TokenFolder, work: Work) -> Evaluation:
    """Return this rank's part of validation on the run's first sequences of the validation text."""
    ids, split, seq_len = data.tokens("valid"), data.manifest.valid, run.model.seq_len
    most, overlap = run.evaluation.sequences or 0, run.evaluation.overlap if run.model.family == "gpt" else 0
    key = evaluation_key(run, data, data.sha256, overlap)
    if run.model.family == "bert":
        scorer, every = work.scorer, num_windows(ids, seq_len)
        assert isinstance(scorer, BatchScorer)
        count = min(most or every, every)
        batch = partial(masked_batch, ids, seq_len=seq_len, seed=MASK_SEED, vocab_size=data.manifest.vocab_size)
        nats, tokens, _ = work.total(count, lambda picks: (scorer.nats(batch(picks)), 0))
        key |= {"sequences": "all" if count == every else count, "mask_seed": MASK_SEED}
        return Evaluation(name="valid", kind="masked", nats=nats, tokens=tokens, key=key)
    windows = Windows(ids, data.manifest.eot, seq_len, overlap, most)
    nats, tokens = work.score(windows)
    is_whole = windows.covered == len(ids)
    if is_whole:
        words, size = split.words, split.bytes
    else:  # of a part only the tokens are known, which may not say what the text was
        words, size = text_counts(data.tokenizer, windows) if data.tokenizer.is_exact else (None, None)
    key |= {"sequences": "all" if is_whole else windows.count}
    return Evaluation(name="valid", kind="causal", nats=nats, tokens=tokens, words=words, bytes=size, key=key)


def evaluation_key(run: Run, data: TokenFolder, identity: str, overlap: int) -> dict[str, str | int | bool]:
    """Return what must be equal for two evaluations to be comparable; `identity` is that of the data."""
    return {
        "tokenizer": data.manifest.tokenizer_sha256,
        "data": identity,
        "context": run.model.seq_len,
        "overlap": overlap,
        "boundary": "sliding" if overlap else "windows",
    }
