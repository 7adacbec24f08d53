"""Evaluation of a trained model: validation, word perplexity, last words, masked tokens, answers, each with its key."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from impl.collectives import all_reduce_sum
from impl.data.batches import Batch, choice_batch, masked_batch, num_windows
from impl.data.config import OPTIONS
from impl.data.race import Race, RacePart
from impl.data.synthetic_race import LEVELS
from impl.data.text import TextFile
from impl.data.tokens import TokenFolder
from impl.detokenize import detokenize, is_word_tokenised
from impl.errors import InputError
from impl.run import Run
from impl.windows import Windows, text_counts

MASK_SEED = 0
"""Seed of BERT's validation sequences and masked positions, the same for every run."""

EvaluationKind = Literal["causal", "masked", "words", "last_word", "choice"]


class Scorer(Protocol):
    """Model that scores tokens; called without gradients and dropout, equally often on every rank."""

    def next_token(self, inputs: np.ndarray, targets: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return -log p(target | inputs so far) in nats, and whether the target is likeliest, both on the CPU.

        Shapes: int64 [b, s], [b, s] -> float32 [b, s], bool [b, s]; b and s differ from call to call.
        """
        ...


@runtime_checkable
class MaskedScorer(Scorer, Protocol):
    """Model that also scores masked tokens."""

    def masked(self, batch: Batch) -> Tensor:
        """Return -log p of the masked positions' original tokens in nats, on the CPU. Shapes: float32 [b, k]."""
        ...


@runtime_checkable
class ChoiceScorer(Scorer, Protocol):
    """Model that answers RACE's questions."""

    race: Race | None

    def choices(self, batch: Batch) -> Tensor:
        """Return -log p of every option in nats, on the CPU. Shapes: float32 [b / 4, 4]."""
        ...


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Sums over all predictions of one evaluation; None where a count has no meaning."""

    name: str
    kind: EvaluationKind
    nats: float
    tokens: int
    """Predicted tokens."""
    words: int | None = None
    """Words that word perplexity is normalised by; of kind `words`: words of the file and one end of each line."""
    bytes: int | None = None
    """UTF-8 bytes of the original text."""
    correct: int | None = None
    total: int | None = None
    key: dict[str, str | int | bool]
    """Properties that must be equal for two values to be in one table."""

    @property
    def perplexity(self) -> float:
        """Perplexity per token of this tokenizer."""
        return _exp(self.nats / self.tokens)

    @property
    def word_perplexity(self) -> float | None:
        """exp(nats / T_o), comparable between tokenizers (Megatron-LM 2019, appendix E.1)."""
        return _exp(self.nats / self.words) if self.words else None

    @property
    def bits_per_byte(self) -> float | None:
        return self.nats / math.log(2) / self.bytes if self.bytes else None

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
        InputError: see `missing_inputs`; or the validation split is shorter than two of BERT's sequences.
    """
    work = Work(scorer, batch, group.rank(), group.size())
    parts: list[Evaluation] = []
    validate = _masked if run.model.family == "bert" else _validation
    if run.evaluation.sequences is not None:
        parts.append((_dev_answers if run.data.race else validate)(run, data, work))
    if final:
        parts += [_words(Path(path), run, data, work) for path in run.evaluation.texts]
        if run.evaluation.lambada is not None:
            parts.append(_last_words(Path(run.evaluation.lambada), run, data, work))
        if run.data.race is not None:
            parts += _test_answers(run, data, work)
    if not parts:
        return []
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    sums = torch.tensor([[p.nats, p.tokens, p.correct or 0] for p in parts], dtype=torch.float64, device=device)
    return [
        replace(p, nats=nats, tokens=round(tokens), correct=None if p.correct is None else round(correct))
        for p, (nats, tokens, correct) in zip(parts, all_reduce_sum(sums, group).tolist(), strict=True)
    ]


def missing_inputs(run: Run) -> str | None:
    """Return what an evaluation of this run lacks (a file, text, a field, room for a word); None: nothing."""
    try:
        for path in run.evaluation.texts:
            _read_text(Path(path))
        if run.evaluation.lambada is not None:
            _read_passages(Path(run.evaluation.lambada), run.model.seq_len)
    except InputError as error:
        return str(error)
    return None


class _Batch(NamedTuple):
    picks: np.ndarray
    """Indices of the pieces to score."""
    counts: bool
    """True if the pieces are this rank's; else the batch only keeps it in step with ranks that have pieces left."""


@dataclass(frozen=True)
class Work:
    """Share of one rank: every `ranks`-th piece, `batch` at once."""

    scorer: Scorer
    batch: int
    rank: int
    ranks: int

    def batches(self, count: int) -> Iterator[_Batch]:
        """Yield as many batches as the rank with most pieces has; a rank with fewer scores piece 0 and discards it."""
        mine, most = np.arange(self.rank, count, self.ranks), -(-count // self.ranks)
        for start in range(0, most, self.batch):
            picks = mine[start : start + self.batch]
            yield _Batch(picks, True) if len(picks) else _Batch(np.zeros(1, np.int64), False)

    def score(self, windows: Windows) -> tuple[float, int]:
        """Return nats and number of the targets in this rank's windows."""
        nats, tokens = 0.0, 0
        for picks, counts in self.batches(windows.count):
            inputs, targets, is_scored = windows.cut(picks)
            losses, _ = self.scorer.next_token(inputs, targets)
            if counts:
                nats += losses[torch.from_numpy(is_scored)].double().sum().item()
                tokens += int(is_scored.sum())
        return nats, tokens

    def score_masked(self, ids: np.ndarray, count: int, *, seq_len: int, vocab_size: int) -> tuple[float, int]:
        """Return nats and number of the masked tokens in this rank's part of the first `count` sequences."""
        assert isinstance(self.scorer, MaskedScorer)
        nats, tokens = 0.0, 0
        for picks, counts in self.batches(count):
            batch = masked_batch(ids, picks, seq_len=seq_len, seed=MASK_SEED, vocab_size=vocab_size)
            losses = self.scorer.masked(batch)
            if counts:
                nats, tokens = nats + losses.double().sum().item(), tokens + losses.numel()
        return nats, tokens


def _validation(run: Run, data: TokenFolder, work: Work) -> Evaluation:
    split, overlap = data.manifest.valid, run.evaluation.overlap
    windows = Windows(
        data.tokens("valid"), data.manifest.eot, run.model.seq_len, overlap, run.evaluation.sequences or 0
    )
    nats, tokens = work.score(windows)
    is_whole = windows.covered == len(windows.tokens)
    words, size = (split.words, split.bytes) if is_whole else text_counts(data.tokenizer, windows)
    key = _key(run, data, data.sha256, overlap) | {"sequences": "all" if is_whole else windows.count}
    return Evaluation(name="valid", kind="causal", nats=nats, tokens=tokens, words=words, bytes=size, key=key)


def _masked(run: Run, data: TokenFolder, work: Work) -> Evaluation:
    ids, seq_len, sequences = data.tokens("valid"), run.model.seq_len, run.evaluation.sequences
    every = num_windows(ids, seq_len)
    count = min(sequences or every, every)
    nats, tokens = work.score_masked(ids, count, seq_len=seq_len, vocab_size=data.manifest.vocab_size)
    key = _key(run, data, data.sha256, 0) | {"sequences": "all" if count == every else count, "mask_seed": MASK_SEED}
    return Evaluation(name="valid", kind="masked", nats=nats, tokens=tokens, key=key)


def _words(path: Path, run: Run, data: TokenFolder, work: Work) -> Evaluation:
    """Evaluate word perplexity of a file: exp(nats / T_o), T_o counted before the text is detokenised."""
    text, overlap = _read_text(path), run.evaluation.overlap
    is_tokenised = is_word_tokenised(text)
    ids = data.tokenizer.encode(detokenize(text) if is_tokenised else text)
    nats, tokens = work.score(Windows(ids, data.manifest.eot, run.model.seq_len, overlap))
    key = _key(run, data, TextFile(path.name, path).sha256(), overlap)
    return Evaluation(
        name=path.name,
        kind="words",
        nats=nats,
        tokens=tokens,
        words=original_tokens(text),
        bytes=len(text.encode()),
        key=key | {"sequences": "all", "detokenized": is_tokenised},
    )


def original_tokens(text: str) -> int:
    """Return T_o: the words of a word-tokenised text plus one end of each line (WikiText-2's test set: 245,569)."""
    return len(text.split()) + text.count("\n") + (not text.endswith("\n"))


def _last_words(path: Path, run: Run, data: TokenFolder, work: Work) -> Evaluation:
    """Evaluate last words of passages; correct if all tokens of a word are the likeliest, given those before.

    Source: Megatron-LM 2019, appendix E.2.
    """
    seq_len, encode = run.model.seq_len, data.tokenizer.encode_batch
    passages = _read_passages(path, seq_len)
    words = encode([f" {word}" for _, word in passages])
    contexts = encode([context for context, _ in passages])
    rows = [np.concatenate([c, w])[-seq_len - 1 :] for c, w in zip(contexts, words, strict=True)]
    order = sorted(range(len(rows)), key=lambda i: (-len(rows[i]), i))
    nats, tokens, correct = 0.0, 0, 0
    for picks, counts in work.batches(len(rows)):
        part = [order[i] for i in picks]
        lengths = np.array([[len(rows[i]) - 1] for i in part])
        firsts = lengths - np.array([[len(words[i])] for i in part])
        padded = np.full((len(part), int(lengths.max()) + 1), data.manifest.eot, np.int64)
        for line, i in zip(padded, part, strict=True):
            line[: len(rows[i])] = rows[i]
        column = np.arange(padded.shape[1] - 1)
        is_word = torch.from_numpy((column >= firsts) & (column < lengths))
        losses, is_likeliest = work.scorer.next_token(padded[:, :-1], padded[:, 1:])
        if counts:
            nats += losses[is_word].double().sum().item()
            tokens += int(is_word.sum())
            correct += int((is_likeliest | ~is_word).all(dim=1).sum())
    key = _key(run, data, TextFile(path.name, path).sha256(), 0)
    return Evaluation(
        name="lambada",
        kind="last_word",
        nats=nats,
        tokens=tokens,
        words=len(passages),
        correct=correct,
        total=len(passages),
        key=key | {"sequences": "all", "boundary": "passages"},
    )


def _dev_answers(run: Run, data: TokenFolder, work: Work) -> Evaluation:
    sequences = run.evaluation.sequences
    return _answers(run, data, work, "dev", most=max(1, sequences // OPTIONS) if sequences else None)


def _test_answers(run: Run, data: TokenFolder, work: Work) -> list[Evaluation]:
    """Evaluate RACE's test on both schools together, and on each."""
    levels = [_answers(run, data, work, "test", level) for level in LEVELS]
    sums = {name: sum(getattr(one, name) for one in levels) for name in ("nats", "tokens", "correct", "total")}
    return [replace(levels[0], name="RACE test", **sums), *(one for one in levels if one.total)]


def _answers(
    run: Run, data: TokenFolder, work: Work, part: RacePart, level: str | None = None, most: int | None = None
) -> Evaluation:
    """Evaluate questions of RACE; correct if the right option is the likeliest. Questions are counted as tokens.

    Args:
        level: of a school; None: both.
        most: how many of the first questions are read; None: all.
    """
    scorer, nats, count, correct = work.scorer, 0.0, 0, 0
    assert isinstance(scorer, ChoiceScorer)
    assert scorer.race is not None
    questions = scorer.race.part(part)
    chosen = np.array([i for i, one in enumerate(questions.levels) if level in (None, one)], np.int64)[:most]
    shape = {"seq_len": run.model.seq_len, "vocab_size": data.manifest.vocab_size}
    for picks, counts in replace(work, batch=max(1, work.batch // OPTIONS)).batches(len(chosen)):
        batch = choice_batch(questions, chosen[picks], seed=None, **shape)
        losses, answers = scorer.choices(batch), torch.from_numpy(batch.targets)
        if counts:
            nats, count = nats + losses.double().gather(1, answers[:, None]).sum().item(), count + len(answers)
            correct += int((losses.argmin(1) == answers).sum())
    read = "all" if most is None or most >= len(questions) else most
    return Evaluation(
        name=" ".join(filter(None, ("RACE", part, level))),
        kind="choice",
        nats=nats,
        tokens=count,
        correct=correct,
        total=len(chosen),
        key=_key(run, data, scorer.race.sha256, 0) | {"sequences": read, "boundary": "questions"},
    )


def _read_text(path: Path) -> str:
    documents = list(TextFile(path.name, path).documents())
    if len(documents) != 1:
        found = f"holds {len(documents)} documents" if documents else "is empty"
        raise InputError(f"{path} {found}; evaluation.texts takes plain text files")
    return documents[0]


def _read_passages(path: Path, seq_len: int) -> list[tuple[str, str]]:
    """Return context and last word of every passage."""
    if ".jsonl" not in path.suffixes[-2:]:
        raise InputError(f"{path}: evaluation.lambada takes a .jsonl file, in each line a passage in the field text")
    passages = []
    for number, text in enumerate(TextFile(path.name, path).documents(), 1):
        parts = text.rsplit(None, 1)
        if len(parts) < 2:
            raise InputError(f"{path}, passage {number}: only a last word; valid: context and a last word")
        # no supported tokenizer makes more tokens than bytes, the space before the word included
        if (size := len(parts[1].encode()) + 1) > seq_len:
            raise InputError(f"{path}, passage {number}: its last word may need model.seq_len {size}, not {seq_len}")
        passages.append((parts[0], parts[1]))
    if not passages:
        raise InputError(f"{path} is empty; valid: in each line a passage in the field text")
    return passages


def _key(run: Run, data: TokenFolder, identity: str, overlap: int) -> dict[str, str | int | bool]:
    return {
        "tokenizer": data.manifest.tokenizer_sha256,
        "data": identity,
        "context": run.model.seq_len,
        "overlap": overlap,
        "boundary": "sliding" if overlap else "windows",
    }


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf
