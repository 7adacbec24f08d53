"""Checks that need no ranks: packages, machine, files and scheduler, each a line that is ok, a warning or failed."""

import contextlib
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

from harness.launch.preflight import RANK_BYTES
from harness.launch.slurm import minutes
from harness.rank.devices import gpu_count
from harness.rank.slurm_queue import ask
from harness.records.environment import CODE, git_state, version_of
from harness.records.printable import several
from harness.terminal import shown

Grade = Literal["ok", "warning", "failed"]
REQUIRED = (
    "matplotlib", "numpy", "pandas", "psutil", "pydantic", "rich", "scipy", "submitit", "tokenizers", "torch", "tyro",
)  # fmt: skip
"""Packages that every sweep or its tables need."""
INSTALL = "make .venv/.dev, or pip install --no-deps --require-hashes --requirement requirements.lock"
LITTLE_SHARED = 2**28
"""Free bytes of /dev/shm below which NCCL may fail for lack of them; docker's default is 64 MiB."""
LITTLE_DISK, NO_DISK = 10 * 2**30, 2**30
CHECKPOINTS = "checkpoints take 12 bytes per parameter; two are kept of each running point"
LOOK_SECONDS, BUSY_PERCENT = 0.5, 15.0
"""Seconds for which the load is sampled before measuring, and percent of the processors that others may use."""
SKEW_SECONDS = 2.0
"""Difference of clocks above which times of records and files mislead."""
POINT_MINUTES = 24 * 60 + 5
"""Time that `run` requests from the scheduler without --time-limit."""
USABLE = ("idle", "mix", "mixed", "alloc", "allocated", "comp", "completing", "resv", "reserved", "plnd", "planned")
"""Slurm's states of nodes that run jobs, or can soon."""


class Check(NamedTuple):
    """Line of the report."""

    what: str
    grade: Grade
    found: str
    mend: str = ""
    """What to do about the problem; empty if the grade is ok."""


def check(what: str, found: str, *faults: tuple[bool, Grade, str]) -> Check:
    """Return a line with grade and mend of the first fault that applies; ok if none does."""
    return next(
        (Check(what, grade, found, mend) for applies, grade, mend in faults if applies), Check(what, "ok", found)
    )


# Code and packages --------------------------------------------------------------------------------------------------


def code() -> Iterator[Check]:
    """Yield checks of the interpreter, the packages against the lock, and the commit that records name."""
    yield check("python", f"{sys.version.split()[0]}, {sys.executable}")
    yield packages(CODE / "requirements.lock")
    state = git_state(CODE)
    found = (
        f"commit {state['commit'][:12]}{', with changes' if state['dirty'] else ''}" if state else "no git repository"
    )
    mend = "run from a git checkout: records name its commit, and points that failed with other code are run again"
    yield check("code", found, (state is None, "warning", mend))


def packages(lock: Path) -> Check:
    """Compare the installed versions with those of a lock file, without the names of builds (`+cpu`)."""
    if not lock.exists():
        mend = "run from a checkout, whose lock has the versions to compare with"
        return Check("packages", "warning", f"{lock} is missing", mend)
    locked = dict(re.findall(r"^\s*([\w.-]+)==([^\s;#]+)", lock.read_text(), re.MULTILINE))
    if missing := [name for name in REQUIRED if version_of(name) is None]:
        return Check("packages", "failed", f"{', '.join(missing)}: not installed", INSTALL)
    present = {name: version for name in locked if (version := version_of(name)) is not None}
    others = [
        f"{name} {version} (lock: {locked[name]})"
        for name, version in present.items()
        if version.partition("+")[0] != locked[name].partition("+")[0]
    ]
    if others:
        return Check("packages", "warning", f"not the lock's: {', '.join(others)}", INSTALL)
    return check("packages", f"{len(present)} installed, at the lock's versions")


# This machine -------------------------------------------------------------------------------------------------------


def machine(ranks: int, device: str) -> Iterator[Check]:
    """Yield checks of this machine's devices, cores and memory for a number of ranks."""
    gpus, cores = gpu_count(), len(os.sched_getaffinity(0))
    cuda = device == "cuda"
    found = f"{several(gpus, 'GPU')} for {several(ranks, 'rank')}" if gpus or cuda else "no GPU: ranks use the CPU"
    yield check("devices", found, (cuda and gpus < ranks, "failed", f"--ranks {gpus or 1}, or --device cpu"))
    mend = f"at most {several(cores, 'rank')} here: times of ranks that share cores show no scaling"
    yield check("cores", f"{cores} for {several(ranks, 'rank')}", (not cuda and ranks > cores, "warning", mend))
    busy = psutil.cpu_percent(LOOK_SECONDS)
    mend = "end them, or measure later: they make steps slower"
    yield check("load", f"other programs use {busy:.0f}% of the processors", (busy > BUSY_PERCENT, "warning", mend))
    free, needed = psutil.virtual_memory().available, ranks * RANK_BYTES
    yield check(
        "memory",
        f"{shown(free)} free; {several(ranks, 'rank')} without a model: {shown(needed)}",
        (free < needed, "failed", "fewer ranks, or end other programs"),
        (free < 2 * needed, "warning", "little is left for the model: fewer ranks, or end other programs"),
    )
    # NCCL connects the ranks of a host through shared memory
    folder = Path("/dev/shm")
    free = shutil.disk_usage(folder).free if folder.is_dir() else None
    yield check(
        "shared memory",
        f"no {folder}" if free is None else f"{folder} has {shown(free)}",
        (free is None, "warning", "communication between ranks of a host is slower; mount a tmpfs there"),
        (cuda and (free or 0) < LITTLE_SHARED, "warning", "in a container: --shm-size 1g, or --ipc host"),
    )


# Files --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def existing(folder: Path) -> Iterator[None]:
    """Make a folder if it is missing; remove what was made afterwards, if it is empty.

    Raises:
        OSError: it cannot be made.
    """
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for one in missing:
            with contextlib.suppress(OSError):  # it is not empty
                one.rmdir()


def files(out: Path) -> Iterator[Check]:
    """Yield checks of a folder's space, and of the file operations that records and locks rely on."""
    try:
        with existing(out), tempfile.TemporaryDirectory(prefix=".doctor-", dir=out) as scratch:
            free = shutil.disk_usage(out).free
            yield check(
                "disk",
                f"{out}: {shown(free)} free",
                (free < NO_DISK, "failed", "free some space: records need it, and checkpoints even more"),
                (free < LITTLE_DISK, "warning", CHECKPOINTS),
            )
            yield renames(Path(scratch))
            yield clock_of_files(Path(scratch))
    except OSError as error:
        yield Check(
            "files",
            "failed",
            f"{out}: {error.strerror or error}",
            "--out: a folder that can be written and that all nodes see",
        )


def renames(scratch: Path) -> Check:
    """Check that a rename replaces a file atomically, and does not replace a folder that is not empty."""
    new, old, mine, theirs = (scratch / name for name in ("new", "old", "mine", "theirs"))
    old.write_text("old")
    new.write_text("new")
    os.replace(new, old)
    for folder in (mine, theirs):
        folder.mkdir()
        (folder / "owner").write_text(folder.name)
    try:
        os.rename(mine, theirs)
        is_kept = False
    except OSError:
        is_kept = (theirs / "owner").read_text() == "theirs"
    is_atomic = old.read_text() == "new" and is_kept
    wrong = f"{scratch.parent}: a rename replaces a folder that is not empty, or does not replace a file"
    mend = "--out: on another file system; on this one two sweeps may run a point twice"
    return check("renames", "atomic" if is_atomic else wrong, (not is_atomic, "failed", mend))


def clock_of_files(scratch: Path) -> Check:
    """Compare the file system's clock with this machine's."""
    path = scratch / "stamp"
    before = time.time()
    path.write_text("now")
    stamped = path.stat().st_mtime
    apart = max(before - stamped, stamped - time.time(), 0.0)
    mend = "ask for NTP on the file server and here: times of files mislead readers, but not decisions on jobs"
    return check("file times", f"{apart:.1f} s from this machine's clock", (apart > SKEW_SECONDS, "warning", mend))


# The scheduler ------------------------------------------------------------------------------------------------------


@dataclass
class Partition:
    """Partition as reported by sinfo."""

    is_default: bool
    is_up: bool
    minutes: int | None
    """Time limit of jobs; None if there is none."""
    nodes: int = 0
    usable: int = 0


def scheduler(partition: str | None, nodes: int) -> Iterator[Check]:
    """Yield checks that Slurm answers, and has the partition with enough nodes and time."""
    code, answer = ask("sinfo", "--noheader", "--format", "%P|%a|%l|%D|%t")
    if code:
        mend = "check that slurmctld is up, and that SLURM_CONF is this cluster's"
        yield Check("scheduler", "failed", f"sinfo: {answer}", mend)
        return
    yield check("scheduler", f"sinfo answers, {several(len(partitions(answer)), 'partition')}")
    yield from of_partition(partitions(answer), partition, nodes)
    code, answer = ask("sacct", "--allocations", "--noheader", "--parsable2", "--format", "JobID", "--starttime", "now")
    mend = "ask for accounting (slurmdbd): it alone knows how a job ended that has left the queue"
    yield check("accounting", "sacct answers" if code == 0 else f"sacct: {answer}", (code != 0, "warning", mend))
    code, answer = ask("scontrol", "show", "config")
    yield Check("requeue", "warning", f"scontrol: {answer}", "check that slurmctld is up") if code else requeue(answer)


def partitions(text: str) -> dict[str, Partition]:
    """Return partitions by name, from lines `NAME|up|LIMIT|NODES|STATE`, one for each state of a partition's nodes."""
    found: dict[str, Partition] = {}
    for name, up, limit, count, state in re.findall(r"^(.+)\|(.+)\|(.+)\|(\d+)\|(\S+)", text, re.MULTILINE):
        one = Partition(is_default=name.endswith("*"), is_up=up == "up", minutes=minutes(limit))
        one = found.setdefault(name.rstrip("*"), one)
        one.nodes += int(count)
        if state.rstrip("~#!%$@^-+").lower() in USABLE:  # `*` marks nodes that do not respond
            one.usable += int(count)
    return found


def of_partition(found: Mapping[str, Partition], names: str | None, nodes: int) -> Iterator[Check]:
    """Yield checks of each partition in a list with commas, by default Slurm's own: it is up, with nodes and time."""
    chosen = names.split(",") if names else [name for name, partition in found.items() if partition.is_default]
    mend = f"--partition, or the site file; valid: {', '.join(found) or 'none'}"
    if not chosen:
        yield Check("partition", "failed", "none is the default", mend)
    for name in chosen:
        if name not in found:
            yield Check("partition", "failed", f"no partition {name}", mend)
            continue
        one = found[name]
        more = f"fewer ranks, or see `sinfo --partition {name} --list-reasons`"
        yield check(
            "partition",
            f"{name}: {one.usable} of {one.nodes} nodes usable, {nodes} needed{'' if one.is_up else '; it is down'}",
            (not one.is_up, "failed", f"{mend}; or wait: `sinfo --partition {name}`"),
            (one.nodes < nodes, "failed", more),
            (one.usable < nodes, "warning", more),
        )
        if one.minutes is not None and one.minutes < POINT_MINUTES:
            limit = f"--time-limit {max(60, one.minutes * 60 - 300)} or less"
            shorter = f"{limit}; with --checkpoint-every longer points are continued"
            yield Check("time limit", "warning", f"{name}: {one.minutes} min, a point may take 24 h", shorter)


def requeue(config: str) -> Check:
    """Check whether Slurm requeues preempted jobs, from the output of `scontrol show config`."""
    values = dict(re.findall(r"^(\w+)\s*=\s*(\S+)", config, re.MULTILINE))
    found = f"preempted jobs are requeued; arrays of up to {values.get('MaxArraySize', 'unknown')}"
    is_off = values.get("JobRequeue") == "0"
    mend = "jobs ask for it by --requeue; if the site forbids it, the next `run` starts preempted points again"
    return check("requeue", "not the cluster's default" if is_off else found, (is_off, "warning", mend))
