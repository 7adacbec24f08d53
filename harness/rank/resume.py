"""Checkpoints of a run, and beside them what was measured until then: a later try at it goes on from there."""

import dataclasses
import json
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from harness.rank.journal import DamagedError, Measured
from harness.records.store import read_checked, with_digest, write_atomically
from impl.checkpoint import NAME, Checkpoints, latest
from impl.errors import InputError
from impl.files import rename
from impl.train import Trainer

T = TypeVar("T")


class Continuation:
    """Saves a checkpoint after every `every` steps and after the last one.

    Args:
        folder: of this run alone; all ranks see it.
        timeout: of the slowest rank's writing.
    """

    def __init__(self, folder: Path, every: int, trainer: Trainer, timeout: timedelta) -> None:
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)
        self.folder, self.group = folder, group
        self.checkpoints = Checkpoints(folder, trainer, group)
        self.every, self.last = every, trainer.run.train.steps
        self.journal = folder / f"rank-{dist.get_rank()}.json"

    def resume(self) -> tuple[Measured | None, list[str]]:
        """Load the newest whole checkpoint: what was measured before it, and warnings; None: training begins anew.

        What is damaged is put out of the way, on all ranks alike: an older one is gone on from, or none.

        Raises:
            InputError: it is one of another run.
            DamagedError: one was found to be damaged when it was loaded in part, and there is no older one.
        """
        before = _measured(self.journal)
        warnings = self._put_aside_what_does_not_fit(len(before.steps) if before else -1)
        while True:
            try:
                loaded = self.checkpoints.load()
                break
            except InputError as error:
                if "cannot be loaded" not in str(error):
                    raise
                warnings.append(str(error))
                if not self._first(lambda: _put_aside(self.folder, newest_only=True)):
                    raise DamagedError(str(error)) from error
        if loaded is None or before is None:
            return None, warnings
        before = before.until(loaded.step)
        before.resumed.append(loaded.step)
        return before, list(dict.fromkeys(warnings + loaded.warnings))

    def _put_aside_what_does_not_fit(self, measured: int) -> list[str]:
        """No checkpoint stays if all are damaged, or if of any rank less was measured than the newest has behind it."""
        of_ranks: list[Any] = [None] * self.group.size()
        dist.all_gather_object(of_ranks, measured, group=self.group)

        def look() -> list[str]:
            saved, damaged = latest(self.folder)
            if saved is not None and min(of_ranks) >= saved.step:
                return []  # whoever loads it says what is wrong with newer ones
            if saved is not None:
                lost = ", ".join(str(rank) for rank, steps in enumerate(of_ranks) if steps < saved.step)
                damaged.append(f"{saved.path} is of no use: what rank {lost} measured before it is lost")
            if damaged:
                _put_aside(self.folder, newest_only=False)
            return damaged

        return self._first(look)

    def _first(self, action: Callable[[], T]) -> T:
        """What the first rank's action gives, on every rank."""
        told: list[Any] = [action() if self.group.rank() == 0 else None]
        dist.broadcast_object_list(told, group=self.group, group_src=0)
        return told[0]

    def after(self, steps: int, measured: Measured, *, now: bool = False) -> None:
        """Save, if it is time to, or has to be now."""
        if not now and steps % self.every and steps != self.last:
            return
        begin = time.perf_counter()
        write_atomically(self.journal, with_digest(json.dumps(dataclasses.asdict(measured))))
        self.checkpoints.save(steps)
        seconds = measured.seconds
        seconds["checkpoint"] = seconds.get("checkpoint", 0.0) + time.perf_counter() - begin


def _measured(journal: Path) -> Measured | None:
    """What a journal holds; None: it is missing, or not as it was written."""
    try:
        return Measured.read(read_checked(journal))
    except ValueError:
        return None


def _put_aside(folder: Path, *, newest_only: bool) -> bool:
    """Give finished checkpoints a name that is none, and that the next save removes; whether any is left."""
    found = sorted(path for path in folder.glob("step-*") if NAME.fullmatch(path.name))
    for path in found[-1:] if newest_only else found:
        rename(path, path.with_suffix(".damaged"))
    return newest_only and len(found) > 1
