"""Runs the smoke tier of every experiment, one after the other: `python -m tests.smoke`, or `make smoke`.

What has a finished record is not run again: the same command goes on where it was interrupted.
"""

import datetime
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import tyro

from harness.experiment.loading import experiment_ids
from harness.records.environment import host_environment
from harness.records.store import FINISHED, Store, write_atomically


class Done(NamedTuple):
    """What became of an experiment."""

    name: str
    statuses: dict[str, int]
    """Points by status; empty: the command itself failed."""
    seconds: float | None
    """From the start of its command to the end; None: some of it was there already."""

    @property
    def is_well(self) -> bool:
        return bool(self.statuses) and not set(self.statuses) - {*FINISHED, "invalid"}

    @property
    def ended(self) -> str:
        return ", ".join(f"{count} {status}" for status, count in self.statuses.items()) or "no records"


def main(only: str = "", out: Path = Path("build/smoke"), keep: Path | None = None) -> int:
    """Run them, and print a line for each.

    Args:
        only: Those whose id contains this.
        out: Folder of records.
        keep: Write a table to this file, too.
    """
    names = [name for name in experiment_ids() if only in name]
    if not names:
        print(f"error: --only {only!r} is in no id; valid: {', '.join(experiment_ids())}", file=sys.stderr)
        return 2
    done: list[Done] = []
    for i, name in enumerate(names, 1):
        print(f"[{i}/{len(names)}] {name}", flush=True)
        done.append(run(name, out))
        took = "some of it was there already" if (seconds := done[-1].seconds) is None else f"{seconds:.0f} s"
        print(f"[{i}/{len(names)}] {name}: {done[-1].ended}, {took}", flush=True)
    if keep is not None:
        write_atomically(keep, report(done))
    failed = [one.name for one in done if not one.is_well]
    print(f"{len(done) - len(failed)} of {len(done)} experiments ended well" + "".join(f"\n  not {n}" for n in failed))
    return 1 if failed else 0


def run(name: str, out: Path) -> Done:
    """One experiment, in a process of its own, whose progress goes to the terminal."""
    is_new, begin = not Store(out, name, "smoke").records(), time.perf_counter()
    command = [sys.executable, "-m", "harness", "run", name, "--tier", "smoke", "--out", str(out), "--json"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    seconds = time.perf_counter() - begin
    document: dict[str, Any] = json.loads(ended.stdout) if ended.stdout.startswith("{") else {}
    statuses = Counter(record["status"] for record in document.get("records", ()))
    return Done(name, dict(statuses), seconds if is_new else None)


def report(done: list[Done]) -> str:
    """The table, in Markdown."""
    machine = host_environment([])
    shown = lambda seconds: "–" if seconds is None else f"{seconds:.0f}"
    return "\n".join(
        [
            "# Experiments at `smoke`",
            "",
            "`python -m tests.smoke --keep results/smoke.md`",
            "",
            f"{len(done)} experiments on {datetime.date.today()}; what came later is not in the table.",
            f"{machine['processor']}, {machine['cores']} cores, no GPU; seconds from the command's start to its end.",
            "",
            "| experiment | points | seconds |",
            "|---|---|--:|",
            *(f"| {one.name} | {one.ended} | {shown(one.seconds)} |" for one in done),
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
