"""What a fit leaves over: learned near its rows, forgotten away from them."""

import math

import numpy as np
import pytest

from impl.run import Run
from impl.simulator.residuals import IGNORED, Residuals
from tests.impl.simulator.made_up import longer, run_of

PLACES = [[1024.0, 1, 1], [1024.0, 1, 1], [1024.0, 2, 1], [1024.0, 2, 2], [2048.0, 8, 4], [2048.0, 8, 8]]
LOGS = [0.05, 0.06, 0.04, -0.05, 0.02, 0.03]
SD = 0.05


def run(hidden: int, tp: int, microbatch: int) -> Run:
    return longer(run_of(tp=tp, microbatch=microbatch), hidden_size=hidden)


def test_rows_are_learned_from_and_far_away_nothing_is_known():
    known = Residuals.of(SD, PLACES, LOGS)
    assert known.factor(run(1024, 1, 1)) == pytest.approx(math.exp(0.05), abs=0.01)
    assert known.factor(run(1024, 2, 2)) < 1 < known.factor(run(2048, 8, 4))
    assert known.factor(run(2**20, 1, 1)) == pytest.approx(1, abs=1e-3)
    assert known.log_sd(run(2**20, 1, 1)) > 0.99 * SD > 2 * known.log_sd(run(1024, 1, 1))


def test_it_is_continuous():
    known = Residuals.of(SD, PLACES, LOGS)
    factors = [known.factor(run(hidden, 2, 1)) for hidden in range(1024, 4096, 16)]
    assert abs(np.diff(factors)).max() < 2e-3


def test_what_no_neighbour_bears_out_is_ignored():
    known = Residuals.of(SD, [*PLACES, [1024.0, 1, 1]], [*LOGS, -1.0])
    assert known.noises[-1] == IGNORED
    assert known.noises.count(IGNORED) == 1
    assert known.factor(run(1024, 1, 1)) > 1.03


def test_rows_left_out_are_expected_from_the_others():
    off, sd = Residuals.of(SD, PLACES, LOGS).left_out()
    without = Residuals.of(SD, PLACES[1:], LOGS[1:])
    assert off[0] == pytest.approx(LOGS[0] - math.log(without.factor(run(1024, 1, 1))))
    assert sd[0] == pytest.approx(without.log_sd(run(1024, 1, 1)))
