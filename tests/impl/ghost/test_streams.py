"""Of GPUs, by ghosts: nothing under way is touched, no host waits in a step, groups are made in one order."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import impl.ghost.recorder
from impl.collectives import Pending
from impl.ghost.events import Kind
from impl.ghost.rank import execute
from impl.ghost.recorder import Recorder, _Work, instead
from impl.ghost.tensors import Unread, _Claiming, without_memory
from impl.mesh import build_mesh
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from impl.train import Trainer
from tests.impl.ghost.test_ghost import SEED, random_runs
from tests.ranks import run_ranks

COUNT = 5
CUDA = torch.device("cuda")
MODEL = ModelConfig(num_layers=4, hidden_size=16, num_heads=2, seq_len=8)


def run_of(plan: Plan, **changes: Any) -> Run:
    run = Run(model=MODEL, plan=plan, train=Recipe(steps=1, global_batch=4 * plan.dp, microbatch=1))
    return replace(run, precision="bf16", **changes)


class Access(NamedTuple):
    """Bytes of a storage that are read or written."""

    tensor: Tensor
    writes: bool
    what: str

    def meets(self, other: "Access") -> bool:
        """Whether both touch the same byte, and one of them writes it."""
        (a, first, stop), (b, start, end) = self.place, other.place
        return a == b and first < end and start < stop and (self.writes or other.writes)

    @property
    def place(self) -> Any:
        x = self.tensor
        extent = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() else 0
        first = x.storage_offset() * x.itemsize
        return x.untyped_storage()._cdata, first, first + extent * x.itemsize


class Streams(TorchDispatchMode):
    """What NCCL's streams read and write until it is waited for, and what touches it meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way: dict[object, tuple[str, list[Access]]] = {}
        self.races: list[str] = []

    def touch(self, accesses: list[Access], stream: str = "") -> None:
        for other, under_way in self.under_way.values():
            if other != stream:
                self.races += [f"{a.what} and {b.what}" for a in accesses for b in under_way if a.meets(b)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            schema, result = func._schema, func(*args, **(kwargs or {}))
            is_view = any(one.alias_info and not one.alias_info.is_write for one in schema.returns)
            if self.under_way and not is_view and "empty" not in schema.name:
                given = [*zip(schema.arguments, args, strict=False)]
                given += [(one, kwargs[one.name]) for one in schema.arguments if one.name in (kwargs or {})]
                writes = lambda one: bool(one.alias_info and one.alias_info.is_write)
                leaves = [(leaf, writes(one)) for one, value in given for leaf in tree_leaves(value)]
                self.touch([Access(x, writes, schema.name) for x, writes in leaves if isinstance(x, Tensor)])
            return result


@contextmanager
def streams() -> Iterator[Streams]:
    """Watch what ghosts inside begin and wait for."""
    found = Streams()

    class Watched(Recorder):
        def _begin(self, kind: Kind, whole: Tensor, group: Any, begin: Any, *others: Any, **named: Any) -> _Work:
            with torch._C.DisableTorchFunction():
                accesses = [Access(x.detach(), i == 0 and kind != "send", kind) for i, x in enumerate(begin.args)]
                found.touch(accesses, group.group_name)
                found.races += [f"{kind} of {x.stride()}" for x in begin.args if not x.is_contiguous() or not x.numel()]
            work = super()._begin(kind, whole, group, begin, *others, **named)
            found.under_way[work] = group.group_name, accesses
            wait = work.wait
            work.wait = lambda: (wait(), found.under_way.pop(work, None))[0]  # type: ignore[method-assign]
            return work

    with instead(impl.ghost.recorder, Recorder=Watched), found:
        yield found


def raced(runs: list[Run], late: bool = False) -> dict[Run, list[str]]:
    """What is touched under way in every run; `late`: each wait is carried out with the next one."""
    dist.destroy_process_group()
    owed: list[Pending] = []
    right = Pending.wait

    def wait(pending: Pending) -> Tensor:
        owed.append(pending)
        for other in owed[:-1]:
            right(other)
        del owed[:-1]
        return pending.tensor

    found: dict[Run, list[str]] = {}
    for run in runs:
        with ExitStack() as stack:
            stack.enter_context(instead(Pending, wait=wait) if late else ExitStack())
            watching = stack.enter_context(streams())
            for rank in range(run.plan.world_size):
                execute(run, rank, 257, repeats=False)
                watching.under_way.clear()
        found[run] = watching.races
    return found


def test_nothing_is_touched_while_a_stream_of_nccl_has_it() -> None:
    on_host = {"offload_optimizer": False, "offload_activations": False}  # not executed for GPUs
    runs = [replace(run, plan=replace(run.plan, **on_host)) for run in islice(random_runs(SEED), COUNT)]
    [found] = run_ranks(1, raced, runs)
    assert not any(found.values()), found


LATE = [Plan(tp=2), Plan(pp=2), Plan(dp=2, zero_stage=2), Plan(dp=2, zero_stage=3), Plan(cp=2), Plan(dp=2)]


def test_a_wait_that_comes_too_late_is_found() -> None:
    [found] = run_ranks(1, partial(raced, late=True), [run_of(plan) for plan in LATE])
    assert all(found.values()), [run.plan for run, races in found.items() if not races]


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
