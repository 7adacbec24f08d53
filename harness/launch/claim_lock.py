"""Claims of harnesses on points: a dead owner loses its claim, and nothing but atomic renames is needed.

A claim is a folder `claims/POINT/TOKEN` with `owner.json` in it, and the owner of TOKEN has the point. Every change is
one rename that fails for all but one process, and an owner writes through its own folder only:

- claim: a prepared folder with TOKEN in it is renamed to `claims/POINT`, which must be missing or empty;
- renew: `owner.json` is rewritten in `claims/POINT/TOKEN`, which is gone if the claim was lost;
- publish: a file in `claims/POINT/TOKEN` is renamed to its place, so a former owner cannot publish;
- take over: TOKEN of an owner that was seen dead is renamed to the new owner's;
- release: TOKEN is renamed away.

Clocks of other machines are never compared: an owner is dead if its process is gone from this very machine, or if its
`owner.json` stayed unchanged for LEASE_SECONDS by the clock of the process that wants the point.
"""

import contextlib
import errno
import itertools
import json
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from harness.rank.json_files import from_document
from harness.records.store import write_atomically
from impl.files import rename

LEASE_SECONDS = 30.0
RENEWALS = 3
"""Number of renewals of a claim within a lease."""
OWNER = "owner.json"
TOKEN_BYTES = 8
TAKEN = (errno.ENOTEMPTY, errno.EEXIST)
"""Errors of a rename to a point that another harness has claimed."""
LOST = (errno.ENOENT, errno.ESTALE)
"""Errors of a rename of a claim that is gone."""


class ClaimLost(Exception):  # noqa: N818  (nothing went wrong here)
    """Another harness has taken the point over."""


@dataclass(frozen=True)
class Claim:
    """Claim on one point."""

    folder: Path
    """Folder `claims/POINT/TOKEN`."""

    def publish(self, path: Path, text: str) -> None:
        """Write a file atomically if the claim is still held.

        Raises:
            ClaimLost: it is not; the file is as it was.
            OSError: the folder cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_atomically(path, text, by_way_of=self.folder)
        except OSError:
            if self.is_held():
                raise
            raise ClaimLost from None

    def is_held(self) -> bool:
        """Return True if no other harness has taken the point over.

        Raises:
            FileNotFoundError: the folder of all claims is gone, as where --out was removed or renamed.
        """
        if not (claims := self.folder.parents[1]).is_dir():
            raise FileNotFoundError(errno.ENOENT, "it was removed or renamed under a sweep", str(claims.parent))
        return self.folder.is_dir()


@dataclass(frozen=True)
class Owner:
    """Process that owns a claim, distinguished from all others of this machine and of others."""

    host: str
    pid: int
    seconds_after_boot: float
    machine: str | None

    @classmethod
    def here(cls) -> "Owner":
        """Return this process."""
        process = psutil.Process()
        return cls(socket.gethostname(), process.pid, _seconds_after_boot(process), _machine())

    @classmethod
    def read(cls, content: bytes) -> "Owner | None":
        """Return the owner in a file; None if it is damaged."""
        try:
            return from_document(cls, json.loads(content))
        except (ValueError, TypeError, RecursionError):
            return None

    def is_gone(self) -> bool:
        """Return True if it was a process of this very machine and has ended; False if that cannot be known."""
        if self.machine is None or self.machine != _machine():
            return False
        try:
            process = psutil.Process(self.pid)
            is_another = abs(_seconds_after_boot(process) - self.seconds_after_boot) > 2
            return is_another or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True
        except (psutil.Error, ValueError, OverflowError):
            return False


def _seconds_after_boot(process: psutil.Process) -> float:
    """Return when a process began, which stays the same where the system's clock is set: both times move with it."""
    return process.create_time() - psutil.boot_time()


class _Seen(NamedTuple):
    token: str
    content: bytes
    since: float


class Claims:
    """Claims of one harness on the points of one store; as a context it renews them, and releases them at its end."""

    def __init__(self, folder: Path, seconds: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self.clock = folder, clock
        self.seconds = LEASE_SECONDS if seconds is None else seconds
        self.held: dict[str, Claim] = {}
        self._seen: dict[str, _Seen] = {}
        self._owner, self._count = asdict(Owner.here()), itertools.count()
        self._lock, self._ended = threading.Lock(), threading.Event()

    def __enter__(self) -> "Claims":
        self._ended.clear()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._keeper.join()
        for name in list(self.held):
            self.release(name)

    def claim(self, name: str) -> Claim | None:
        """Return a claim on this point; None if another harness has it, until it is free or its owner dead.

        Raises:
            OSError: the folder cannot be written.
        """
        if name in self.held and self.held[name].is_held():
            return self.held[name]
        folder, token = self.folder / name, secrets.token_hex(TOKEN_BYTES)
        owner = self._look(name)
        taken = self._take_over(folder, owner, token) if owner is not None else self._take_free(folder, token)
        if not taken:
            return None
        claim = Claim(folder / token)
        with self._lock:
            self.held[name] = claim
        self._seen.pop(name, None)
        return claim

    def owner(self, name: str) -> str | None:
        """Return the owner of this point in words that name the claim; None if there is none."""
        folder, token = self.folder / name, self._look(name)
        if token is None:
            return None if os.access(folder, os.R_OK) or not folder.exists() else f"another user ({folder})"
        owner = Owner.read(self._seen[name].content)
        who = f"process {owner.pid} on {owner.host}" if owner is not None else "an unknown process"
        return f"{who} ({folder})"

    def renew(self) -> None:
        """Show other harnesses that the owner of these claims is alive."""
        with self._lock:
            held = list(self.held.values())
        for claim in held:
            with contextlib.suppress(OSError):  # only another owner takes a claim, not a full disk
                self._write_owner(claim.folder)

    def release(self, name: str) -> None:
        """Make this point free for all."""
        with self._lock:
            claim = self.held.pop(name, None)
        if claim is None:
            return
        away = self.folder / f".{name}.{claim.folder.name}"
        with contextlib.suppress(OSError):  # it was lost, or the disk is gone
            rename(claim.folder, away)
            shutil.rmtree(away, ignore_errors=True)
            os.rmdir(self.folder / name)  # an empty one is free; not empty: claimed again at once

    def _keep(self) -> None:
        while not self._ended.wait(self.seconds / RENEWALS):
            self.renew()

    def _look(self, name: str) -> str | None:
        """Return the token of the owner, None if there is none; remember since when it has been unchanged."""
        try:
            token = min(os.listdir(self.folder / name), default=None)
        except OSError:
            token = None
        if token is None:
            self._seen.pop(name, None)
            return None
        try:
            content = (self.folder / name / token / OWNER).read_bytes()
        except OSError:
            content = b""
        if name not in self._seen or self._seen[name][:2] != (token, content):
            self._seen[name] = _Seen(token, content, self.clock())
        return token

    def _take_free(self, folder: Path, token: str) -> bool:
        self.folder.mkdir(parents=True, exist_ok=True)
        prepared = self.folder / f".new-{token}"
        try:
            (prepared / token).mkdir(parents=True)
            self._write_owner(prepared / token)
            rename(prepared, folder)
            return True
        except OSError as error:
            if error.errno not in TAKEN:
                raise
            return False
        finally:
            shutil.rmtree(prepared, ignore_errors=True)

    def _take_over(self, folder: Path, owner: str, token: str) -> bool:
        seen = self._seen[folder.name]
        if self.clock() - seen.since < self.seconds:
            process = Owner.read(seen.content)
            if process is None or not process.is_gone():
                return False
        try:
            rename(folder / owner, folder / token)
            self._write_owner(folder / token)
            return True
        except OSError as error:
            if error.errno not in LOST:
                raise
            return False  # released, or another process was quicker

    def _write_owner(self, folder: Path) -> None:
        """Write the owner by way of a new file each time, since a former owner may still be writing."""
        content = json.dumps({**self._owner, "count": next(self._count)})
        write_atomically(folder / OWNER, content, by_way_of=folder, is_lasting=False)


def _machine() -> str | None:
    """Return this boot of this machine, and its visible processes; None if the system does not show them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return None
