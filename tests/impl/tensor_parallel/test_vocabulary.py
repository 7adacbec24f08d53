"""The split vocabulary: losses and predictions are those of whole logits, and padding takes no part in anything."""

import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import Tensor

from impl.collectives import counted
from impl.cost.traffic import Count
from impl.model.config import padded_vocabulary
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


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_losses_and_predictions_are_those_of_whole_logits(ranks: int) -> None:
    """With no rank sending more than two numbers a token."""
    padded = [Case(3, 2, logits, bf16, 0) for logits in SCALES for bf16 in (False, True)]  # of 4 ranks 3 have padding
    tied = [Case(5, size, "tied", True, seed) for seed, size in enumerate((128, 129, 384))]
    in_chunks = [Case(2000, 500, "normal", bf16, 0) for bf16 in (False, True)]  # 2000 x 256 logits a rank are two
    of = random.Random(ranks)
    drawn = [
        Case(of.randint(1, 9), of.randint(2, 700), of.choice(list(SCALES)), of.random() < 0.5, of.randrange(2**16))
        for _ in range(100)
    ]
    some = [*drawn, *padded, *tied, *in_chunks]
    answers = run_ranks(ranks, score_all, some)
    for case, *found in zip(some, *answers, strict=True):
        assert_is_whole(case, ranks, found)
        gathered = lambda size, n=case.n: {"all_gather": Count(1, ranks * n * 2 * size)} if ranks > 1 else {}
        for of_rank in found:
            assert of_rank.moved == [gathered(4 if case.bf16 else 8), {}, gathered(8)]
