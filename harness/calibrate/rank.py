"""One rank of a calibration: measure what a system's file describes, all ranks at once, and train a few small runs.

Started by the launcher as a worker is. Ranks compute at the same time, as they do in training: cores, caches and memory
that they share are measured as they will be used.
"""

import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.calibrate.runs import CalibrationOrders, runs_to_train
from harness.doctor.rank import Told
from harness.rank.rendezvous import join
from harness.rank.roofline import product, seconds
from impl.collectives import (
    all_gather_into_start,
    all_reduce_start,
    receive_start,
    reduce_scatter_into_start,
    send_start,
)
from impl.cost.gemms import Pass, Product
from impl.cost.traffic import Op
from impl.data.synthetic import SyntheticConfig, write_synthetic
from impl.data.tokens import TokenFolder
from impl.mesh import build_mesh
from impl.model.fused_attention import attend
from impl.model.gelu import gelu
from impl.run import Precision, Run, to_dict
from impl.squares import squares
from impl.train import WEIGHTS, Trainer

REPEATS = 7
"""Timed repeats of a measurement, after an untimed first one; the median counts."""
PASSES: tuple[Pass, ...] = ("forward", "input gradient", "weight gradient")
EDGES = {"cpu": (64, 256, 1024, 2048), "cuda": (128, 512, 2048, 8192)}
"""Edges of the measured products, in all combinations."""
CORES = {
    "cpu": list(itertools.product((4,), (4,), (64, 128, 256, 512), (32, 64, 128))),
    "cuda": list(itertools.product((2,), (16,), (512, 1024, 2048, 4096), (64, 128))),
}
"""Shapes of measured attention: batch, heads, sequence, size of a head."""
SENT = {
    "cpu": (2**8, 2**12, 2**15, 2**18, 2**20, 2**22, 2**24),
    "cuda": (2**8, 2**14, 2**18, 2**20, 2**22, 2**24, 2**26, 2**28),
}
"""Bytes of the whole tensor of a collective."""
MOVED = {"cpu": (2**12, 2**20, 2**24), "cuda": (2**12, 2**24, 2**30)}
"""Bytes that an elementwise operation reads and writes."""
LAYER = {"cpu": (512, 256), "cuda": (4096, 2048)}
"""Tokens and hidden size of a layer's elementwise operations."""
UPDATED = {"cpu": 2**21, "cuda": 2**26}
"""Elements of an update."""
TENSORS = 50
"""Tensors of an update whose time does not depend on their elements."""
STEPS = {"cpu": (3, 9), "cuda": (5, 15)}
"""Steps of each trained run: warm-up steps, and steps of which the median counts."""


def main(attempt: Path, rank: int, local_rank: int, world_size: int, rendezvous: str) -> int:
    """Measure with the other ranks; return the exit status, and write a failure file if it fails."""
    told = Told(attempt, rank)
    with told.failure():
        orders = CalibrationOrders.read(attempt)
        torch.set_num_threads(orders.threads)
        told.now("meeting the other ranks", torch=str(torch.__version__).partition("+")[0])
        device = join(orders, rank, local_rank, world_size, rendezvous).device
        if device.type == "cuda":
            known = torch.cuda.get_device_properties(device)
            told.found |= {"device_name": known.name, "processors": known.multi_processor_count}
        Calibrating(device, told, orders.precisions, orders.threads).run_to_end()
        dist.destroy_process_group()
    return told.status


class Calibrating:
    """The rank's part of every measurement, in an order that all ranks share."""

    def __init__(self, device: torch.device, told: Told, precisions: Sequence[Precision], threads: int) -> None:
        self.device, self.told, self.precisions, self.threads = device, told, precisions, threads
        assert dist.group.WORLD is not None
        self.world: dist.ProcessGroup = dist.group.WORLD
        self.rank, self.ranks = self.world.rank(), self.world.size()

    def run_to_end(self) -> None:
        """Carry out every part, reporting its name and the progress as it begins, and its results."""
        parts: dict[str, Callable[[], object]] = {}
        for precision in self.precisions:
            parts |= {
                f"products, {precision}": lambda p=precision: self._products(p),
                f"attention, {precision}": lambda p=precision: self._attention(p),
                f"elementwise, {precision}": lambda p=precision: self._elementwise(p),
            }
        parts["update"] = self._update
        if self.ranks > 1:
            parts |= {"collectives": self._collectives, "collectives beside products": self._overlap}
        runs = runs_to_train(self.ranks, self.device.type, self.precisions, self.threads)
        parts |= {f"training, {label}": lambda run=run: self._trained(run) for label, run in runs.items()}
        for done, (name, measure) in enumerate(parts.items()):
            self.told.now(name, done=done, of=len(parts))
            self.told.found[name] = measure()
        dist.barrier()
        self.told.now("", done=len(parts), of=len(parts))

    # What a rank computes -----------------------------------------------------------------------------------------

    def _products(self, precision: str) -> dict[str, list[list[float]]]:
        """Measure products by pass: m, n, k, seconds."""
        dtype, shapes = WEIGHTS[precision], list(itertools.product(EDGES[self.device.type], repeat=3))
        timed = lambda pass_, m, n, k: self._seconds(product(Product("", pass_, m, n, k, 1, False), dtype, self.device))
        rows = lambda pass_: [[m, n, k, timed(pass_, m, n, k)] for m, n, k in shapes]
        return {pass_: rows(pass_) for pass_ in PASSES}

    def _attention(self, precision: str) -> list[list[float]]:
        """Measure attention as a layer calls it: batch, heads, sequence, head size, seconds forward and backward."""
        found = []
        for batch, heads, seq_len, head_size in CORES[self.device.type]:
            qkv = self._random(precision, batch * seq_len, 3 * heads * head_size).requires_grad_()
            seconds = self._both(lambda qkv=qkv, s=seq_len, a=heads: attend(qkv, s, a, causal=True), qkv)
            found.append([batch, heads, seq_len, head_size, *seconds])
        return found

    def _elementwise(self, precision: str) -> dict[str, Any]:
        """Measure additions, small and large, and the elementwise operations of layers.

        Additions: bytes and seconds. Operations: bytes a second, forward and backward, by their names in
        `impl.simulator.operations`.
        """
        size, kind = WEIGHTS[precision].itemsize, self.device.type
        added = []
        for moved in MOVED[kind]:
            a, b, out = (self._random(precision, moved // (3 * size)) for _ in range(3))
            added.append([moved, self._seconds(lambda a=a, b=b, out=out: torch.add(a, b, out=out))])
        n, h = LAYER[kind]
        norm = nn.LayerNorm(h, device=self.device, dtype=WEIGHTS[precision])
        x, y, wide = (self._random(precision, n, width).requires_grad_() for width in (h, h, 4 * h))
        own = n * h * size
        sums, biases = self._seconds(lambda: x.detach() + y.detach()), self._seconds(lambda: wide.detach().sum(0))
        rates = {"residual": (3 * own / sums, 3 * own / sums), "biases": (4 * own / biases, 4 * own / biases)}
        for name, forward, of, units in (("norm", lambda: norm(x), x, 1), ("gelu", lambda: gelu(wide), wide, 4)):
            seconds = self._both(forward, of)
            rates[name] = (2 * units * own / seconds[0], 3 * units * own / seconds[1])
        return {"added": added, "rates": rates}

    def _update(self) -> dict[str, float]:
        """Measure an update of fp32 parameters: seconds of one large tensor, and of each of many small ones.

        Zeroing the gradient, its norm and clipping are included.
        """
        found = {"count": float(UPDATED[self.device.type])}
        for name, n, tensors in (("parameters", UPDATED[self.device.type], 1), ("tensor", 16, TENSORS)):
            weights = [nn.Parameter(torch.zeros(n, device=self.device)) for _ in range(tensors)]
            gradient = torch.ones(n * tensors, device=self.device)
            for weight, part in zip(weights, gradient.split(n), strict=True):
                weight.grad = part
            adam = torch.optim.AdamW(weights, fused=True)

            def update(gradient: Tensor = gradient, adam: torch.optim.AdamW = adam) -> None:
                gradient.zero_()
                squares([gradient])
                torch._foreach_mul_([gradient], 1.0)
                adam.step()

            found[name] = self._seconds(update) / tensors
        return found

    # What ranks send ----------------------------------------------------------------------------------------------

    def _collectives(self) -> dict[str, list[list[float]]]:
        """Measure every collective over all ranks: bytes of the whole tensor, and seconds."""
        kinds: tuple[Op, ...] = ("all_reduce", "all_gather", "reduce_scatter", "send")
        return {
            op: [[size, self._seconds(self._collective(op, size))] for size in SENT[self.device.type]] for op in kinds
        }

    def _collective(self, op: Op, size: int) -> Callable[[], object]:
        """Return a call of the collective; a send goes to the next rank, on all ranks at once."""
        group, n = self.world, self.ranks
        part = torch.zeros(max(1, size // 4 // n), device=self.device)
        whole = part.repeat(n)
        buffer, before, behind = torch.empty_like(whole), (self.rank - 1) % n, (self.rank + 1) % n

        def send() -> None:
            pending = [send_start(whole, behind, group), receive_start(buffer, before, group)]
            for one in pending:
                one.wait()

        calls: dict[Op, Callable[[], object]] = {
            "all_reduce": lambda: all_reduce_start(whole, group).wait(),
            "all_gather": lambda: all_gather_into_start(whole, part, group).wait(),
            "reduce_scatter": lambda: reduce_scatter_into_start(part, whole, group).wait(),
            "send": send,
        }
        return calls[op]

    def _overlap(self) -> list[dict[str, float]]:
        """Measure seconds of products alone, of an all-reduce alone, and of the products while it is under way."""
        n, found = 512 if self.device.type == "cpu" else 4096, []
        operation = product(Product("", "forward", n, n, n, 1, False), WEIGHTS["fp32"], self.device)
        one = self._seconds(operation)
        for size in SENT[self.device.type][-2:]:
            tensor = torch.zeros(size // 4, device=self.device)
            sent = self._seconds(lambda tensor=tensor: all_reduce_start(tensor, self.world).wait())
            count = max(1, round(1.5 * sent / one))

            def both(tensor: Tensor = tensor, count: int = count) -> None:
                pending = all_reduce_start(tensor, self.world)
                for _ in range(count):
                    operation()
                pending.wait()

            found.append({"computing": count * one, "sending": sent, "both": self._seconds(both)})
        return found

    # Whole steps --------------------------------------------------------------------------------------------------

    def _trained(self, run: Run) -> dict[str, Any]:
        """Train a run for a few steps; return it with the seconds of its timed steps, after the warm-up steps."""
        with tempfile.TemporaryDirectory() as folder:
            write_synthetic(Path(folder) / "data", SyntheticConfig(train_tokens=100_000, valid_tokens=1_000))
            data = TokenFolder.open(Path(folder) / "data")
            trainer = Trainer(run, data, build_mesh(run.plan, self.device.type), self.device)
            seconds, (warm, counted) = [], STEPS[self.device.type]
            for i in range(warm + counted):
                dist.barrier()
                begin = time.perf_counter()
                trainer.step(i).grad_norm.item()  # wait for the device
                seconds.append(time.perf_counter() - begin)
        return {"run": to_dict(run), "seconds": seconds[warm:]}

    # How it is timed ------------------------------------------------------------------------------------------------

    def _random(self, precision: str, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).to(WEIGHTS[precision])

    def _both(self, forward: Callable[[], Tensor], of: Tensor) -> tuple[float, float]:
        """Return seconds of a forward pass, and of its backward pass."""
        once = self._seconds(forward)
        grad = torch.ones_like(forward())
        whole = self._seconds(lambda: torch.autograd.grad(forward(), of, grad))
        return once, max(whole - once, 1e-9)

    def _seconds(self, operation: Callable[[], object]) -> float:
        """Return the median time of a call, with all ranks beginning at once and calling equally often."""
        operation()
        dist.barrier()
        return statistics.median(seconds(operation, self.device) for _ in range(REPEATS))


if __name__ == "__main__":
    status = main(Path(sys.argv[1]), *map(int, sys.argv[2:5]), rendezvous=sys.argv[5])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # as a worker does: all files are written
