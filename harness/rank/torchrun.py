"""Ranks on nodes that torchrun has started: `torchrun --nnodes 2 ... -m lmscale run quickstart --on torchrun`.

Every process that torchrun starts runs the same command. The first one carries out the sweep; each other one supervises
the rank of its own number in every attempt that the first one announces in torchrun's store. What ranks write is in a
folder that all nodes see, as on a cluster.
"""

import atexit
import functools
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from harness.rank.addresses import own_address
from harness.rank.devices import visible_gpus
from harness.rank.heartbeat import read_alive
from harness.rank.orders import Orders, UnreadableError
from harness.rank.supervisor import Supervisor, Task
from impl.errors import InputError

if TYPE_CHECKING:
    import torch.distributed as dist

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
"""Variables that torchrun sets."""
EXAMPLE = "torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m lmscale run ..."
LONG = timedelta(days=365)
"""Timeout of torchrun's store: processes wait in it for as long as the sweep goes on."""
END = "end"
"""What is announced after the last attempt."""


@dataclass(frozen=True)
class Agents:
    """Nodes and processes of torchrun."""

    ranks: int
    per_node: int
    hosts: tuple[str, ...]

    def why_invalid(self, ranks: int) -> str | None:
        """Return why this many ranks cannot be placed on them, in one line; None if they can."""
        if ranks > self.ranks:
            return f"the plan needs {ranks} ranks, torchrun has started {self.ranks}; valid: a plan of {self.ranks}"
        if ranks > self.per_node and ranks % self.per_node:
            return f"{ranks} ranks do not fill nodes of {self.per_node} (torchrun --nproc-per-node) evenly"
        return None

    def of_ranks(self, ranks: int) -> tuple[str, ...]:
        """Return the hosts of the first ranks."""
        return self.hosts[: -(-ranks // self.per_node)]


class Announced:
    """Attempts in torchrun's store, in order: the first process writes them, each other one reads."""

    def __init__(self, store: "dist.Store") -> None:
        self.store, self.count = store, 0

    def put(self, what: str) -> None:
        """Announce an attempt, or the end."""
        self.store.set(f"attempt {self.count}", what)
        self.count += 1

    def get(self) -> str:
        """Wait for the next one."""
        self.count += 1
        return self.store.get(f"attempt {self.count - 1}").decode()


@functools.cache
def join() -> tuple[Agents, Announced] | None:
    """Return the sweep's connection in the first process; in every other process follow it to its end, and return None.

    Raises:
        InputError: torchrun has not started this process, or nodes do not have as many processes each.
    """
    variables = environment(os.environ)
    rank, node = int(variables["RANK"]), int(variables["GROUP_RANK"])
    import torch.distributed as dist

    store = next(iter(dist.rendezvous("env://", timeout=LONG)))[0]
    store.set_timeout(LONG)
    announced, first = Announced(store), variables["MASTER_ADDR"]
    if variables["LOCAL_RANK"] == "0":
        store.set(f"host {node}", own_address(first) if node else first)
    if rank:
        follow(announced, rank, variables)
        return None
    atexit.register(_end, announced)
    ranks, per_node = int(variables["WORLD_SIZE"]), int(variables["LOCAL_WORLD_SIZE"])
    if ranks % per_node:
        raise InputError(f"--on torchrun: {ranks} processes, {per_node} of them here; valid: as many on each node")
    hosts = tuple(store.get(f"host {each}").decode() for each in range(ranks // per_node))
    return Agents(ranks, per_node, hosts), announced


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables.

    Raises:
        InputError: some are missing.
    """
    if missing := [name for name in NAMES if name not in variables]:
        raise InputError(f"--on torchrun: {missing[0]} is not set, so torchrun has not started this; valid: {EXAMPLE}")
    return {name: variables[name] for name in NAMES}


def follow(announced: Announced, rank: int, variables: Mapping[str, str]) -> None:
    """Supervise the rank of this number in every attempt, until the end is announced."""
    while (what := announced.get()) != END:
        attempt = Path(what)
        with suppress(UnreadableError):  # it was given up before it began
            orders = replace(Orders.read(attempt), driver_pid=None)  # a process of another host
            if rank < orders.ranks:
                node, local_rank = int(variables["GROUP_RANK"]), int(variables["LOCAL_RANK"])
                task = Task(rank, orders.ranks, local_rank, attempt.name, orders.hosts, node)
                gpus = visible_gpus() if orders.device == "cuda" else ()  # all, of which each rank takes its own
                Supervisor(attempt, orders, task, gpus=gpus).run()


def others_run(attempt: Path, ranks: int) -> bool:
    """Return True if a rank that another process supervises has not ended."""
    lives = (read_alive(attempt, rank) for rank in range(1, ranks))
    return any(life is None or not life.ended for life in lives)


def _end(announced: Announced) -> None:
    with suppress(RuntimeError, OSError):
        announced.put(END)
