"""The split vocabulary: losses and predictions are those of whole logits, and padding takes no part in anything."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as functional
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from impl.collectives import counted
from impl.cost.traffic import Count
from impl.model.config import padded_vocabulary
from impl.tensor_parallel.conjugates import F
from impl.tensor_parallel.group import TensorParallel
from impl.tensor_parallel.vocabulary import VocabParallelEmbedding
from tests.ranks import run_ranks

SCALES = {"normal": 1.0, "extreme": 1e4, "tied": 1.0, "equal": 1e4, "spike": 1e4}


class Case(NamedTuple):
    """Logits of n tokens over a vocabulary."""

    n: int
    vocab_size: int
    logits: str
    """Of what size, a key of `SCALES`."""
    bf16: bool
    seed: int

    def whole(self, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
        """Logits with padding that would win every prediction, targets, and the loss's gradient."""
        generator = torch.Generator().manual_seed(self.seed)
        padded = padded_vocabulary(self.vocab_size, ranks)
        normal = lambda *shape: torch.randn(shape, dtype=torch.float64, generator=generator)
        logits = {
            "normal": lambda: normal(self.n, padded),
            "extreme": lambda: 1e4 * normal(self.n, padded).clamp(-1, 1),
            "tied": lambda: normal(self.n, padded).round().clamp(-1, 1),
            "equal": lambda: torch.full((self.n, padded), -1e4, dtype=torch.float64),
            "spike": lambda: -1e4 + 2e4 * (torch.arange(padded) == self.seed % self.vocab_size).repeat(self.n, 1),
        }[self.logits]()
        logits[:, self.vocab_size :] = 3e4
        targets = torch.randint(self.vocab_size, (self.n,), generator=generator)
        best = logits[:, : self.vocab_size].argmax(1)
        targets = targets.where(torch.rand(self.n, generator=generator) < 0.5, best)
        return logits.to(torch.bfloat16 if self.bf16 else torch.float64), targets, normal(self.n)


cases = st.builds(
    Case,
    n=st.integers(1, 9),
    vocab_size=st.integers(2, 700),
    logits=st.sampled_from(list(SCALES)),
    bf16=st.booleans(),
    seed=st.integers(0, 2**16),
)  # fmt: skip


class Scored(NamedTuple):
    """What a rank found: the loss, its part of the gradient, whether targets are likeliest, and what it moved."""

    nats: np.ndarray
    grad: np.ndarray
    is_likeliest: np.ndarray
    moved: list[dict[str, Count]]


def score(case: Case) -> Scored:
    assert dist.group.WORLD is not None
    tp = TensorParallel(dist.group.WORLD, sequence_parallel=False, overlap=True)
    vocabulary = VocabParallelEmbedding(case.vocab_size, 1, tp)
    whole, targets, upstream = case.whole(tp.degree)
    own = whole.chunk(tp.degree, 1)[tp.part.index].clone().requires_grad_()
    with counted() as forward:
        nats = vocabulary.nats(own.clone(), targets)
    with counted() as backward:
        nats.backward(upstream.to(nats.dtype))
    with counted() as predicting, torch.no_grad():
        is_likeliest = vocabulary.is_likeliest(own.detach().clone(), targets)
    assert own.grad is not None
    moved = [{op: count for (_, op), count in counts.items()} for counts in (forward, backward, predicting)]
    return Scored(nats.detach().numpy(), own.grad.double().numpy(), is_likeliest.numpy(), moved)


def score_all(some: list[Case]) -> list[Scored]:
    return [score(case) for case in some]


def of_whole_logits(case: Case, ranks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """torch's cross-entropy of the logits without padding, in fp32 if they are bf16; its gradient; the predictions."""
    logits, targets, upstream = case.whole(ranks)
    logits = logits[:, : case.vocab_size].to(torch.float32 if case.bf16 else torch.float64).requires_grad_()
    nats = functional.cross_entropy(logits, targets, reduction="none")
    nats.backward(upstream.to(nats.dtype))
    assert logits.grad is not None
    return nats.detach().numpy(), logits.grad.double().numpy(), (logits.argmax(1) == targets).numpy()


def assert_is_whole(case: Case, ranks: int, found: list[Scored]) -> None:
    nats, grad, is_likeliest = of_whole_logits(case, ranks)
    joined = np.concatenate([each.grad for each in found], axis=1)
    assert not joined[:, case.vocab_size :].any(), "padding has a gradient"
    # a logit of 10^4 is known to so much only, and a logarithm of probability no better
    exact = 2.0**-22 if case.bf16 else 1e-12
    error = exact * SCALES[case.logits]
    rounded = 2.0**-7 if case.bf16 else exact  # exponentials are rounded, and gradients
    np.testing.assert_allclose(joined[:, : case.vocab_size], grad, rtol=rounded, atol=4 * error)
    for each in found:
        assert each.nats.dtype == nats.dtype
        assert np.isfinite(each.nats).all()
        np.testing.assert_allclose(each.nats, nats, rtol=exact, atol=error)
        np.testing.assert_array_equal(each.is_likeliest, is_likeliest)


@settings(max_examples=25)
@given(ranks=st.integers(1, 4), some=st.lists(cases, min_size=1, max_size=12))
@example(ranks=4, some=[Case(3, 2, logits, bf16, 0) for logits in SCALES for bf16 in (False, True)])  # 3 ranks: padding
@example(ranks=3, some=[Case(5, 128, "tied", True, 1), Case(5, 129, "tied", True, 2), Case(5, 384, "tied", True, 3)])
def test_losses_and_predictions_are_those_of_whole_logits(ranks: int, some: list[Case]) -> None:
    answers = run_ranks(ranks, score_all, some)
    for i, case in enumerate(some):
        assert_is_whole(case, ranks, [answer[i] for answer in answers])


@pytest.mark.parametrize("bf16", [False, True])
def test_logits_that_do_not_fit_a_chunk_at_once(bf16: bool) -> None:
    case = Case(2000, 500, "normal", bf16, 0)  # 2000 x 256 logits a rank are two chunks
    assert_is_whole(case, 2, run_ranks(2, score, case))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_no_rank_sends_more_than_two_numbers_a_token(ranks: int) -> None:
    for bf16, size in ((True, 4), (False, 8)):
        case = Case(7, 600, "normal", bf16, 0)
        for found in run_ranks(ranks, score, case):
            gathered = lambda number: {"all_gather": Count(1, ranks * 7 * 2 * number)} if ranks > 1 else {}
            assert found.moved == [gathered(size), {}, gathered(8)]


VOCABULARY, HIDDEN = 300, 5


def look_up(sequence_parallel: bool) -> dict[str, Any]:
    """A rank's look-up of 24 tokens, its gradient, and its part of the output head's scores."""
    assert dist.group.WORLD is not None
    tp = TensorParallel(dist.group.WORLD, sequence_parallel, overlap=True)
    vocabulary = VocabParallelEmbedding(VOCABULARY, HIDDEN, tp)
    weight, tokens, upstream = embedding()
    vocabulary.weight = torch.nn.Parameter(vocabulary.shard.take(weight, tp.part))
    own = lambda t: t.chunk(tp.tokens.of)[tp.tokens.index]
    out = vocabulary(tokens)
    out.backward(own(upstream))
    assert vocabulary.weight.grad is not None
    scores = vocabulary.logits(upstream, F).detach()
    return {
        "out": out.detach().numpy(),
        "grad": vocabulary.weight.grad.numpy(),
        "scores": scores.numpy(),
        "shard": vocabulary.shard,
    }


def embedding() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64, generator=generator)
    tokens = torch.randint(VOCABULARY, (24,), generator=generator)
    return weight, tokens, torch.randn(24, HIDDEN, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_look_up_is_that_of_the_whole_matrix(ranks: int, sequence_parallel: bool) -> None:
    weight, tokens, upstream = embedding()
    weight.requires_grad_()
    expected = functional.embedding(tokens, weight)
    expected.backward(upstream)
    answers = run_ranks(ranks, look_up, sequence_parallel)
    of = lambda what: [answer[what] for answer in answers]
    out = [np.concatenate(of("out"))] if sequence_parallel else of("out")
    for found in out:
        np.testing.assert_array_equal(found, expected.detach().numpy())
    grad = answers[0]["shard"].join([torch.from_numpy(part) for part in of("grad")])
    assert weight.grad is not None
    np.testing.assert_allclose(grad.numpy(), weight.grad.numpy(), rtol=1e-12)
    scores = np.concatenate(of("scores"), axis=1)
    assert scores.shape == (24, padded_vocabulary(VOCABULARY, ranks))
    np.testing.assert_allclose(scores[:, :VOCABULARY], (upstream @ weight.detach().t()).numpy(), rtol=1e-12, atol=1e-12)
    assert not scores[:, VOCABULARY:].any()
