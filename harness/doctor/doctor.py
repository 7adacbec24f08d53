"""The verb `doctor`: checks before a sweep, each a line that is ok, a warning or failed."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from harness.doctor import checks
from harness.doctor.checks import Check
from harness.doctor.measuring import failure_of, follow, orders, started
from harness.doctor.ranks import of_ranks, rank_table, time_table
from harness.doctor.report import HostReport, report_of
from harness.experiment.folders import OWN
from harness.launch.flags import DeviceChoice, require_positive
from harness.launch.site_file import read_cluster
from harness.launch.slurm import DeviceKind, Site, Where
from harness.rank.devices import gpu_count
from harness.rank.json_files import read_as
from harness.rank.slurm_queue import log_lines
from harness.terminal import Flag, print_json
from impl.errors import InputError
from impl.fields import divisors
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run

MARKS = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def doctor(
    *,
    on: Where = "local",
    ranks: int | None = None,
    site: Path | None = None,
    partition: str | None = None,
    account: str | None = None,
    ranks_per_node: int | None = None,
    device: DeviceChoice = "auto",
    out: Path = OWN,
    wait: float = 300.0,
    json: Flag = False,
) -> int:
    """Check this environment before a sweep: versions, devices, disk, clocks, scheduler, communication of ranks.

    Args:
        on: Local processes, or a Slurm cluster.
        ranks: Ranks to start; by default one per GPU here (two without), or two whole nodes of the cluster.
        site: Site file, as given to `run`.
        partition: Slurm partition.
        account: Slurm account.
        ranks_per_node: Ranks on one node of the cluster.
        device: cpu, or cuda with one GPU per rank; auto is cuda where this machine has GPUs.
        out: Folder of records, as given to `run`: it is checked, and temporarily holds the ranks' files.
        wait: Seconds to wait for the ranks, including the cluster's queue.
        json: Print one JSON document on standard output.
    """
    cluster = read_cluster(site, partition=partition, account=account, ranks_per_node=ranks_per_node)
    gpus = gpu_count() if on == "local" else 0
    chosen: DeviceKind = ("cuda" if gpus else "cpu") if device == "auto" else device
    here = gpus if gpus and chosen == "cuda" else 2
    count = ranks if ranks is not None else here if on == "local" else 2 * cluster.ranks_per_node
    where = Site(on=on, device=chosen, cluster=cluster)
    require_positive(wait=wait, ranks=count)
    if (on == "slurm" or chosen == "cpu") and (reason := where.why_invalid(count)):
        raise InputError(f"--ranks {count}: {reason}")
    report = Findings(quiet=json)
    for line in _before(where, count, out):
        report.add(line)
    if report.has_failed:
        report.add(Check("ranks", "warning", "not started", "mend first what has failed above"))
        return report.end([])
    return report.end(_with_ranks(where, count, out, wait, report))


class Findings:
    """Results of the checks of a machine, each printed as a line as soon as it is known."""

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

    def end(self, ranks: Sequence[HostReport]) -> int:
        """Print tables of ranks and times, and the counts; return the exit status."""
        counts = Counter(line.grade for line in self.lines)
        if self.quiet:
            lines = [line._asdict() for line in self.lines]
            print_json({"checks": lines, "ranks": [asdict(rank) for rank in ranks], "counts": counts})
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
    yield from checks.files(out)


def _with_ranks(site: Site, ranks: int, out: Path, wait: float, report: Findings) -> list[HostReport]:
    """Start the ranks, wait until they have ended, and report on them; return their reports."""
    run = Run(plan=layout(ranks), train=Recipe(global_batch=ranks, microbatch=1))
    spec = orders(run, site, wait, "harness.doctor.rank")
    try:
        with checks.existing(out), started(spec, site, out) as attempt:
            state = follow(attempt, spec)
            found = [one for rank in range(ranks) if (one := read_as(HostReport, report_of(attempt, rank)))]
            for line in of_ranks(run.plan, found, failure_of(attempt, ranks), state, log_lines(attempt)):
                report.add(line)
            return found
    except InputError as error:
        mend = "options that the scheduler requires belong in the site file"
        report.add(Check("ranks", "failed", str(error), mend))
        return []


def layout(ranks: int) -> Plan:
    """Return a plan of this number of ranks with the most degrees above 1, as equal as possible."""
    pairs = [(dp, tp) for dp in divisors(ranks) for tp in divisors(ranks // dp)]
    dp, tp, pp = min((sorted((dp, tp, ranks // dp // tp), reverse=True) for dp, tp in pairs), key=sum)
    return Plan(dp=dp, tp=tp, pp=pp)
