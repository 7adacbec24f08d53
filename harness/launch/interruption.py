"""Interruption of a sweep by Ctrl-C."""

import contextlib
import signal
from collections.abc import Iterator


class LeftRunning(KeyboardInterrupt):
    """The sweep was interrupted, and a scheduler's jobs go on."""


def go_on(points: int) -> str:
    """Return the message on what an interrupted command leaves."""
    return f"{points} points go on without this command" if points != 1 else "1 point goes on without this command"


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore another Ctrl-C while ranks are being stopped."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
