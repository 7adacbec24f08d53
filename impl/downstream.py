"""Evaluations on other data than the training text's: word perplexity, last words of passages, RACE's answers."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from impl.data.config import OPTIONS
from impl.data.race import LEVELS, RacePart, choice_batch, race_part, race_sha256
from impl.data.text import TextFile
from impl.data.tokens import TokenFolder
from impl.detokenize import detokenize, is_word_tokenised
from impl.errors import InputError
from impl.evaluate import BatchScorer, Evaluation, Windows, Work, evaluation_key
from impl.run import Run


def downstream(run: Run, data: TokenFolder, work: Work, *, final: bool) -> Iterator[Evaluation]:
    """Yield this rank's part of RACE's validation, and if `final` of the run's texts, LAMBADA and RACE's test."""
    sequences = run.evaluation.sequences
    if run.data.race and sequences is not None:
        yield _answers(run, data, work, "dev", most=max(1, sequences // OPTIONS) if sequences else None)
    for path in run.evaluation.texts if final else ():
        yield _words(Path(path), run, data, work)
    if final and run.evaluation.lambada is not None:
        yield _last_words(Path(run.evaluation.lambada), run, data, work)
    if final and run.data.race:
        yield from _test_answers(run, data, work)


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


def _words(path: Path, run: Run, data: TokenFolder, work: Work) -> Evaluation:
    """Evaluate word perplexity of a file: exp(nats / T_o), T_o counted before the text is detokenised."""
    text, overlap = _read_text(path), run.evaluation.overlap
    is_tokenised = is_word_tokenised(text)
    ids = data.tokenizer.encode(detokenize(text) if is_tokenised else text)
    nats, tokens = work.score(Windows(ids, data.manifest.eot, run.model.seq_len, overlap))
    key = evaluation_key(run, data, TextFile(path.name, path).sha256(), overlap)
    key |= {"sequences": "all", "detokenized": is_tokenised}
    words, size = original_tokens(text), len(text.encode())
    return Evaluation(name=path.name, kind="words", nats=nats, tokens=tokens, words=words, bytes=size, key=key)


def original_tokens(text: str) -> int:
    """Return T_o: the words of a word-tokenised text plus one end of each line (WikiText-2's test set: 245,569)."""
    return len(text.split()) + text.count("\n") + (not text.endswith("\n"))


def _last_words(path: Path, run: Run, data: TokenFolder, work: Work) -> Evaluation:
    """Evaluate last words of passages; correct if all tokens of a word are the likeliest, given those before.

    Source: Megatron-LM 2019, appendix E.2.
    """
    seq_len, encode = run.model.seq_len, data.tokenizer.encode_batch
    passages = _read_passages(path, seq_len)
    contexts = encode([context for context, _ in passages])
    wholes = encode([f"{context} {word}" for context, word in passages])  # some tokenizers mark where a text begins
    rows = [(ids[-seq_len - 1 :], len(ids) - len(c)) for ids, c in zip(wholes, contexts, strict=True)]
    rows.sort(key=lambda row: len(row[0]), reverse=True)  # batches of similar lengths, the longest first

    def score(picks: np.ndarray) -> tuple[torch.Tensor, int]:
        part = [rows[i] for i in picks]
        lengths = np.array([[len(ids) - 1] for ids, _ in part])
        firsts = lengths - np.array([[size] for _, size in part])
        # experts' capacity is a share of the length, which is not to depend on what a passage is scored beside
        width = int(lengths.max()) if run.model.expert_capacity is None else seq_len
        padded = np.full((len(part), width + 1), data.manifest.eot, np.int64)
        for line, (ids, _) in zip(padded, part, strict=True):
            line[: len(ids)] = ids
        column = np.arange(padded.shape[1] - 1)
        is_word = torch.from_numpy((column >= firsts) & (column < lengths))
        losses, is_likeliest = work.scorer.next_token(padded[:, :-1], padded[:, 1:])
        return losses[is_word], int((is_likeliest | ~is_word).all(dim=1).sum())

    nats, tokens, correct = work.total(len(rows), score)
    key = evaluation_key(run, data, TextFile(path.name, path).sha256(), 0)
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
    scorer, spec = work.scorer, run.data.race
    assert spec is not None
    assert isinstance(scorer, BatchScorer)
    questions = race_part(spec, part, data.tokenizer)
    chosen = np.array([i for i, one in enumerate(questions.levels) if level in (None, one)], np.int64)[:most]
    shape = {"seq_len": run.model.seq_len, "vocab_size": data.manifest.vocab_size}

    def score(picks: np.ndarray) -> tuple[torch.Tensor, int]:
        batch = choice_batch(questions, chosen[picks], seed=None, **shape)
        losses, answers = scorer.nats(batch), torch.from_numpy(batch.targets)
        return losses.gather(1, answers[:, None]), int((losses.argmin(1) == answers).sum())

    nats, count, correct = replace(work, batch=max(1, work.batch // OPTIONS)).total(len(chosen), score)
    read = "all" if most is None or most >= len(questions) else most
    return Evaluation(
        name=" ".join(filter(None, ("RACE", part, level))),
        kind="choice",
        nats=nats,
        tokens=count,
        correct=correct,
        total=len(chosen),
        key=evaluation_key(run, data, race_sha256(spec), 0) | {"sequences": read, "boundary": "questions"},
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
