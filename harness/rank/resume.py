"""Checkpoints of a run with the measurements up to them, from which a later attempt resumes."""

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from harness.rank.instruments import DamagedError, Measured
from harness.rank.journal import Journal
from impl.checkpoint import NAME, Checkpoints, UnloadableError, latest
from impl.files import rename
from impl.train import Trainer

LOOK_SECONDS = 1.0
"""Approximate time between two looks for a request to end."""
AGREE_AFTER = 2
"""Steps of an attempt after which the duration of a step is known, as the first may compile."""
MOST_STEPS = 1000
"""Largest number of steps between two looks."""


class AgreedEnd:
    """Step after which all ranks end, chosen by rank 0, whose supervisor receives the scheduler's signal.

    On a request rank 0 chooses a later step at which all ranks look, and writes it into the run's store before it goes
    on; since every step ends with a sum over all ranks, no rank can have passed that step by then. Between two looks
    about a second passes, however short a step is, so that the other ranks rarely query the host of rank 0.

    Args:
        is_requested: returns True if this rank is to end; called on rank 0 only.
    """

    def __init__(self, store: dist.Store, rank: int, is_requested: Callable[[], bool]) -> None:
        self.store, self.rank, self.is_requested = store, rank, is_requested
        self._calls, self._every = 0, 1
        self._end: int | None = None

    def ends(self, steps: int, seconds: float) -> bool:
        """Return True if training ends after this many steps; every rank has to call this after each step."""
        self._calls += 1
        if self._calls == AGREE_AFTER:
            if self.rank == 0:
                self.store.set("look", str(min(MOST_STEPS, max(1, int(LOOK_SECONDS / max(seconds, 1e-6))))))
            self._every = int(self.store.get("look"))
        if self._end is None:
            if self.rank == 0:
                if self.is_requested():
                    self._end = steps + self._every - steps % self._every
                    self.store.set("end", str(self._end))
            elif (self._calls <= AGREE_AFTER or steps % self._every == 0) and self.store.check(["end"]):
                self._end = int(self.store.get("end"))
        return self._end is not None and steps >= self._end


class Writing:
    """Note a slow write as progress: as long as this process writes, and `seconds` more, as others write."""

    def __init__(self, note: Callable[[], None], seconds: float) -> None:
        self.note, self.seconds = note, seconds
        self._written, self._since = -1, 0.0

    def __call__(self) -> None:
        """Note progress, unless nothing has been written for too long."""
        now, written = time.monotonic(), written_bytes()
        if written != self._written:
            self._written, self._since = written, now
        if now - self._since < self.seconds:
            self.note()


def written_bytes() -> int:
    """Return the bytes that this process has written so far; 0 where the system does not say."""
    try:
        counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(counts["wchar"])
    except (OSError, ValueError, KeyError):
        return 0


class Continuation:
    """Checkpoints saved after every `every` steps, after the last one, and before an agreed end.

    Args:
        folder: folder of this run alone, visible to all ranks.
        timeout: longest time that ranks wait for the slowest one's writing.
        end: agreement on an earlier end; None if none can be requested.
        note: notes progress of this rank.
    """

    def __init__(
        self,
        folder: Path,
        every: int,
        trainer: Trainer,
        timeout: timedelta,
        end: AgreedEnd | None = None,
        note: Callable[[], None] = lambda: None,
    ) -> None:
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)
        self.folder, self.group, self.end = folder, group, end
        waits = Writing(note, timeout.total_seconds())
        self.checkpoints = Checkpoints(folder, trainer, group, on_wait=waits, on_read=note)
        self.every, self.last = every, trainer.run.train.steps
        self.journal = Journal(folder / f"rank-{dist.get_rank()}.json")

    def resume(self) -> tuple[Measured | None, list[str]]:
        """Load the newest whole checkpoint; return the measurements before it, None at step 0, and warnings.

        Damaged checkpoints are put aside, alike on all ranks; training resumes from an older one, or at step 0.

        Raises:
            InputError: the checkpoint is of another run.
            DamagedError: the checkpoint was partly loaded when it was found to be damaged, and there is no older one.
        """
        before = self.journal.read()
        warnings = self._put_aside_unusable(len(before.steps) if before else -1)
        while True:
            try:
                loaded = self.checkpoints.load()
                break
            except UnloadableError as error:
                warnings.append(str(error))
                if not self.checkpoints.on_first(lambda: _put_aside(self.folder)):
                    raise DamagedError(str(error)) from error
        if loaded is None or before is None:
            return None, warnings
        before = before.until(loaded.step)
        before.resumed.append(loaded.step)
        return before, list(dict.fromkeys(warnings + loaded.warnings))

    def _put_aside_unusable(self, measured: int) -> list[str]:
        """Put checkpoints aside if all are damaged, and those after more steps than any rank has measurements of."""
        of_ranks: list[Any] = [None] * self.group.size()
        dist.all_gather_object(of_ranks, measured, group=self.group)

        def look() -> list[str]:
            saved, damaged = latest(self.folder)
            common = min(of_ranks)
            if saved is not None and common >= saved.step:
                return []  # loading reports what is wrong with newer ones
            if saved is not None:
                lost = ", ".join(str(rank) for rank, steps in enumerate(of_ranks) if steps < saved.step)
                damaged.append(f"{saved.path} cannot be used: measurements of rank {lost} are missing")
            if damaged:
                _put_aside(self.folder, common if saved is not None else -1)
            return damaged

        return self.checkpoints.on_first(look)

    def after(self, steps: int, measured: Measured, seconds: float = 0.0) -> bool:
        """Save a checkpoint if one is due after this many steps; return True if training ends here, with all saved."""
        ends = self.end is not None and self.end.ends(steps, seconds)
        if ends or steps % self.every == 0 or steps == self.last:
            begin = time.perf_counter()
            self.journal.add(measured)
            self.checkpoints.save(steps)
            spent = measured.seconds.get("checkpoint", 0.0) + time.perf_counter() - begin
            measured.seconds["checkpoint"] = spent
        if ends:
            self.checkpoints.wait()
        return ends


def _put_aside(folder: Path, beyond: int | None = None) -> bool:
    """Rename the newest checkpoint, or all `beyond` a step, so that the next save removes it; True if any is left."""
    found = {int(match[1]): path for path in folder.glob("step-*") if (match := NAME.fullmatch(path.name))}
    most = max(found, default=0) - 1 if beyond is None else beyond
    for step, path in found.items():
        if step > most:
            rename(path, path.with_suffix(".damaged"))
    return any(step <= most for step in found)
