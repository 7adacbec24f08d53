"""Runs whose start takes longer than their training, what shows them, and the processes that carry them out."""

import contextlib
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from harness.experiment.experiment import Point
from harness.launch.follow import Display
from harness.launch.preflight import Datasets
from harness.launch.slurm import Site
from harness.launch.sweep import Options, Sweep
from harness.launch.trackers import Trackers
from harness.rank import jobs
from harness.records.record import Record
from harness.records.store import Document, Store
from impl.data.config import DataConfig
from impl.data.synthetic import SyntheticConfig, write_synthetic
from impl.evaluation_config import EvaluationConfig
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run

ENDLESS = 10**9
"""Steps of a run that only a fault can end."""


def write_tokens(folder: Path) -> Path:
    write_synthetic(folder, SyntheticConfig(train_tokens=3000, valid_tokens=1000))
    return folder


def small(data: Path, *, dp: int = 1, steps: int = 3, seed: int = 0, **recipe: Any) -> Run:
    return Run(
        model=ModelConfig(num_layers=1, hidden_size=16, num_heads=1, seq_len=16),
        plan=Plan(dp=dp),
        train=replace(Recipe(steps=steps, global_batch=2, microbatch=1, warmup_steps=0), **recipe),
        data=DataConfig(dataset=str(data)),
        evaluation=EvaluationConfig(sequences=4),
        seed=seed,
    )


def point(run: Run) -> Point:
    return Point(run, f"seed={run.seed}")


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let this process write no longer file, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Told(Display):
    """A display that remembers; it calls `on_start` with a point's id, and `on_look` while a point runs."""

    def __init__(
        self, on_look: Callable[[Point], None] | None = None, on_start: Callable[[str], None] | None = None
    ) -> None:
        self.messages: list[str] = []
        self.starts: list[str] = []
        self.skips: list[str] = []
        self.queues: list[tuple[int, int]] = []
        self.reasons: list[str] = []
        self.ends: list[tuple[str, str]] = []
        self.end_times: dict[str, float] = {}
        self.on_look, self.on_start = on_look, on_start
        self.trackers = Trackers()

    def message(self, text: str) -> None:
        self.messages.append(text)

    def started(self, point: Point) -> None:
        self.starts.append(point.run.id)
        if self.on_start is not None:
            self.on_start(point.run.id)

    def advanced(self, point: Point, steps: Sequence[Document]) -> None:
        if self.on_look is not None:
            self.on_look(point)

    def finished(self, point: Point, record: Record) -> None:
        self.ends.append((point.run.id, record.status))
        self.end_times[point.run.id] = time.monotonic()

    def counted(self, point: Point) -> None:
        self.skips.append(point.run.id)

    def waiting(self, pending: int, running: int, why: str = "") -> None:
        self.queues.append((pending, running))
        self.reasons.append(why)


def sweep(store: Store, runs: list[Run], *, site: Any = None, told: Told | None = None, **options: Any) -> Told:
    """Runs what is missing and returns what the display was told; a site may know its jobs itself."""
    told, site = told or Told(), site or Site()
    keeper = site if hasattr(site, "states") else jobs
    Sweep(store, Datasets(store.folder / "cache"), Options(site=site, **options), told, keeper).run(
        [point(run) for run in runs]
    )
    return told


def kept(store: Store, run: Run) -> Record:
    """Return the record of a run that has one."""
    record = store.read(run.id)
    assert record is not None
    return record


def processes(folder: Path, program: str = "") -> list[psutil.Process]:
    """Live processes that were told of a path below this folder, of a program if one is named."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        mine = any(word.removeprefix("file://").startswith(f"{folder}/") for word in words)
        if mine and program in " ".join(words) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def kill_all(folder: Path, program: str = "") -> None:
    """End what still works below this folder, unless it ends by itself meanwhile."""
    for process in processes(folder, program):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def worker(folder: Path, rank: int) -> psutil.Process:
    """The process that trains this rank."""
    [found] = [p for p in processes(folder, "harness.rank.worker") if p.cmdline()[-4] == str(rank)]
    return found


def wait_until(condition: Callable[[], Any], seconds: float = 90.0) -> None:
    """Waits for something that must come; long, since machines that run tests are shared."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)


def trains(folder: Path, ranks: int) -> bool:
    """Whether this many ranks of a run below the folder have written steps."""
    return sum(log.stat().st_size > 0 for log in folder.rglob("rank-*.steps.jsonl")) == ranks
