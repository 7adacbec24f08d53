"""A fault that happens once, in whichever process it strikes."""

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ERRORS = {
    "disk full": lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "made up"),
    "read-only": lambda: OSError(errno.EROFS, os.strerror(errno.EROFS), "made up"),
    "raises": lambda: RuntimeError("made up"),
    "out of memory": lambda: MemoryError("made up"),
}


class Fault:
    """Fault that happens at most once: the file `fired` shows that it has."""

    def __init__(self, what: str, fired: Path) -> None:
        self.what, self.fired = what, fired

    def is_due(self) -> bool:
        """Return True if it has not happened yet, and mark it as happened."""
        try:
            os.close(os.open(self.fired, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def strike(self) -> None:
        if not self.is_due():
            return
        if self.what in ERRORS:
            raise ERRORS[self.what]()
        if self.what.startswith("pause "):
            time.sleep(float(self.what.removeprefix("pause ")))
            return
        name, _, whom = self.what.partition(" to ")
        os.kill(os.getppid() if whom == "supervisor" else os.getpid(), signal.Signals[name])
        if whom:
            signal.pause()


def at_renaming(fault: Fault, name: str, *, behind: bool = False) -> None:
    """Make the fault happen just before, or `behind`, the renaming of a complete new file to this name."""
    replace: Callable[..., None] = os.replace

    def instead(source: Any, target: Any, **kwargs: Any) -> None:
        if Path(target).name == name and not behind:
            fault.strike()
        replace(source, target, **kwargs)
        if Path(target).name == name and behind:
            fault.strike()

    os.replace = instead
