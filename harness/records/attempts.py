"""Attempts at runs: folders of a store where ranks work, until the record that they end in is written."""

import errno
import os
import secrets
import shutil
from pathlib import Path

from harness.records.store import Store, require_name
from impl.grouping import by_key

JOB = "job.json"
"""File in an attempt's folder with the submitted job, read and written by `harness.rank.jobs`."""
HARVESTED = "harvested"
"""File in an attempt's folder that marks its record as written."""


class Attempts:
    """Attempts at the runs of one store, and the checkpoints that they share."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def new(self, run_id: str) -> Path:
        """Make an empty folder for an attempt at a run, and return it."""
        require_name(run_id)
        root = self.store.folder / "attempts"
        root.mkdir(parents=True, exist_ok=True)
        attempt = root.resolve() / f"{run_id}-{secrets.token_hex(4)}"
        attempt.mkdir()  # mkdtemp would make it unreadable for other users
        return attempt

    def open(self) -> dict[str, list[Path]]:
        """Return the attempts that were submitted and have no record yet, by the id of their run."""
        return by_key((attempt.name.rpartition("-")[0], attempt) for attempt in filter(self._is_open, self.all()))

    def open_of(self, run_id: str) -> list[Path]:
        """Return the attempts at one run that were submitted and have no record yet."""
        return [attempt for attempt in self.all(run_id) if self._is_open(attempt)]

    def _is_open(self, attempt: Path) -> bool:
        """Return True if an attempt was submitted and has no record yet; one that cannot be read is left out."""
        if attempt in self.store.ignored:
            return False
        try:
            return (attempt / JOB).exists() and not (attempt / HARVESTED).exists()
        except PermissionError as error:
            self.store.ignored[attempt] = f"another user's try, which cannot be read ({error.strerror})"
            return False
        except OSError:
            return True  # a transient failure of the file system does not end an attempt

    def close(self, attempt: Path) -> None:
        """Mark an attempt as harvested; if the mark cannot be written, leave the attempt out of this store."""
        try:
            (attempt / HARVESTED).touch()
        except FileNotFoundError:
            pass
        except OSError as error:
            self.store.ignored[attempt] = f"it is over, which could not be marked there ({error.strerror})"

    def all(self, run_id: str = "") -> list[Path]:
        """Return all attempts at a run, or at any."""
        root = (self.store.folder / "attempts").resolve()
        try:
            names = sorted(os.listdir(root))
        except OSError:
            return []
        return [root / name for name in names if name.startswith(f"{run_id}-" if run_id else "") and name[0] != "."]

    def forget(self, attempt: Path) -> None:
        """Remove the folder of an attempt that is not needed any more."""
        shutil.rmtree(attempt, ignore_errors=True)

    def dead_starts(self, run_id: str) -> list[Path]:
        """Return the attempts at a run that were never submitted, as their process was stopped before."""
        return [attempt for attempt in self.all(run_id) if _is_missing(attempt / JOB)]

    def checkpoints(self, run_id: str) -> Path:
        """Return the folder of a run's checkpoints, shared by all its attempts."""
        return (self.store.folder / "checkpoints" / run_id).resolve()

    def forget_checkpoints(self, run_id: str) -> None:
        """Remove the checkpoints of a run that has a finished record."""
        shutil.rmtree(self.checkpoints(run_id), ignore_errors=True)


def _is_missing(path: Path) -> bool:
    """Return True if the file does not exist; False also if that cannot be determined."""
    try:
        os.stat(path)
    except OSError as error:
        return error.errno == errno.ENOENT
    return False
