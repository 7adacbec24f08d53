"""Rows of the fullest rank in the normal limit against all choices counted out, and against choices drawn."""

from collections import Counter
from itertools import combinations, product
from math import sqrt

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from impl.cost.fullest import fullest_share


def counted_out(tokens: int, choices: int, experts: int, ranks: int) -> tuple[float, float]:
    """Mean and standard deviation of the fullest rank's rows over the mean, each set of choices counted once."""
    each = [Counter(e * ranks // experts for e in chosen) for chosen in combinations(range(experts), choices)]
    loads = {(0,) * ranks: 1}
    for _ in range(tokens):
        more = Counter[tuple[int, ...]]()
        for (load, ways), added in product(loads.items(), each):
            more[tuple(load[r] + added[r] for r in range(ranks))] += ways
        loads = more
    ways, most = np.array(list(loads.values()), dtype=float), np.array([max(load) for load in loads])
    most = most / (tokens * choices / ranks)
    mean = float(ways @ most / ways.sum())
    return mean, sqrt(max(0.0, float(ways @ most**2 / ways.sum()) - mean**2))


@settings(max_examples=40)
@given(st.integers(4, 12), st.integers(1, 3), st.integers(1, 2), st.integers(1, 4))
@example(12, 2, 2, 4)
@example(4, 3, 1, 4)
def test_few_tokens_are_as_when_all_choices_are_counted_out(tokens: int, choices: int, own: int, ranks: int):
    experts = own * ranks
    assume(choices <= experts)
    assume(tokens * choices >= 2 * ranks)
    mean, deviation = fullest_share(tokens, choices, experts, ranks)
    exact, about = counted_out(tokens, choices, experts, ranks)
    assert mean == pytest.approx(exact, rel=0.05)
    assert deviation == pytest.approx(about, abs=0.1)


@pytest.mark.parametrize(
    ("tokens", "choices", "experts", "ranks"), [(2048, 2, 8, 8), (4096, 1, 16, 4), (512, 8, 64, 8)]
)
def test_many_tokens_are_as_when_choices_are_drawn(tokens: int, choices: int, experts: int, ranks: int):
    chance = np.random.default_rng(0)
    most = []
    for _ in range(200):
        order = chance.random((tokens, experts)).argpartition(choices, axis=1)[:, :choices]
        loads = np.bincount((order * ranks // experts).ravel(), minlength=ranks)
        most.append(loads.max() / loads.mean())
    mean, deviation = fullest_share(tokens, choices, experts, ranks)
    assert mean - 1 == pytest.approx(np.mean(most) - 1, rel=0.1)
    assert deviation == pytest.approx(np.std(most), rel=0.2)


def test_one_rank_or_all_experts_leave_nothing_to_chance():
    assert fullest_share(100, 2, 8, 1) == fullest_share(100, 8, 8, 4) == (1.0, 0.0)


@given(st.integers(100, 10**6), st.integers(1, 4), st.sampled_from([2, 4, 8, 64]))
def test_more_tokens_are_more_even_and_more_ranks_less(tokens: int, choices: int, ranks: int):
    of = lambda n, r: fullest_share(n, choices, 64, r)[0]
    assert 1 <= of(2 * tokens, ranks) <= of(tokens, ranks)
    if ranks < 64:
        assert of(tokens, ranks) < of(tokens, 2 * ranks)
