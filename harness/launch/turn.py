"""Turns of commands on this machine: while one times its runs no other trains here, as both would be slower."""

import fcntl
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from harness.launch.attempt import Options

FOLDER = "LMSCALE_TURNS"
"""Environment variable with the folder of the locked files; without it they are among the temporary files."""


class Turn:
    """Turn of this process, until it is closed; it ends with the process, however that ends.

    A lock on one file for each user and kind of device. Commands that run several points at a time, whose timings are
    not meant to be good, share it.
    """

    def __init__(self, options: Options, what: str, say: Callable[[str], None]) -> None:
        self.name, self.what, self.say = f"lmscale-{os.getuid()}-{options.site.device}.lock", what, say
        self.kind = fcntl.LOCK_SH if options.at_once > 1 else fcntl.LOCK_EX
        self.file: IO[str] | None = None
        self.seen = ""
        """The process that was last shown."""

    def take(self) -> bool:
        """Return True if it is this process's turn, also where no file can be locked; else say whose it is, once."""
        if self.file is not None:
            return True
        path = Path(os.environ.get(FOLDER) or tempfile.gettempdir()) / self.name
        try:
            file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+")
        except OSError:
            return True
        try:
            fcntl.lockf(file, self.kind | fcntl.LOCK_NB)
        except OSError:
            with file:
                other = file.read()
            if other not in ("", self.seen):  # it is empty for a moment
                self.say(f"{other} trains on this machine; waiting, as both would be slower")
                self.seen = other
            return False
        file.truncate(0)
        file.write(f"process {os.getpid()} ({self.what})")
        file.flush()
        self.file = file
        return True

    def close(self) -> None:
        """Let other processes have their turn."""
        if self.file is not None:
            self.file.close()
            self.file = None
