"""One rank of the doctor's job: report its host, meet the other ranks, and measure communication.

The launcher starts it like a worker. After every part it writes its report, so that the report of a rank that hangs
names the part.
"""

import json
import os
import platform
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from harness.rank.devices import rank_device
from harness.rank.failure import fail
from harness.rank.orders import Orders
from harness.rank.rendezvous import join
from harness.records.store import write_atomically
from impl.collectives import all_gather, all_reduce_sum, receive_start, send_start
from impl.mesh import build_mesh
from impl.plan import AXES

SIZES = (2**16, 2**20, 2**24)
"""Bytes of the messages that are timed."""
REPEATS = 7
"""Timed repeats of a message, after an untimed first one; the median counts."""


def main(attempt: Path, rank: int, local_rank: int, world_size: int, rendezvous: str) -> int:
    """Check this rank; return the exit status, and write a failure file if it fails."""
    told = Told(attempt, rank)
    with told.failure():
        Examined(attempt, rank, local_rank, world_size, rendezvous, told).run_to_end()
    return told.status


class Told:
    """Report of a rank, written to `rank-R.json` after every part."""

    def __init__(self, attempt: Path, rank: int) -> None:
        self.attempt, self.rank, self.status = attempt, rank, 0
        self.path = attempt / f"rank-{rank}.json"
        self.found: dict[str, Any] = {"rank": rank, "axes": {}}
        self.at = "starting"

    def now(self, at: str, **found: Any) -> None:
        """Add results to the report, and name the part that begins."""
        self.at = at
        self.found |= found
        write_atomically(self.path, json.dumps(self.found | {"at": at}))

    @contextmanager
    def failure(self) -> Iterator[None]:
        """Write a failure file, with the part that failed, for any exception inside; `status` is 1 then."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            sys.stderr.flush()
            first_line = (str(error).strip().splitlines() or [""])[0]
            reason = f"rank {self.rank}, {self.at}: {type(error).__name__}: {first_line}"
            fail(self.attempt, self.rank, "error", reason)
            self.status = 1


class Examined:
    """Checks of one rank, in an order that all ranks share."""

    def __init__(self, attempt: Path, rank: int, local_rank: int, world_size: int, rendezvous: str, told: Told) -> None:
        orders = Orders.read(attempt)
        self.run, self.told, self.rank = orders.run, told, rank
        told.now("meeting the other ranks", local_rank=local_rank, **_host(orders.device, local_rank))
        self.device = join(orders, rank, local_rank, world_size, rendezvous).device
        told.now("making the mesh", met_seconds=time.time() - orders.submitted)
        self.mesh = build_mesh(self.run.plan, self.device.type)
        assert dist.group.WORLD is not None
        self.world: dist.ProcessGroup = dist.group.WORLD

    def run_to_end(self) -> None:
        """Reduce over every axis of the mesh, compare clocks, and time messages."""
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        self.told.now("all-reduce over all ranks", place=dict(zip(AXES, coordinate, strict=True)))
        self._reduce(self.world)
        for axis in AXES:
            group = self.mesh.get_group(axis)
            if group.size() > 1:
                self.told.now(f"all-reduce over {axis}")
                self.told.found["axes"][axis] = self._reduce(group)
        self.told.now("comparing clocks")
        self.told.now("timing all-reduce", clock_seconds=self._clock())
        all_reduce = [self._timed(size, self._all_reduce(size)) for size in SIZES]
        self.told.now("timing transfers", all_reduce=all_reduce if self.world.size() > 1 else [])
        self.told.now("leaving", transfers=[self._transfers(peer) for peer in self._peers()])
        dist.barrier()
        dist.destroy_process_group()
        self.told.now("")

    def _reduce(self, group: dist.ProcessGroup) -> float:
        """Return the seconds of an all-reduce of the ranks' numbers.

        Raises:
            RuntimeError: the sum is wrong.
        """
        begin = time.perf_counter()
        total = all_reduce_sum(torch.tensor([float(self.rank)], device=self.device), group).item()
        seconds = time.perf_counter() - begin
        expected = float(sum(dist.get_process_group_ranks(group)))
        if total != expected:
            raise RuntimeError(f"the sum is {total:g}, and should be {expected:g}")
        return seconds

    def _clock(self) -> float:
        """Return the seconds that this clock is ahead of the first rank's: the least of several measurements."""
        ahead = []
        for _ in range(REPEATS):
            dist.barrier()
            now = torch.tensor([time.time()], dtype=torch.float64, device=self.device)
            times = all_gather(now, self.world).tolist()
            ahead.append(now.item() - times[0])
        return min(ahead, key=abs)

    def _peers(self) -> list[int]:
        """Return the ranks that the first one exchanges messages with: its neighbour, and the first of another host."""
        name = int(sha256(socket.gethostname().encode()).hexdigest()[:8], 16)
        hosts = all_gather(torch.tensor([name], dtype=torch.int64, device=self.device), self.world).tolist()
        elsewhere = [rank for rank, host in enumerate(hosts) if host != hosts[0]][:1]
        return sorted({*range(1, min(2, len(hosts))), *elsewhere})

    def _transfers(self, peer: int) -> dict[str, Any]:
        return {"peer": peer, "sizes": [self._timed(size, self._there_and_back(size, peer)) for size in SIZES]}

    def _all_reduce(self, size: int) -> Callable[[], object]:
        tensor = torch.zeros(size // 4, device=self.device)
        return lambda: all_reduce_sum(tensor, self.world)

    def _there_and_back(self, size: int, peer: int) -> Callable[[], object]:
        tensor = torch.zeros(size // 4, device=self.device)
        other = {0: peer, peer: 0}.get(self.rank)
        directions = (send_start, receive_start) if self.rank == 0 else (receive_start, send_start)

        def exchange() -> None:
            if other is not None:
                for start in directions:
                    start(tensor, other, self.world).wait()

        return exchange

    def _timed(self, size: int, action: Callable[[], object]) -> dict[str, float]:
        """Return the bytes of a message, and its median seconds."""
        seconds = []
        for _ in range(REPEATS + 1):
            dist.barrier()
            begin = time.perf_counter()
            action()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            seconds.append(time.perf_counter() - begin)
        return {"bytes": size, "seconds": statistics.median(seconds[1:])}


def _host(device: str, local_rank: int) -> dict[str, Any]:
    """Return the rank's host, device and software."""
    cuda = device == "cuda"
    known = cuda and torch.cuda.is_available()
    return {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "device": torch.cuda.get_device_name(rank_device(local_rank)) if known else "none" if cuda else "cpu",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "backend": "nccl" if cuda else "gloo",
        "has_backend": dist.is_nccl_available() if cuda else dist.is_gloo_available(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        "core_set": sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else [],
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().available,
    }


if __name__ == "__main__":
    status = main(Path(sys.argv[1]), *map(int, sys.argv[2:5]), rendezvous=sys.argv[5])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # like a worker: everything is written
