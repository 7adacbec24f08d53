"""What many records cost: `python -m tests.scale --keep results/scale.md`.

A store of made-up records of an experiment with quickstart's claims, then each verb that reads all of it, in a process
of its own: processor time, wall time and peak memory.
"""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import tyro

from harness.records.environment import host_environment
from harness.records.store import SCHEMA, Store, write_atomically
from harness.records.writable import require_writable
from impl.evaluation_config import EvaluationConfig
from impl.model.norm_placement import PLACEMENTS
from impl.model.sizes import named
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from tests.harness.made_up_records import document, record_of

NAME = "scale/many"
SEEDS, BATCHES = 10, (8, 16, 24, 32, 40)
IN_STORE = (NAME, "--tier", "smoke", "--out", "{out}")
VERBS = {
    "status": ("status", *IN_STORE),
    "run --dry-run": ("run", *IN_STORE, "--dry-run"),
    "claims": ("claims", *IN_STORE),
    "table": ("table", *IN_STORE),
    "report": ("report", "--results", "{out}", "--out", "{site}"),
    "run, nothing missing": ("run", *IN_STORE),
}
EXPERIMENT = """'''What do this many records cost?'''
from dataclasses import replace
from experiments.quickstart import EXPERIMENT
from tests.scale import runs
EXPERIMENT = replace(EXPERIMENT, runs=dict.fromkeys(("smoke", "small", "paper"), runs({count}, {steps})))
"""


CALL = """import sys, experiments
experiments.__path__.append(sys.argv[1])
from harness.cli.main import main
sys.exit(main(sys.argv[2:]))"""


class Cost(NamedTuple):
    """Of one call."""

    processor_seconds: float
    wall_seconds: float
    peak_bytes: int
    exit_status: int


def runs(count: int, steps: int) -> list[Run]:
    """Two sizes, two placements, one and two ranks, five batches, ten seeds, and as many learning rates as it takes."""
    models = [
        replace(named(size), norm_placement=norm) for norm in list(PLACEMENTS)[:2] for size in ("gpt-0.5m", "gpt-2m")
    ]
    rates = range(1, 2 + count // (len(models) * 2 * len(BATCHES) * SEEDS))
    return [
        Run(
            model=model,
            plan=Plan(dp=dp),
            train=Recipe(steps=steps, global_batch=batch, microbatch=4, lr=rate * 1e-5, warmup_steps=1),
            evaluation=EvaluationConfig(every=max(1, steps // 4)),
            seed=seed,
        )
        for rate, batch, model, dp, seed in product(rates, BATCHES, models, (1, 2), range(SEEDS))
    ][:count]


def fill(out: Path, made: list[Run]) -> int:
    """Write a record for each; their bytes."""
    store, size = Store(out, NAME, "smoke"), 0
    require_writable(store.recorded)
    for i, run in enumerate(made):
        record = document(record_of(run, tier="smoke", seconds=0.1 / run.plan.dp, nats=2.1 + 0.001 * (i % 97)))
        record |= {"schema": SCHEMA, "experiment": NAME, "cause": "", "attempt": "", "tries": []}
        size += store.write(record, Path.write_text).stat().st_size
        if i % 10_000 == 9_999:
            print(f"{i + 1:,} records written", flush=True)
    return size


def measured(packages: Path, out: Path, words: tuple[str, ...]) -> Cost:
    """One call of a verb in a process of its own."""
    began = time.perf_counter()
    with (out / "log").open("a") as log:
        places = {"out": out, "site": packages.with_name("site")}
        call = [sys.executable, "-c", CALL, str(packages), *(word.format(**places) for word in words)]
        child = subprocess.Popen(call, stdout=log, stderr=log)
        _, status, used = os.wait4(child.pid, 0)
    wall, child.returncode = time.perf_counter() - began, os.waitstatus_to_exitcode(status)
    return Cost(used.ru_utime + used.ru_stime, wall, used.ru_maxrss * 1024, child.returncode)


def table(records: int, steps: int, only: str) -> list[str]:
    """Measure one store; its section, in Markdown."""
    lines = []
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        packages, out = Path(folder) / "packages", Path(folder) / "out"
        (packages / "scale").mkdir(parents=True)
        (packages / "scale" / "__init__.py").touch()
        (packages / "scale" / "many.py").write_text(EXPERIMENT.format(count=records, steps=steps))
        size = fill(out, runs(records, steps))
        what = "1 record" if records == 1 else f"{records:,} records"
        lines += [f"## {what} of {steps:,} steps, {size / 2**20:,.0f} MiB", ""]
        lines += ["| verb | processor (s) | wall (s) | peak memory (MiB) | exit status |", "|---|---|---|---|---|"]
        for name, words in VERBS.items():
            if only in name:
                cost = measured(packages, out, words)
                lines.append(
                    f"| {name} | {cost.processor_seconds:.1f} | {cost.wall_seconds:.1f} "
                    f"| {cost.peak_bytes / 2**20:,.0f} | {cost.exit_status} |"
                )
                print(lines[-1], flush=True)
    return [*lines, ""]


def main(
    stores: tuple[tuple[int, int], ...] = ((10_000, 40), (100_000, 40), (1, 1_000_000)),
    only: str = "",
    keep: Path | None = None,
) -> None:
    """Measure, and print a table for each store.

    Args:
        stores: Records and steps of each store, as `10000 40 1 1000000`.
        only: The verbs whose name this is a part of.
        keep: Write the tables to this file, too.
    """
    machine = host_environment([])
    lines = ["# What many records cost", "", "`python -m tests.scale --keep results/scale.md`", ""]
    lines += [
        f"Made-up records, each verb in a process of its own; {machine['processor']}, {machine['cores']} cores.",
        "",
    ]
    for records, steps in stores:
        lines += table(records, steps, only)
    if keep is not None:
        write_atomically(keep, "\n".join(lines))


if __name__ == "__main__":
    tyro.cli(main)
