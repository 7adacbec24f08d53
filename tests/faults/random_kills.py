"""Kills what a sweep consists of at random moments: `python -m tests.faults.random_kills --kills 60 [--on slurm]`.

Sweeps of four points, two at a time, each in a process of its own. While one runs, a process of it (the harness, a
supervisor, a rank) is killed every few seconds; on Slurm a job may be requeued or cancelled, a node drained or the
controller killed instead. Then the same command is given until every point is finished, and each record must be that
of an undisturbed sweep. Like an administrator, it resumes nodes that Slurm drains by itself ("Duplicate jobid", after a
controller was killed) and releases jobs that Slurm holds.
"""

import argparse
import contextlib
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from harness.launch.slurm import Where
from harness.rank.job import job_of
from harness.rank.slurm_queue import BEHIND_SECONDS
from impl.run import Run
from tests.faults.carry_out import ROOT, essence, undisturbed
from tests.faults.faulty import LAYOUTS, SAVING, FaultySite, place, run_of, store_of
from tests.harness.small_runs import processes, sweep, write_tokens
from tests.slurm.two_nodes import TwoNodes, two_nodes

COMMANDS = 8
"""At most until every point is finished, once nothing is killed any more."""
PER_SWEEP = 4
LONGEST = 600 + BEHIND_SECONDS
"""Seconds in which a sweep that nothing strikes any more has to end, with a job whose end the accounting has missed."""
AWAY = (5, 60)
"""Seconds for which a controller is away."""
ENDING = 90
"""Seconds in which Slurm has to end what it has signalled, and a job that was accepted without an answer gives up.

Such a job has no files; if it has started before its folder is removed, submitit looks for them for 60 s.
"""


def main() -> int:
    """Exit status 0 if every record was equal, none was lost and no process was left."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.random_kills", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--on", choices=("local", "slurm"), default="local")
    parser.add_argument("--sweep", nargs=2, type=Path, metavar=("FOLDER", "TOKENS"), help="be one of the sweeps")
    given = parser.parse_args()
    if given.sweep:
        return one_sweep(given.sweep[0], given.sweep[1], given.on)
    chance, done = random.Random(given.seed), Counter[str]()
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(two_nodes()) if given.on == "slurm" else None
        if cluster:
            threading.Thread(target=administrate, daemon=True).start()
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kills-")))
        tokens = write_tokens(scratch / "tokens")
        expected = {run_of(name, tokens).id: undisturbed(name, scratch / name, tokens) for name in LAYOUTS}
        problems = 0
        while (struck := done.total()) < given.kills:
            folder = scratch / f"sweep-{struck}"
            folder.mkdir()
            done += disturbed(folder, tokens, given.on, min(PER_SWEEP, given.kills - struck), chance, cluster)
            problem = finished(folder, tokens, given.on, expected)
            problems += bool(problem)
            print(f"{done.total()}/{given.kills}: {problem or 'all records equal'}", flush=True)
    print(", ".join(f"{count} {what}" for what, count in done.most_common()), f"(seed {given.seed})")
    return int(problems > 0)


def ask(*words: str) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        return subprocess.run(words, capture_output=True, timeout=60, check=False, text=True).stdout
    return ""


def administrate() -> None:
    """Resume drained nodes and release held jobs, for ever."""
    while True:
        time.sleep(10)
        for node in ask("sinfo", "--noheader", "--Node", "--states=drain", "--format=%N").split():
            ask("scontrol", "update", f"nodename={node}", "state=resume")
        for job in ask("squeue", "--noheader", "--array", "--states=pending", "--format=%i|%r").splitlines():
            if "held" in job.lower():
                ask("scontrol", "release", job.partition("|")[0])


def runs(tokens: Path) -> list[Run]:
    return [run_of(layout, tokens) for layout in LAYOUTS]


def one_sweep(folder: Path, tokens: Path, on: Where) -> int:
    pausing = {"rank": 0, "phase": "backward", "what": "pause 1", "fired": str(folder / "paused")}
    store = store_of(folder)
    sweep(store, runs(tokens), site=FaultySite(fault=pausing, **place(on)), saving=SAVING, jobs=2)
    return int(not all(map(store.has_finished, (run.id for run in runs(tokens)))))


def command(folder: Path, tokens: Path, on: Where) -> list[str]:
    return [sys.executable, "-m", "tests.faults.random_kills", "--on", on, "--sweep", str(folder), str(tokens)]


def disturbed(
    folder: Path, tokens: Path, on: Where, kills: int, chance: random.Random, cluster: TwoNodes | None
) -> Counter[str]:
    """Strike a sweep this often, starting it again when it has ended; what was struck."""
    done = Counter[str]()
    with (folder / "log").open("w") as log:
        while done.total() < kills:
            driver = subprocess.Popen(command(folder, tokens, on), cwd=ROOT, stdout=log, stderr=log)
            while driver.poll() is None and done.total() < kills:
                time.sleep(chance.uniform(0.5, 6))
                if struck := strike(folder, driver, chance, cluster):
                    done[struck] += 1
            if all(map(store_of(folder).has_finished, (run.id for run in runs(tokens)))):
                break
        try:
            driver.wait(timeout=LONGEST)
        except subprocess.TimeoutExpired:
            driver.kill()
            print(f"no end after {dict(done)}:", (folder / "log").read_text()[-2000:])
            print(*(ask(name, "--long") for name in ("squeue", "sinfo") if cluster), flush=True)
            raise
    return done or Counter({"nothing: it had ended": 1})


def strike(folder: Path, driver: subprocess.Popen[Any], chance: random.Random, cluster: TwoNodes | None) -> str:
    """Do one thing; nothing: there was nothing to do it to."""
    if cluster and chance.random() < 0.5:
        what, act = chance.choice(on_slurm(folder, cluster, chance))
        act()
        return what
    found = processes(folder)
    if driver.poll() is None and chance.random() < 0.25:
        driver.kill()
        return "harness killed"
    if not found:
        return ""
    victim = chance.choice(found)
    with contextlib.suppress(psutil.NoSuchProcess):
        victim.kill()
        return (
            "supervisor killed"
            if {"harness.rank.local", "submitit.core._submit"} & {*victim.info["cmdline"]}
            else "rank killed"
        )
    return ""


def on_slurm(folder: Path, cluster: TwoNodes, chance: random.Random) -> list[tuple[str, Callable[[], Any]]]:
    """What can be done to a cluster and the sweep's jobs."""
    jobs = [job.job for attempt in store_of(folder).folder.glob("attempts/*") if (job := job_of(attempt))]

    def drained() -> None:
        ask("scontrol", "update", "nodename=node1", "state=drain", "reason=chaos")
        time.sleep(5)
        ask("scontrol", "update", "nodename=node1", "state=resume")

    def away(seconds: int) -> None:
        cluster.kill("slurmctld")
        time.sleep(seconds)
        cluster.start("slurmctld")

    of_jobs = [(f"job {verb}", lambda verb=verb: ask(*verb.split(), chance.choice(jobs))) for verb in
               ("scancel", "scontrol requeue")] if jobs else []  # fmt: skip
    absences = [(f"controller away {seconds} s", partial(away, seconds)) for seconds in AWAY]
    return [("node drained", drained), *absences, *of_jobs]


def finished(folder: Path, tokens: Path, on: Where, expected: dict[str, dict[str, Any]]) -> str:
    """Give the command until every point is finished; what is not as it has to be, or nothing."""
    store = store_of(folder)
    for _ in range(COMMANDS):
        with (folder / "log").open("a") as log:
            if not subprocess.run(
                command(folder, tokens, on), cwd=ROOT, stdout=log, stderr=log, timeout=LONGEST
            ).returncode:
                break
    found = {run_id: store.read(run_id) for run_id in expected}
    differing = [
        f"{run_id} ({record.status} {record.cause}: {record.reason})" if record else f"{run_id} (none)"
        for run_id, record in found.items()
        if essence(record) != expected[run_id]
    ]
    until = time.monotonic() + (2 if on == "local" else ENDING)
    while (left := [one.info["cmdline"] for one in processes(folder)]) and time.monotonic() < until:
        time.sleep(0.5)
    files = sorted(path.stem for path in store.recorded.glob("*.json"))
    lost = "" if files == sorted(expected) else f"records {files}, not {sorted(expected)}"
    return "; ".join(
        filter(None, [f"not equal: {', '.join(differing)}" if differing else "", lost, f"left: {left}" if left else ""])
    )


if __name__ == "__main__":
    sys.exit(main())
