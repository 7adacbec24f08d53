"""Carries one case of the matrix out: a sweep with the fault, then as many as it takes, and is the record as it was?"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from harness.experiment.experiment import Point
from harness.launch import sweep as sweeps
from harness.launch.slurm import Site
from harness.rank.job import job_of
from harness.records.environment import host_environment
from harness.records.record import Record
from harness.records.store import SCHEMA, Store, write_atomically
from impl.errors import InputError
from impl.run import Run, to_dict
from tests.faults.cases import Case
from tests.faults.faulty import SAVING, FaultySite, place, run_of, store_of
from tests.harness.small_runs import Told, processes, sweep

ROOT = Path(__file__).resolve().parents[2]
HANG_SECONDS = 15.0
"""Longer than ranks take to start on a machine with too much to do."""
COMMANDS = 3
"""At most, behind the one with the fault."""
KEPT = ("id", "status", "reason", "run", "evaluations")
"""Of a record, what has to be equal bit by bit, beside the numbers of every step."""
KILLED_SECONDS = 12.0
"""A job that is cancelled has some seconds before it is killed; that long a rank stands in a step."""
ROOM = "256k"


@dataclass(frozen=True)
class Outcome:
    """What became of a case."""

    first: str
    """Status and cause of the first try; what there was instead, where it left none."""
    commands: int
    """`run`s that it took behind the one with the fault."""
    problem: str = ""
    """What was not as it has to be; nothing: it held."""
    skipped: str = ""
    """Why it was not carried out."""


def undisturbed(layout: str, folder: Path, tokens: Path) -> dict[str, Any]:
    """What the record of a point has to say, by a sweep that nothing happens to."""
    run = run_of(layout, tokens)
    sweep(store_of(folder), [run], saving=SAVING)
    found = essence(store_of(folder).read(run.id))
    assert found["status"] == "ok", found["reason"]
    return found


def essence(record: Record | None) -> dict[str, Any]:
    """Of a record, what no fault may change."""
    if record is None:
        return {}
    steps = [{name: value for name, value in asdict(step).items() if name != "seconds"} for step in record.steps]
    return {**{name: getattr(record, name) for name in KEPT}, "steps": steps}


def carry_out(case: Case, folder: Path, tokens: Path, expected: dict[str, Any]) -> Outcome:
    """The sweep with the fault, and sweeps until the point is finished; its record beside the expected one."""
    if case.on == "slurm" and (why := no_slurm()):
        return Outcome("", 0, skipped=why)
    run, store = run_of(case.layout, tokens), store_of(folder)
    bystander = put_bystander(store)
    code = host_environment([])  # somebody may be at work on it: what failed by itself is left alone by the same code
    try:
        with patch.object(sweeps, "host_environment", lambda _: code), output_of(case, folder) as mend:
            first, commands = in_turn(case, folder, run, mend)
    except Unmountable as why:
        return Outcome("", 0, skipped=str(why))
    finally:
        for process in processes(folder):
            process.kill()
    record = store.read(run.id)
    return Outcome(first, commands, problem=why_not(case, folder, record, expected, first, bystander))


def alone(task: tuple[Case, Path, Path, dict[str, Any]]) -> Outcome:
    """`carry_out` in a folder that it makes; whatever goes wrong is the case's own problem."""
    case, folder, tokens, expected = task
    folder.mkdir()
    sweeps.SCHEDULER_SECONDS = 1.0
    try:
        return carry_out(case, folder, tokens, expected)
    except Exception as error:
        return Outcome("", 0, problem=f"{type(error).__name__}: {error}")


def why_not(
    case: Case, folder: Path, record: Record | None, expected: dict[str, Any], first: str, bystander: tuple[Path, str]
) -> str:
    """What did not hold; nothing: all did."""
    path, text = bystander
    if not (folder / "fired").exists():
        return "the fault never happened"
    if case.causes and not any(first.endswith(f" {cause}") for cause in case.causes):
        return f"told as {first}, not {' or '.join(case.causes)}"
    if path.read_text() != text:
        return "another record was changed"
    found = essence(record)
    if differing := [name for name in expected if found.get(name) != expected[name]]:
        ended = f"{record.status}: {record.reason}" if record else "no record"
        return f"not as undisturbed: {', '.join(differing)} ({ended})"
    return ""


def in_turn(case: Case, folder: Path, run: Run, mend: Any) -> tuple[str, int]:
    """The first try's end, and the number of commands behind the one with the fault."""
    store = store_of(folder)
    first = with_fault(case, folder, run)
    record = store.read(run.id)
    if record is not None and (tries := record.tries):
        first = f"{tries[0].status} {tries[0].cause}"
    elif record is not None and not (record.status == "ok" and first):
        first = f"{record.status} {record.cause or ''}".strip()
    mend()
    for count in range(COMMANDS + 1):
        record = store.read(run.id)
        if record is not None and record.status == "ok":
            return first, count
        left = record is not None and record.cause in ("error", "oom")
        # what failed by itself is left alone until it is asked for
        ordered = {"retry": "all"} if left and count else {}
        told = run_again(case, folder, run, **ordered)
        if left and not ordered and told.starts:
            return f"{first}, and run again unasked", count
    return first, COMMANDS


def run_again(case: Case, folder: Path, run: Run, **ordered: Any) -> Told:
    """The same command, without a fault of its own."""
    site = FaultySite(fault=fault_of(case, folder), **place(case.on))
    return attempted(store_of(folder), run, site, Told(), **ordered)


def attempted(store: Store, run: Run, site: FaultySite, told: Told, **ordered: Any) -> Told:
    """A sweep of the one point; what ends it is told."""
    try:
        return sweep(store, [run], site=site, told=told, saving=SAVING, hang_seconds=HANG_SECONDS, **ordered)
    except (OSError, InputError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        told.messages.append(f"{type(error).__name__}: {why}")
        return told


def fault_of(case: Case, folder: Path, **other: Any) -> dict[str, Any]:
    """The fault as a rank is told of it; of a case that has none in a rank, one that never happens."""
    rank = -1 if case.rank is None else case.rank
    return {"rank": rank, "phase": case.phase, "what": case.fault, "fired": str(folder / "fired"), **other}


def with_fault(case: Case, folder: Path, run: Run) -> str:
    """The command with the fault; what there is to say of it where no record does."""
    store, kinds = store_of(folder), {"record": damaged_record, "checkpoint": damaged_checkpoint}
    kinds |= {"attempt": damaged_attempt, "job": signalled_job}
    if case.place == "harness":
        return dying_harness(case, folder, run)
    if case.place in kinds:
        return kinds[case.place](case, folder, run)
    if case.place == "output":
        (folder / "fired").touch()
    told = attempted(store, run, FaultySite(fault=fault_of(case, folder), **place(case.on)), Told())
    return told.messages[-1] if case.place == "output" and told.messages else ""


def dying_harness(case: Case, folder: Path, run: Run) -> str:
    """A harness of its own process, which has the fault."""
    given = {"folder": str(folder), "run": to_dict(run), "on": case.on, "phase": case.phase, "what": case.fault}
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.faulty", json.dumps(given)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    return f"the harness ended with {signal.Signals(-done.returncode).name if done.returncode < 0 else done.returncode}"


def damaged_record(case: Case, folder: Path, run: Run) -> str:
    """An undisturbed sweep, whose record is damaged afterwards."""
    (folder / "fired").touch()
    run_again(case, folder, run)
    damage(store_of(folder).path(run.id), case.fault)
    return f"the record is {case.fault}"


def damaged_checkpoint(case: Case, folder: Path, run: Run) -> str:
    """A sweep that is killed behind two checkpoints, of which the newest, or all, are damaged afterwards."""
    store = store_of(folder)
    killed = Case("rank 0", "optimizer", "SIGKILL", case.layout, case.on)
    site = FaultySite(fault=fault_of(killed, folder), **place(case.on))
    attempted(store, run, site, Told(), retries=0)
    own = store.checkpoints(run.id)
    saved = sorted(path for path in own.glob("step-*") if not path.suffix)
    for path in saved if case.phase == "all of them" else saved[-1:]:
        chosen = {
            "metadata": [path / ".metadata"],
            "data": sorted(path.glob("*.distcp")),
            "all of them": [path / ".metadata"],
        }
        for file in chosen.get(case.phase) or [own / "rank-1.json"]:
            damage(file, case.fault)
    return f"{case.phase}: {case.fault}"


def damaged_attempt(case: Case, folder: Path, run: Run) -> str:
    """A try whose harness was killed before it wrote the record, and of which a file is damaged afterwards."""
    dying_harness(Case("harness", "record write", "SIGKILL"), folder, run)
    [attempt] = store_of(folder).attempts_of(run.id)
    names = {"job": "job.json", "orders": "spec.json", "result": "rank-1.json", "steps log": "rank-1.steps.jsonl"}
    path = attempt / names[case.phase]
    damage(path, case.fault)
    if path.exists():
        os.utime(path, (0, 0))  # longer ago than a submission takes
    return f"{case.phase}: {case.fault}"


def damage(path: Path, how: str) -> None:
    """Does to a file what disks, editors and people do."""
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        changed = {
            "empty": b"",
            "cut short": content[: len(content) // 2],
            "junk": b"\x00\xff junk \xfe" * (1 + len(content) // 9),
            "middle overwritten": content[: len(content) // 2] + b"#" * 9 + content[len(content) // 2 + 9 :],
            "fields missing": re.sub(rb', "seconds": [\d.e-]+', b"", content),
            "first byte flipped": bytes([content[0] ^ 1 if content else 1]) + content[1:],
            "one bit flipped": _with_one_bit_flipped(content),
        }
        path.write_bytes(changed[how])


def _with_one_bit_flipped(content: bytes) -> bytes:
    """Flip a bit, in the middle, of what is a digit in JSON: the document stays one."""
    if not content:
        return b""
    at = next((at for at in range(len(content) // 2, len(content)) if chr(content[at]) in "2468"), len(content) // 2)
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def signalled_job(case: Case, folder: Path, run: Run) -> str:
    """A Slurm job that somebody cancels or requeues while it trains."""
    store = store_of(folder)
    pausing = fault_of(
        case, folder, rank=0, phase="forward", what=f"pause {KILLED_SECONDS}", fired=str(folder / "paused")
    )

    def act(point: Point) -> None:
        jobs = [job for path in (store.folder / "attempts").glob(f"{run.id}-*") if (job := job_of(path))]
        if (folder / "paused").exists() and not (folder / "fired").exists() and jobs:
            (folder / "fired").touch()
            subprocess.run([*case.fault.split(), jobs[0].job], check=True, timeout=60)

    attempted(store, run, FaultySite(fault=pausing, **place(case.on)), Told(on_look=act))
    return ""


# What has to be there ------------------------------------------------------------------------------------------------


class Unmountable(Exception):  # noqa: N818  (nothing went wrong)
    """This machine lets nobody here make a small disk."""


@contextlib.contextmanager
def output_of(case: Case, folder: Path) -> Iterator[Any]:
    """For faults of the output folder a small disk, full or read-only until it is mended."""
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
    """Until there is no room for another byte."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def put_bystander(store: Store) -> tuple[Path, str]:
    """A finished record of another point, which nothing may touch, and its text."""
    record = {"schema": SCHEMA, "id": "bystander", "experiment": store.experiment, "tier": store.tier}
    path = store.write({**record, "source": "measured", "config": {}, "status": "ok", "reason": None})
    return path, path.read_text()


def no_slurm() -> str:
    """Why no case can be carried out on Slurm; nothing: one answers."""
    try:
        Site("slurm").require()
    except InputError as error:
        return str(error)
    return ""
