"""One rank of the doctor's job: report its host, meet the other ranks, and measure communication."""

import contextlib
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable
from hashlib import sha256

import psutil
import torch
import torch.distributed as dist

from harness.doctor.report import HostReport, Rank, Timing, Transfer, execute
from harness.rank.orders import Orders
from harness.rank.roofline import seconds
from impl.collectives import all_gather, all_reduce_sum, receive_start, send_start
from impl.device import KINDS
from impl.errors import InputError
from impl.mesh import build_mesh
from impl.plan import AXES

SIZES = (2**16, 2**20, 2**24)
"""Bytes of the messages that are timed."""
REPEATS = 7
"""Timed repeats of a measurement, after an untimed first one; the median counts."""


def measure(rank: Rank) -> None:
    """Reduce over every axis of the mesh, compare clocks, and time messages, in an order that all ranks share."""
    orders = Orders.read(rank.attempt)
    report = rank.report = host_report(rank, orders.device)
    rank.begin("meeting the other ranks")
    device = rank.join(orders)
    report.met_seconds = time.time() - orders.submitted
    rank.begin("making the mesh")
    mesh = build_mesh(orders.run.plan, device.type)
    coordinate, world = mesh.get_coordinate(), dist.group.WORLD
    assert coordinate is not None
    assert world is not None
    report.place = dict(zip(AXES, coordinate, strict=True))
    rank.begin("all-reduce over all ranks")
    _reduce(rank.rank, world, device)
    for axis in AXES:
        group = mesh.get_group(axis)
        if group.size() > 1:
            rank.begin(f"all-reduce over {axis}")
            report.axes[axis] = _reduce(rank.rank, group, device)
    rank.begin("comparing clocks")
    report.clock_seconds = _clock(world, device)
    rank.begin("timing all-reduce")
    if world.size() > 1:
        report.all_reduce = _timed(lambda tensor: all_reduce_sum(tensor, world), device)
    rank.begin("timing transfers")
    report.transfers = tuple(Transfer(peer, _transfers(peer, world, device)) for peer in _peers(world, device))
    rank.begin("leaving")
    dist.barrier()
    dist.destroy_process_group()
    rank.begin("")


def host_report(rank: Rank, device: str) -> HostReport:
    """Return the report with the rank's host, device and software."""
    kind, name = KINDS[device], "none"
    with contextlib.suppress(InputError, RuntimeError):  # the driver finds none
        hardware = kind.of_rank(rank.local_rank).hardware()
        name = hardware.name if hardware else device
    core_set = sorted(os.sched_getaffinity(0))
    return HostReport(
        rank=rank.rank,
        local_rank=rank.local_rank,
        host=socket.gethostname(),
        process=os.getpid(),
        device=name,
        python=platform.python_version(),
        torch=str(torch.__version__),
        backend=kind.backend,
        has_backend=dist.is_backend_available(kind.backend),
        cores=len(core_set),
        core_set=core_set,
        threads=torch.get_num_threads(),
        memory_bytes=psutil.virtual_memory().available,
    )


def _reduce(rank: int, group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the seconds of an all-reduce of the ranks' numbers.

    Raises:
        RuntimeError: the sum is wrong.
    """
    begin = time.perf_counter()
    total = all_reduce_sum(torch.tensor([float(rank)], device=device), group).item()
    seconds = time.perf_counter() - begin
    expected = float(sum(dist.get_process_group_ranks(group)))
    if total != expected:
        raise RuntimeError(f"the sum is {total:g}, and should be {expected:g}")
    return seconds


def _clock(world: dist.ProcessGroup, device: torch.device) -> float:
    """Return the seconds that this clock is ahead of the first rank's: the least of several measurements."""
    ahead = []
    for _ in range(REPEATS):
        dist.barrier()
        now = torch.tensor([time.time()], dtype=torch.float64, device=device)
        ahead.append(now.item() - all_gather(now, world)[0].item())
    return min(ahead, key=abs)


def _peers(world: dist.ProcessGroup, device: torch.device) -> list[int]:
    """Return the ranks that the first one exchanges messages with: its neighbour, and the first of another host."""
    name = int(sha256(socket.gethostname().encode()).hexdigest()[:8], 16)
    hosts = all_gather(torch.tensor([name], dtype=torch.int64, device=device), world).tolist()
    elsewhere = [rank for rank, host in enumerate(hosts) if host != hosts[0]][:1]
    return sorted({*range(1, min(2, len(hosts))), *elsewhere})


def _transfers(peer: int, world: dist.ProcessGroup, device: torch.device) -> tuple[Timing, ...]:
    """Measure messages from the first rank to a peer and back; other ranks only take part in barriers."""
    rank = world.rank()
    other = {0: peer, peer: 0}.get(rank)
    directions = (send_start, receive_start) if rank == 0 else (receive_start, send_start)

    def exchange(tensor: torch.Tensor) -> None:
        if other is not None:
            for start in directions:
                start(tensor, other, world).wait()

    return _timed(exchange, device)


def _timed(action: Callable[[torch.Tensor], object], device: torch.device) -> tuple[Timing, ...]:
    """Measure an action on messages of every size."""
    tensors = {size: torch.zeros(size // 4, device=device) for size in SIZES}
    return tuple(Timing(size, median_seconds(lambda t=t: action(t), device)) for size, t in tensors.items())


def median_seconds(operation: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a call, with all ranks beginning at once and calling equally often."""
    operation()
    dist.barrier()
    return statistics.median(seconds(operation, device) for _ in range(REPEATS))


if __name__ == "__main__":
    execute(measure)
