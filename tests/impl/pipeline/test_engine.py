"""What a rank really does in a step: its row in order, no work twice, and no more memory than the table says."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from impl import collectives
from impl.evaluation_config import EvaluationConfig
from impl.model.config import ModelConfig
from impl.pipeline import engine
from impl.pipeline.schedule import HELD, SENDS_UNDER_WAY, Action, Op, Schedule, lower
from impl.pipeline.schedules import build
from impl.pipeline.simulate import simulate, uniform
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from impl.train import Trainer
from tests.impl.on_ranks import on_ranks
from tests.impl.pipeline import own_schedule

OWN = own_schedule.__name__
MODEL = ModelConfig(num_layers=5, hidden_size=16, num_heads=2, seq_len=16, dropout=0.1)
PLANS = [
    Plan(pp=2, schedule="gpipe"),
    Plan(pp=2),
    Plan(pp=2, schedule="interleaved", chunks=2),
    Plan(pp=2, schedule=f"{OWN}:two_ways", chunks=2),
    Plan(pp=2, schedule=f"{OWN}:every_other"),
    Plan(pp=2, schedule="zbv", chunks=2),
    Plan(pp=2, schedule="dualpipe_v", chunks=2),
    Plan(pp=4),
    Plan(pp=4, schedule="zb_h1"),
    Plan(pp=4, schedule="zb_h2"),
    Plan(pp=4, schedule="eager_one_f_one_b"),
    Plan(pp=4, schedule=own_schedule.SEARCHED),
    Plan(pp=2, schedule=f"rows:FFFIFW{'IW' * 3},{'FIW' * 4}"),
    Plan(pp=2, schedule=own_schedule.SEARCHED_V, chunks=2),
    Plan(pp=2, tp=2),
    Plan(pp=2, tp=2, schedule="zb_h1", sequence_parallel=True),
]


def run_of(plan: Plan, pp: int = 0) -> Run:
    """Two microbatches for each pipeline rank, here or of a plan to compare with."""
    recipe = Recipe(global_batch=2 * (pp or plan.pp), microbatch=1)
    return Run(model=MODEL, plan=plan, train=recipe, evaluation=EvaluationConfig(sequences=3))


def table(run: Run) -> Schedule:
    return build(run.plan.schedule, run.plan.pp, run.microbatches, run.plan.chunks)


@dataclass
class Seen:
    """What one rank was seen to do and to hold in one step."""

    pp_rank: int
    row: list[str] = field(default_factory=list)
    """Actions that compute, in their order."""
    live: int = 0
    """Most forward passes of which anything was still kept for the backward pass."""
    outputs: int = 0
    """Most outputs of stages whose memory was not free while their graphs lived."""
    buffers: int = 0
    """Receive buffers, in two steps."""
    flops: int = 0
    """Of matrix products, in one step."""


class Memory:
    """What autograd keeps of every forward pass, and the outputs, by stage and microbatch."""

    def __init__(self, one: Trainer) -> None:
        self.kept: dict[tuple[int, int], list[StorageWeakRef]] = {}
        self.outputs: dict[tuple[int, int], StorageWeakRef] = {}
        self._sent = {stage for stage in one.own if stage + 1 < len(one.stages) and stage + 1 not in one.own}
        self._shared = {storage(p) for p in one.model.parameters()}

    def of(self, forward: engine.Forward) -> engine.Forward:
        """The same forward passes, looked at. What comes from other stages and the weights are not a pass's own."""

        def watched(stage: int, microbatch: int, x: Tensor | None) -> Tensor:
            kept = self.kept[stage, microbatch] = []
            shared = self._shared | ({storage(x)} if x is not None else set())

            def pack(tensor: Tensor) -> Tensor:
                if storage(tensor) not in shared:
                    kept.append(StorageWeakRef(tensor.untyped_storage()))
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                out = forward(stage, microbatch, x)
            if stage in self._sent:
                self.outputs[stage, microbatch] = StorageWeakRef(out.untyped_storage())
            return out

        return watched

    def live(self) -> int:
        return sum(not all(ref.expired() for ref in refs) for refs in self.kept.values())

    def live_outputs(self) -> int:
        return sum(not ref.expired() for ref in self.outputs.values())


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def seen(one: Trainer) -> Seen:
    found, memory = Seen(one.pp_group.rank()), Memory(one)
    run, held = one.engine.run, dict[int, Tensor]()  # buffers are held here, or one's place might be given to another

    @contextmanager
    def watch(action: Action) -> Iterator[None]:
        found.row.append(str(action))
        yield
        found.live = max(found.live, memory.live())
        found.outputs = max(found.outputs, memory.live_outputs())

    def receive_start(buffer: Tensor, *others: Any) -> collectives.Pending:
        held[buffer.data_ptr()] = buffer
        return collectives.receive_start(buffer, *others)

    one.engine.run = lambda forward, like, watch=None: run(memory.of(forward), like, watch)
    with mock.patch.object(engine, "receive_start", receive_start):
        one.step(0, watch)
        with FlopCounterMode(display=False) as counter:
            one.step(1)
    found.buffers, found.flops = len(held), counter.get_total_flops()
    return found


def evaluated(one: Trainer) -> tuple[int, set[str], set[int]]:
    """Pipeline rank, forward passes of evaluation, and (nothing may be kept for a backward pass) its live graphs."""
    memory, row, live, run = Memory(one), set[str](), set[int](), one.scorer.run

    @contextmanager
    def watch(action: Action) -> Iterator[None]:
        row.add(str(action))
        yield
        live.add(memory.live())

    with mock.patch.object(one.scorer, "run", lambda forward, like: run(memory.of(forward), like, watch)):
        one.evaluate(final=False)
    return one.pp_group.rank(), row, live


def looked_at(one: Trainer) -> tuple[tuple[int, set[str], set[int]], Seen]:
    return evaluated(one), seen(one)


@cache
def found(data: Path) -> dict[Run, list[Any]]:
    """What `looked_at` found on every rank, for every plan and for serial training."""
    return on_ranks(looked_at, [run_of(Plan(), 2), run_of(Plan(), 4), *map(run_of, PLANS)], data)


# One step ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.schedule.split(':')[-1]}-pp={plan.pp}-tp={plan.tp}")
def test_a_rank_does_its_row_in_order_and_holds_what_is_simulated(plan: Plan, data: Path) -> None:
    run = run_of(plan)
    schedule = table(run)
    assert len(found(data)[run]) == plan.world_size
    for _, one in found(data)[run]:
        assert one.row == [str(action) for action in schedule.rows[one.pp_rank]]
        assert one.live == simulate(schedule, uniform()).peak_in_flight(one.pp_rank)
        assert one.outputs <= SENDS_UNDER_WAY + 1, "outputs are released once they are sent"
        assert one.buffers == buffers_needed(schedule, one.pp_rank)


def test_evaluation_passes_forward_through_every_stage_only(data: Path) -> None:
    for run, ranks in found(data).items():
        for (rank, row, live), _ in ranks:
            assert row == {f"{stage}F0" for stage in table(run).stages_of(rank)}
            assert live == {0}


def buffers_needed(schedule: Schedule, rank: int) -> int:
    """Most transfers that have been asked for by a rank, and of which the backward pass is not finished."""
    held = Counter[tuple[int, int]]()
    most = 0
    for action in lower(schedule)[rank]:
        held[action[1:]] += action.op in (Op.RECV_F, Op.RECV_B)
        most = max(most, held.total())
        if HELD.get(action.op) == -1:
            del held[action[1:]]
    return most


# Work ----------------------------------------------------------------------------------------------------------------


def test_no_rank_works_twice(data: Path) -> None:
    """What all ranks compute is what serial does; with a split backward pass each computes what it does in 1F1B."""
    of = lambda plan, pp=0: [one.flops for _, one in found(data)[run_of(plan, pp)]]
    for plan in PLANS:
        if plan.tp == 1:
            assert sum(of(plan)) == sum(of(Plan(), plan.pp)) > 0
        if plan.schedule in ("zb_h1", "zb_h2", own_schedule.SEARCHED, f"{OWN}:every_other"):
            assert of(plan) == of(replace(plan, schedule="one_f_one_b", sequence_parallel=False))


# Errors --------------------------------------------------------------------------------------------------------------


def raising(_: Tensor) -> Tensor:
    raise LookupError("made up")


def said_of(one: Trainer, stage: int, microbatch: int, broken: Callable[[Tensor], object]) -> str:
    """What the engine says if `broken` is what comes of this stage's output."""
    run = one.engine.run

    def of(forward: engine.Forward) -> engine.Forward:
        def passed(*at: Any) -> Tensor:
            out = forward(*at)
            if at[:2] == (stage, microbatch):
                broken(out)
            return out

        return passed

    with mock.patch.object(one.engine, "run", lambda forward, like, watch: run(of(forward), like, watch)):
        try:
            one.backward(0)
        except RuntimeError as error:
            return f"{error} <- {type(error.__cause__).__name__}"
    return ""


def what_is_said(one: Trainer) -> list[str]:
    return [said_of(one, 0, 2, raising), said_of(one, 1, 2, lambda out: out.register_hook(raising))]


def test_an_error_names_the_rank_the_stage_and_the_action(data: Path) -> None:
    both_stages_here = run_of(Plan(schedule="interleaved", chunks=2), 2)
    [said] = on_ranks(what_is_said, [both_stages_here], data)[both_stages_here]
    assert said == [
        "pipeline rank 0, stage 0, forward pass of microbatch 2 (0F2): made up <- LookupError",
        "pipeline rank 0, stage 1, backward pass of microbatch 2 (1B2): made up <- LookupError",
    ]
