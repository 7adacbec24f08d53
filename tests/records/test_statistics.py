import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.records.statistics import Estimate, estimate, quartiles, t_quantile, warmup_steps

finite = st.floats(-1e6, 1e6)


@pytest.mark.parametrize(("steps", "dropped"), [(0, 0), (1, 0), (2, 1), (4, 2), (6, 3), (20, 3), (31, 4), (300, 30)])
def test_warmup_rule(steps: int, dropped: int) -> None:
    assert warmup_steps(steps) == dropped


@given(st.integers(1, 10_000))
def test_at_least_half_of_the_steps_are_timed(steps: int) -> None:
    assert steps - warmup_steps(steps) >= steps / 2


def test_interval_is_student_t() -> None:
    # t(0.975, 2) = 4.303, as in any printed table; deviation of 1, 2, 3 is 1
    assert estimate([1.0, 2.0, 3.0]).half_width == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)


def test_one_value_has_no_interval() -> None:
    assert estimate([5.0]) == Estimate(5.0, None, 1)
    assert (estimate([5.0]) / Estimate(2.0, 0.1, 3)).half_width is None
    with pytest.raises(ValueError, match="at least one"):
        estimate([])


@given(st.lists(finite, min_size=2, max_size=9), finite)
def test_interval_does_not_depend_on_the_origin(values: list[float], shift: float) -> None:
    moved = estimate([v + shift for v in values])
    assert moved.half_width == pytest.approx(estimate(values).half_width, rel=1e-6, abs=1e-6)


def test_ratio_adds_relative_errors_in_quadrature_with_welchs_freedom() -> None:
    errors = 0.03 / t_quantile(2), 0.04 / t_quantile(4)
    ratio = Estimate(8.0, 8 * 0.03, 3) / Estimate(4.0, 4 * 0.04, 5)
    assert (ratio.mean, ratio.n) == (2.0, 3)
    freedom = (errors[0] ** 2 + errors[1] ** 2) ** 2 / (errors[0] ** 4 / 2 + errors[1] ** 4 / 4)
    assert ratio.freedom == pytest.approx(freedom)
    assert ratio.half_width == pytest.approx(2.0 * t_quantile(freedom) * math.hypot(*errors))
    assert math.isnan((ratio / Estimate(0.0, 0.1, 3)).mean)
    noise = Estimate(0.0, 0.3, 3) / Estimate(2.0, 0.1, 5)
    assert (noise.mean, noise.half_width) == (0.0, pytest.approx(0.15)), "a mean of 0 has an error too"


def test_quartiles() -> None:
    assert quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == (2.0, 3.0, 4.0)
    assert quartiles([1.0, 2.0]) == (1.25, 1.5, 1.75)
    assert quartiles([7.0]) == (7.0, 7.0, 7.0)
