"""Goodput under failures: the published best intervals, a simulation of failures, and what is refused."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.predict.goodput import HOUR, Failures, goodput
from tests.harness.calls import call, refused


@pytest.mark.parametrize(("hours", "minutes"), [(24, 117), (6, 57), (0.25, 9.1)])
def test_best_intervals_are_dalys(hours: float, minutes: float):
    """Daly 2006, figures 3 to 5: 5 minutes a checkpoint, 10 minutes a restart."""
    assert goodput(1, Failures(hours, 300, 600)).interval / 60 == pytest.approx(minutes, rel=0.01)


@given(st.floats(1e-3, 1e3), st.floats(0.1, 600), st.floats(0, 600), st.sampled_from((0.5, 0.9, 1.1, 2.0)))
def test_no_other_interval_trains_more(hours: float, saving: float, restart: float, factor: float):
    found = goodput(1, Failures(hours, saving, restart))
    assert 0 <= found.share < 1
    assert 0 < found.interval <= found.mean_seconds
    assert trained(found.interval * factor, hours, saving, restart) <= found.share * (1 + 1e-6)


@given(st.floats(1e6, 1e15), st.floats(1e-15, 1e3))
def test_the_best_interval_is_youngs_where_failures_are_rare(hours: float, saving: float):
    """Young 1974: sqrt(2 d M)."""
    found = goodput(1, Failures(hours, saving, 0.0))
    assert found.interval == pytest.approx(math.sqrt(2 * saving * hours * HOUR), rel=1e-3)
    assert 0.999 < found.share <= 1


def trained(interval: float, hours: float, saving: float, restart: float) -> float:
    """Return the share of time that trains, of as many failures as there are numbers, with this interval."""
    between = hours * HOUR
    exponent = (interval + saving) / between
    return interval / between / math.exp(restart / between) / math.expm1(exponent) if exponent < 700 else 0.0


def test_a_run_with_failures_at_random_has_this_goodput():
    """An hour between failures, 100 s a checkpoint, 200 s a restart, which may fail as well."""
    found, generator = goodput(4, Failures(4, 100, 200)), random.Random(3)
    at, done, fails = 0.0, 0.0, generator.expovariate(1 / found.mean_seconds)
    for _ in range(20_000):
        while at + found.interval + 100 > fails:
            at, fails = fails, fails + generator.expovariate(1 / found.mean_seconds)
            while at + 200 > fails:
                at, fails = fails, fails + generator.expovariate(1 / found.mean_seconds)
            at += 200
        at, done = at + found.interval + 100, done + found.interval
    assert done / at == pytest.approx(found.share, rel=0.01)


def test_more_devices_fail_more_often():
    shares = [goodput(devices, Failures(50_000, 60, 300)).share for devices in (8, 1024, 16_384, 10**9)]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == 0.0


RUN = ("predict", "--system", "selene", "--model", "ptdp-7.5b", "--plan.tp", "4")


def test_the_verb_says_how_much_of_the_time_trains():
    told = call(*RUN, "--mtbf", "50000").output
    assert "goodput" in told
    assert "% of the time" in told
    assert "goodput" not in call(*RUN).output


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--mtbf", "0"], "--mtbf 0.0; valid: 1e-15 to 1e+15"),
        (["--mtbf", "nan"], "--mtbf nan; valid: 1e-15 to 1e+15"),
        (["--mtbf", "9", "--checkpoint-seconds", "-1"], "--checkpoint-seconds -1.0; valid: 1e-15 to 1e+15"),
        (["--mtbf", "9", "--restart-seconds", "-1"], "--restart-seconds -1.0; valid: 0 to 1e+15"),
    ],
)
def test_times_that_are_none_are_refused(options: list[str], problem: str):
    assert problem in refused(*RUN, *options)
