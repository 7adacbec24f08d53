"""Executor of one rank's row of a pipeline schedule, independent of schedule, model and data."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from impl.collectives import Pending, receive_start, send_start
from impl.pipeline.schedule import SENDS_UNDER_WAY, Action, Op, Schedule, lower

Forward = Callable[[int, int, Tensor | None], Tensor]
"""(stage, microbatch, the stage's input, None for the first) -> its output, which is the loss if it is the last."""
Owed = list[Callable[[], None]]
"""Deferred computations of weight gradients."""
Collecting = Callable[[], AbstractContextManager[Owed]]
"""Context manager whose list collects the weight gradients deferred by a backward pass inside."""
Watch = Callable[[Action], AbstractContextManager[None]]
"""Context manager entered around every computing action, to measure it."""

WORDS = {Op.F: "forward pass", Op.B: "backward pass", Op.I: "input gradient", Op.W: "weight gradient"}


@dataclass(frozen=True)
class Links:
    """Transfer of activations and their gradients from one pipeline rank to another."""

    group: dist.ProcessGroup
    pack: Callable[[Tensor], Tensor] = lambda tensor: tensor
    """Function that returns what is sent of a tensor: all, or this tensor-parallel rank's part."""
    unpack: Callable[[Tensor], Tensor] = lambda part: part
    """Function that restores the whole tensor from what was received."""
    over: Mapping[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict)
    """Process groups of two by (sender, receiver), where a pair has one of its own."""


@dataclass
class _Step:
    """State of a rank during one step, by stage and microbatch."""

    input_gradients: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    """Lists of one gradient, filled by the backward pass; the input is released (a stage may keep parts of it)."""
    outputs: dict[tuple[int, int], Any] = field(default_factory=dict)
    """Losses, or gradient edges at which a backward pass begins; the output itself is released once it is sent."""
    owed: dict[tuple[int, int], Owed] = field(default_factory=dict)
    outbox: dict[Action, Tensor] = field(default_factory=dict)
    arrived: dict[Action, Pending] = field(default_factory=dict)
    buffers: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    """Receive buffers, free for reuse after the microbatch's backward pass in the stage."""
    sent: list[Pending] = field(default_factory=list)


class Engine:
    """Pipeline execution of one rank.

    Receives are posted where the row has them and awaited when their tensor is used; buffers are reused.

    Args:
        collecting: how the backward pass is split, where the schedule requires it.
    """

    def __init__(self, schedule: Schedule, links: Links, collecting: Collecting) -> None:
        self.rank, self.links, self.collecting = links.group.rank(), links, collecting
        self.schedule, self.row = schedule, lower(schedule)[links.group.rank()]
        self.own, self.last = set(schedule.stages_of(self.rank)), len(schedule.rank_of) - 1
        self._free: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}

    @property
    def buffers(self) -> list[Tensor]:
        """Receive buffers kept between steps."""
        return [buffer for free in self._free.values() for buffer in free]

    def run(self, forward: Forward, like: Tensor, watch: Watch | None = None) -> None:
        """Execute the row's actions; gradients are accumulated by autograd, or by deferred computations.

        Args:
            like: a tensor of the shape, type and device of what stages send each other.

        Communication: one send and receive of it, packed, for each microbatch, direction and border between ranks.

        Raises:
            RuntimeError: an action failed; names the rank, the action and its stage.
        """
        step, packed = _Step(), self.links.pack(like)
        for action in self.row:
            try:
                if action.op in WORDS:
                    received = self._take(step, action)
                    with watch(action) if watch else nullcontext():
                        self._compute(step, forward, action, received)
                else:
                    self._transfer(step, packed, action)
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                what = WORDS.get(action.op, "transfer")
                where = f"pipeline rank {self.rank}, stage {action.stage}, {what} of microbatch {action.microbatch}"
                raise RuntimeError(f"{where} ({action}): {error}") from error
        for pending in step.sent:
            pending.wait()

    def _compute(self, step: _Step, forward: Forward, action: Action, received: Tensor | None) -> None:
        op, stage, microbatch = action
        at = stage, microbatch
        if op is Op.F:
            arriving = step.input_gradients.setdefault(at, []) if torch.is_grad_enabled() else None
            x = _enter(received, arriving) if received is not None and arriving is not None else received
            y = forward(stage, microbatch, x)
            if torch.is_grad_enabled():
                step.outputs[at] = y if stage == self.last else torch.autograd.graph.get_gradient_edge(y)
            if stage < self.last:
                self._hand_over(step, Op.F, at, y.detach())
        elif op is Op.W:
            self._pay(step, at)
        else:
            with self.collecting() if self.schedule.is_split else nullcontext([]) as owed:
                torch.autograd.backward([step.outputs.pop(at)], [received])
            for grad in step.input_gradients.pop(at):
                self._hand_over(step, Op.B, at, grad)
            step.owed[at] = owed
            if op is Op.B:
                self._pay(step, at)

    def _hand_over(self, step: _Step, op: Op, at: tuple[int, int], tensor: Tensor) -> None:
        """Pass a tensor to a neighbouring stage: at once if it is on this rank, else at the row's send."""
        stage, microbatch = at
        other, send, receive = (stage + 1, Op.SEND_F, Op.RECV_F) if op is Op.F else (stage - 1, Op.SEND_B, Op.RECV_B)
        if other in self.own:
            step.arrived[Action(receive, other, microbatch)] = Pending(tensor, None)
        else:
            step.outbox[Action(send, stage, microbatch)] = tensor

    def _take(self, step: _Step, action: Action) -> Tensor | None:
        """Wait for and return another stage's result that this action reads; None: it reads none."""
        op, stage, microbatch = action
        if op is Op.W or stage == (0 if op is Op.F else self.last):
            return None
        pending = step.arrived.pop(Action(Op.RECV_F if op is Op.F else Op.RECV_B, stage, microbatch))
        tensor = pending.wait()
        return self.links.unpack(tensor) if pending.work is not None else tensor

    def _transfer(self, step: _Step, packed: Tensor, action: Action) -> None:
        peer = self.schedule.peer(action)
        if action.op in (Op.SEND_F, Op.SEND_B):
            step.sent = [pending for pending in step.sent if not pending.is_done()]
            while len(step.sent) >= SENDS_UNDER_WAY:
                step.sent.pop(0).wait()
            tensor = self.links.pack(step.outbox.pop(action)).contiguous()
            way = self.links.over.get((self.rank, peer))
            step.sent.append(send_start(tensor, peer, self.links.group, way))
        else:
            free = self._free.setdefault((tuple(packed.shape), packed.dtype), [])
            buffer = free.pop() if free else torch.empty_like(packed)
            step.buffers.setdefault((action.stage, action.microbatch), []).append(buffer)
            way = self.links.over.get((peer, self.rank))
            step.arrived[action] = receive_start(buffer, peer, self.links.group, way)

    def _pay(self, step: _Step, at: tuple[int, int]) -> None:
        """Compute the deferred weight gradients, and release the microbatch's buffers."""
        for pay in step.owed.pop(at):
            pay()
        for buffer in step.buffers.pop(at, ()):
            self._free[tuple(buffer.shape), buffer.dtype].append(buffer)


class _Enter(torch.autograd.Function):
    """Entry into a stage: puts the gradient of its input into a list, without keeping the input."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, received: Tensor, arriving: list[Tensor]) -> Tensor:
        ctx.arriving = arriving
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.arriving.append(grads[0])
        return None, None, None


def _enter(received: Tensor, arriving: list[Tensor]) -> Tensor:
    return cast(Tensor, _Enter.apply(torch.empty(0, requires_grad=True), received.detach(), arriving))
