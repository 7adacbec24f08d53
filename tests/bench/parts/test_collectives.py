"""Collectives and transfers between two gloo ranks of one machine, by size: this process is one of them."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pytest_benchmark.fixture import BenchmarkFixture

from impl.collectives import all_gather, all_reduce_sum, receive_start, reduce_scatter_start, send_start
from tests.ranks import CONTEXT

ROUNDS, WARMUP = 40, 5
SIZES = {"4KiB": 2**12, "256KiB": 2**18, "4MiB": 2**22, "32MiB": 2**25}
PATIENCE = timedelta(seconds=60)


def there_and_back(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """To the other rank, and what it has from there."""
    other = 1 - group.rank()
    for is_sender in (group.rank() == 0, group.rank() == 1):
        (send_start if is_sender else receive_start)(tensor, other, group).wait()


OPERATIONS: dict[str, Callable[[torch.Tensor, dist.ProcessGroup], object]] = {
    "all_reduce": all_reduce_sum,
    "reduce_scatter": lambda tensor, group: reduce_scatter_start(tensor, group).wait(),
    "all_gather": lambda tensor, group: all_gather(tensor[: len(tensor) // group.size()], group),
    "there_and_back": there_and_back,
}
"""Sizes are those of the whole tensor: the sum, all parts together."""


def join(rank: int, place: str) -> dist.ProcessGroup:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2, timeout=PATIENCE)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def follow(place: str) -> None:
    """Rank 1: does what it is told, as often as rank 0 does it."""
    group = join(1, place)
    while True:
        told: list[tuple[str, int] | None] = [None]
        dist.broadcast_object_list(told, src=0)
        if told[0] is None:
            break
        name, size = told[0]
        tensor = torch.zeros(size // 4)
        for _ in range(WARMUP + ROUNDS):
            OPERATIONS[name](tensor, group)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def group(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dist.ProcessGroup]:
    place = f"file://{Path(tmp_path_factory.mktemp('group')) / 'rendezvous'}"
    other = CONTEXT.Process(target=follow, args=(place,))
    other.start()
    try:
        yield join(0, place)
        dist.broadcast_object_list([None], src=0)
        dist.destroy_process_group()
        other.join(timeout=10)
    finally:
        other.kill()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_collective(name: str, size: str, group: dist.ProcessGroup, benchmark: BenchmarkFixture) -> None:
    tensor = torch.zeros(SIZES[size] // 4)
    dist.broadcast_object_list([(name, SIZES[size])], src=0)
    benchmark.pedantic(OPERATIONS[name], (tensor, group), rounds=ROUNDS, warmup_rounds=WARMUP)
    benchmark.extra_info["bytes"] = SIZES[size]
