"""Checks and tables of what the doctor's ranks report."""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from harness.doctor.checks import SKEW_SECONDS, Check, check
from impl.plan import AXES, Plan

SLOW_BYTES_PER_SECOND = 1e8
"""Least rate between hosts that is not slow: below it is what 1 Gbit Ethernet carries."""
NETWORK = "a firewall, or the wrong network? `interface` in the site file names the one that ranks use"

Facts = dict[str, Any]
"""Report of a rank."""


def of_ranks(
    plan: Plan, found: Sequence[Facts], failures: Sequence[Facts], state: str, log: Sequence[str]
) -> Iterator[Check]:
    """Yield checks of where the ranks run, whether they meet, and how fast they communicate.

    Args:
        found: reports of ranks, by rank; those of ranks that did not start are missing.
        failures: failure files of ranks.
        state: state of the ranks' job.
        log: last lines of the scheduler's log.
    """
    why = _last_words(failures, state, log)
    if missing := sorted(set(range(plan.world_size)) - {facts["rank"] for facts in found}):
        mend = "check that all nodes see this code, its Python and --out; modules and container are the site file's"
        if state.startswith("pending"):
            mend = "the queue is long: a longer --wait, fewer --ranks, or another partition"
        yield Check("ranks", "failed", f"no report from rank {_listed(missing)}: {why}", mend)
        return
    yield check("ranks", f"{plan.world_size} on {_counted(found, 'host')}")
    yield from _hosts(found)
    yield from _meeting(plan, found, why)
    if all("clock_seconds" in facts for facts in found):
        yield _clocks(found)
    if all(facts["at"] == "" for facts in found):
        yield from _speeds(found)


def _last_words(failures: Sequence[Facts], state: str, log: Sequence[str]) -> str:
    """Return the reason of the first failure with the end of its log, else the job's state and the scheduler's log."""
    if failures:
        first = min(failures, key=lambda failure: failure["time"])
        last = _last(first["log"])
        is_known = not last or first["reason"].rpartition(": ")[2] in last
        return first["reason"] if is_known else f"{first['reason']} ({last})"
    return f"the job is {state}{f': {_last(log)}' if _last(log) else ''}"


def _last(lines: Sequence[str]) -> str:
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _counted(found: Sequence[Facts], name: str) -> str:
    """Return the values of a field, each with the number of ranks that have it."""
    return ", ".join(f"{value} ({count})" for value, count in Counter(facts[name] for facts in found).items())


def _hosts(found: Sequence[Facts]) -> Iterator[Check]:
    """Yield checks that all ranks run with the same software on the same kind of device, with a core each."""
    for what, name in (("torch", "torch"), ("python of ranks", "python"), ("device of ranks", "device")):
        values = {facts[name] for facts in found}
        yield check(
            what,
            _counted(found, name) if len(values) > 1 or "none" in values else str(found[0][name]),
            ("none" in values, "failed", "no GPU is visible there: request them from the scheduler, or --device cpu"),
            (len(values) > 1, "warning", "losses and times of ranks that differ cannot be reproduced: use one image"),
        )
    if not all(facts["has_backend"] for facts in found):
        yield Check("backend", "failed", f"this torch has no {found[0]['backend']}", "another build, or --device cpu")
    crowded = _crowded(found)
    mend = "`cpus_per_rank` in the site file, or fewer ranks a node"
    least = min(facts["cores"] for facts in found)
    yield check("cores of ranks", crowded or f"{least} or more", (bool(crowded), "warning", mend))


def _crowded(found: Sequence[Facts]) -> str:
    """Return a host with fewer cores than ranks; empty if there is none."""
    for host in dict.fromkeys(facts["host"] for facts in found):
        own = [facts for facts in found if facts["host"] == host]
        cores = {core for facts in own for core in facts["core_set"]}
        if cores and len(own) > len(cores):
            return f"{host} gives {len(cores)} to {len(own)} ranks"
    return ""


def _meeting(plan: Plan, found: Sequence[Facts], why: str) -> Iterator[Check]:
    """Yield checks that the ranks have met, and that an all-reduce over every axis has ended; none after a failure."""
    if late := [facts["rank"] for facts in found if "met_seconds" not in facts]:
        yield Check("meeting", "failed", f"rank {_listed(late)} met no other rank: {why}", NETWORK)
        return
    yield check("meeting", f"all ranks after {max(facts['met_seconds'] for facts in found):.1f} s")
    for axis in (axis for axis in AXES if getattr(plan, axis) > 1):
        if lost := [facts["rank"] for facts in found if axis not in facts["axes"]]:
            yield Check(f"all-reduce {axis}", "failed", f"rank {_listed(lost)} did not return from it: {why}", NETWORK)
            return
        seconds = max(facts["axes"][axis] for facts in found)
        yield check(f"all-reduce {axis}", f"groups of {getattr(plan, axis)}, {seconds * 1e3:.1f} ms")
    if stuck := [f"rank {facts['rank']} {facts['at']}" for facts in found if facts["at"]]:
        yield Check("end", "failed", f"{', '.join(stuck)}: {why}", NETWORK)


def _clocks(found: Sequence[Facts]) -> Check:
    """Compare the clocks of the ranks' hosts."""
    ahead = [facts["clock_seconds"] for facts in found]
    apart = max(ahead) - min(ahead)
    if apart > SKEW_SECONDS:
        worst = max(found, key=lambda facts: abs(facts["clock_seconds"]))
        mend = "ask for NTP there; times of ranks in records are their hosts'"
        return Check("clocks", "warning", f"{apart:.1f} s apart, {worst['host']} most", mend)
    return check("clocks", f"within {max(apart, 1e-3) * 1e3:.0f} ms of each other")


def _speeds(found: Sequence[Facts]) -> Iterator[Check]:
    """Yield the rates between ranks, and check those between hosts."""
    first = found[0]
    for transfer in first["transfers"]:
        is_across = found[transfer["peer"]]["host"] != first["host"]
        best = max(one_way(one) for one in transfer["sizes"])
        is_slow = is_across and best < SLOW_BYTES_PER_SECOND
        rate = f"rank 0 to {transfer['peer']}: {best / 1e9:.2f} GB/s"
        yield check("p2p hosts" if is_across else "p2p", rate, (is_slow, "warning", f"slow for a cluster; {NETWORK}"))
    if first["all_reduce"]:
        best = max(ring(one, len(found)) for one in first["all_reduce"])
        yield check("all-reduce", f"{len(found)} ranks: {best / 1e9:.2f} GB/s sent by each")


def one_way(there_and_back: Mapping[str, float]) -> float:
    """Return the bytes per second of one direction, from the time of both."""
    return 2 * there_and_back["bytes"] / there_and_back["seconds"]


def ring(reduced: Mapping[str, float], ranks: int) -> float:
    """Return the bytes per second that a rank sends in a ring all-reduce: 2 (n - 1) / n of the message.

    It is NCCL's bus bandwidth.
    """
    return 2 * (ranks - 1) / ranks * reduced["bytes"] / reduced["seconds"]


def rank_table(ranks: Sequence[Facts]) -> Table:
    """Return the table of the ranks' hosts, and their places in the mesh."""
    table = Table("rank", "host", "local rank", "process", *AXES, "device", "cores", box=None, pad_edge=False)
    for facts in ranks:
        place = [facts.get("place", {}).get(axis, "") for axis in AXES]
        words = [facts[name] for name in ("rank", "host", "local_rank", "process")]
        table.add_row(*map(str, [*words, *place, facts["device"], facts["cores"]]))
    return table


def time_table(ranks: Sequence[Facts]) -> Table:
    """Return the table of times and rates of messages by size; an all-reduce takes the median rank's time."""
    table = Table("message", "bytes", "µs", "GB/s", box=None, pad_edge=False)
    done = [facts for facts in ranks if facts["at"] == ""]
    if len(done) < 2:
        return table
    rows = [
        (f"rank 0 to {transfer['peer']} and back", one, one_way(one))
        for transfer in done[0]["transfers"]
        for one in transfer["sizes"]
    ]
    for i, one in enumerate(done[0]["all_reduce"]):
        median = {**one, "seconds": statistics.median(facts["all_reduce"][i]["seconds"] for facts in done)}
        rows.append((f"all-reduce, {len(done)} ranks", median, ring(median, len(done))))
    for what, one, rate in rows:
        table.add_row(what, f"{one['bytes']:,}", f"{one['seconds'] * 1e6:,.0f}", f"{rate / 1e9:.3f}")
    return table
