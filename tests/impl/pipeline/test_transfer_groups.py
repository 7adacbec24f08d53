"""A GPU's transfers: each way between two pipeline ranks has a group of its own."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from impl.device import Device
from impl.ghost.events import begun
from impl.ghost.recorder import instead, recorded
from impl.mesh import build_mesh, transfer_groups, zero_groups
from impl.model.config import ModelConfig
from impl.pipeline.schedules import build
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from impl.train import Trainer
from tests.impl.on_ranks import on_ranks
from tests.ranks import run_ranks

MODEL = ModelConfig(num_layers=4, hidden_size=16, num_heads=2, seq_len=8)
PLANS = [
    Plan(pp=4), Plan(pp=2, schedule="interleaved", chunks=2, dp=2), Plan(pp=2, schedule="zbv", chunks=2, tp=2),
    Plan(pp=2, tp=2, sequence_parallel=True), Plan(pp=3),
]  # fmt: skip
Ways = dict[tuple[str, tuple[int, ...]], set[tuple[int | None, int | None]]]
"""(sender, receiver) of what goes over a group, by its name and members."""


def with_and_without(usual: Trainer) -> tuple[list[list[Any]], Ways]:
    """Losses and norms of two steps, first with the one group of the pipeline, and what the other groups carry."""
    other = trainer_with_groups(usual)
    steps = [[(step.loss.item(), step.grad_norm.item()) for step in map(one.step, range(2))] for one in (usual,)]
    with recorded("gloo", is_real=True) as recorder:
        steps.append([(step.loss.item(), step.grad_norm.item()) for step in map(other.step, range(2))])
    ways: Ways = {}
    rank = dist.get_rank()
    for _, event in begun(recorder.log):
        if event.kind in ("send", "receive"):
            way = (rank, event.peer) if event.kind == "send" else (event.peer, rank)
            ways.setdefault((event.group, event.members), set()).add(way)
    return steps, ways


def trainer_with_groups(usual: Trainer) -> Trainer:
    with instead(Device, queues_transfers=True):
        return Trainer(usual.run, usual.data, build_mesh(usual.run.plan, "cpu"), torch.device("cpu"))


def test_each_way_has_a_group_of_two_ranks_and_no_bit_changes(data: Path) -> None:
    train = lambda plan: Recipe(steps=2, global_batch=4 * plan.dp, microbatch=1)
    found = on_ranks(with_and_without, [Run(model=MODEL, plan=plan, train=train(plan)) for plan in PLANS], data)
    for run, of_ranks in found.items():
        ways = list(chain.from_iterable(ways.items() for _, ways in of_ranks))
        assert all(len(over) == 1 and members == tuple(sorted(*over)) for (_, members), over in ways), (run, ways)
        assert len({way for _, over in ways for way in over}) == len({name for (name, _), _ in ways})
        for (usual, other), _ in of_ranks:
            assert usual == other, run


def splits(plan: Plan) -> list[list[list[int]]]:
    """What a rank asks for where all ranks have a communicator that can be split."""
    dist.destroy_process_group()
    asked: list[list[list[int]]] = []
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=plan.world_size)
    mesh = build_mesh(plan, "cpu")
    assert dist.group.WORLD is not None
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)

    def split_group(*, split_ranks: list[list[int]], **_: object) -> dist.ProcessGroup | None:
        asked.append(split_ranks)
        return dist.group.WORLD if any(dist.get_rank() in ranks for ranks in split_ranks) else None

    with instead(dist, split_group=split_group, new_group=None):
        transfer_groups(mesh, build(plan.schedule, plan.pp, plan.pp, plan.chunks).ways)
        zero_groups(mesh, plan)
    dist.destroy_process_group()
    return asked


@pytest.mark.parametrize(("pp", "chunks", "most"), [(8, 2, 4), (7, 2, 6), (8, 1, 4), (2, 2, 2)])
def test_groups_are_made_by_few_splits_of_all_ranks(pp: int, chunks: int, most: int) -> None:
    """However many ranks there are: two ways for each of the two or, around an odd ring, three turns of pairs."""
    schedule = "interleaved" if chunks > 1 else "one_f_one_b"
    plan = Plan(pp=pp, chunks=chunks, schedule=schedule, dp=6, tp=2, zero_stage=1, zero_group=3)
    [asked] = run_ranks(1, splits, plan)
    of_zero, of_transfers = asked[-3:], asked[:-3]
    assert len(of_transfers) == most
    for ranks in asked:
        assert len({*chain(*ranks)}) == len([*chain(*ranks)])
    borders = pp if chunks > 1 and pp > 2 else pp - 1
    assert sum(map(len, of_transfers)) == 2 * borders * plan.dp * plan.tp
    assert [len(ranks) * len(ranks[0]) for ranks in of_zero] == [plan.world_size] * 3
