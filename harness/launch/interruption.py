"""What a Ctrl-C means to a sweep."""

import contextlib
import signal
from collections.abc import Iterator


class LeftRunning(KeyboardInterrupt):
    """The sweep was interrupted; jobs that it does not own go on."""


def go_on(points: int) -> str:
    """Says what an interrupted command leaves."""
    return f"{points} points go on without this command" if points != 1 else "1 point goes on without this command"


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """A second Ctrl-C while the ranks are being stopped changes nothing."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
