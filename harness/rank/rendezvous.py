"""How the ranks of a run find each other: a file on one machine, a port of the first host on a cluster.

On a cluster the host is the first of the scheduler's list and the port follows from the job's number, so that nothing
has to be told. The first rank listens on the address by which the job's other hosts reach it, and on no other. The
store's keys begin with a hash of the run's token, and each rank proves that it has read the token before it counts as
present. The token itself is never sent.
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
"""Below those that systems hand out by themselves."""
TRIED = 5
PATIENCE_SECONDS = 5.0
"""How long somebody behind a port may take to say that he is of this run."""
LOOPBACK = "127.0.0.1"
DISCARD = 9
HERE = "here"
T = TypeVar("T")


class MeetingError(RuntimeError):
    """The ranks did not find each other."""


class Meeting(NamedTuple):
    """What a rank has when all have met."""

    device: "torch.device"
    store: "dist.Store"
    """The run's own: what one rank puts there, all see."""


# Where, before any rank has started ----------------------------------------------------------------------------------


def ports(job: str) -> list[int]:
    """Where the ranks of a job may meet, in the order in which they try: one may be taken."""
    return random.Random(job).sample(PORTS, TRIED)


def address(hosts: Sequence[str], node: int) -> str:
    """The first host's, as this one reaches it; the first itself: its own on the way to the others."""
    if len(hosts) == 1:
        return LOOPBACK
    return hosts[0] if node else own_address(hosts[1])


def own_address(other: str) -> str:
    """This host's on the way to another: its name may stand for one that only itself can reach."""
    family, kind, protocol, _, to = socket.getaddrinfo(other, DISCARD, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as way:
        way.connect(to)  # nothing is sent
        return way.getsockname()[0]


def interface(hosts: Sequence[str], node: int) -> str | None:
    """The network interface on the way to the job's other hosts, or within this one; None: not found."""
    try:
        own = LOOPBACK if len(hosts) == 1 else own_address(hosts[0] if node else hosts[1])
    except OSError:
        return None
    found = (name for name, has in psutil.net_if_addrs().items() if any(a.address.split("%")[0] == own for a in has))
    return next(found, None)


# Meeting ------------------------------------------------------------------------------------------------------------


def meet(orders: Orders, rank: int, local_rank: int, world_size: int, rendezvous: str) -> Meeting:
    """Join the other ranks of the run and take a device.

    Args:
        rendezvous: file://PATH, or tcp://HOST:PORT,PORT,...
    Raises:
        MeetingError: they are not there within the time that collectives have.
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
    except torch.OutOfMemoryError:
        raise
    except (OSError, RuntimeError) as error:
        if isinstance(error, MeetingError):
            raise
        first_line = (str(error).strip().splitlines() or [""])[0]
        raise MeetingError(f"{type(error).__name__}: {first_line}") from error
    return Meeting(device, store)


def _store(rendezvous: str, rank: int, world_size: int, token: str, timeout: timedelta) -> "dist.Store":
    import torch.distributed as dist

    kind, _, place = rendezvous.partition("://")
    if kind == "file":
        return dist.FileStore(place, world_size)
    host, _, numbers = place.rpartition(":")
    tried = [int(number) for number in numbers.split(",")]
    if rank:
        own = _join(host, tried, token, timeout)
        _prove(own, rank, token)
    else:
        own = dist.PrefixStore(_proof(token, "prefix"), _open(host, tried, timeout))
        _admit(own, world_size, token)
    return own


def _proof(token: str, *of: object) -> str:
    """A hash of these words that only who knows the token can make."""
    return hmac.digest(token.encode(), json.dumps(of).encode(), "sha256").hex()


def _admit(store: "dist.Store", world_size: int, token: str) -> None:
    """As rank 0, wait for the other ranks, check their proofs and answer each.

    Raises:
        MeetingError: a process that does not know the token has taken a rank's place.
    """
    nonce = secrets.token_hex(16)
    store.set(HERE, nonce)
    for rank in range(1, world_size):
        own, _, proof = store.get(f"rank {rank}").decode(errors="replace").partition(" ")
        if not hmac.compare_digest(proof.encode(), _proof(token, rank, nonce, own).encode()):
            raise MeetingError(f"a process that does not know the run's token came as rank {rank}")
        store.set(f"answer {rank}", _proof(token, 0, rank, own))


def _prove(store: "dist.Store", rank: int, token: str) -> None:
    """As another rank, prove to know the token, and wait for the proof of rank 0.

    Raises:
        MeetingError: a process that does not know the token has taken the place of rank 0.
    """
    own = secrets.token_hex(16)
    store.set(f"rank {rank}", f"{own} {_proof(token, rank, store.get(HERE).decode(errors='replace'), own)}")
    if not hmac.compare_digest(store.get(f"answer {rank}"), _proof(token, 0, rank, own).encode()):
        raise MeetingError("a process that does not know the run's token came as rank 0")


def _open(host: str, tried: Sequence[int], timeout: timedelta) -> "dist.Store":
    """Listen on the first port that is free.

    Raises:
        MeetingError: none is.
    """
    import torch.distributed as dist

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in tried:
        try:
            listener = socket.create_server((host, port), family=family, backlog=4096)
        except OSError as error:
            why = os.strerror(error.errno or 0)
            continue
        return dist.TCPStore(
            host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    raise MeetingError(f"cannot listen at {host} on any of the ports {', '.join(map(str, tried))} ({why})")


def _join(host: str, tried: Sequence[int], token: str, timeout: timedelta) -> "dist.Store":
    """Go from port to port until somebody of this run is behind one.

    Raises:
        MeetingError: nobody is, for as long as one may wait.
    """
    end = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < end:
        for port in tried:
            store = _within(PATIENCE_SECONDS, lambda port=port: _knock(host, port, token))
            if store is not None:
                store.set_timeout(timeout)
                return store
        time.sleep(0.2)
    where = f"{host}, ports {', '.join(map(str, tried))}"
    raise MeetingError(f"no rank 0 of this run at {where}, within {timeout.total_seconds():.0f} s")


def _knock(host: str, port: int, token: str) -> "dist.Store | None":
    """The store behind a port, if it is this run's."""
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
    """What an action gives; None: it takes too long, as with somebody behind a port who says nothing."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(action()), daemon=True)
    thread.start()
    thread.join(2 * seconds + 1)
    return found[0] if found else None


def rendezvous_of(attempt: Path, hosts: Sequence[str], node: int, job: str | None) -> str:
    """What `meet` is told: of a job on a cluster, or of processes on this machine."""
    if job is None:
        return f"file://{attempt}/rendezvous"
    return f"tcp://{address(hosts, node)}:{','.join(map(str, ports(job)))}"
