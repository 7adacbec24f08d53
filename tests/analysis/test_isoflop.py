"""IsoFLOP profiles: parabolas and powers that were put in come out."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.analysis.isoflop import Profile, exponent

SIZES = (1e3, 2e3, 5e3, 1e4, 3e4)


def profile(flops: float, best: float, *, seed: int = 0, curvature: float = 0.1) -> Profile:
    """Losses on a parabola of log N with its lowest point at `best`."""
    losses = tuple(1.5 + curvature * math.log(size / best) ** 2 for size in SIZES)
    return Profile(flops, seed, SIZES, losses)


@given(st.floats(1.1e3, 2.9e4), st.floats(1e-3, 10))
def test_the_lowest_point_of_a_parabola_is_found(best: float, curvature: float) -> None:
    assert profile(1e9, best, curvature=curvature).best == pytest.approx(best, rel=1e-4)


def test_a_lowest_point_outside_of_the_sizes_is_none() -> None:
    assert math.isnan(profile(1e9, 500).best)
    assert math.isnan(profile(1e9, 1e5).best)
    assert math.isnan(profile(1e9, 5e3, curvature=-0.1).best), "a highest point"
    assert math.isnan(profile(1e9, 5e3, curvature=0.0).best)
    assert math.isnan(Profile(1e9, 0, SIZES[:2], (1.0, 2.0)).best)


@given(st.floats(0.1, 1.0))
def test_the_power_of_the_best_sizes_is_found(power: float) -> None:
    found = [profile(1e9 * 2**i, 1.5e3 * 2 ** (i * power), seed=seed) for i in range(4) for seed in range(2)]
    slope = exponent(found)
    assert (slope.mean, slope.n) == (pytest.approx(power, rel=1e-3), 4)
    assert slope.half_width == pytest.approx(0, abs=1e-3)
    assert exponent([*found, profile(1e12, 1e9)]).n == 4, "a budget without a best size is left out"


def test_one_budget_has_no_power() -> None:
    assert math.isnan(exponent([profile(1e9, 5e3), profile(1e9, 6e3, seed=1)]).mean)
    assert math.isnan(exponent([]).mean)
