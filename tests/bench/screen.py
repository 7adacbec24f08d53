"""A line on the terminal that says where a long benchmark is, written by ranks whose own output pytest keeps."""

import os
import time
from collections.abc import Callable
from multiprocessing.reduction import DupFd
from typing import Any

PLAIN_SECONDS = 15.0
"""How often it says something where it is not a terminal."""


class Screen:
    """An open file; processes that are given this one when they start write to the same."""

    def __init__(self, file: int) -> None:
        self.file = file
        self.is_terminal = os.isatty(file)
        self.said: float | None = None

    def say(self, text: str) -> None:
        """Show this in place of what was said before; where lines stay, not too many of them."""
        now = time.monotonic()
        if self.is_terminal:
            text = text[: os.get_terminal_size(self.file).columns - 1]
            self._write(f"\r\033[K{text}" if self.said is not None else f"\n{text}")
        elif self.said is None or now - self.said >= PLAIN_SECONDS:
            self._write(f"\n{text}")
        else:
            return
        self.said = now

    def clear(self) -> None:
        """Leave the line empty for what comes next."""
        self._write("\r\033[K" if self.is_terminal else "\n")
        self.said = None

    def _write(self, text: str) -> None:
        os.write(self.file, text.encode())

    def __reduce__(self) -> tuple[Callable[[Any], "Screen"], tuple[Any]]:
        return _opened, (DupFd(self.file),)


def _opened(file: Any) -> Screen:
    return Screen(file.detach())
