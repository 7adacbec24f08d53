"""Of GPUs, by ghosts: a late wait is found, no host waits in a step, groups are made in one order."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from impl.collectives import Pending
from impl.ghost.rank import execute
from impl.ghost.recorder import instead
from impl.ghost.tensors import Unread, _Claiming, without_memory
from impl.mesh import build_mesh
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from impl.train import Trainer
from tests.ranks import run_ranks

CUDA = torch.device("cuda")
MODEL = ModelConfig(num_layers=2, hidden_size=16, num_heads=2, seq_len=8)


def run_of(plan: Plan, **changes: Any) -> Run:
    run = Run(model=MODEL, plan=plan, train=Recipe(steps=1, global_batch=2 * plan.dp, microbatch=1))
    return replace(run, precision="bf16", **changes)


def used_early(plans: list[Plan]) -> list[list[str]]:
    """What is used before its wait by every plan, if each wait is carried out with the next one."""
    dist.destroy_process_group()
    owed: list[Pending] = []
    right = Pending.wait

    def late(pending: Pending) -> Tensor:
        owed.append(pending)
        for other in owed[:-1]:
            right(other)
        del owed[:-1]
        return pending.tensor

    with instead(Pending, wait=late):
        return [[line for rank in range(2) for line in execute(run_of(plan), rank, 257).early] for plan in plans]


def test_a_wait_that_comes_too_late_is_found() -> None:
    """And no line is found where waits are in time: tests/impl/ghost/test_orders.py, by random plans."""
    plans = [Plan(tp=2), Plan(pp=2), Plan(dp=2, zero_stage=2), Plan(dp=2, zero_stage=3), Plan(cp=2), Plan(dp=2)]
    [found] = run_ranks(1, used_early, plans)
    assert all(found), [plan for plan, lines in zip(plans, found, strict=True) if not lines]


# The host -------------------------------------------------------------------------------------------------------------

READS = {getattr(torch.Tensor, name) for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__")}


def waits(runs: list[Run]) -> list[Counter[str]]:
    """How often the host waits for the device in a step, by what it calls."""
    dist.destroy_process_group()
    right, found = _Claiming.__torch_function__, []

    def seen(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            is_there = bool(args) and isinstance(args[0], Tensor) and args[0].device.type == "meta"
            is_copied = func is torch.Tensor.to and not is_there and any("cuda" in str(a) for a in args[1:])
        if (func in READS and is_there) or is_copied:
            found[-1][func.__name__] += 1
        return right(self, func, types, args, kwargs)

    with instead(_Claiming, __torch_function__=seen):
        for run in runs:
            found.append(Counter[str]())
            execute(run, 0, 257, repeats=False)
    return found


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_no_host_waits_in_a_step_but_for_fp16(family: Any) -> None:
    plans = [Plan(tp=2, sequence_parallel=True), Plan(pp=2, schedule="zb_h1"), Plan(dp=2, zero_stage=3), Plan(cp=2)]
    model = replace(MODEL, family=family, dropout=0.1)
    of = lambda plan: replace(model, attention_dropout=0.0) if plan.cp > 1 else model
    runs = [run_of(plan, model=of(plan)) for plan in (*plans, Plan(recompute="full"))]
    runs.append(replace(runs[-1], precision="fp16"))
    [found] = run_ranks(1, waits, runs)
    assert found == [{}] * (len(plans) + 1) + [{"item": 1}]


# Groups ---------------------------------------------------------------------------------------------------------------


def made(runs: list[Run]) -> list[list[list[Any]]]:
    """The groups that each rank of every run makes, in order."""
    dist.destroy_process_group()
    right: Callable[..., Any] = dist.new_group
    of_runs = []
    for run in runs:
        of_runs.append([list[Any]() for _ in range(run.plan.world_size)])
        for rank, groups in enumerate(of_runs[-1]):
            new = lambda ranks, *how, to=groups, **options: (to.append(list(ranks)), right(ranks, *how, **options))[1]
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=run.plan.world_size)
            with instead(dist, new_group=new), instead(torch.distributed.device_mesh, new_group=new):
                mesh = build_mesh(run.plan, "cpu")
                with without_memory(CUDA):
                    Trainer(run, Unread(257), mesh, CUDA)  # type: ignore[arg-type]
            dist.destroy_process_group()
    return of_runs


def test_every_rank_makes_the_same_groups_in_the_same_order() -> None:
    """As NCCL needs it, of groups that a rank does not belong to as well."""
    plans = [Plan(pp=2, tp=2), Plan(pp=2, dp=2, cp=2, zero_stage=1, zero_group=2), Plan(dp=2, tp=2)]
    model = replace(MODEL, num_heads=4, kv_heads=1)  # whose heads tensor-parallel ranks share
    [found] = run_ranks(1, made, [*map(run_of, plans), run_of(Plan(tp=4), model=model)])
    for of_ranks in found:
        assert len(of_ranks[0]) > 1
        assert all(groups == of_ranks[0] for groups in of_ranks)
