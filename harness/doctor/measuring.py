"""Attempts of ranks that measure instead of training: started by the launcher, followed to their end, and removed."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.launch.slurm import Site, Where, orders_at
from harness.rank import jobs
from harness.rank.failure import Failure, first_failure
from harness.rank.job import JobState
from harness.rank.orders import Orders
from impl.run import Run

COLLECTIVE_SECONDS = 30.0
"""Timeout of a collective, which takes milliseconds between hosts that are connected."""
POLL_SECONDS: dict[Where, float] = {"local": 0.25, "slurm": 2.0}
"""Time between two queries of the job's state; a scheduler answers many users."""


def orders(run: Run, site: Site, wait: float, module: str) -> Orders:
    """Return orders for ranks that execute this module instead of a training worker."""
    return Orders(
        **orders_at(site, run),
        module=module,
        time_limit_seconds=wait,
        collective_timeout_seconds=COLLECTIVE_SECONDS,
        hang_seconds=0,  # these ranks send no heartbeats
        requeues=0,
    )


@contextmanager
def started(orders: Orders, site: Site, folder: Path | None = None) -> Iterator[Path]:
    """Start ranks, and yield their attempt: a new folder in the given one. End and remove them afterwards.

    Raises:
        InputError: the scheduler refuses the job.
    """
    top = Path(tempfile.mkdtemp(prefix=".ranks-", dir=folder)).resolve()
    attempt = top / "attempt"
    try:
        orders.write(attempt)
        site.submit([attempt], orders.ranks, orders.time_limit_seconds, 1)
        yield attempt
    finally:
        jobs.cancel([attempt])
        shutil.rmtree(top, ignore_errors=True)


def follow(attempt: Path, orders: Orders, look: Callable[[], object] = lambda: None) -> str:
    """Wait until the ranks' job has ended, or its time is over, with a look before each query.

    Return its state, as in `pending (Resources)`.
    """
    end, state = time.monotonic() + orders.time_limit_seconds, JobState("unknown")
    while time.monotonic() < end:
        look()
        state = jobs.states([attempt]).get(attempt, state)
        if state.name == "ended":
            break
        time.sleep(POLL_SECONDS[orders.on])
    return f"{state.name} ({state.reason})" if state.reason else state.name


def failure_of(attempt: Path, ranks: int) -> Failure | None:
    """Return the failure of a rank that caused the others; None if no rank has failed."""
    return first_failure([found for rank in range(ranks) if (found := Failure.of_rank(attempt, rank)) is not None])
