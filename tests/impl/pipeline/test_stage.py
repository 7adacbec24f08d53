"""Layers shared out over stages."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.errors import InputError
from impl.pipeline.stage import partition


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write total as a sum of that many positive numbers, in order."""
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        yield from ((first, *rest) for rest in compositions(total - first, parts - 1))


def rank(counts: tuple[int, ...], last_extra: float) -> tuple[float, int]:
    """What is minimised: the slowest stage, then how unequal the counts are."""
    work = [float(count) for count in counts]
    work[-1] += last_extra
    return max(work), sum(count * count for count in counts)


extras = st.integers(0, 40).map(lambda n: n / 8)  # sums of which are exact


@given(st.integers(1, 9), st.integers(1, 9), extras)
def test_no_other_partition_is_better(num_layers: int, stages: int, last_extra: float):
    stages = min(stages, num_layers)
    ranges = partition(num_layers, stages, last_extra)
    assert [layer for part in ranges for layer in part] == list(range(num_layers))
    found = rank(tuple(map(len, ranges)), last_extra)
    assert found == min(rank(other, last_extra) for other in compositions(num_layers, stages))


@pytest.mark.parametrize(
    ("arguments", "counts"),
    [
        ((8, 4), [2, 2, 2, 2]),
        ((7, 4), [1, 2, 2, 2]),
        ((24, 4, 2.0), [6, 6, 7, 5]),
        ((8, 4, 1.0), [2, 2, 2, 2]),
        ((6, 4, 1.0), [1, 2, 2, 1]),
        ((5, 2, 100.0), [4, 1]),
        ((3, 1, 5.0), [3]),
        ((6, 3, 5.0), [2, 3, 1]),
        ((10, 4, 0.1), [2, 3, 3, 2]),
    ],
)
def test_the_head_counts_as_work(arguments: tuple, counts: list[int]):
    assert [len(part) for part in partition(*arguments)] == counts


def test_a_stage_without_a_layer_is_refused():
    with pytest.raises(InputError, match=r"plan.pp x plan.chunks 9 is more than model.num_layers 8.*valid: 1 to 8"):
        partition(8, 9)
    assert len(partition(8, 8)) == 8
