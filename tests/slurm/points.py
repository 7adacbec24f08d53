"""Points on a real Slurm: how they are asked for, found while they train, and stopped meanwhile."""

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from harness.launch.site_file import Cluster
from harness.launch.slurm import Site
from harness.rank.job import job_of
from harness.records.record import Record
from harness.records.store import Store
from impl.run import Run
from tests.harness.small_runs import processes, trains, wait_until

STEPS = 700
"""Some seconds of training: long enough for something to happen meanwhile."""


def on_slurm(**settings: Any) -> Site:
    return Site("slurm", cluster=Cluster(**{"memory_per_rank": "1G", **settings}))


def attempt_of(store: Store, run: Run) -> Path:
    [attempt] = (store.folder.resolve() / "attempts").glob(f"{run.id}-*")
    return attempt


def in_training(store: Store, run: Run) -> Path:
    """Wait until all ranks of a run train, and return its attempt."""
    found = lambda: list((store.folder / "attempts").glob(f"{run.id}-*"))
    wait_until(lambda: len(found()) == 1 and trains(found()[0], run.plan.world_size), 180)
    return attempt_of(store, run)


def ranks_of(attempt: Path) -> list[psutil.Process]:
    """Return the processes that train."""
    found = processes(attempt.parent, "harness.rank.worker")
    return [process for process in found if str(attempt) in process.info["cmdline"]]


def send(signal_number: int, ranks: Sequence[psutil.Process]) -> None:
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            rank.send_signal(signal_number)


@contextmanager
def held(ranks: Sequence[psutil.Process]) -> Iterator[None]:
    """Stop processes meanwhile."""
    send(signal.SIGSTOP, ranks)
    try:
        yield
    finally:
        send(signal.SIGCONT, ranks)


def number(attempt: Path) -> str:
    job = job_of(attempt)
    assert job is not None
    return job.job


def losses(record: Record) -> list[float]:
    assert record.status == "ok", record.reason
    return list(record.losses)


@contextmanager
def meanwhile(action: Callable[[], None]) -> Iterator[None]:
    """Do something during a sweep, and check that it was done."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(action)
        yield
        done.result()
