"""Carries out one case of the matrix: a sweep with the fault, then sweeps until the point is finished."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from harness.experiment.experiment import Point
from harness.launch import sweep as sweeps
from harness.launch.slurm import Site
from harness.rank.job import job_of
from harness.records.attempts import Attempts
from harness.records.environment import host_environment
from harness.records.record import Record
from harness.records.store import SCHEMA, Store, write_atomically
from impl.errors import InputError
from impl.run import Run, to_dict
from tests.faults.cases import Case
from tests.faults.faulty import SAVING, FaultySite, place, run_of, store_of
from tests.harness.small_runs import Told, kill_all, sweep

ROOT = Path(__file__).resolve().parents[2]
HANG_SECONDS = 15.0
"""Longer than ranks take to start on a busy machine."""
COMMANDS = 3
"""Most commands after the one with the fault."""
KEPT = ("id", "status", "reason", "run", "evaluations")
"""Fields of a record that must be equal bit by bit, besides the numbers of every step."""
KILLED_SECONDS = 12.0
"""Pause of a rank in a step, longer than a cancelled job has before it is killed."""
ROOM = "256k"


@dataclass(frozen=True)
class Outcome:
    """Outcome of a case."""

    first: str
    """Status and cause of the first try, or what happened if it left none."""
    commands: int
    """Commands after the one with the fault."""
    problem: str = ""
    """What did not hold; "" if all did."""
    skipped: str = ""
    """Why the case was not carried out."""


def undisturbed(layout: str, folder: Path, tokens: Path) -> dict[str, Any]:
    """Return what the record of a point has to hold, from a sweep without a fault."""
    run = run_of(layout, tokens)
    sweep(store_of(folder), [run], saving=SAVING)
    found = essence(store_of(folder).read(run.id))
    assert found["status"] == "ok", found["reason"]
    return found


def essence(record: Record | None) -> dict[str, Any]:
    """Return the part of a record that no fault may change."""
    if record is None:
        return {}
    steps = [{name: value for name, value in asdict(step).items() if name != "seconds"} for step in record.steps]
    return {**{name: getattr(record, name) for name in KEPT}, "steps": steps}


def carry_out(case: Case, folder: Path, tokens: Path, expected: dict[str, Any]) -> Outcome:
    """Return the outcome of a case in a folder of its own; any error is a problem of the case."""
    if case.on == "slurm" and (why := no_slurm()):
        return Outcome("", 0, skipped=why)
    folder.mkdir(exist_ok=True)
    run, store = run_of(case.layout, tokens), store_of(folder)
    bystander = put_bystander(store)
    unchanged, code = bystander.read_text(), host_environment([])  # the same code in each command
    try:
        with (
            patch.object(sweeps, "host_environment", lambda _: code),
            patch.object(sweeps, "SCHEDULER_SECONDS", 1.0),
            output_of(case, folder) as mend,
        ):
            first, commands = in_turn(case, folder, run, mend)
    except Unmountable as why:
        return Outcome("", 0, skipped=str(why))
    except Exception as error:
        return Outcome("", 0, problem=f"{type(error).__name__}: {error}")
    finally:
        kill_all(folder)
    record, problem = store.read(run.id), ""
    found = essence(record)
    if not (folder / "fired").exists():
        problem = "the fault never happened"
    elif case.causes and not any(first.endswith(f" {cause}") for cause in case.causes):
        problem = f"first outcome {first}, not {' or '.join(case.causes)}"
    elif bystander.read_text() != unchanged:
        problem = "another record was changed"
    elif differing := [name for name in expected if found.get(name) != expected[name]]:
        ended = f"{record.status}: {record.reason}" if record else "no record"
        problem = f"not as undisturbed: {', '.join(differing)} ({ended})"
    return Outcome(first, commands, problem)


def in_turn(case: Case, folder: Path, run: Run, mend: Callable[[], object]) -> tuple[str, int]:
    """Return the end of the first try, and the number of commands after the one with the fault."""
    store = store_of(folder)
    first = with_fault(case, folder, run)
    record = store.read(run.id)
    if record is not None and record.tries:
        first = f"{record.tries[0].status} {record.tries[0].cause}"
    elif record is not None and not (record.status == "ok" and first):
        first = f"{record.status} {record.cause or ''}".strip()
    mend()
    for count in range(COMMANDS + 1):
        record = store.read(run.id)
        if record is not None and record.status == "ok":
            return first, count
        # what the code itself caused is left alone until it is asked for
        left = record is not None and record.cause in ("error", "oom")
        told = run_again(case, folder, run, **({"retry": "all"} if left and count else {}))
        if left and not count and told.starts:
            return f"{first}, and run again unasked", count
    return first, COMMANDS


def run_again(case: Case, folder: Path, run: Run, **options: Any) -> Told:
    """Give the same command again, without a fault of its own."""
    return attempted(case, folder, run, fault_of(case, folder), Told(), **options)


def attempted(case: Case, folder: Path, run: Run, fault: dict[str, Any], told: Told, **options: Any) -> Told:
    """Sweep the one point; an error that ends it becomes a message."""
    site = FaultySite(fault=fault, **place(case.on))
    try:
        return sweep(store_of(folder), [run], site=site, told=told, saving=SAVING, hang_seconds=HANG_SECONDS, **options)
    except (OSError, InputError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        told.messages.append(f"{type(error).__name__}: {why}")
        return told


def fault_of(case: Case, folder: Path, **other: Any) -> dict[str, Any]:
    """Return the fault in a rank's orders; without a fault in a rank, one that never happens."""
    rank = -1 if case.rank is None else case.rank
    return {"rank": rank, "phase": case.phase, "what": case.fault, "fired": str(folder / "fired"), **other}


def with_fault(case: Case, folder: Path, run: Run) -> str:
    """Give the command with the fault; return what happened where no record says it."""
    kinds = {"harness": dying_harness, "record": damaged_record, "checkpoint": damaged_checkpoint}
    kinds |= {"attempt": damaged_attempt, "job": signalled_job}
    if case.place in kinds:
        return kinds[case.place](case, folder, run)
    if case.place == "output":
        (folder / "fired").touch()
    messages = run_again(case, folder, run).messages
    return messages[-1] if case.place == "output" and messages else ""


def dying_harness(case: Case, folder: Path, run: Run) -> str:
    """Run a harness that has the fault, in a process of its own."""
    given = {"folder": str(folder), "run": to_dict(run), "on": case.on, "phase": case.phase, "what": case.fault}
    command = [sys.executable, "-m", "tests.faults.faulty", json.dumps(given)]
    status = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=180, check=False).returncode
    return f"the harness ended with {signal.Signals(-status).name if status < 0 else status}"


def damaged_record(case: Case, folder: Path, run: Run) -> str:
    """Sweep undisturbed, then damage the record."""
    (folder / "fired").touch()
    run_again(case, folder, run)
    damage(store_of(folder).path(run.id), case.fault)
    return f"the record is {case.fault}"


def damaged_checkpoint(case: Case, folder: Path, run: Run) -> str:
    """Kill a sweep after two checkpoints, then damage the newest of them, or all."""
    killed = Case("rank 0", "optimizer", "SIGKILL", case.layout, case.on)
    attempted(case, folder, run, fault_of(killed, folder), Told(), retries=0)
    own = Attempts(store_of(folder)).checkpoints(run.id)
    saved = sorted(path for path in own.glob("step-*") if not path.suffix)
    files = {
        "metadata": [saved[-1] / ".metadata"],
        "data": sorted(saved[-1].glob("*.distcp")),
        "journal": [own / "rank-1.json"],
        "all of them": [path / ".metadata" for path in saved],
    }
    for file in files[case.phase]:
        damage(file, case.fault)
    return f"{case.phase}: {case.fault}"


def damaged_attempt(case: Case, folder: Path, run: Run) -> str:
    """Kill a harness before it writes the record, then damage a file of its attempt."""
    dying_harness(Case("harness", "record write", "SIGKILL"), folder, run)
    [attempt] = Attempts(store_of(folder)).open_of(run.id)
    names = {"job": "job.json", "orders": "spec.json", "result": "rank-1.json", "steps log": "rank-1.steps.jsonl"}
    path = attempt / names[case.phase]
    damage(path, case.fault)
    if path.exists():
        os.utime(path, (0, 0))  # longer ago than a submission takes
    return f"{case.phase}: {case.fault}"


def damage(path: Path, how: str) -> None:
    """Damage a file as disks, editors and people do."""
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
        return
    middle = len(content) // 2
    # a bit of a digit in JSON, which stays a document
    bit = next((at for at in range(middle, len(content)) if chr(content[at]) in "2468"), middle)
    flipped = lambda at: content[:at] + bytes(byte ^ 1 for byte in content[at : at + 1]) + content[at + 1 :]
    changed = {
        "empty": b"",
        "cut short": content[:middle],
        "junk": b"\x00\xff junk \xfe" * (1 + len(content) // 9),
        "middle overwritten": content[:middle] + b"#" * 9 + content[middle + 9 :],
        "fields missing": re.sub(rb', "seconds": [\d.e-]+', b"", content),
        "first byte flipped": flipped(0),
        "one bit flipped": flipped(bit),
    }
    path.write_bytes(changed[how])


def signalled_job(case: Case, folder: Path, run: Run) -> str:
    """Cancel or requeue a Slurm job while it trains."""
    paused = folder / "paused"
    pausing = fault_of(case, folder, rank=0, phase="forward", what=f"pause {KILLED_SECONDS}", fired=str(paused))

    def act(point: Point) -> None:
        attempts = (store_of(folder).folder / "attempts").glob(f"{run.id}-*")
        jobs = [job for path in attempts if (job := job_of(path))]
        if paused.exists() and not (folder / "fired").exists() and jobs:
            (folder / "fired").touch()
            subprocess.run([*case.fault.split(), jobs[0].job], check=True, timeout=60)

    attempted(case, folder, run, pausing, Told(on_look=act))
    return ""


class Unmountable(Exception):  # noqa: N818  (nothing went wrong)
    """No small disk can be mounted here."""


@contextlib.contextmanager
def output_of(case: Case, folder: Path) -> Iterator[Callable[[], object]]:
    """Mount a small disk, full or read-only, for faults of the output folder; yield what mends it."""
    if case.place != "output":
        yield lambda: None
        return
    out = store_of(folder).folder.parents[1]
    out.mkdir(parents=True, exist_ok=True)
    kept = {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    mount("-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", str(out))
    try:
        for name, content in kept.items():
            write_atomically(out / name, content.decode())
        if case.fault == "disk full":
            fill(out / "filler")
            mend = lambda: (out / "filler").unlink()
        else:
            mount("-o", "remount,ro", str(out))
            mend = lambda: mount("-o", "remount,rw", str(out))
        yield lambda: (mend(), mount("-o", "remount,size=64m", str(out)))
        shutil.copytree(out, folder / "copy", symlinks=True)
    finally:
        subprocess.run(["umount", "--lazy", out], check=False, capture_output=True)
        if (folder / "copy").exists():
            shutil.copytree(folder / "copy", out, symlinks=True, dirs_exist_ok=True)


def mount(*words: str) -> None:
    done = subprocess.run(["mount", *words], check=False, capture_output=True, text=True)
    if done.returncode:
        raise Unmountable(f"mount: {(done.stderr.strip().splitlines() or ['refused'])[-1]}")


def fill(path: Path) -> None:
    """Write until there is no room for another byte."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def put_bystander(store: Store) -> Path:
    """Write a finished record of another point, which must stay as it is."""
    record = {"schema": SCHEMA, "id": "bystander", "experiment": store.experiment, "tier": store.tier}
    return store.write({**record, "source": "measured", "config": {}, "status": "ok", "reason": None})


def no_slurm() -> str:
    """Return why no case can be carried out on Slurm; "" if one answers."""
    try:
        Site("slurm").require()
    except InputError as error:
        return str(error)
    return ""
