"""Simulated steps of grids of tensor-parallel ranks."""

import pytest

from impl.run import Run
from impl.simulator.step import predict
from tests.impl.simulator.made_up import SYSTEM, run_of
from tests.impl.simulator.test_metamorphic import free_network
from tests.impl.simulator.test_step import VOCAB, seconds


def grid(x: int, y: int) -> Run:
    return run_of(tp=x * y, tp3=(x, y, 1), dp=2)


def test_a_grid_of_one_column_is_megatrons() -> None:
    for x in (1, 2, 4):
        assert predict(grid(x, 1), VOCAB, SYSTEM) == predict(run_of(tp=x, dp=2), VOCAB, SYSTEM)


def test_a_network_that_takes_no_time_leaves_no_communication() -> None:
    found = predict(grid(2, 2), VOCAB, free_network())
    assert found.exposed["tp"] < 1e-6 * found.seconds


@pytest.mark.parametrize("x", [1, 2, 4])
def test_ranks_that_divide_features_wait_for_each_other(x: int) -> None:
    """Within a node and beyond it, where these ranks are x apart."""
    for y in (2, 4):
        found = predict(grid(x, y), VOCAB, SYSTEM)
        assert 0 < found.exposed["tp"] < found.seconds
        assert found.memory[0].states < predict(grid(x, 1), VOCAB, SYSTEM).memory[0].states
        assert seconds(grid(x, y)) > predict(grid(x, y), VOCAB, free_network()).seconds
