"""Least traffic of a product: no grid of ranks moves less, some move just that; and what plans move over it."""

from dataclasses import replace
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.cost.least_traffic import least_words, moved_bytes, needed_bytes
from impl.cost.place import Place
from impl.cost.traffic import step_traffic
from impl.fields import divisors
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run

SIZES = st.integers(1, 200)
VOCAB = 512
BASE = Run(
    model=ModelConfig(num_layers=3, hidden_size=64, num_heads=8, seq_len=64, positions="rotary", tied=False),
    train=Recipe(global_batch=128, microbatch=2),
)


def of_grid(sizes: tuple[int, int, int], grid: tuple[int, int, int]) -> float:
    """Return what a rank moves where a grid divides the three directions: each matrix's part but what it holds."""
    m, n, k = sizes
    p, q, r = grid
    held = (m * n + n * k + m * k) / prod(grid)
    return m * n / (p * q) + n * k / (q * r) + m * k / (p * r) - held


def grids(ranks: int) -> list[tuple[int, int, int]]:
    return [(p, q, ranks // p // q) for p in divisors(ranks) for q in divisors(ranks // p)]


@given(SIZES, SIZES, SIZES, st.integers(1, 64))
def test_no_grid_moves_less(m: int, n: int, k: int, ranks: int) -> None:
    least = least_words(m, n, k, ranks)
    assert 0 <= least <= min(of_grid((m, n, k), grid) for grid in grids(ranks)) * (1 + 1e-9)
    assert least == pytest.approx(least_words(k, m, n, ranks))


@pytest.mark.parametrize(
    ("sizes", "grid"),
    [((960, 12, 10), (8, 1, 1)), ((64, 32, 4), (4, 2, 1)), ((32, 32, 32), (4, 4, 4)), ((40, 20, 10), (4, 2, 1))],
)
def test_fitting_grids_move_as_little(sizes: tuple[int, int, int], grid: tuple[int, int, int]) -> None:
    assert least_words(*sizes, ranks=prod(grid)) == pytest.approx(of_grid(sizes, grid))


def over(plan: Plan, microbatch: int) -> float:
    run = replace(BASE, plan=plan, train=replace(BASE.train, microbatch=microbatch))
    traffic = [step_traffic(Place(run, VOCAB, i), run.model.seq_len) for i in range(plan.pp)]
    return max(moved_bytes(run, one) for one in traffic) / needed_bytes(run, VOCAB, run.model.seq_len)


def test_zero_3_moves_three_times_the_weights_for_each_microbatch_and_copies_save_a_third() -> None:
    once = over(Plan(dp=8, zero_stage=3), 16)
    matrices, embedding = 3 * 12 * 64**2 + VOCAB * 64, VOCAB * 64  # which is gathered and reduced, and looked up
    assert once == pytest.approx(1 + 2 * embedding / (3 * matrices), rel=0.02)
    for copies in (Plan(dp=8), Plan(dp=8, zero_stage=1)):
        assert over(copies, 16) == pytest.approx(2 * (matrices + embedding) / (3 * matrices), rel=0.02)
    assert over(Plan(dp=8, zero_stage=3), 4) == pytest.approx(4 * once, rel=1e-3)


def test_tensor_parallelism_moves_as_much_in_any_number_of_microbatches() -> None:
    plan = Plan(tp=8, sequence_parallel=True)
    assert over(plan, 16) == pytest.approx(over(plan, 1), rel=1e-3)
    assert over(plan, 16) > 1
