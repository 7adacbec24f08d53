"""What our own trainer shows of itself, and other engines do not: what it holds and moves, and when it computes."""

import dataclasses
from contextlib import nullcontext
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from harness.rank.journal import Measured
from harness.rank.stopwatch import Stopwatch
from impl.collectives import counted
from impl.cost.traffic import Count
from impl.plan import AXES
from impl.tracking import tracked
from impl.train import Step, Trainer


class Inside:
    """Looks into a trainer's first step, and at what it keeps between steps."""

    def __init__(self, trainer: Trainer, mesh: DeviceMesh, watch: Stopwatch) -> None:
        self.trainer, self.mesh, self.watch = trainer, mesh, watch
        # what a compiled layer keeps is the compiler's choice, and hooks would make it compile anew
        self.activations = None if trainer.run.compile else trainer.activation_bytes()._asdict()
        self.memory: dict[str, int] | None = None

    def step(self, i: int, measured: Measured) -> Step:
        """A step, the memory that it took, and what this rank's collectives moved in it, by axes of the mesh; every
        step is alike."""
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
        """This rank's part of the record."""
        return {
            "state_bytes": self.trainer.state_bytes()._asdict(),
            "activation_bytes": self.activations,
            "memory": self.memory,
            "traffic": measured.traffic,
            "timeline": self.watch.row() if self._shows_timeline() else None,
        }

    def _shows_timeline(self) -> bool:
        """One rank of every pipeline rank: data- and tensor-parallel ranks do the same at the same time."""
        pp = self.trainer.run.plan.pp
        return pp > 1 and self.mesh.get_local_rank("dp") == self.mesh.get_local_rank("tp") == 0
