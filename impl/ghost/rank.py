"""One rank of a run, executed alone: the real trainer, mesh and engine, on tensors without memory."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from impl.collectives import counted
from impl.cost.traffic import Count, Op
from impl.errors import InputError
from impl.ghost.events import Begin, Log, Wait
from impl.ghost.recorder import recorded
from impl.ghost.tensors import Counting, Unread, counting, without_memory
from impl.grouping import by_key
from impl.instruments import named_groups
from impl.mesh import build_mesh
from impl.pipeline.engine import Engine, Forward, Watch, _Step
from impl.pipeline.schedule import Action
from impl.pipeline.schedule import Op as Work
from impl.run import Run
from impl.train import Trainer
from impl.zero.buckets import Bucket

SAMPLES = 3
"""Passes of a kind that are executed first: the second and the third have to be alike."""
LAST = 2
"""That are executed last."""


class Pass(NamedTuple):
    """Events that a rank began in a pass, as a range of its log."""

    action: Action
    start: int
    stop: int


@dataclass
class Executed:
    """Record of what one rank did in a step."""

    rank: int
    log: Log
    passes: list[Pass]
    counts: dict[str, dict[Op, Count]]
    """Calls and bytes by axes of the mesh, in the form of `impl.cost.traffic.step_traffic`."""
    memory: dict[str, int]
    """Bytes at the fullest moment, by category."""
    flops: int
    """FLOPs of matrix products and attention."""
    repeated: int
    """Number of passes that were not executed, because they repeat an executed one."""
    pp_rank: int
    head_positions: int
    names: dict[str, str]
    """Axes of every group, by the group's name."""
    backend: str
    early: list[str]
    """First use of a result that was not waited for, and the number of further ones; empty if there is none."""


@dataclass
class _Template:
    """Effects of a pass, which later passes of its kind repeat."""

    events: list[Begin | Wait]
    """Events of the pass; a wait's place counts from this list's start."""
    counts: dict[tuple[str, Op], Count]
    flops: int
    grown: int
    """Change of the bytes in use over the pass, without its input and what it hands over."""
    keeps_input: bool
    """Whether autograd keeps the pass's input for the backward pass."""
    arrived: Counter[Bucket]
    """Number of gradients that the pass adds to each bucket."""


class NotAlikeError(RuntimeError):
    """Passes that should repeat do not: all have to be executed."""


class Repeating(Engine):
    """An engine that executes the first and the last passes of each kind, and lets the others repeat a middle one.

    Sends, receives and their waits are all carried out, by the engine's own code. What a pass that repeats keeps for
    the backward pass is memory of the same size.
    """

    def __init__(self, trainer: Trainer, log: list[Begin | Wait], *, repeats: bool) -> None:
        engine = trainer.engine
        super().__init__(engine.schedule, engine.links, engine.collecting)
        self.trainer, self.log, self.repeats = trainer, log, repeats
        self.passes: list[Pass] = []
        self.repeated = 0
        self._executed = self._samples()
        self._templates: dict[tuple[Work, int], list[_Template]] = {}
        self._kept: dict[tuple[int, int], list[Tensor]] = {}

    def start(self, tracker: Counting, counts: dict[tuple[str, Op], Count]) -> None:
        self.tracker, self.counts = tracker, counts

    def run(self, forward: Forward, like: Tensor, watch: Watch | None = None) -> None:
        self._like = like
        super().run(forward, like, watch)

    def _samples(self) -> set[int]:
        """Return the microbatches that are executed: of every kind of pass the first and the last ones."""
        kinds = by_key(((op, stage), microbatch) for op, stage, microbatch in self.schedule.rows[self.rank])
        return {k for order in kinds.values() for k in (*order[:SAMPLES], *order[-LAST:])}

    def _compute(self, step: _Step, forward: Forward, action: Action, received: Tensor | None) -> None:
        start = len(self.log)
        if action.microbatch in self._executed or not self.repeats:
            with self._sampled(step, action, received):
                super()._compute(step, forward, action, received)
        else:
            self._repeat(step, action, received)
            self.repeated += 1
        self.passes.append(Pass(action, start, len(self.log)))

    @contextmanager
    def _sampled(self, step: _Step, action: Action, received: Tensor | None) -> Iterator[None]:
        found = self._templates.setdefault(action[:2], [])
        if len(found) == SAMPLES:
            yield
            return
        start, counts, flops, before = len(self.log), dict(self.counts), self.tracker.flops, self.tracker.alive
        missing, there = Counter(self.trainer.gradients._missing), {*step.outbox, *step.arrived}
        yield
        waits = lambda event: Wait(event.of - start) if isinstance(event, Wait) else event
        handed = [tensor for key, tensor in step.outbox.items() if key not in there]
        handed += [pending.tensor for key, pending in step.arrived.items() if key not in there]
        more = {key: count + counts.get(key, Count()) * -1 for key, count in self.counts.items()}
        found.append(
            _Template(
                [waits(event) for event in self.log[start:]],
                {key: count for key, count in more.items() if count.calls},
                self.tracker.flops - flops,
                self.tracker.alive - before - sum(tensor.nbytes for tensor in handed),
                action.op is Work.F and received is not None and self.tracker.keeps(received),
                missing - Counter(self.trainer.gradients._missing),
            )
        )

    def _repeat(self, step: _Step, action: Action, received: Tensor | None) -> None:
        op, stage, microbatch = action
        at, samples = (stage, microbatch), self._templates.get((op, stage), [])
        if len(samples) < SAMPLES or not self._are_alike(*samples[1:]):
            raise NotAlikeError(f"{action} cannot repeat what was executed")
        one, start = samples[-1], len(self.log)
        self.log += [Wait(event.of + start) if isinstance(event, Wait) else event for event in one.events]
        for key, count in one.counts.items():
            self.counts[key] = self.counts[key] + count
        self.tracker.flops += one.flops
        self.trainer.gradients._missing.update(
            {bucket: self.trainer.gradients._missing[bucket] - n for bucket, n in one.arrived.items()}
        )
        size = one.grown + sum(tensor.nbytes for tensor in self._kept.pop(at, ()))
        kept = [torch.empty(size, dtype=torch.uint8, device=self._like.device)] if size > 0 else []
        # a buffer of the engine's is there in any case
        is_buffer = any(received is buffer for buffer in step.buffers.get(at, ()))
        kept += [received] if one.keeps_input and received is not None and not is_buffer else []
        if kept:
            self._kept[at] = [self.tracker.pack(tensor) for tensor in kept]
        if op is Work.F and stage < self.last:
            self._hand_over(step, Work.F, at, torch.empty_like(self._like))
        if op in (Work.B, Work.I) and stage:
            self._hand_over(step, Work.B, at, torch.empty_like(self._like))
        if op in (Work.B, Work.W):
            step.owed[at] = []
            self._pay(step, at)

    @staticmethod
    def _are_alike(a: _Template, b: _Template) -> bool:
        inside = all(event.of >= 0 for event in a.events if isinstance(event, Wait))
        return inside and (a.events, a.counts, a.flops, a.arrived) == (b.events, b.counts, b.flops, b.arrived)


def refusals(run: Run, device: str) -> list[str]:
    """Return the reasons why a run cannot be executed without devices, one line each."""
    found = run.untrainable()
    valid = {
        f"engine {run.engine} is not executed without its ranks; valid: native": run.engine != "native",
        "compile True is not executed without memory; valid: False": run.compile,
        "data.race is not executed without its questions; valid: without": run.data.race is not None,
    }
    for name in ("offload_optimizer", "offload_activations"):
        needs = f"plan.{name} needs the host's memory beside a GPU's, which is not executed; valid: --device cpu"
        valid[needs] = getattr(run.plan, name) and device != "cpu"
    return found + [text for text, is_so in valid.items() if is_so]


def execute(
    run: Run, rank: int, tokenizer_tokens: int, *, device: str = "cuda", backend: str = "nccl", repeats: bool = True
) -> Executed:
    """Do one step of one rank, whose collectives and transfers are recorded and do nothing.

    Args:
        tokenizer_tokens: tokens of the run's tokenizer.
        device: whose branches are taken: cuda or cpu.
        backend: of the process groups: nccl or gloo.
        repeats: passes in the middle may repeat what was executed; False executes all.

    Raises:
        InputError: the run cannot be executed so.
    """
    if lines := refusals(run, device):
        raise InputError(lines[0])
    # every microbatch reduces gradients at stages 2 and 3, among those of others
    if repeats and run.plan.zero_stage < 2:
        try:
            return _execute(run, rank, tokenizer_tokens, device, backend, repeats=True)
        except RuntimeError as error:
            if not isinstance(error.__cause__, NotAlikeError):
                raise
    return _execute(run, rank, tokenizer_tokens, device, backend, repeats=False)


def _execute(run: Run, rank: int, tokens: int, device: str, backend: str, *, repeats: bool) -> Executed:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=run.plan.world_size)
    try:
        mesh, there = build_mesh(run.plan, "cpu"), torch.device(device)
        with recorded(backend, is_real=False) as recorder, without_memory(there):
            one = Trainer(run, Unread(tokens), mesh, there)  # type: ignore[arg-type]
            one.engine = engine = Repeating(one, recorder.log, repeats=repeats)
            with counted() as counts, counting(one, recorder.under_way.look) as tracker:
                engine.start(tracker, counts)
                one.step(0)
            settle(one)
            memory = tracker.parts_of(one)
        by_axes = dict[str, dict[Op, Count]]()
        names = named_groups(one)
        for (group, op), count in counts.items():
            of_axes = by_axes.setdefault(names[group], {})
            of_axes[op] = of_axes.get(op, Count()) + count
        uses = recorder.under_way.early
        early = [f"rank {rank}: {uses[0]}{f', and {len(uses) - 1} more' if uses[1:] else ''}"] if uses else []
        found = recorder.log, engine.passes, by_axes, memory, tracker.flops, engine.repeated
        return Executed(rank, *found, one.pp_group.rank(), one.head_positions, names, backend, early)
    finally:
        dist.destroy_process_group()


def settle(one: Trainer) -> None:
    """Wait for parameters that are being gathered for the next step, as that would."""
    for bucket in one.buckets:
        one.parameters.settle(bucket)
