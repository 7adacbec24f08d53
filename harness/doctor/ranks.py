"""Checks and tables of what the doctor's ranks report."""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.table import Table

from harness.doctor.checks import SKEW_SECONDS, Check, check
from harness.doctor.report import HostReport, Timing
from harness.rank.failure import Failure
from impl.plan import AXES, Plan

SLOW_BYTES_PER_SECOND = 1e8
"""Least rate between hosts that is not slow: below it is what 1 Gbit Ethernet carries."""
NETWORK = "a firewall, or the wrong network? `interface` in the site file names the one that ranks use"
SHARED_GPU = "several ranks of a host have one GPU: a GPU for each rank, from the scheduler or CUDA_VISIBLE_DEVICES"


def of_ranks(
    plan: Plan, found: Sequence[HostReport], failure: Failure | None, state: str, log: Sequence[str]
) -> Iterator[Check]:
    """Yield checks of where the ranks run, whether they meet, and how fast they communicate.

    Args:
        found: reports of ranks, by rank; those of ranks that did not start are missing.
    """
    why = _reason(failure, state, log)
    if missing := sorted(set(range(plan.world_size)) - {report.rank for report in found}):
        mend = "check that all nodes see this code, its Python and --out; modules and container are the site file's"
        if state.startswith("pending"):
            mend = "the queue is long: a longer --wait, fewer --ranks, or another partition"
        yield Check("ranks", "failed", f"no report from rank {', '.join(map(str, missing))}: {why}", mend)
        return
    yield check("ranks", f"{plan.world_size} on {_counted([report.host for report in found])}")
    yield from _hosts(found)
    yield from _meeting(plan, found, why)
    ahead = [(report.clock_seconds, report.host) for report in found if report.clock_seconds is not None]
    if len(ahead) == len(found):
        yield _clocks(ahead)
    if all(report.at == "" for report in found):
        yield from _speeds(found)


def _reason(failure: Failure | None, state: str, log: Sequence[str]) -> str:
    """Return the reason of the failure with the end of its log, else the job's state and the scheduler's log."""
    last = next((line.strip() for line in reversed(failure.log if failure else log) if line.strip()), "")
    if failure is None:
        return f"the job is {state}{f': {last}' if last else ''}"
    is_known = not last or failure.reason.rpartition(": ")[2] in last
    return failure.reason if is_known else f"{failure.reason} ({last})"


def _counted(values: Sequence[str]) -> str:
    """Return the different values, each with the number of ranks that have it."""
    return ", ".join(f"{value} ({count})" for value, count in Counter(values).items())


def _hosts(found: Sequence[HostReport]) -> Iterator[Check]:
    """Yield checks that all ranks run with the same software on the same kind of device, with a core each."""
    for what, values in (
        ("torch", [report.torch for report in found]),
        ("python of ranks", [report.python for report in found]),
        ("device of ranks", [report.device for report in found]),
    ):
        differ = len(set(values)) > 1
        yield check(
            what,
            _counted(values) if differ or "none" in values else values[0],
            ("none" in values, "failed", "no GPU is visible there: request them from the scheduler, or --device cpu"),
            (differ, "warning", "losses and times of ranks that differ cannot be reproduced: use one image"),
        )
    if not all(report.has_backend for report in found):
        yield Check("backend", "failed", f"this torch has no {found[0].backend}", "another build, or --device cpu")
    crowded = _crowded(found)
    mend = "`cpus_per_rank` in the site file, or fewer ranks a node"
    least = min(report.cores for report in found)
    yield check("cores of ranks", crowded or f"{least} or more", (bool(crowded), "warning", mend))


def _crowded(found: Sequence[HostReport]) -> str:
    """Return a host with fewer cores than ranks; empty if there is none."""
    for host, ranks in Counter(report.host for report in found).items():
        cores = {core for report in found if report.host == host for core in report.core_set}
        if ranks > len(cores):
            return f"{host} gives {len(cores)} to {ranks} ranks"
    return ""


def _meeting(plan: Plan, found: Sequence[HostReport], why: str) -> Iterator[Check]:
    """Yield checks that the ranks have met, and that an all-reduce over every axis has ended; none after a failure."""
    mend = SHARED_GPU if "Duplicate GPU" in why else NETWORK  # NCCL's words
    if late := [report.rank for report in found if report.met_seconds is None]:
        yield Check("meeting", "failed", f"rank {', '.join(map(str, late))} met no other rank: {why}", mend)
        return
    yield check("meeting", f"all ranks after {max(report.met_seconds or 0.0 for report in found):.1f} s")
    for axis in (axis for axis in AXES if getattr(plan, axis) > 1):
        if lost := [report.rank for report in found if axis not in report.axes]:
            ranks = ", ".join(map(str, lost))
            yield Check(f"all-reduce {axis}", "failed", f"rank {ranks} did not return from it: {why}", mend)
            return
        seconds = max(report.axes[axis] for report in found)
        yield check(f"all-reduce {axis}", f"groups of {getattr(plan, axis)}, {seconds * 1e3:.1f} ms")
    if stuck := [f"rank {report.rank} {report.at}" for report in found if report.at]:
        yield Check("end", "failed", f"{', '.join(stuck)}: {why}", mend)


def _clocks(ahead: Sequence[tuple[float, str]]) -> Check:
    """Compare the clocks of ranks' hosts: seconds ahead of the first one's, and name."""
    apart = max(ahead)[0] - min(ahead)[0]
    if apart > SKEW_SECONDS:
        _, worst = max(ahead, key=lambda clock: abs(clock[0]))
        mend = "ask for NTP there; times of ranks in records are their hosts'"
        return Check("clocks", "warning", f"{apart:.1f} s apart, {worst} most", mend)
    return check("clocks", f"within {max(apart, 1e-3) * 1e3:.0f} ms of each other")


def _speeds(found: Sequence[HostReport]) -> Iterator[Check]:
    """Yield the rates between ranks, and check those between hosts."""
    first = found[0]
    for transfer in first.transfers:
        is_across = found[transfer.peer].host != first.host
        best = max(map(_one_way, transfer.sizes))
        is_slow = is_across and best < SLOW_BYTES_PER_SECOND
        rate = f"rank 0 to {transfer.peer}: {best / 1e9:.2f} GB/s"
        yield check("p2p hosts" if is_across else "p2p", rate, (is_slow, "warning", f"slow for a cluster; {NETWORK}"))
    if first.all_reduce:
        best = max(_ring(timing, len(found)) for timing in first.all_reduce)
        yield check("all-reduce", f"{len(found)} ranks: {best / 1e9:.2f} GB/s sent by each")


def _one_way(there_and_back: Timing) -> float:
    """Return the bytes per second of one direction, from the time of both."""
    return 2 * there_and_back.bytes / there_and_back.seconds


def _ring(reduced: Timing, ranks: int) -> float:
    """Return the bytes per second that a rank sends in a ring all-reduce: 2 (n - 1) / n of the message.

    It is NCCL's bus bandwidth.
    """
    return 2 * (ranks - 1) / ranks * reduced.bytes / reduced.seconds


def rank_table(ranks: Sequence[HostReport]) -> Table:
    """Return the table of the ranks' hosts, and their places in the mesh."""
    table = Table("rank", "host", "local rank", "process", *AXES, "device", "cores", box=None, pad_edge=False)
    for one in ranks:
        place = [one.place.get(axis, "") for axis in AXES]
        table.add_row(*map(str, [one.rank, one.host, one.local_rank, one.process, *place, one.device, one.cores]))
    return table


def time_table(ranks: Sequence[HostReport]) -> Table:
    """Return the table of times and rates of messages by size; an all-reduce takes the median rank's time."""
    table = Table("message", "bytes", "µs", "GB/s", box=None, pad_edge=False)
    done = [report for report in ranks if report.at == ""]
    if len(done) < 2:
        return table
    rows = [
        (f"rank 0 to {transfer.peer} and back", timing, _one_way(timing))
        for transfer in done[0].transfers
        for timing in transfer.sizes
    ]
    for timings in zip(*(report.all_reduce for report in done), strict=True):
        median = Timing(timings[0].bytes, statistics.median(timing.seconds for timing in timings))
        rows.append((f"all-reduce, {len(done)} ranks", median, _ring(median, len(done))))
    for what, timing, rate in rows:
        table.add_row(what, f"{timing.bytes:,}", f"{timing.seconds * 1e6:,.0f}", f"{rate / 1e9:.3f}")
    return table
