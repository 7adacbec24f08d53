"""Evaluation: sums and normalisations by hand, whole-word LAMBADA, any number of ranks, keys, bad files."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from impl.data.batches import Batch, num_windows
from impl.data.prepare import prepare
from impl.data.tokens import TokenFolder
from impl.downstream import missing_inputs, original_tokens
from impl.evaluate import Evaluation, Scorer, Work, evaluate
from impl.evaluation_config import EvaluationConfig
from impl.model.config import ModelConfig
from impl.run import Run
from tests.impl.data.library_files import WORDS as PIECES
from tests.impl.data.library_files import library_files

VOCAB, EOT = 257, 256
VALID = "A cat sat, ça va. " * 20 + "End\n"
WORDS = " = Cats = \n \n The cat @-@ like <unk> sat , 's \n"
PASSAGES = ["one two three", 'He said: "go\n\nNow let us', "a long way to walk before the very end", "x yz"]


class Uniform:
    """Every token is equally likely, token 0 the likeliest by a hair."""

    def next_token(self, inputs: np.ndarray, targets: np.ndarray) -> tuple[Tensor, Tensor]:
        return torch.full(targets.shape, math.log(VOCAB)), torch.from_numpy(targets == 0)

    def nats(self, batch: Batch) -> Tensor:
        return torch.full(batch.targets.shape, math.log(VOCAB))


class Chain(Uniform):
    """A token depends on the one before it: row of `probabilities`, or one half for what has no row."""

    def __init__(self, probabilities: dict[tuple[int, int], float]) -> None:
        self.p = np.full((VOCAB, VOCAB), 0.5)
        for pair, p in probabilities.items():
            self.p[pair] = p

    def next_token(self, inputs: np.ndarray, targets: np.ndarray) -> tuple[Tensor, Tensor]:
        p = self.p[inputs, targets]
        return torch.from_numpy(-np.log(p)).float(), torch.from_numpy(p > 0.5)

    def nats(self, batch: Batch) -> Tensor:
        seen = np.take_along_axis(batch.inputs, np.asarray(batch.positions), 1) % VOCAB
        return torch.from_numpy(-np.log(self.p[seen, batch.targets])).float()


class Recorded(Uniform):
    """Remembers what it was asked; knows every target in `likeliest`."""

    def __init__(self, likeliest: bytes = b"") -> None:
        self.likeliest, self.calls = set(likeliest), []

    def next_token(self, inputs: np.ndarray, targets: np.ndarray) -> tuple[Tensor, Tensor]:
        self.calls.append((inputs, targets))
        return super().next_token(inputs, targets)[0], torch.from_numpy(np.isin(targets, list(self.likeliest)))


class Kept(Uniform):
    """Remembers the tokens of all rows, whatever the vocabulary."""

    def __init__(self) -> None:
        self.rows: list[np.ndarray] = []

    def next_token(self, inputs: np.ndarray, targets: np.ndarray) -> tuple[Tensor, Tensor]:
        self.rows += [np.append(row[0], asked) for row, asked in zip(inputs, targets, strict=True)]
        return torch.ones(inputs.shape), torch.zeros(inputs.shape, dtype=torch.bool)


Score = Callable[..., list[Evaluation]]


@pytest.fixture
def score(one_rank: dist.ProcessGroup) -> Score:
    """Evaluates on one rank."""

    def on_one_rank(run: Run, data: TokenFolder, scorer: Scorer, batch: int = 3) -> list[Evaluation]:
        return evaluate(run, data, scorer, one_rank, final=True, batch=batch)

    return on_one_rank


def folder(path: Path, valid: str = VALID) -> TokenFolder:
    for name, text in (("train", "some text\n"), ("valid", valid)):
        (path / f"{name}.txt").write_text(text)
    prepare(str(path / "train.txt"), "byte", path / "tokens", valid=str(path / "valid.txt"))
    return TokenFolder.open(path / "tokens")


def the_run(seq_len: int = 16, family: Literal["gpt", "bert"] = "gpt", sequences: int = 0, **evaluation: Any) -> Run:
    return Run(
        model=ModelConfig(family=family, seq_len=seq_len),
        evaluation=EvaluationConfig(sequences=sequences, **evaluation),
    )


def everything(path: Path) -> dict[str, Any]:
    """Files for word perplexity and LAMBADA, as fields of an evaluation config."""
    (path / "words.txt").write_text(WORDS)
    (path / "lambada.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in PASSAGES))
    return {"texts": (str(path / "words.txt"),), "lambada": str(path / "lambada.jsonl")}


def test_uniform_scorer_gives_the_vocabulary(tmp_path: Path, score: Score) -> None:
    data = folder(tmp_path)
    found = score(the_run(**everything(tmp_path)), data, Uniform()) + score(the_run(family="bert"), data, Uniform())
    assert [e.kind for e in found] == ["causal", "words", "last_word", "masked"]
    assert [e.name for e in found] == ["valid", "words.txt", "lambada", "valid"]
    for e in found:
        assert e.nats / e.tokens == pytest.approx(math.log(VOCAB), rel=1e-6)
    assert [e.accuracy for e in found] == [None, None, 0.0, None]
    assert found[3].word_perplexity is found[3].bytes is None


def test_last_words_are_scored_as_tokens_of_the_whole_passage(tmp_path: Path, score: Score) -> None:
    library = library_files(tmp_path / "library", "llama-2")
    (tmp_path / "train.txt").write_text(" ".join(PIECES) * 20)
    prepare(str(tmp_path / "train.txt"), f"hf:{library}", tmp_path / "tokens")
    data, run = TokenFolder.open(tmp_path / "tokens"), the_run(lambada=everything(tmp_path)["lambada"])
    scorer = Kept()
    score(run, data, scorer)
    wanted = {tuple(data.tokenizer.encode(text).tolist()) for text in PASSAGES}
    rows = {tuple(ids[: (ids != data.manifest.eot).argmin() or None].tolist()) for ids in scorer.rows[-len(PASSAGES) :]}
    assert all(any(whole[-len(row) :] == row for whole in wanted) for row in rows)


def test_words_of_a_part_are_counted_where_its_tokens_say_what_the_text_was(tmp_path: Path, score: Score) -> None:
    (tmp_path / "train.txt").write_text("It's what they don't say. " * 200)
    for kind, is_known in (("bert", False), ("llama-3", True)):
        library = library_files(tmp_path / kind, kind)
        prepare(str(tmp_path / "train.txt"), f"hf:{library}", tmp_path / f"{kind}-tokens")
        [part] = score(the_run(sequences=2), TokenFolder.open(tmp_path / f"{kind}-tokens"), Kept())
        assert (part.words is not None, part.bytes is not None) == (is_known, is_known), kind


def test_validation_counts_the_whole_split(tmp_path: Path, score: Score) -> None:
    data = folder(tmp_path)
    [valid] = score(the_run(), data, Uniform())
    split = data.manifest.valid
    assert (valid.tokens, valid.words, valid.bytes) == (split.tokens, split.words, split.bytes)
    [part] = score(the_run(sequences=2), data, Uniform())
    # "A cat sat, ça va. A cat sat, ç": ç is two bytes, and the cut word counts
    assert (part.tokens, part.words, part.bytes) == (32, 9, 32)
    assert part.key["sequences"] == 2


def test_a_known_chain_gives_the_number_by_hand(tmp_path: Path, score: Score) -> None:
    a, b = b"ab"
    chain = Chain({(EOT, a): 0.25, (a, a): 0.75, (a, b): 0.125, (b, a): 1.0, (b, EOT): 0.1})
    data = folder(tmp_path, "aabab")
    by_hand = -math.log(0.25 * 0.75 * 0.125 * 1.0 * 0.125 * 0.1)
    for overlap in range(4):
        [valid] = score(the_run(seq_len=4, overlap=overlap), data, chain)
        assert valid.nats == pytest.approx(by_hand, rel=1e-6)
        assert (valid.tokens, valid.words, valid.bytes) == (6, 1, 5)


def test_word_perplexity_is_normalised_by_original_tokens(tmp_path: Path, score: Score) -> None:
    _, words, _ = score(the_run(**everything(tmp_path)), folder(tmp_path), Uniform())
    # = Cats = | The cat @-@ like <unk> sat , 's | three ends of line
    assert original_tokens(WORDS) == words.words == 3 + 8 + 3
    natural = "= Cats =\n\nThe cat-like <unk> sat,'s\n"
    assert words.tokens == len(natural)
    assert words.bytes == len(WORDS)
    assert words.word_perplexity == pytest.approx(VOCAB ** (len(natural) / 14), rel=1e-5)
    assert words.key["detokenized"] is True


def test_a_natural_text_is_not_detokenised(tmp_path: Path, score: Score) -> None:
    text = "No marks , and no last end of line"
    _, words = score(the_run(**file(tmp_path, "plain.txt", text.encode())), folder(tmp_path), Uniform())
    assert (words.tokens, words.words, words.key["detokenized"]) == (len(text), 10, False)


@pytest.mark.parametrize(("known", "correct"), [(b" thre", 1), (b" the", 0), (b" threus", 2), (b"", 0)])
def test_a_last_word_is_right_only_as_a_whole(tmp_path: Path, score: Score, known: bytes, correct: int) -> None:
    _, _, lambada = score(the_run(**everything(tmp_path)), folder(tmp_path), Recorded(known))
    assert (lambada.correct, lambada.total) == (correct, len(PASSAGES))
    assert lambada.tokens == len(" three us end yz")
    assert lambada.words == len(PASSAGES)


def test_a_passage_keeps_its_last_context(tmp_path: Path, score: Score) -> None:
    scorer = Recorded()
    score(the_run(seq_len=8, **everything(tmp_path)), folder(tmp_path), scorer, 4)
    inputs, targets = scorer.calls[-1]
    rows = sorted(bytes(i for i in row.tolist() if i != EOT) for row in targets)
    assert rows == sorted([b"wo three", b"w let us", b"very end", b" yz"])
    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])


def test_passages_are_as_long_as_the_model_where_experts_have_a_capacity(tmp_path: Path, score: Score) -> None:
    """It is a share of the length, which else depends on the passages of one batch."""
    run, data = the_run(seq_len=40, **everything(tmp_path)), folder(tmp_path)
    limited = replace(run, model=replace(run.model, experts=2, expert_capacity=1.0))
    for one, of_lengths in ((run, False), (limited, True)):
        widths = set[int]()
        for batch in (1, 2, 4):
            scorer = Recorded()
            score(one, data, scorer, batch)
            widths |= {targets.shape[1] for _, targets in scorer.calls[-4 // batch :]}
        assert (widths == {40}) == of_lengths


def test_keys_tell_what_cannot_be_compared(tmp_path: Path, score: Score) -> None:
    data, files = folder(tmp_path), everything(tmp_path)
    keys = lambda run, data=data: [e.key for e in score(run, data, Uniform())]
    plain = keys(the_run(**files))
    assert plain == keys(replace(the_run(**files), seed=5))
    assert all(a != b for a, b in zip(plain, keys(the_run(seq_len=17, **files)), strict=True))
    valid, words, lambada = keys(the_run(overlap=3, **files))
    assert (plain[0]["boundary"], valid["boundary"]) == ("windows", "sliding")
    assert words != plain[1]
    assert lambada == plain[2]
    assert keys(the_run(sequences=3))[0] != plain[0]
    prepare(str(tmp_path / "train.txt"), "bpe:260", tmp_path / "bpe", valid=str(tmp_path / "valid.txt"))
    other = keys(the_run(**files), TokenFolder.open(tmp_path / "bpe"))
    assert all(a["tokenizer"] != b["tokenizer"] for a, b in zip(plain, other, strict=True))
    (tmp_path / "words.txt").write_text("something else")
    assert keys(the_run(**files))[1]["data"] != plain[1]["data"]


def test_masked_positions_do_not_depend_on_the_runs_seed(tmp_path: Path, score: Score) -> None:
    data, run, chain = folder(tmp_path), the_run(family="bert", sequences=5), random_chain()
    [first], [second] = score(run, data, chain), score(replace(run, seed=9), data, chain, 5)
    assert first.tokens == second.tokens > 0
    assert first.nats == pytest.approx(second.nats, rel=1e-12)
    [every] = score(the_run(family="bert"), data, chain)
    assert every.tokens == first.tokens // 5 * num_windows(data.tokens("valid"), 16)


def test_diverged_models_have_values_too() -> None:
    lost = Evaluation(name="valid", kind="causal", nats=math.nan, tokens=4, words=2, key={})
    assert math.isnan(lost.word_perplexity or 0.0)
    assert replace(lost, nats=1e6).word_perplexity == math.inf


def random_chain() -> Chain:
    p = np.random.default_rng(1).uniform(0.3, 1.0, (VOCAB, VOCAB))
    return Chain({(i, j): p[i, j] for i in range(VOCAB) for j in range(VOCAB)})


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 5))
def test_all_ranks_make_equally_many_passes_and_count_every_piece_once(count: int, ranks: int, batch: int) -> None:
    of_ranks = [list(Work(Uniform(), batch, rank, ranks).batches(count)) for rank in range(ranks)]
    assert len({len(passes) for passes in of_ranks}) == 1
    assert all(0 < len(picks) <= batch and max(picks) < count for passes in of_ranks for picks, _ in passes)
    counted = [pick for passes in of_ranks for picks, counts in passes if counts for pick in picks.tolist()]
    assert sorted(counted) == list(range(count))


def file(path: Path, name: str, content: bytes | None) -> dict[str, Any]:
    """Write a file, and return it as a field of an evaluation config: a .txt file for texts, another for LAMBADA."""
    if content is not None:
        (path / name).write_bytes(content)
    return {"texts": (str(path / name),)} if name.endswith(".txt") else {"lambada": str(path / name)}


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("absent.txt", None, "absent.txt"),
        ("latin.txt", b"fine\nfa\xe7ade\n", "latin.txt is not UTF-8: byte 7, line 2"),
        ("empty.txt", b" \n", "empty.txt is empty"),
        ("l.jsonl", b'{"text": "a b"}\n{"txt": "a b"}', "line 2: no text"),
        ("l.jsonl", b'{"text": "a b"}\n{"text": " b"}', "passage 2: only a last word"),
        ("l.jsonl", b"", "l.jsonl is empty"),
        ("l.jsonl", b"nonsense", "line 1: not JSON"),
        ("l.jsonl", b'{"text": "a sesquipedalianword"}', "may need model.seq_len 19, not 16"),
        ("absent.jsonl", None, "absent.jsonl"),
        ("words.md", b"a b", "takes a .jsonl file"),
    ],
)
def test_bad_files_are_named_in_one_line(tmp_path: Path, name: str, content: bytes | None, says: str) -> None:
    reason = missing_inputs(the_run(**file(tmp_path, name, content)))
    assert reason is not None
    assert says in reason
    assert "\n" not in reason
    assert missing_inputs(the_run(**everything(tmp_path))) is missing_inputs(Run()) is None
