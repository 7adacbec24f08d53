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
import json
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from harness.records.store import read_json
from impl.files import rename

LEASE_SECONDS = 30.0
RENEWALS = 3
"""Number of renewals of a claim within a lease."""
OWNER = "owner.json"
TOKEN_BYTES = 8
TAKEN = (errno.ENOTEMPTY, errno.EEXIST)
LOST = (errno.ENOENT, errno.ESTALE)


class ClaimLost(Exception):  # noqa: N818  (nothing went wrong here)
    """Another harness has taken the point over."""


@dataclass
class Claim:
    """Claim on one point."""

    folder: Path
    """Folder `claims/POINT/TOKEN`."""
    is_lost: bool = False

    def publish(self, path: Path, text: str) -> None:
        """Write a file atomically if the claim is still held.

        Raises:
            ClaimLost: it is not; the file is as it was.
            OSError: the folder cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _put(text, self.folder, path, is_lasting=True)
        except OSError:
            if self.is_held():
                raise
            raise ClaimLost from None

    def is_held(self) -> bool:
        """Return True if no other harness has taken the point over."""
        self.is_lost = self.is_lost or not self.folder.is_dir()
        return not self.is_lost


@dataclass
class _Seen:
    token: str
    content: bytes
    since: float


@dataclass
class Claims:
    """Claims of one harness on the points of one store; as a context it renews them, and releases them at its end.

    Args:
        folder: folder `claims` of the store, visible to all that share the store.
        clock: returns seconds that never go back.
    """

    folder: Path
    seconds: float = field(default_factory=lambda: LEASE_SECONDS)
    clock: Callable[[], float] = time.monotonic
    held: dict[str, Claim] = field(default_factory=dict)
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _owner: dict[str, Any] = field(default_factory=lambda: whoami())
    _count: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ended: threading.Event = field(default_factory=threading.Event)
    _keeper: threading.Thread | None = None

    def __enter__(self) -> "Claims":
        self._ended.clear()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._keeper is not None:
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
        folder, token = self.folder / name, self._token(name)
        if token is None:
            return None if os.access(folder, os.R_OK) or not folder.exists() else f"another user ({folder})"
        owner: Any = read_json(folder / token / OWNER)
        who = f"process {owner['pid']} on {owner['host']}" if _is_owner(owner) else "an unknown process"
        return f"{who} ({folder})"

    def renew(self) -> None:
        """Show other harnesses that the owner of these claims is alive; claims that were taken over become lost."""
        with self._lock:
            held = list(self.held.values())
            self._count += 1
        for claim in held:
            try:
                self._write_owner(claim.folder)
            except OSError as error:  # a full disk does not lose a claim, only another owner does
                claim.is_lost = claim.is_lost or error.errno in LOST

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
        claim.is_lost = True

    def _keep(self) -> None:
        while not self._ended.wait(self.seconds / RENEWALS):
            self.renew()

    def _token(self, name: str) -> str | None:
        try:
            return min(os.listdir(self.folder / name), default=None)
        except OSError:
            return None

    def _look(self, name: str) -> str | None:
        """Return the token of the owner, None if there is none; remember since when it has been unchanged."""
        token = self._token(name)
        if token is None:
            self._seen.pop(name, None)
            return None
        try:
            content = (self.folder / name / token / OWNER).read_bytes()
        except OSError:
            content = b""
        seen = self._seen.get(name)
        if seen is None or (seen.token, seen.content) != (token, content):
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
        if self.clock() - seen.since < self.seconds and not is_gone(seen.content):
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
        _put(json.dumps({**self._owner, "count": self._count}), folder, folder / OWNER)


def _put(text: str, folder: Path, path: Path, *, is_lasting: bool = False) -> None:
    """Write a file by way of a new one in this folder, which is never made: without it nothing is written.

    It is a new one each time, since a former owner may still be writing.
    """
    handle, name = tempfile.mkstemp(dir=folder, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            if is_lasting:
                file.flush()
                os.fsync(file.fileno())
        os.chmod(name, 0o644)
        rename(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def whoami() -> dict[str, Any]:
    """Return what distinguishes this process from all others, of this machine and of others."""
    process = psutil.Process()
    return {"host": socket.gethostname(), "pid": process.pid, "started": process.create_time(), "machine": _machine()}


def is_gone(owner: bytes) -> bool:
    """Return True if this owner was a process of this very machine and has ended; False if that cannot be known."""
    try:
        found = json.loads(owner)
    except (ValueError, RecursionError):
        return False
    if not _is_owner(found) or found.get("machine") is None or found["machine"] != _machine():
        return False
    try:
        process = psutil.Process(found["pid"])
        is_another = abs(process.create_time() - found["started"]) > 2
        return is_another or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except (psutil.Error, KeyError, TypeError, ValueError, OverflowError):
        return False


def _is_owner(document: Any) -> bool:
    return isinstance(document, dict) and isinstance(document.get("pid"), int) and isinstance(document.get("host"), str)


def _machine() -> str | None:
    """Return this boot of this machine, and its visible processes; None if the system does not show them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return None
