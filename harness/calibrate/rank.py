"""One rank of a calibration: measure what a system's file describes, all ranks at once, and train a few small runs.

Started by the launcher as a worker is. Ranks compute at the same time, as they do in training: cores, caches and memory
that they share are measured as they will be used.
"""

import datetime
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor, nn

from harness.calibrate.runs import MEASURED, CalibrationOrders, runs_to_train
from harness.calibrate.system import Measurements
from harness.doctor.rank import median_seconds
from harness.doctor.report import Rank, execute
from harness.predict.fit import Measured
from harness.predict.simulation import Done
from harness.rank.roofline import collective, product
from harness.records.environment import processor
from harness.records.store import write_atomically
from impl.collectives import all_gather, all_reduce_start
from impl.cost.gemms import Pass, Product
from impl.cost.traffic import Op
from impl.data.synthetic import SyntheticConfig, write_synthetic
from impl.data.tokens import TokenFolder
from impl.device import Device
from impl.mesh import build_mesh
from impl.model.fused_attention import attend
from impl.model.gelu import gelu
from impl.run import Precision, Run
from impl.simulator.system import OWN_STACK, AttentionTable, Elementwise, Four, GemmTable
from impl.squares import squares
from impl.train import WEIGHTS, Trainer

PASSES: tuple[Pass, ...] = ("forward", "input gradient", "weight gradient")
OPS: tuple[Op, ...] = ("all_reduce", "all_gather", "reduce_scatter", "send")
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
OVERLAPPED = {"cpu": 512, "cuda": 4096}
"""Edge of the products that are computed beside an all-reduce."""
UPDATED = {"cpu": 2**21, "cuda": 2**26}
"""Elements of an update."""
TENSORS = 50
"""Tensors of an update whose time does not depend on their elements."""
STEPS = {"cpu": (3, 9), "cuda": (5, 15)}
"""Steps of each trained run: warm-up steps, and steps of which the median counts."""


def measure(rank: Rank) -> None:
    """Measure with the other ranks; the first one writes the results."""
    orders = CalibrationOrders.read(rank.attempt)
    torch.set_num_threads(orders.threads)
    rank.begin("meeting the other ranks")
    device = rank.join(orders)
    found = Calibrating(device, orders.precisions, orders.threads).run_to_end(rank)
    dist.destroy_process_group()
    if rank.rank == 0:
        write_atomically(rank.attempt / MEASURED, TypeAdapter(Measurements).dump_json(found))
    rank.begin("")


class Calibrating:
    """The rank's part of every measurement, in an order that all ranks share."""

    def __init__(self, device: torch.device, precisions: Sequence[Precision], threads: int) -> None:
        self.device, self.precisions, self.threads = device, precisions, threads
        assert dist.group.WORLD is not None
        self.world: dist.ProcessGroup = dist.group.WORLD
        ranks, known = self.world.size(), Device.of(device).hardware()
        memory = known.total_memory if known else psutil.virtual_memory().total // ranks
        self.found = Measurements(
            source=f"measured here on {datetime.date.today()}",
            stack=f"{OWN_STACK}, PyTorch {str(torch.__version__).partition('+')[0]}",
            hardware=known.name if known else processor(),
            kind="cuda" if known else "cpu",
            memory_bytes=int(min(self._of_ranks(memory))),
            processors=known.multi_processor_count if known else None,
            ranks=ranks,
        )

    def run_to_end(self, rank: Rank) -> Measurements:
        """Carry out every part, reporting its name and the progress as it begins; return the results."""
        parts: dict[str, Callable[[], object]] = {}
        for precision in self.precisions:
            parts |= {
                f"products, {precision}": lambda p=precision: self._products(p),
                f"attention, {precision}": lambda p=precision: self._attention(p),
                f"elementwise, {precision}": lambda p=precision: self._elementwise(p),
            }
        parts |= {"additions": self._additions, "update": self._update}
        if self.found.ranks > 1:
            parts |= {"collectives": self._collectives, "collectives beside products": self._overlap}
        runs = runs_to_train(self.found.ranks, self.device.type, self.precisions, self.threads)
        parts |= {f"training, {label}": lambda args=(label, run): self._train(*args) for label, run in runs.items()}
        rank.report.of = len(parts)
        for rank.report.done, (name, part) in enumerate(parts.items()):
            rank.begin(name)
            part()
        dist.barrier()
        rank.report.done = len(parts)
        return self.found

    # Computing ----------------------------------------------------------------------------------------------------

    def _products(self, precision: Precision) -> None:
        dtype, shapes = WEIGHTS[precision], list(itertools.product(EDGES[self.device.type], repeat=3))
        timed = lambda pass_, m, n, k: self._seconds(product(Product("", pass_, m, n, k, 1, False), dtype, self.device))
        for pass_ in PASSES:
            rows: list[Four] = [(m, n, k, timed(pass_, m, n, k)) for m, n, k in shapes]
            self.found.gemm.append(GemmTable(precision, self.found.source, rows, pass_))

    def _attention(self, precision: Precision) -> None:
        """Measure attention as a layer calls it."""
        rows = []
        for batch, heads, seq_len, head_size in CORES[self.device.type]:
            qkv = self._random(precision, batch * seq_len, 3 * heads * head_size).requires_grad_()
            seconds = self._both(lambda qkv=qkv, s=seq_len, a=heads: attend(qkv, s, a, a, causal=True), qkv)
            rows.append((batch, heads, seq_len, head_size, *seconds))
        self.found.attention.append(AttentionTable(precision, self.found.source, rows))

    def _elementwise(self, precision: Precision) -> None:
        """Measure the bytes a second of layers' elementwise operations, by their names in the simulator."""
        (n, h), size = LAYER[self.device.type], WEIGHTS[precision].itemsize
        norm = nn.LayerNorm(h, device=self.device, dtype=WEIGHTS[precision])
        x, y, wide = (self._random(precision, n, width).requires_grad_() for width in (h, h, 4 * h))
        own = n * h * size
        sums, biases = self._seconds(lambda: x.detach() + y.detach()), self._seconds(lambda: wide.detach().sum(0))
        rates = {"residual": (3 * own / sums, 3 * own / sums), "biases": (4 * own / biases, 4 * own / biases)}
        for name, forward, of, units in (("norm", lambda: norm(x), x, 1), ("gelu", lambda: gelu(wide), wide, 4)):
            seconds = self._both(forward, of)
            rates[name] = (2 * units * own / seconds[0], 3 * units * own / seconds[1])
        self.found.elementwise += [
            Elementwise(precision, name, *rate, self.found.source) for name, rate in rates.items()
        ]

    def _additions(self) -> None:
        precision = self.precisions[0]
        for moved in MOVED[self.device.type]:
            a, b, out = (self._random(precision, moved // (3 * WEIGHTS[precision].itemsize)) for _ in range(3))
            self.found.added.append((moved, self._seconds(lambda a=a, b=b, out=out: torch.add(a, b, out=out))))

    def _update(self) -> None:
        """Measure updates of fp32 parameters, with zeroing the gradient, its norm and clipping."""
        self.found.updated = UPDATED[self.device.type]
        self.found.update_seconds = self._seconds(self._updating(self.found.updated, 1))
        self.found.tensor_seconds = self._seconds(self._updating(16, TENSORS)) / TENSORS

    def _updating(self, n: int, tensors: int) -> Callable[[], object]:
        """Return an update of some tensors of n parameters each."""
        weights = [nn.Parameter(torch.zeros(n, device=self.device)) for _ in range(tensors)]
        gradient = torch.ones(n * tensors, device=self.device)
        for weight, part in zip(weights, gradient.split(n), strict=True):
            weight.grad = part
        adam = torch.optim.AdamW(weights, fused=True)

        def update() -> None:
            gradient.zero_()
            squares([gradient])
            torch._foreach_mul_([gradient], 1.0)
            adam.step()

        return update

    # Sending ------------------------------------------------------------------------------------------------------

    def _collectives(self) -> None:
        """Measure every collective over all ranks; a send goes to the next rank, on all ranks at once."""
        timed = lambda op, size: self._seconds(collective(op, size, torch.float32, self.world, self.device))
        for op in OPS:
            self.found.collectives[op] = [(size, timed(op, size)) for size in SENT[self.device.type]]

    def _overlap(self) -> None:
        """Compare products alone and the largest all-reduce alone with the products while it is under way."""
        n = OVERLAPPED[self.device.type]
        operation = product(Product("", "forward", n, n, n, 1, False), WEIGHTS["fp32"], self.device)
        tensor = torch.zeros(SENT[self.device.type][-1] // 4, device=self.device)
        one = self._seconds(operation)
        sending = self._seconds(lambda: all_reduce_start(tensor, self.world).wait())
        count = max(1, round(1.5 * sending / one))

        def both() -> None:
            pending = all_reduce_start(tensor, self.world)
            for _ in range(count):
                operation()
            pending.wait()

        computing = count * one
        hidden = (computing + sending - self._seconds(both)) / min(computing, sending)
        self.found.overlap = min(1.0, max(0.0, hidden))

    # Whole steps --------------------------------------------------------------------------------------------------

    def _train(self, label: str, run: Run) -> None:
        """Train a run for a few steps; of each timed one the slowest rank's time counts."""
        with tempfile.TemporaryDirectory() as folder:
            write_synthetic(Path(folder) / "data", SyntheticConfig(train_tokens=100_000, valid_tokens=1_000))
            data = TokenFolder.open(Path(folder) / "data")
            trainer = Trainer(run, data, build_mesh(run.plan, self.device.type), self.device)
            seconds, (warm, counted) = [], STEPS[self.device.type]
            for i in range(warm + counted):
                dist.barrier()
                begin = time.perf_counter()
                trainer.step(i).grad_norm.item()  # wait for the device
                seconds.append(max(self._of_ranks(time.perf_counter() - begin)))
        self.found.trained.append(Measured(label, Done(run), statistics.median(seconds[warm:])))

    # Timing -------------------------------------------------------------------------------------------------------

    def _random(self, precision: Precision, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).to(WEIGHTS[precision])

    def _both(self, forward: Callable[[], Tensor], of: Tensor) -> tuple[float, float]:
        """Return seconds of a forward pass, and of its backward pass."""
        once = self._seconds(forward)
        grad = torch.ones_like(forward())
        whole = self._seconds(lambda: torch.autograd.grad(forward(), of, grad))
        return once, max(whole - once, 1e-9)

    def _seconds(self, operation: Callable[[], object]) -> float:
        """Return the median rank's time of a call."""
        return statistics.median(self._of_ranks(median_seconds(operation, self.device)))

    def _of_ranks(self, value: float) -> list[float]:
        """Return every rank's value."""
        return all_gather(torch.tensor([value], dtype=torch.float64, device=self.device), self.world).tolist()


if __name__ == "__main__":
    execute(measure)
