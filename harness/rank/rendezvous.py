"""Rendezvous of the ranks of a run: by a file on one machine, by a port of the first host on a cluster.

On a cluster the host is the first of the scheduler's list and the port follows from the job's number, so no message
is needed. Rank 0 listens only on the address by which the job's other hosts reach it. The store's keys begin with a
hash of the run's token, and each rank proves that it knows the token before it counts as present. The token itself is
never sent.
"""

import hmac
import json
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import psutil

from harness.rank.devices import rank_device
from harness.rank.orders import Orders

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

PORTS = range(20_000, 32_000)
"""Ports below those that systems assign by themselves."""
PORTS_OF_JOB = 5
PATIENCE_SECONDS = 5.0
"""Longest wait for a proof that the process behind a port is of this run."""
LOOPBACK = "127.0.0.1"
DISCARD = 9
HERE = "here"
T = TypeVar("T")


class RendezvousError(RuntimeError):
    """The ranks did not find each other."""


class Joined(NamedTuple):
    """Device of a rank that has joined the others, and a store that all of them share."""

    device: "torch.device"
    store: "dist.Store"


# Place, before any rank has started ----------------------------------------------------------------------------------


def place(attempt: Path, hosts: Sequence[str], node: int, job: str | None) -> str:
    """Return where ranks join: for a job on a cluster tcp://HOST:PORT,PORT,..., else file://PATH.

    Args:
        job: number of the Slurm job; None for processes of this machine.
    """
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


# Rendezvous ---------------------------------------------------------------------------------------------------------


def join(orders: Orders, rank: int, local_rank: int, world_size: int, rendezvous: str) -> Joined:
    """Join the other ranks of the run, and choose a device; for DeepSpeed also set the variable LOCAL_RANK.

    Args:
        rendezvous: file://PATH, or tcp://HOST:PORT,PORT,...

    Raises:
        RendezvousError: they are not there within the timeout of collectives.
    """
    import torch
    import torch.distributed as dist

    timeout = timedelta(seconds=orders.collective_timeout_seconds)
    cuda = orders.device == "cuda"
    device = rank_device(local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        if "LOCAL_RANK" in os.environ:
            os.environ["LOCAL_RANK"] = str(device.index)  # DeepSpeed takes its device from it
    try:
        store = _store(rendezvous, rank, world_size, orders.token, timeout)
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device if cuda else None,
        )
    except (torch.OutOfMemoryError, RendezvousError):
        raise
    except (OSError, RuntimeError) as error:
        first_line = (str(error).strip().splitlines() or [""])[0]
        raise RendezvousError(f"{type(error).__name__}: {first_line}") from error
    return Joined(device, store)


def _store(rendezvous: str, rank: int, world_size: int, token: str, timeout: timedelta) -> "dist.Store":
    import torch.distributed as dist

    kind, _, where = rendezvous.partition("://")
    if kind == "file":
        return dist.FileStore(where, world_size)
    host, _, numbers = where.rpartition(":")
    candidates = [int(number) for number in numbers.split(",")]
    if rank:
        own = _connect(host, candidates, token, timeout)
        _prove(own, rank, token)
    else:
        own = dist.PrefixStore(_proof(token, "prefix"), _listen(host, candidates, timeout))
        _admit(own, world_size, token)
    return own


def _proof(token: str, *of: object) -> str:
    """Return a hash of these words that only a process with the token can compute."""
    return hmac.digest(token.encode(), json.dumps(of).encode(), "sha256").hex()


def _admit(store: "dist.Store", world_size: int, token: str) -> None:
    """As rank 0, wait for the other ranks, check their proofs and answer each.

    Raises:
        RendezvousError: a process without the token has taken a rank's place.
    """
    nonce = secrets.token_hex(16)
    store.set(HERE, nonce)
    for rank in range(1, world_size):
        own, _, proof = store.get(f"rank {rank}").decode(errors="replace").partition(" ")
        if not hmac.compare_digest(proof.encode(), _proof(token, rank, nonce, own).encode()):
            raise RendezvousError(f"a process that does not know the run's token came as rank {rank}")
        store.set(f"answer {rank}", _proof(token, 0, rank, own))


def _prove(store: "dist.Store", rank: int, token: str) -> None:
    """As another rank, prove to know the token, and wait for the proof of rank 0.

    Raises:
        RendezvousError: a process without the token has taken the place of rank 0.
    """
    own = secrets.token_hex(16)
    store.set(f"rank {rank}", f"{own} {_proof(token, rank, store.get(HERE).decode(errors='replace'), own)}")
    if not hmac.compare_digest(store.get(f"answer {rank}"), _proof(token, 0, rank, own).encode()):
        raise RendezvousError("a process that does not know the run's token came as rank 0")


def _listen(host: str, candidates: Sequence[int], timeout: timedelta) -> "dist.Store":
    """Listen on the first port that is free.

    Raises:
        RendezvousError: none is.
    """
    import torch.distributed as dist

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in candidates:
        try:
            listener = socket.create_server((host, port), family=family, backlog=4096)
        except OSError as error:
            why = os.strerror(error.errno or 0)
            continue
        return dist.TCPStore(
            host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    raise RendezvousError(f"cannot listen at {host} on any of the ports {', '.join(map(str, candidates))} ({why})")


def _connect(host: str, candidates: Sequence[int], token: str, timeout: timedelta) -> "dist.Store":
    """Try port after port until rank 0 of this run is behind one.

    Raises:
        RendezvousError: it is behind none within the timeout.
    """
    end = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < end:
        for port in candidates:
            store = _within(PATIENCE_SECONDS, lambda port=port: _knock(host, port, token))
            if store is not None:
                store.set_timeout(timeout)
                return store
        time.sleep(0.2)
    where = f"{host}, ports {', '.join(map(str, candidates))}"
    raise RendezvousError(f"no rank 0 of this run at {where}, within {timeout.total_seconds():.0f} s")


def _knock(host: str, port: int, token: str) -> "dist.Store | None":
    """Return the store behind a port if it is this run's, else None."""
    import torch.distributed as dist

    try:
        socket.create_connection((host, port), timeout=PATIENCE_SECONDS).close()  # a store would try for long
        patience = timedelta(seconds=PATIENCE_SECONDS)
        store = dist.TCPStore(host, port, is_master=False, timeout=patience, wait_for_workers=False)
        own = dist.PrefixStore(_proof(token, "prefix"), store)
        own.wait([HERE], patience)
    except (OSError, RuntimeError):
        return None
    return own


def _within(seconds: float, action: Callable[[], T]) -> T | None:
    """Return the result of an action; None if it takes too long, as with a process behind a port that is silent."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(action()), daemon=True)
    thread.start()
    thread.join(2 * seconds + 1)
    return found[0] if found else None
