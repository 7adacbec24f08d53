"""Runs a function on several gloo ranks, forked from a server that has torch imported already."""

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch._dynamo", "harness.rank.worker", "impl.checkpoint", "scipy.optimize", "pytest", "pandas", "hypothesis"]
)
"""What the modules of tests import: else every rank does so."""
NCCLS = ("all_reduce", "all_gather_single", "reduce_scatter_single", "broadcast")
"""Functions of torch.distributed that refuse, with NCCL only, a tensor that is not contiguous."""
TIMEOUT_SECONDS = 300
"""Ten times what the slowest takes, since layers may be compiled while other tests have both cores."""
COLLECTIVE = timedelta(seconds=240)
"""Shorter, so that a rank tells where it waited."""


def run_ranks(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What `function(*args)` returns on each rank, no tensors; a rank's exception is raised here with its traceback."""
    with tempfile.TemporaryDirectory() as folder:
        queue = CONTEXT.Queue()
        make = lambda rank: CONTEXT.Process(target=_rank, args=(rank, ranks, folder, queue, function, args))
        processes = [make(rank) for rank in range(ranks)]
        for process in processes:
            process.start()
        try:
            answers = dict(queue.get(timeout=TIMEOUT_SECONDS) for _ in processes)
        finally:
            for process in processes:
                process.join(timeout=5)
                process.kill()
    errors = [error for error, _ in answers.values() if error]
    assert not errors, errors[0]
    return [answers[rank][1] for rank in range(ranks)]


def _rank(rank: int, ranks: int, folder: str, queue: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    _share_one_loop()
    for name in NCCLS:
        setattr(dist, name, _of_contiguous(getattr(dist, name)))
    store = f"file://{Path(folder) / 'rendezvous'}"
    try:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=COLLECTIVE)
        dist.barrier()  # no rank leaves before all have come
        answer = function(*args)
        if dist.is_initialized():
            dist.barrier()  # nor while another still connects a group that both made
        queue.put((rank, (None, answer)))
    except BaseException:
        queue.put((rank, (traceback.format_exc(), None)))
    if dist.is_initialized():
        dist.destroy_process_group()


def _of_contiguous(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch.distributed that takes what NCCL takes: gloo also takes a transposed tensor, as it lies."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for x in (*args, *kwargs.values()):
            assert getattr(x, "is_contiguous", lambda: True)(), (
                f"{function.__name__} of a tensor of strides {x.stride()}"
            )
        return function(*args, **kwargs)

    return call


def _share_one_loop() -> None:
    """Let all groups of this process share one thread that receives: a group's own would wake 100 times a second."""
    from torch.distributed import ProcessGroupGloo, distributed_c10d

    gloo: Any = ProcessGroupGloo
    device = gloo.create_default_device()

    class Sharing(ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **_: Any) -> None:
            options = gloo._Options()
            options._devices, options._threads, options._timeout = [device], 2, timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = Sharing
