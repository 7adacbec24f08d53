"""Measurements of a rank: times of its actions, and what only this project's trainer shows of itself."""

import dataclasses
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from harness.rank.json_files import from_document
from harness.records.store import Document
from impl.collectives import counted
from impl.cost.traffic import Count
from impl.device import Device
from impl.instruments import activation_bytes, gradients_under_way, named_groups, state_bytes, tracked
from impl.pipeline.schedule import Action
from impl.plan import AXES
from impl.train import Step, Trainer


@dataclass
class Measured:
    """Measurements of one rank so far, over all attempts at the run; saved along with each checkpoint."""

    steps: list[Document] = field(default_factory=list)
    evaluations: list[Document] = field(default_factory=list)
    traffic: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    resumed: list[int] = field(default_factory=list)
    """Steps at which training was resumed from a checkpoint."""
    code: list[Document] = field(default_factory=list)
    """Code of the steps, on rank 0: its git state and first `step`; more than one where it was changed meanwhile."""
    peak_bytes: int = 0
    memory: dict[str, int] | None = None
    """Bytes of the inspected step's tensors, by what they are."""
    timeline: list[list[Any]] | None = None
    """Rows of the latest step, as `Stopwatch.row`; of one that was not inspected."""

    @classmethod
    def read(cls, entries: Sequence[Any]) -> "Measured | None":
        """Return the measurements in the JSON objects of a journal; None if training cannot be resumed with them."""
        try:
            parts: list[Measured] = [from_document(cls, entry) for entry in entries]
        except TypeError:
            return None
        if not parts:
            return None
        steps, evaluations = chain(*(part.steps for part in parts)), chain(*(part.evaluations for part in parts))
        found = dataclasses.replace(parts[-1], steps=list(steps), evaluations=list(evaluations))
        has_steps = [line.get("step") for line in found.steps] == list(range(len(found.steps)))
        others = (*found.evaluations, *found.code)
        return found if has_steps and all(isinstance(line.get("step"), int) for line in others) else None

    def until(self, step: int) -> "Measured":
        """Return the measurements before a step; those that were written may be of a later one than its checkpoint."""
        steps = [line for line in self.steps if line["step"] < step]
        evaluations = [line for line in self.evaluations if line["step"] <= step]
        seconds = self.seconds | {"training": sum(line.get("seconds", 0.0) for line in steps)}
        code = [one for one in self.code if one["step"] < step]
        return dataclasses.replace(self, steps=steps, evaluations=evaluations, seconds=seconds, code=code)

    @property
    def git(self) -> Document:
        """Code of the last steps as records have it, with other code that trained those `before`; {} if not known."""
        *before, code = self.code
        return code | {"before": before} if before else {name: code[name] for name in code if name != "step"}

    def note_code(self, git: Document, step: int) -> None:
        """Note the code that trains from a step on, unless it is that of the steps before."""
        self.code = self.code or [{"step": 0}]  # not known: journals of earlier versions do not say
        exactly = lambda one: (one.get("commit"), one.get("diff_sha256"))
        if exactly(self.code[-1]) != exactly(git):
            self.code.append({**git, "step": step})


class DamagedError(RuntimeError):
    """The only checkpoint is damaged, and was put aside: another attempt begins at step 0."""


class Stopwatch:
    """Start and end of every action of the latest step, in seconds, on one scale for all ranks.

    On a GPU they are CUDA events, so nothing waits for the device, and count from the last `reset`: intervals are
    milliseconds in fp32, 2 ms apart after 5 hours, and clocks of GPUs drift. All ranks have to construct theirs
    together. Ranks of one machine share its clock; other machines' clocks are set by a barrier, to within its own time.

    `begun` and `ended` are called with every action, for reports of the rank's place.
    """

    def __init__(
        self,
        device: torch.device,
        begun: Callable[[Action], None] = lambda _: None,
        ended: Callable[[Action], None] = lambda _: None,
    ) -> None:
        self._begun, self._ended = begun, ended
        self._device = Device.of(device)
        host, clocks = socket.gethostname(), list[Any]([None] * dist.get_world_size())
        dist.barrier()
        dist.all_gather_object(clocks, (host, self._device.clock(self._device.mark())))
        self._zero = next(clock for name, clock in clocks if name == host)
        self.reset()

    def reset(self) -> None:
        """Forget the previous step, which the device has finished."""
        self._marks: list[tuple[Action, Any, Any]] = []
        self._first = self._device.mark()
        self._began = self._device.clock(self._first) - self._zero

    @contextmanager
    def __call__(self, action: Action) -> Iterator[None]:
        self._begun(action)
        start = self._device.mark()
        yield
        self._marks.append((action, start, self._device.mark()))
        self._ended(action)

    def row(self) -> list[list[Any]]:
        """Return [action, start, end] of the latest step, as `impl.pipeline.simulate.Timeline` reads them."""
        return [[str(action), self._seconds(start), self._seconds(end)] for action, start, end in self._marks]

    def _seconds(self, mark: Any) -> float:
        return self._began + self._device.seconds(self._first, mark)


class Inspection:
    """Inspection of a trainer: memory and traffic of its first step, and what it holds between steps."""

    def __init__(self, trainer: Trainer, mesh: DeviceMesh, watch: Stopwatch) -> None:
        self.trainer, self.mesh, self.watch = trainer, mesh, watch
        # the compiler decides what a compiled layer keeps, and hooks would make it compile again
        self.activations = None if trainer.run.compile else activation_bytes(trainer)._asdict()
        is_first = not any(mesh.get_local_rank(axis) for axis in AXES[1:])
        self.shows_timeline = trainer.run.plan.pp > 1 and is_first

    def step(self, i: int, measured: Measured) -> Step:
        """Do a step, and measure its memory and the traffic of this rank's collectives by axes of the mesh."""
        trainer = self.trainer
        # operations of a compiled layer are not seen one by one
        passing = lambda: gradients_under_way(trainer)
        tracking = nullcontext() if trainer.run.compile else tracked(trainer.held(), trainer.device, passing)
        with counted() as counts, tracking as memory:
            step = trainer.step(i)
        measured.memory = memory.parts(trainer.held()) if memory is not None else None
        measured.traffic = {}
        names, kept = named_groups(trainer), (*AXES, "dp_cp", "zero", "replicas", "features", "heads")
        for (group, op), count in counts.items():
            ops = measured.traffic.setdefault(names[group] if names[group] in kept else "joint", {})
            ops[op] = dataclasses.asdict(count + Count(**ops.get(op, {})))
        return step

    def keep(self, measured: Measured) -> None:
        """Keep the timeline of the latest step; one rank of each pipeline rank has it."""
        if self.shows_timeline:
            measured.timeline = self.watch.row() or measured.timeline

    def of_rank(self, measured: Measured) -> Document:
        """Return this rank's part of the record."""
        self.keep(measured)
        return {
            "state_bytes": state_bytes(self.trainer)._asdict(),
            "activation_bytes": self.activations,
            "memory": measured.memory,
            "traffic": measured.traffic,
            "timeline": measured.timeline,
        }
