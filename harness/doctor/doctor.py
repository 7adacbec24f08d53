"""The verb `doctor`: checks before a sweep, each a line that is ok, a warning or failed."""

import contextlib
import json as json_format
import os
import secrets
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console

from harness.doctor import checks
from harness.doctor.checks import Check
from harness.doctor.ranks import Facts, of_ranks, rank_table, time_table
from harness.experiment.folders import OWN
from harness.launch.site_file import read_cluster
from harness.launch.slurm import Device, Site, Where
from harness.rank import jobs, slurm_queue
from harness.rank.devices import gpu_count
from harness.rank.orders import Orders
from harness.records.environment import CODE
from harness.records.store import read_json
from harness.terminal import Flag
from impl.errors import InputError
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run, to_dict

COLLECTIVE_SECONDS = 30.0
"""Timeout of a collective, which takes milliseconds between hosts that are connected."""
POLL_SECONDS: dict[Where, float] = {"local": 0.25, "slurm": 2.0}
"""Time between two queries of the job's state; a scheduler answers many users."""
MARKS = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def doctor(
    *,
    on: Where = "local",
    ranks: int | None = None,
    site: Path | None = None,
    partition: str | None = None,
    account: str | None = None,
    ranks_per_node: int | None = None,
    device: Device | Literal["auto"] = "auto",
    out: Path = OWN,
    wait: float = 300.0,
    json: Flag = False,
) -> int:
    """Check this environment before a sweep: versions, devices, disk, clocks, scheduler, and how ranks talk.

    Args:
        on: Local processes, or a Slurm cluster.
        ranks: Ranks to start; by default one per GPU here (two without), or two whole nodes of the cluster.
        site: Site file, as given to `run`.
        partition: Slurm partition.
        account: Slurm account.
        ranks_per_node: Ranks on one node of the cluster.
        device: cpu, or cuda with one GPU per rank; auto is cuda where this machine has GPUs.
        out: Folder of records, as given to `run`: it is checked, and has the ranks' files.
        wait: Seconds to wait for the ranks, in the cluster's queue too.
        json: Print one JSON document on standard output.
    """
    if not 0 < wait < float("inf"):
        raise InputError(f"--wait {wait}: must be more than 0, and finite")
    cluster = read_cluster(site, partition=partition, account=account, ranks_per_node=ranks_per_node)
    gpus = gpu_count() if on == "local" else 0
    chosen: Device = ("cuda" if gpus else "cpu") if device == "auto" else device
    count = ranks if ranks is not None else max(gpus, 2) if on == "local" else 2 * cluster.ranks_per_node
    where = Site(on=on, device=chosen, cluster=cluster)
    if count < 1:
        raise InputError(f"--ranks {count}: must be 1 or more")
    if (on == "slurm" or chosen == "cpu") and (reason := where.why_invalid(count)):
        raise InputError(f"--ranks {count}: {reason}")
    report = Report(quiet=json)
    for line in _before(where, count, out):
        report.add(line)
    found: list[Facts] = []
    if report.has_failed:
        report.add(Check("ranks", "warning", "not started", "mend first what has failed above"))
    else:
        found = _with_ranks(where, count, out, wait, report)
    return report.end(found)


class Report:
    """Lines, each printed as soon as it is known."""

    def __init__(self, *, quiet: bool) -> None:
        self.lines: list[Check] = []
        self.console = Console(highlight=False, soft_wrap=True, quiet=quiet)
        self.quiet = quiet

    @property
    def has_failed(self) -> bool:
        """True if a check has failed."""
        return any(line.grade == "failed" for line in self.lines)

    def add(self, line: Check) -> None:
        """Print a line, unless the report is quiet."""
        self.lines.append(line)
        mark = f"[{MARKS[line.grade]}]{line.grade:<7}[/]"
        self.console.print(f"{mark}  {line.what:<16} ", end="")
        self.console.print(line.found, markup=False)
        if line.mend:
            self.console.print(f"{'':<9}{'':<17}{line.mend}", markup=False)

    def end(self, ranks: Sequence[Facts]) -> int:
        """Print tables of ranks and times, and the counts; return the exit status."""
        counts = Counter(line.grade for line in self.lines)
        if self.quiet:
            document = {"checks": [line._asdict() for line in self.lines], "ranks": ranks, "counts": counts}
            print(json_format.dumps(document, indent=1, allow_nan=False))
            return int(self.has_failed)
        for table in (rank_table(ranks), time_table(ranks)):
            if table.row_count:
                self.console.print(table)
        print(", ".join(f"{counts[grade]} {grade}" for grade in MARKS if counts[grade]))
        return int(self.has_failed)


def _before(site: Site, ranks: int, out: Path) -> Iterator[Check]:
    """Yield the checks that start no rank."""
    yield from checks.code()
    if site.on == "slurm":
        yield from checks.scheduler(site.cluster.partition, site.nodes(ranks))
    else:
        yield from checks.machine(ranks, site.device)
    with _there(out) as problem:
        if problem:
            yield Check("files", "failed", problem, checks.NO_FOLDER)
        else:
            yield from checks.files(out)


@contextlib.contextmanager
def _there(out: Path) -> Iterator[str]:
    """Make a folder for as long as it is needed, and yield why it cannot be made; empty if it can.

    Folders that were made are removed afterwards if they are empty.
    """
    missing = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        problem = ""
    except OSError as error:
        problem = f"{out}: {error.strerror or error}"
    try:
        yield problem
    finally:
        for folder in missing:
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()


# The ranks ----------------------------------------------------------------------------------------------------------


def _with_ranks(site: Site, ranks: int, out: Path, wait: float, report: Report) -> list[Facts]:
    """Start the ranks, wait until they have ended, and report on them; return their reports."""
    run = Run(plan=layout(ranks), train=Recipe(global_batch=ranks, microbatch=1))
    with _there(out):
        attempt = Path(tempfile.mkdtemp(prefix=".doctor-", dir=out)).resolve() / "doctor"
        attempt.mkdir()
        try:
            orders(run, site, wait, "harness.doctor.rank").write(attempt)
            try:
                site.submit([attempt], ranks, wait, 1)
            except InputError as error:
                mend = "options that the scheduler requires belong into the site file"
                report.add(Check("ranks", "failed", str(error), mend))
                return []
            state = _wait(attempt, wait, POLL_SECONDS[site.on])
            found = [facts for rank in range(ranks) if (facts := read_json(attempt / f"rank-{rank}.json"))]
            failures = [read_json(path) for path in sorted(attempt.glob("rank-*.failure.json"))]
            for line in of_ranks(run.plan, found, [f for f in failures if f], state, slurm_queue.log_lines(attempt)):
                report.add(line)
            return found
        finally:
            jobs.cancel([attempt])
            shutil.rmtree(attempt.parent, ignore_errors=True)


def layout(ranks: int) -> Plan:
    """Return a plan of this many ranks with as many degrees above 1 as its prime factors allow."""
    degrees, factors, left, factor = {"dp": 1, "tp": 1, "pp": 1}, list[int](), ranks, 2
    while left > 1:
        if left % factor:
            factor += 1
        else:
            factors.append(factor)
            left //= factor
    for factor in reversed(factors):
        degrees[min(degrees, key=lambda axis: degrees[axis])] *= factor
    return Plan(dp=degrees["dp"], tp=degrees["tp"], pp=degrees["pp"])


def orders(run: Run, site: Site, wait: float, module: str) -> Orders:
    """Return orders for ranks that execute this module instead of a training worker."""
    return Orders(
        config=to_dict(run),
        module=module,
        ranks=run.plan.world_size,
        on=site.on,
        device=site.device,
        interface=site.cluster.interface,
        container=tuple(site.cluster.container),
        code=CODE,
        folder=Path.cwd(),
        submitted=time.time(),
        token=secrets.token_hex(16),
        time_limit_seconds=wait,
        collective_timeout_seconds=COLLECTIVE_SECONDS,
        hang_seconds=0,  # these ranks send no heartbeats
        requeues=0,
        driver_pid=os.getpid() if site.on == "local" else None,
    )


def _wait(attempt: Path, seconds: float, pause: float) -> str:
    """Wait until the ranks' job has ended, or takes too long; return its state."""
    end, state = time.monotonic() + seconds, None
    while time.monotonic() < end:
        state = jobs.states([attempt]).get(attempt)
        if state is not None and state.name == "ended":
            return "ended"
        time.sleep(pause)
    if state is None:
        return "unknown"
    return f"{state.name} ({state.reason})" if state.reason else state.name
