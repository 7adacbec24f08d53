"""Addresses at which the ranks of a run join: a file on one machine, ports of the first host on a cluster.

On a cluster the host is the first of the scheduler's list and the port follows from the job's number, so no message
is needed.
"""

import random
import socket
from collections.abc import Sequence
from pathlib import Path

import psutil

PORTS = range(20_000, 32_000)
"""Ports below those that systems assign by themselves."""
PORTS_OF_JOB = 5
LOOPBACK = "127.0.0.1"
DISCARD = 9
"""Port of another host for which a route is looked up; nothing is sent to it."""


def place(attempt: Path, hosts: Sequence[str], node: int, job: str | None) -> str:
    """Return where ranks join: for a Slurm job tcp://HOST:PORT,PORT,..., without one file://PATH."""
    if job is None:
        return f"file://{attempt}/rendezvous"
    return f"tcp://{address(hosts, node)}:{','.join(map(str, ports(job)))}"


def ports(job: str) -> list[int]:
    """Return the ports of a job in the order in which they are tried, as one may be taken."""
    return random.Random(job).sample(PORTS, PORTS_OF_JOB)


def address(hosts: Sequence[str], node: int) -> str:
    """Return the first host's address as this host reaches it; on the first host, its own towards the others."""
    if len(hosts) == 1:
        return LOOPBACK
    return hosts[0] if node else own_address(hosts[1])


def own_address(other: str) -> str:
    """Return this host's address on the route to another; its name may stand for one that only itself can reach."""
    family, kind, protocol, _, to = socket.getaddrinfo(other, DISCARD, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as route:
        route.connect(to)  # nothing is sent
        return route.getsockname()[0]


def interface(hosts: Sequence[str], node: int) -> str | None:
    """Return the network interface on the route to the job's other hosts, or within this one; None if not found."""
    try:
        own = LOOPBACK if len(hosts) == 1 else own_address(hosts[0] if node else hosts[1])
    except OSError:
        return None
    found = (name for name, has in psutil.net_if_addrs().items() if any(a.address.split("%")[0] == own for a in has))
    return next(found, None)
