"""A page that shows a sweep as it runs: losses, throughput, states and the ends of ranks' logs; it reloads itself."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from harness.experiment.experiment import Point
from harness.rank.failure import last_lines
from harness.rank.orders import Orders, UnreadableError
from harness.rank.results import MEMORY, steps_so_far
from harness.records.attempts import Attempts
from harness.records.printable import printable
from harness.records.store import Store, write_atomically
from harness.report.html import TEMPLATES, templates
from harness.terminal import shown

MARK = 'name="generator" content="lmscale watch"'
"""Text of a page by which it is known."""
EVERY_SECONDS = 5.0
"""Time between two pages, each of which asks a scheduler for the jobs."""
MOST_STEPS, LATEST, LINES, RANKS = 300, 10, 12, 8
"""Steps of a curve, steps that a rate is of, lines of a rank's log, and ranks whose logs are shown."""
WIDTH, HEIGHT, COLOURS = 720, 240, 6


class Course(NamedTuple):
    """Point with what is known of its steps."""

    label: str
    state: str
    reason: str
    losses: Sequence[float | None]
    rate: float
    """Tokens per second over the last steps; NaN before the first."""
    memory: str
    logs: list[tuple[int, str]]
    """Ends of the logs of ranks that run."""
    steps: int


@contextmanager
def kept(
    path: Path, store: Store, points: Sequence[Point], states: Callable[[], list[tuple[str, str]]]
) -> Iterator[None]:
    """Write a page every few seconds, and once more at the end; `states` returns those of all points.

    Raises:
        OSError: the file cannot be written.
    """
    write = lambda *, is_live: write_atomically(path, page(store, points, states(), is_live=is_live), is_lasting=False)
    ended = threading.Event()

    def go_on() -> None:
        while not ended.wait(EVERY_SECONDS):
            with suppress(OSError):  # a full disk ends no sweep
                write(is_live=True)

    write(is_live=True)
    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        write(is_live=False)


def page(store: Store, points: Sequence[Point], states: Sequence[tuple[str, str]], *, is_live: bool) -> str:
    """Return the page of this moment."""
    attempts = Attempts(store).open()
    found = [
        _course(store, point, attempts.get(point.id, []), *state) for point, state in zip(points, states, strict=True)
    ]
    return templates().get_template("live.html").render(
        heading=f"{store.experiment}, {store.tier} tier", courses=found, is_live=is_live,
        style=(TEMPLATES / "style.css").read_text(), every=round(EVERY_SECONDS), curves=curves(found),
        size=(WIDTH, HEIGHT), time=time.strftime("%H:%M:%S"), colours=COLOURS,
    )  # fmt: skip


def _course(store: Store, point: Point, attempts: Sequence[Path], state: str, reason: str) -> Course:
    steps, logs = list[dict[str, float]](), list[tuple[int, str]]()
    for attempt in attempts[-1:]:
        with suppress(UnreadableError):  # its log is being written again
            steps = steps_so_far(attempt)
        orders = Orders.found(attempt)
        ranks = range(min(orders.ranks, RANKS) if orders else 0)
        logs = [(rank, printable("\n".join(last_lines(attempt, rank)[-LINES:]))) for rank in ranks]
    record = None if steps else store.read(point.id)
    losses = [*record.losses] if record is not None else [step["loss"] for step in steps]
    seconds = [record.step_seconds] if record is not None else [step["seconds"] for step in steps[-LATEST:]]
    rate = point.run.tokens_per_step * len(seconds) / max(sum(seconds), 1e-9) if seconds else float("nan")
    memory = record.peak_memory_bytes if record is not None else (steps[-1].get(MEMORY) if steps else None)
    size = shown(memory) if memory and memory == memory else ""
    return Course(point.label, state, reason, losses, rate, size, logs, point.run.train.steps)


def curves(courses: Sequence[Course]) -> list[tuple[int, str]]:
    """Return the points of each course's line in the figure, by its number; losses run from its top to its bottom."""
    finite = [loss for one in courses for loss in one.losses if loss is not None and loss == loss]
    if not finite:
        return []
    low, high, longest = min(finite), max(finite), max(len(one.losses) for one in courses)
    found = []
    for i, one in enumerate(courses):
        every = -(-len(one.losses) // MOST_STEPS) or 1
        at = [(step, loss) for step, loss in enumerate(one.losses) if step % every == 0 and loss is not None]
        x = lambda step: 50 + (WIDTH - 60) * step / max(longest - 1, 1)
        y = lambda loss: 10 + (HEIGHT - 40) * (high - loss) / max(high - low, 1e-9)
        line = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in at if loss == loss)
        found += [(i, line)] if line else []
    return found
