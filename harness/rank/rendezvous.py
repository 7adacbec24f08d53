"""Rendezvous of the ranks of a run, at the place that `addresses` has chosen.

On a cluster rank 0 listens only on the address by which the job's other hosts reach it. The store's keys begin with a
hash of the run's token, and each rank proves that it has the token before it counts as present. The token itself is
never sent.
"""

import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from harness.rank.failure import one_line
from harness.rank.orders import Orders
from impl.device import KINDS

PATIENCE_SECONDS = 5.0
"""Longest wait for a proof that the process behind a port is of this run."""
HERE = "here"
T = TypeVar("T")


class RendezvousError(RuntimeError):
    """The ranks did not find each other."""


def join(
    orders: Orders, rank: int, local_rank: int, world_size: int, rendezvous: str
) -> tuple[torch.device, dist.Store]:
    """Join the other ranks of the run; return this rank's device, and a store that all of them share.

    For DeepSpeed the variable LOCAL_RANK is set, too.

    Args:
        rendezvous: file://PATH, or tcp://HOST:PORT,PORT,...

    Raises:
        RendezvousError: they are not there within the timeout of collectives.
    """
    timeout = timedelta(seconds=orders.collective_timeout_seconds)
    device = KINDS[orders.device].of_rank(local_rank)
    bound = device.enter()
    if bound is not None and "LOCAL_RANK" in os.environ:
        os.environ["LOCAL_RANK"] = str(bound.index)  # DeepSpeed takes its device from it
    try:
        store = _store(rendezvous, rank, world_size, orders.token, timeout)
        dist.init_process_group(
            device.backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=bound,
        )
    except RendezvousError:
        raise
    except (OSError, RuntimeError) as error:
        raise RendezvousError(one_line(error)) from error
    return device.device, store


def _store(rendezvous: str, rank: int, world_size: int, token: str, timeout: timedelta) -> dist.Store:
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


def _admit(store: dist.Store, world_size: int, token: str) -> None:
    """As rank 0, wait for the other ranks, check their proofs and answer each."""
    nonce = secrets.token_hex(16)
    store.set(HERE, nonce)
    for rank in range(1, world_size):
        own, _, proof = store.get(f"rank {rank}").decode(errors="replace").partition(" ")
        _require_equal(proof, _proof(token, rank, nonce, own), rank)
        store.set(f"answer {rank}", _proof(token, 0, rank, own))


def _prove(store: dist.Store, rank: int, token: str) -> None:
    """As another rank, prove to have the token, and wait for the proof of rank 0."""
    own = secrets.token_hex(16)
    store.set(f"rank {rank}", f"{own} {_proof(token, rank, store.get(HERE).decode(errors='replace'), own)}")
    _require_equal(store.get(f"answer {rank}").decode(errors="replace"), _proof(token, 0, rank, own), 0)


def _require_equal(proof: str, expected: str, rank: int) -> None:
    if not hmac.compare_digest(proof.encode(), expected.encode()):
        raise RendezvousError(f"a process without the run's token came as rank {rank}")


def _listen(host: str, candidates: Sequence[int], timeout: timedelta) -> dist.Store:
    """Listen on the first port that is free."""
    family, why = socket.AF_INET6 if ":" in host else socket.AF_INET, ""
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


def _connect(host: str, candidates: Sequence[int], token: str, timeout: timedelta) -> dist.Store:
    """Try port after port until rank 0 of this run is behind one."""
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


def _knock(host: str, port: int, token: str) -> dist.Store | None:
    """Return the store behind a port if it is this run's, else None."""
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
