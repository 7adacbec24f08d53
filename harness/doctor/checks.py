"""What `doctor` looks at itself, each a line that is ok, a warning or failed, with the mend."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

from harness.launch.preflight import RANK_BYTES
from harness.rank.devices import gpu_count
from harness.records.environment import CODE, git_state
from harness.terminal import shown

Grade = Literal["ok", "warning", "failed"]

REQUIRED = (
    "matplotlib", "numpy", "pandas", "psutil", "pydantic", "rich", "scipy", "submitit", "tokenizers", "torch", "tyro",
)  # fmt: skip
"""Packages without which no sweep runs, or none of its tables is written."""
INSTALL = "pip install --constraint requirements.lock --editable ."
LITTLE_SHARED = 2**28
"""Bytes of /dev/shm below which NCCL may find no room; docker gives 64 MiB where it is not asked for more."""
LITTLE_DISK, NO_DISK = 10 * 2**30, 2**30
SKEW_SECONDS = 2.0
"""How far clocks may be apart before times in records and of files mislead."""
POINT_SECONDS = 24 * 3600.0 + 300.0
"""What `run` asks the scheduler for where no --time-limit is given."""
ASK_SECONDS = 20.0
USABLE = ("idle", "mix", "mixed", "alloc", "allocated", "comp", "completing", "resv", "reserved")
"""Slurm's words for nodes that run jobs now or soon."""


class Check(NamedTuple):
    """One line of the doctor's report."""

    what: str
    grade: Grade
    found: str
    mend: str = ""


def ok(what: str, found: str) -> Check:
    return Check(what, "ok", found)


def warning(what: str, found: str, mend: str) -> Check:
    return Check(what, "warning", found, mend)


def failed(what: str, found: str, mend: str) -> Check:
    return Check(what, "failed", found, mend)


# Code and packages --------------------------------------------------------------------------------------------------


def code() -> Iterator[Check]:
    """Interpreter, packages against the lock, and the commit that records will name."""
    yield ok("python", f"{sys.version.split()[0]}, {sys.executable}")
    lock = CODE / "requirements.lock"
    if lock.exists():
        there = {_normal(d.name): d.version for d in metadata.distributions() if d.name}
        yield packages(locked(lock.read_text()), there)
    else:
        yield warning("packages", f"{lock} is missing", "run from a checkout: versions are compared with its lock")
    state = git_state(CODE)
    if state is None:
        mend = "run from a git checkout: records name its commit, and failed points of other code run again"
        yield warning("code", "no git repository", mend)
    else:
        yield ok("code", f"commit {state['commit'][:12]}{', and changes to it' if state['dirty'] else ''}")


def locked(text: str) -> dict[str, str]:
    """Versions by package, as a lock file has them."""
    pairs = re.findall(r"^\s*([\w.-]+)==([^\s;#]+)", text, re.MULTILINE)
    return {_normal(name): version for name, version in pairs}


def packages(lock: Mapping[str, str], there: Mapping[str, str]) -> Check:
    """What is installed, beside the versions that results were measured with; a build's name (`+cpu`) is left out."""
    missing = [name for name in REQUIRED if name not in there]
    if missing:
        return failed("packages", f"{', '.join(missing)}: not installed", INSTALL)
    other = [
        f"{name} {there[name]} (lock: {version})"
        for name, version in lock.items()
        if name in there and there[name].partition("+")[0] != version.partition("+")[0]
    ]
    if other:
        return warning("packages", f"not the lock's: {', '.join(other)}", INSTALL)
    return ok("packages", f"{sum(name in there for name in lock)} installed, at the lock's versions")


def _normal(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


# This machine -------------------------------------------------------------------------------------------------------


def machine(ranks: int, device: str) -> Iterator[Check]:
    """Devices, cores and memory of this machine for this many ranks."""
    gpus, cores = gpu_count(), len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    if device == "cuda" and gpus < ranks:
        yield failed("devices", f"{gpus} GPUs for {ranks} ranks", f"--ranks {max(1, gpus)}, or --device cpu")
    else:
        yield ok("devices", f"{gpus} GPUs" if gpus else "no GPU: ranks are CPU processes and talk through gloo")
    if device == "cpu" and ranks > cores:
        mend = f"at most {cores} ranks here: of times of ranks that share cores nobody reads any scaling"
        yield warning("cores", f"{cores} for {ranks} ranks", mend)
    else:
        yield ok("cores", f"{cores} for {ranks} ranks")
    yield memory(psutil.virtual_memory().available, ranks)
    yield from shared_memory(Path("/dev/shm"), device)


def memory(free: int, ranks: int) -> Check:
    """Whether ranks that hold nothing yet fit."""
    needed = ranks * RANK_BYTES
    if free < needed:
        return failed("memory", f"{shown(free)} free, {ranks} ranks need {shown(needed)}", "fewer ranks, or end others")
    if free < 2 * needed:
        found = f"{shown(free)} free, {ranks} ranks alone need {shown(needed)}"
        return warning("memory", found, "little is left for the model: fewer ranks, or end other programs")
    return ok("memory", f"{shown(free)} free")


def shared_memory(folder: Path, device: str) -> Iterator[Check]:
    """Room in /dev/shm, where NCCL's ranks of one host talk."""
    if not folder.is_dir():
        yield warning("shared memory", f"no {folder}", "ranks of one host talk more slowly; mount a tmpfs there")
        return
    free = shutil.disk_usage(folder).free
    if device == "cuda" and free < LITTLE_SHARED:
        yield warning("shared memory", f"{folder} has {shown(free)}", "in a container: --shm-size 1g, or --ipc host")
    else:
        yield ok("shared memory", f"{folder} has {shown(free)}")


# Files --------------------------------------------------------------------------------------------------------------


def files(out: Path) -> Iterator[Check]:
    """Room below `out`, and whether what records and locks rely on works there."""
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=out) as scratch:
            yield room(shutil.disk_usage(out).free, out)
            yield renames(Path(scratch))
            yield clock_of_files(Path(scratch))
    except OSError as error:
        why = error.strerror or str(error)
        yield failed("files", f"{out}: {why}", "--out: a folder that can be written and that all nodes see")


def room(free: int, out: Path) -> Check:
    if free < NO_DISK:
        return failed("disk", f"{out}: {shown(free)} free", "make room: records, and above all checkpoints, need it")
    if free < LITTLE_DISK:
        mend = "checkpoints take 12 bytes per parameter, two are kept of each running point"
        return warning("disk", f"{out}: {shown(free)} free", mend)
    return ok("disk", f"{out}: {shown(free)} free")


def renames(scratch: Path) -> Check:
    """Whether a rename replaces a file at once, and refuses to replace a folder that is not empty."""
    new, old, mine, theirs = (scratch / name for name in ("new", "old", "mine", "theirs"))
    old.write_text("old")
    new.write_text("new")
    os.replace(new, old)
    for folder in (mine, theirs):
        folder.mkdir()
        (folder / "owner").write_text(folder.name)
    try:
        os.rename(mine, theirs)
        refuses = False
    except OSError:
        refuses = (theirs / "owner").read_text() == "theirs"
    if old.read_text() == "new" and refuses:
        return ok("renames", "atomic")
    mend = "--out: another file system; two harnesses on this one could run a point twice"
    return failed("renames", f"{scratch.parent}: a rename replaces what it must not, or nothing", mend)


def clock_of_files(scratch: Path) -> Check:
    """How far the file system's clock is from this machine's."""
    path = scratch / "stamp"
    before = time.time()
    path.write_text("now")
    stamped = path.stat().st_mtime
    apart = max(before - stamped, stamped - time.time(), 0.0)
    if apart > SKEW_SECONDS:
        mend = "ask for NTP on the file server and here; nothing is decided by these times, but people are misled"
        return warning("file times", f"{apart:.1f} s from this machine's clock", mend)
    return ok("file times", "as this machine's clock")


# The scheduler ------------------------------------------------------------------------------------------------------


class Partition(NamedTuple):
    """What sinfo says of one partition."""

    is_default: bool
    is_up: bool
    seconds: float
    """Longest time of a job; infinity: any."""
    nodes: int
    usable: int


def scheduler(partition: str | None, nodes: int) -> Iterator[Check]:
    """Whether Slurm answers, and has the partition, enough nodes in it, and time."""
    code, answer = ask("sinfo", "--noheader", "--format", "%P|%a|%l|%D|%t")
    if code:
        yield failed("scheduler", f"sinfo: {answer}", "is slurmctld up, and SLURM_CONF that of this cluster?")
        return
    yield ok("scheduler", f"sinfo answers, {len(partitions(answer))} partitions")
    yield from of_partition(partitions(answer), partition, nodes)
    code, answer = ask("sacct", "--allocations", "--noheader", "--parsable2", "--format", "JobID", "--starttime", "now")
    if code:
        mend = "ask for accounting (slurmdbd): how a job that the queue has forgotten has ended is known from it alone"
        yield warning("accounting", f"sacct: {answer}", mend)
    else:
        yield ok("accounting", "sacct answers")
    code, answer = ask("scontrol", "show", "config")
    if code:
        yield warning("requeue", f"scontrol: {answer}", "is slurmctld up?")
    else:
        yield requeue(answer)


def ask(*command: str) -> tuple[int, str]:
    """Exit status and output of a program, or a status that is not 0 and the last line of its complaint."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ASK_SECONDS)
    except FileNotFoundError:
        return 127, "not on this machine"
    except (OSError, subprocess.SubprocessError):
        return 1, f"no answer within {ASK_SECONDS:.0f} s"
    if done.returncode == 0:
        return 0, done.stdout
    return done.returncode, ([line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"])[-1]


def partitions(text: str) -> dict[str, Partition]:
    """Partitions by name, from lines `NAME|up|LIMIT|NODES|STATE`, one for each state that nodes are in."""
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        words = line.strip().split("|")
        if len(words) != 5 or not words[3].isdigit():
            continue
        name, count = words[0].rstrip("*"), int(words[3])
        usable = count if words[4].rstrip("*~#!%$@^-+").lower() in USABLE and not words[4].endswith("*") else 0
        before = found.get(name)
        found[name] = Partition(
            words[0].endswith("*"),
            words[1] == "up",
            duration(words[2]),
            count + (before.nodes if before else 0),
            usable + (before.usable if before else 0),
        )
    return found


def duration(text: str) -> float:
    """Seconds of Slurm's `[days-]hours:minutes:seconds`, of which the first may be missing; infinity for no limit."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text.strip())
    if match is None:
        return float("inf")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return 86400.0 * days + 3600.0 * hours + 60.0 * minutes + seconds


def of_partition(found: Mapping[str, Partition], name: str | None, nodes: int) -> Iterator[Check]:
    """Whether there is a partition of this name, by default Slurm's own, that is up and has nodes and time.

    Of several names with commas between them each has to be good.
    """
    chosen = name.split(",") if name else [one for one, what in found.items() if what.is_default]
    mend = f"--partition, or the site file; valid: {', '.join(found) or 'none'}"
    if not chosen:
        yield failed("partition", "none is the default", mend)
    for one in chosen:
        if one in found:
            yield from _of_one(one, found[one], nodes, mend)
        else:
            yield failed("partition", f"no partition {one}", mend)


def _of_one(chosen: str, one: Partition, nodes: int, mend: str) -> Iterator[Check]:
    if not one.is_up:
        yield failed("partition", f"{chosen} is down", f"{mend}; or wait: `sinfo --partition {chosen}`")
    elif one.usable < nodes:
        found_there = f"{chosen}: {one.usable} of {one.nodes} nodes usable, {nodes} needed"
        grade = failed if one.nodes < nodes else warning
        yield grade("partition", found_there, f"fewer ranks, or see `sinfo --partition {chosen} --list-reasons`")
    else:
        yield ok("partition", f"{chosen}: {one.usable} of {one.nodes} nodes usable")
    if one.seconds < POINT_SECONDS:
        mend = f"--time-limit {max(60, int(one.seconds) - 300)} or less; with --checkpoint-every longer points go on"
        yield warning("time limit", f"{chosen}: {one.seconds / 60:g} min, a point is given 24 h", mend)


def requeue(config: str) -> Check:
    """Whether jobs may come back after preemption, and how many an array may have."""
    values = dict(re.findall(r"^(\w+)\s*=\s*(\S+)", config, re.MULTILINE))
    array = values.get("MaxArraySize", "unknown")
    if values.get("JobRequeue") == "0":
        mend = "jobs ask for it by --requeue; if the site forbids it, preempted points are run again by the next `run`"
        return warning("requeue", "not the cluster's default", mend)
    return ok("requeue", f"jobs come back after preemption; arrays of up to {array}")
