"""What the words of the doctor's ranks come to, as lines of its report and as tables."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from harness.doctor.checks import SKEW_SECONDS, Check, failed, ok, warning
from impl.plan import AXES, Plan

SLOW_BYTES_PER_SECOND = 1e8
"""Between hosts: below what 1 Gbit Ethernet carries."""
NETWORK = "a firewall, or the wrong network? `interface` in the site file names the one that ranks use"

Facts = dict[str, Any]
"""What a rank has written of itself."""


def of_ranks(
    plan: Plan, found: Sequence[Facts], failures: Sequence[Facts], state: str, said: Sequence[str]
) -> Iterator[Check]:
    """What the ranks' words come to: who came, on which host, whether they met and how they talk."""
    ranks, there = plan.world_size, {facts["rank"] for facts in found}
    if len(found) < ranks:
        missing = ", ".join(str(rank) for rank in range(ranks) if rank not in there)
        yield failed("ranks", f"no word from rank {missing}: {_last_words(failures, state, said)}", _mend(state))
        return
    hosts = Counter(facts["host"] for facts in found)
    yield ok("ranks", f"{ranks} on {', '.join(f'{host} ({count})' for host, count in hosts.items())}")
    yield from _hosts(found)
    yield from _meeting(plan, found, failures, state, said)
    if all("clock_seconds" in facts for facts in found):
        yield _clocks(found)
    if all(facts["at"] == "" for facts in found):
        yield from _speeds(found)


def _last_words(failures: Sequence[Facts], state: str, said: Sequence[str]) -> str:
    """Why, from whoever knows most: a rank's failure and the end of its log, the scheduler's log, the job's state."""
    if failures:
        first = min(failures, key=lambda failure: failure["time"])
        last = next((line.strip() for line in reversed(first["log"]) if line.strip()), "")
        is_told = not last or first["reason"].rpartition(": ")[2] in last
        return first["reason"] if is_told else f"{first['reason']} ({last})"
    last = next((line.strip() for line in reversed(said) if line.strip()), "")
    return f"the job is {state}{f': {last}' if last else ''}"


def _mend(state: str) -> str:
    if state.startswith("pending"):
        return "the queue is long: a longer --wait, fewer --ranks, or another partition"
    return "do all nodes see this code, its Python and --out? modules and container are the site file's"


def _hosts(found: Sequence[Facts]) -> Iterator[Check]:
    """Whether all ranks run on the same kind of thing."""
    for what, name in (("torch", "torch"), ("python of ranks", "python"), ("device of ranks", "device")):
        values = Counter(facts[name] for facts in found)
        shown = ", ".join(f"{value} ({count})" for value, count in values.items())
        if "none" in values:
            yield failed(what, shown, "no GPU is seen there: ask the scheduler for them, or --device cpu")
        elif len(values) > 1:
            yield warning(what, shown, "ranks that differ give losses and times that no one can repeat: one image")
        else:
            yield ok(what, next(iter(values)))
    backend = found[0]["backend"]
    if not all(facts["has_backend"] for facts in found):
        yield failed("backend", f"this torch has no {backend}", "another build of torch, or --device cpu")
    crowded = _crowded(found)
    if crowded:
        yield warning("cores of ranks", crowded, "`cpus_per_rank` in the site file, or fewer ranks a node")
    else:
        least = min(facts["cores"] for facts in found)
        yield ok("cores of ranks", f"{least} or more")


def _crowded(found: Sequence[Facts]) -> str:
    """A host whose ranks have to share cores; nothing: there is none."""
    for host in dict.fromkeys(facts["host"] for facts in found):
        own = [facts for facts in found if facts["host"] == host]
        cores = {core for facts in own for core in facts["core_set"]}
        if cores and len(own) > len(cores):
            return f"{host} gives {len(cores)} to {len(own)} ranks"
    return ""


def _meeting(
    plan: Plan, found: Sequence[Facts], failures: Sequence[Facts], state: str, said: Sequence[str]
) -> Iterator[Check]:
    """Whether the ranks have met, and an all-reduce over every axis has come back."""
    late = [facts["rank"] for facts in found if "met_seconds" not in facts]
    if late:
        named = ", ".join(map(str, late))
        yield failed("meeting", f"rank {named} met nobody: {_last_words(failures, state, said)}", NETWORK)
        return
    yield ok("meeting", f"all ranks after {max(facts['met_seconds'] for facts in found):.1f} s")
    for axis in AXES:
        degree = getattr(plan, axis)
        if degree == 1:
            continue
        lost = [facts["rank"] for facts in found if axis not in facts["axes"]]
        if lost:
            named = ", ".join(map(str, lost))
            found_there = f"rank {named} did not come back from it: {_last_words(failures, state, said)}"
            yield failed(f"all-reduce {axis}", found_there, NETWORK)
            return
        seconds = max(facts["axes"][axis] for facts in found)
        yield ok(f"all-reduce {axis}", f"groups of {degree}, {seconds * 1e3:.1f} ms")
    stuck = [facts for facts in found if facts["at"]]
    if stuck:
        at = ", ".join(f"rank {facts['rank']} {facts['at']}" for facts in stuck)
        yield failed("end", f"{at}: {_last_words(failures, state, said)}", NETWORK)


def _clocks(found: Sequence[Facts]) -> Check:
    """How far the clocks of the ranks' hosts are apart."""
    ahead = [facts["clock_seconds"] for facts in found]
    apart = max(ahead) - min(ahead)
    if apart > SKEW_SECONDS:
        worst = max(found, key=lambda facts: abs(facts["clock_seconds"]))
        found_there = f"{apart:.1f} s apart, {worst['host']} most"
        return warning("clocks", found_there, "ask for NTP there; times of ranks in records are their hosts'")
    return ok("clocks", f"within {max(apart, 1e-3) * 1e3:.0f} ms of each other")


def _speeds(found: Sequence[Facts]) -> Iterator[Check]:
    """Bandwidths, and whether the one between hosts is one."""
    first = found[0]
    for transfer in first["transfers"]:
        peer = found[transfer["peer"]]
        across = peer["host"] != first["host"]
        best = max(one_way(one) for one in transfer["sizes"])
        what, shown = "p2p" if not across else "p2p hosts", f"rank 0 to {transfer['peer']}: {best / 1e9:.2f} GB/s"
        slow = across and best < SLOW_BYTES_PER_SECOND
        yield warning(what, shown, f"slow for a cluster; {NETWORK}") if slow else ok(what, shown)
    if first["all_reduce"]:
        best = max(ring(one, len(found)) for one in first["all_reduce"])
        yield ok("all-reduce", f"{len(found)} ranks: {best / 1e9:.2f} GB/s sent by each")


def one_way(there_and_back: Mapping[str, float]) -> float:
    """Bytes per second of one direction, from the time of both."""
    return 2 * there_and_back["bytes"] / there_and_back["seconds"]


def ring(reduced: Mapping[str, float], ranks: int) -> float:
    """Bytes per second that a rank sends in a ring all-reduce, 2 (n - 1) / n of the message (NCCL's bus bandwidth)."""
    return 2 * (ranks - 1) / ranks * reduced["bytes"] / reduced["seconds"]


# Tables -------------------------------------------------------------------------------------------------------------


def rank_table(ranks: Sequence[Facts]) -> Table:
    """Who runs where, at which place of the mesh."""
    table = Table("rank", "host", "local rank", "process", *AXES, "device", "cores", box=None, pad_edge=False)
    for facts in ranks:
        place = facts.get("place", {})
        words = [facts["rank"], facts["host"], facts["local_rank"], facts["process"]]
        words += [place.get(axis, "") for axis in AXES] + [facts["device"], facts["cores"]]
        table.add_row(*map(str, words))
    return table


def time_table(ranks: Sequence[Facts]) -> Table:
    """Times and rates of messages by size; of an all-reduce the median rank's."""
    table = Table("message", "bytes", "µs", "GB/s", box=None, pad_edge=False)
    done = [facts for facts in ranks if facts["at"] == ""]
    if len(done) < 2:
        return table
    row: Callable[[str, Mapping[str, float], float], None] = lambda what, one, rate: table.add_row(
        what, f"{one['bytes']:,}", f"{one['seconds'] * 1e6:,.0f}", f"{rate / 1e9:.3f}"
    )
    for transfer in done[0]["transfers"]:
        for one in transfer["sizes"]:
            row(f"rank 0 to {transfer['peer']} and back", one, one_way(one))
    for i, one in enumerate(done[0]["all_reduce"]):
        median = statistics.median(facts["all_reduce"][i]["seconds"] for facts in done)
        shown = {**one, "seconds": median}
        row(f"all-reduce, {len(done)} ranks", shown, ring(shown, len(done)))
    return table
