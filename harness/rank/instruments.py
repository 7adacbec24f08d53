"""Measurements of a rank: what every engine shows, and what only this project's trainer shows of itself."""

import dataclasses
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from harness.rank.json_files import from_document
from harness.rank.stopwatch import Stopwatch
from impl.collectives import counted
from impl.cost.traffic import Count
from impl.instruments import activation_bytes, state_bytes, tracked
from impl.plan import AXES
from impl.train import Step, Trainer


@dataclass
class Measured:
    """Measurements of one rank so far, over all attempts at the run; saved along with each checkpoint."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    traffic: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    resumed: list[int] = field(default_factory=list)
    """Steps at which training was resumed from a checkpoint."""

    @classmethod
    def read(cls, document: Any) -> "Measured | None":
        """Return the measurements in a JSON object; None if training cannot be resumed with them."""
        if not isinstance(document, dict) or set(document) != {one.name for one in dataclasses.fields(cls)}:
            return None
        try:
            found: Measured = from_document(cls, document)
        except TypeError:
            return None
        lines = [*found.steps, *found.evaluations]
        if not all(isinstance(line, dict) and isinstance(line.get("step"), int) for line in lines):
            return None
        return found if [line["step"] for line in found.steps] == list(range(len(found.steps))) else None

    def until(self, step: int) -> "Measured":
        """Return the measurements before a step."""
        steps = [line for line in self.steps if line["step"] < step]
        evaluations = [line for line in self.evaluations if line["step"] <= step]
        return dataclasses.replace(self, steps=steps, evaluations=evaluations)


class DamagedError(RuntimeError):
    """The only checkpoint is damaged, and is out of the way now: another attempt begins at step 0."""


class Inspection:
    """Inspection of a trainer: memory and traffic of its first step, and what it holds between steps."""

    def __init__(self, trainer: Trainer, mesh: DeviceMesh, watch: Stopwatch) -> None:
        self.trainer, self.mesh, self.watch = trainer, mesh, watch
        # the compiler decides what a compiled layer keeps, and hooks would make it compile again
        self.activations = None if trainer.run.compile else activation_bytes(trainer)._asdict()
        self.memory: dict[str, int] | None = None

    def step(self, i: int, measured: Measured) -> Step:
        """Do a step, and measure its memory and the traffic of this rank's collectives by axes of the mesh."""
        trainer = self.trainer
        # operations of a compiled layer are not seen one by one
        tracking = nullcontext() if trainer.run.compile else tracked(trainer.held(), trainer.device)
        with counted() as counts, tracking as memory:
            step = trainer.step(i)
        self.memory = memory.parts(trainer.held()) if memory is not None else None
        measured.traffic = {}
        axes = {str(self.mesh.get_group(axis).group_name): axis for axis in AXES}
        for (group, op), count in counts.items():
            ops = measured.traffic.setdefault(axes.get(group, "joint"), {})
            ops[op] = dataclasses.asdict(count + Count(**ops.get(op, {})))
        return step

    def of_rank(self, measured: Measured) -> dict[str, Any]:
        """Return this rank's part of the record."""
        return {
            "state_bytes": state_bytes(self.trainer)._asdict(),
            "activation_bytes": self.activations,
            "memory": self.memory,
            "traffic": measured.traffic,
            "timeline": self.watch.row() if self._shows_timeline() else None,
        }

    def _shows_timeline(self) -> bool:
        """Return True for one rank of each pipeline rank; the others do the same at the same time."""
        pp = self.trainer.run.plan.pp
        return pp > 1 and self.mesh.get_local_rank("dp") == self.mesh.get_local_rank("tp") == 0
