"""What the harness itself costs: `python -m tests.overhead --keep results/sweep_overhead.md` runs a sweep and measures.

Per point: the time from its start to its record, apart from what its ranks trained and evaluated. Of the driver: the
share of a core that it takes while it waits, for a point of this machine and for 200 jobs of a scheduler.
"""

import contextlib
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tyro

from harness.experiment.experiment import Point
from harness.records.environment import host_environment
from harness.records.record import Record
from harness.records.store import Store, write_atomically
from impl.run import Run
from tests.harness.fake_site import FakeSite
from tests.harness.small_runs import ENDLESS, Told, small, sweep, write_tokens


class Clocked(Told):
    """A display that notes when each point began and ended."""

    def __init__(self) -> None:
        super().__init__()
        self.began: dict[str, float] = {}
        self.took: dict[str, float] = {}
        self.records: list[Record] = []

    def started(self, point: Point) -> None:
        self.began[point.id] = time.perf_counter()

    def finished(self, point: Point, record: Record) -> None:
        self.took[point.id] = time.perf_counter() - self.began[point.id]
        self.records.append(record)
        if len(self.records) % 10 == 0:
            print(f"{len(self.records)} points, the last took {self.took[point.id]:.2f} s", flush=True)


def main(points: int = 200, steps: int = 400, seconds: float = 60.0, keep: Path | None = None) -> None:
    """Measure, and print a table.

    Args:
        points: Of the sweep, one after the other.
        steps: Of each point.
        seconds: How long the driver is watched while it waits.
        keep: Write the table to this file, too.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was measured until then is told
    with tempfile.TemporaryDirectory() as folder:
        tokens = write_tokens(Path(folder) / "tokens")
        store = Store(Path(folder) / "out", "overhead", "smoke")
        told, begin = Clocked(), time.perf_counter()
        try:
            sweep(store, [small(tokens, steps=steps, seed=seed) for seed in range(points)], told=told)
        except KeyboardInterrupt:
            print(f"interrupted after {len(told.records)} points")
        wall = time.perf_counter() - begin
        here = waiting(Store(Path(folder) / "here", "overhead", "smoke"), [small(tokens, steps=ENDLESS)], seconds)
        many = [small(tokens, seed=seed) for seed in range(200)]
        cluster = FakeSite(looks=ENDLESS, on="slurm")
        there = waiting(Store(Path(folder) / "there", "overhead", "smoke"), many, seconds, cluster)
    text = report(told, wall, here, there)
    print(text)
    if keep is not None:
        write_atomically(keep, text)


def waiting(store: Store, runs: list[Run], seconds: float, site: Any = None) -> float:
    """The share of a core that a driver takes while nothing ends."""
    begun: list[float] = []

    def look(*_: object) -> None:
        """Once everything runs: from now on for so long."""
        if not begun:
            begun.extend([time.process_time(), time.perf_counter()])
        if time.perf_counter() - begun[1] > seconds:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        sweep(store, runs, told=Told(on_look=look), site=site)
    return (time.process_time() - begun[0]) / (time.perf_counter() - begun[1])


def report(told: Clocked, wall: float, here: float, there: float) -> str:
    """The table, in Markdown."""
    of_ranks = lambda r: r.times.training_seconds + r.times.evaluation_seconds
    parts: dict[str, Callable[[Record], float]] = {
        "start to record": lambda r: told.took[r.id],
        "training and evaluation": of_ranks,
        "ranks' start-up (process, imports, meeting, model)": lambda r: r.times.startup_seconds or 0.0,
        "harness's own: submitting, noticing the end, record": lambda r: (
            told.took[r.id] - of_ranks(r) - (r.times.startup_seconds or 0.0)
        ),
    }
    good = [record for record in told.records if record.status == "ok"]
    lines = ["| seconds a point | median | 5% | 95% |", "|---|---|---|---|"]
    for name, part in parts.items():
        values = sorted(map(part, good))
        low, high = values[len(values) // 20], values[-1 - len(values) // 20]
        lines.append(f"| {name} | {statistics.median(values):.2f} | {low:.2f} | {high:.2f} |")
    machine = host_environment([])
    return "\n".join(
        [
            "# What a sweep costs besides training",
            "",
            "`python -m tests.overhead --keep results/sweep_overhead.md`",
            "",
            f"{len(good)} of {len(told.records)} points ok, one rank each, one after the other, in {wall:.0f} s; "
            f"{machine['processor']}, {machine['cores']} cores, no GPU.",
            "",
            *lines,
            "",
            "| the driver while it waits | share of a core |",
            "|---|---|",
            f"| for a point of this machine | {here:.2%} |",
            f"| for 200 jobs of a scheduler, all running (its commands not counted) | {there:.2%} |",
            "",
        ]
    )


if __name__ == "__main__":
    tyro.cli(main)
