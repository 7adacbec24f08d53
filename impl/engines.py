"""Engines that train a run: this project's own, or a peer behind the same interface."""

from importlib import import_module
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from impl.data.tokens import TokenFolder
from impl.errors import InputError
from impl.evaluate import Evaluation
from impl.peers.validity import EnginePart, part_of
from impl.pipeline.engine import Watch
from impl.run import Run
from impl.train import Step

TRAINERS: dict[EnginePart, tuple[str, str]] = {
    "native": ("impl.train", "Trainer"),
    "plain": ("impl.peers.ddp", "PlainTrainer"),
    "ddp": ("impl.peers.ddp", "DDPTrainer"),
    "fsdp": ("impl.peers.fsdp", "FSDPTrainer"),
    "dtensor": ("impl.peers.dtensor", "DTensorTrainer"),
    "context": ("impl.peers.context", "ContextParallelTrainer"),
    "pipelining": ("impl.peers.pipelining", "PipeliningTrainer"),
    "deepspeed": ("impl.peers.deepspeed", "DeepSpeedTrainer"),
    "deepspeed_pipeline": ("impl.peers.deepspeed_pipeline", "DeepSpeedPipelineTrainer"),
}
"""Module and class of each engine; a module is imported when a run needs it: DeepSpeed's import takes seconds."""


class Engine(Protocol):
    """Engine that trains one run: `step(i)` does the i-th optimizer step; calls with i = 0, 1, ... train the model."""

    vocab_size: int

    def step(self, i: int, watch: Watch | None = None) -> Step:
        """Do the i-th optimizer step, equal on every rank; only the native pipeline uses the watch."""
        ...

    def evaluate(self, *, final: bool) -> list[Evaluation]:
        """Run validation, and after the last step the run's other evaluations; results are equal on every rank."""
        ...

    def settings(self) -> dict[str, Any]:
        """Return the engine's version and its resolved configuration, ready for JSON."""
        ...


def make(run: Run, data: TokenFolder, mesh: DeviceMesh, device: torch.device) -> Engine:
    """Return the trainer of the run's engine.

    Raises:
        InputError: the run is not valid, or not with its engine.
    """
    if problems := run.untrainable():
        raise InputError(problems[0])
    module, name = TRAINERS[part_of(run)]
    return getattr(import_module(module), name)(run, data, mesh, device)
