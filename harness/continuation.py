"""Checkpoints of a run, and beside them what was measured until then: a later try at it goes on from there."""

import dataclasses
import json
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from harness.store import read_json, write_atomically
from impl.checkpoint import Checkpoints
from impl.errors import InputError
from impl.train import Trainer


@dataclass
class Measured:
    """What one rank has measured so far, over all tries at the run."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    traffic: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    resumed: list[int] = field(default_factory=list)
    """Steps that were behind a try when it began, of each that went on from a checkpoint."""


class Continuation:
    """Saves a checkpoint after every `every` steps and after the last one.

    Args:
        folder: of this run alone; all ranks see it.
        timeout: of the slowest rank's writing.
    """

    def __init__(self, folder: Path, every: int, trainer: Trainer, timeout: timedelta) -> None:
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)
        self.checkpoints = Checkpoints(folder, trainer, group)
        self.every, self.last = every, trainer.run.train.steps
        self.journal = folder / f"rank-{dist.get_rank()}.json"

    def resume(self) -> tuple[Measured, list[str]] | None:
        """Load the newest checkpoint: what was measured before it, and warnings; None: there is none.

        Raises:
            InputError: it cannot be gone on from.
        """
        loaded = self.checkpoints.load()
        if loaded is None:
            return None
        kept = read_json(self.journal)
        if kept is None:
            raise InputError(f"{self.journal} is missing; without {self.journal.parent} training begins anew")
        before = Measured(**kept)
        before.steps = [line for line in before.steps if line["step"] < loaded.step]
        before.evaluations = [line for line in before.evaluations if line["step"] <= loaded.step]
        before.resumed.append(loaded.step)
        return before, loaded.warnings

    def after(self, steps: int, measured: Measured) -> None:
        """Save, if it is time to."""
        if steps % self.every and steps != self.last:
            return
        begin = time.perf_counter()
        write_atomically(self.journal, json.dumps(dataclasses.asdict(measured)))
        self.checkpoints.save(steps)
        seconds = measured.seconds
        seconds["checkpoint"] = seconds.get("checkpoint", 0.0) + time.perf_counter() - begin
