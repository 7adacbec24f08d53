"""The law of loss by size and data: known constants are found again, and resamples say how certain they are."""

import math
from itertools import product

import numpy as np
import pytest

from harness.analysis.scaling_law import Law, Observation, _drawn, between, can_fit, fitted
from harness.experiment.published import published

SIZES, TOKENS = np.geomspace(7e7, 1.6e10, 6), np.geomspace(5e9, 5e11, 5)


def printed(prefix: str) -> Law:
    """Hoffmann et al.'s constants (`fit`), or those of the same data fitted again (`refit`)."""
    return Law(*(float(published("chinchilla2022", f"{prefix}_{name}")["value"].iloc[0]) for name in Law._fields))


def points(law: Law, noise: float = 0.0, runs: int = 3, seed: int = 0) -> list[Observation]:
    """Losses of runs of each size after some of their tokens; all of a run are off by as much, and each by a tenth."""
    draw = np.random.default_rng(seed)
    found = []
    for size, run in product(SIZES, range(runs)):
        own = draw.normal(0, noise)
        found += [
            Observation(
                size, tokens, law.loss(size, tokens) * math.exp(own + draw.normal(0, noise / 10)), f"{size:.0f}-{run}"
            )
            for tokens in TOKENS
        ]
    return found


@pytest.mark.parametrize("prefix", ["fit", "refit"])
def test_chinchillas_constants_are_found_in_losses_that_follow_them(prefix: str) -> None:
    law = printed(prefix)
    found = fitted(points(law, runs=1), resamples=2)
    assert found.law == pytest.approx(law, rel=0.01)
    assert found.off < 1e-4


def test_the_least_loss_of_a_budget_is_where_it_was_published() -> None:
    (parameters,) = published("chinchilla2022", "refit_optimal_parameters")["value"]
    (tokens,) = published("chinchilla2022", "refit_optimal_tokens")["value"]
    assert printed("refit").optimum(5.76e23) == pytest.approx((parameters, tokens), rel=0.001)
    rounded = printed("fit").optimum(5.76e23)
    assert rounded[1] / rounded[0] == pytest.approx(92.6, rel=0.001)
    law, best = printed("refit"), printed("refit").optimum(1e22)
    assert all(law.loss(*best) < law.loss(best[0] * by, best[1] / by) for by in (0.9, 1.1))


def test_the_interval_holds_what_is_true_and_grows_with_the_noise() -> None:
    law, ask = printed("refit"), lambda law: law.loss(1e11, 2e12)
    widths = []
    for noise in (0.002, 0.02):
        low, high = fitted(points(law, noise, runs=4), resamples=40).interval(ask)
        assert low < ask(law) < high
        widths.append(high - low)
    assert widths[1] > 3 * widths[0]


def test_a_run_that_is_far_off_pulls_little() -> None:
    law = printed("refit")
    off = [p._replace(loss=1.3 * p.loss) if p.run == f"{SIZES[2]:.0f}-0" else p for p in points(law, 0.001)]
    found = fitted(off, resamples=2).law
    assert found.loss(1e10, 1e11) == pytest.approx(law.loss(1e10, 1e11), rel=0.01)


def test_draws_are_of_whole_runs_and_repeat_themselves() -> None:
    made = points(printed("refit"), 0.02)
    one, same, other = (fitted(made, resamples=8, seed=seed) for seed in (0, 0, 1))
    assert np.array_equal(one.resampled.alpha, same.resampled.alpha)
    assert not np.array_equal(one.resampled.alpha, other.resampled.alpha)
    alone = fitted(points(printed("refit"), 0.02, runs=1), resamples=4)
    assert math.isnan(alone.interval(lambda law: law.alpha)[0])  # a single run of each says nothing


def test_resamples_of_few_runs_scatter_as_much_as_new_runs_do() -> None:
    law, off = printed("refit"), [-0.03, 0.0, 0.03]
    made = [
        Observation(size, tokens, law.loss(size, tokens) * math.exp(own), f"{size}-{own}")
        for size, own, tokens in product(SIZES, off, TOKENS)
    ]
    weights = _drawn(made, 4000, np.random.default_rng(0))
    first = [i for i, point in enumerate(made) if (point.parameters, point.tokens) == (SIZES[0], TOKENS[0])]
    means = (weights[:, first] * np.log([made[i].loss for i in first])).mean(axis=1)
    assert weights[:, first].sum(axis=1) == pytest.approx(len(off))
    assert means.std() == pytest.approx(np.std(off, ddof=1) / math.sqrt(len(off)), rel=0.05)


def test_what_can_be_fitted() -> None:
    made = points(printed("refit"))
    assert can_fit(made)
    assert not can_fit(made[:5])
    assert not can_fit([p for p in made if p.parameters <= SIZES[1]])
    assert not can_fit([p for p in made if p.tokens <= TOKENS[1]])
    assert between([1.0] * 10) == (1.0, 1.0)
