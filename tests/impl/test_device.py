"""What training asks of a GPU, by a driver that records it: copies, waits, and an update that a graph could hold."""

import ast
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from impl.checkpoint import Checkpoints
from impl.device import Cuda, Device
from impl.instruments import attention_kernel
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from impl.train import Trainer
from tests.fake_cuda import Driver, fake_cuda
from tests.impl.on_ranks import own_group, trainer

pytestmark = pytest.mark.usefixtures("one_rank")
ROOT = Path(__file__).resolve().parents[2]
MODEL = ModelConfig(num_layers=2, hidden_size=16, num_heads=2, seq_len=8)
RUN = Run(model=MODEL, train=Recipe(steps=3, global_batch=4, microbatch=2))
OFFLOADED = {"recompute": "full", "offload_activations": True}


def weights(one: Trainer) -> list[np.ndarray]:
    return [bucket.weights.float().numpy().copy() for bucket in one.buckets]


def test_the_driver_that_stands_in_copies_late(cuda: Driver) -> None:
    device, x = Device.of(torch.device("cpu")), torch.ones(3)
    assert type(device) is Cuda
    there, here = device.put(x), device.fetch(x)
    assert here.isnan().all(), "nothing has waited"
    assert torch.equal(device.put(here), x), "what is queued on the same stream comes later"
    device.wait()
    assert torch.equal(here, x)
    assert there is not x
    device.put(here)
    here += 1
    with pytest.raises(AssertionError, match="before the copy from it had ended"):
        device.wait()


@pytest.mark.parametrize(
    ("plan", "precision", "waits"),
    [
        (Plan(), "bf16", 0),
        (Plan(), "fp32", 0),
        (Plan(), "fp16", 1),  # whether gradients have overflowed
        (Plan(**OFFLOADED), "fp32", 0),
        (Plan(**OFFLOADED), "bf16", 0),
        (Plan(offload_optimizer=True), "bf16", 1),  # for the gradients, which the host uses
        (Plan(offload_optimizer=True), "fp32", 1),
        (Plan(schedule="zb_h1", recompute="selective"), "bf16", 0),
    ],
)
def test_a_step_is_as_on_a_processor_and_waits_for_nothing_else(
    plan: Plan, precision: Any, waits: int, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = replace(RUN, plan=plan, precision=precision)
    expected = trainer(run, data)
    losses = [expected.step(i).loss.item() for i in range(3)]
    with fake_cuda(monkeypatch) as cuda:
        one = trainer(run, data)
        steps = []
        for i in range(3):
            cuda.calls.clear()
            steps.append(one.step(i))
            assert cuda.waits == waits * len(one.buckets if plan.offload_optimizer else [one]), cuda.calls
        fetched = run.microbatches * MODEL.num_layers if plan.offload_activations else 0
        fetched += len(one.buckets) if plan.offload_optimizer else 0
        assert cuda.calls.count("fetch") == fetched
        cuda.wait("end")
    assert [step.loss.item() for step in steps] == losses
    assert all(map(np.array_equal, weights(one), weights(expected)))


def test_a_checkpoint_has_the_values_of_its_step(data: Path, tmp_path: Path, cuda: Driver) -> None:
    one, group = trainer(RUN, data), own_group()
    checkpoints = Checkpoints(tmp_path, one, group)
    for i in range(2):
        one.step(i)
        saved = weights(one)
        checkpoints.save(i + 1)
        one.step(2)  # while it is written
        checkpoints.wait()
        assert Checkpoints(tmp_path, one, group).load() is not None
        assert all(map(np.array_equal, weights(one), saved))
    arrays = 4 * RUN.microbatches * 2  # of four steps, with inputs and targets
    assert cuda.calls.count("lock") == len(checkpoints._copies) + arrays, "kept between saves"


class Launched(TorchDispatchMode):
    """Operations with the memory of the tensors that stay."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lists = [[t.data_ptr() for t in arg] for arg in args if isinstance(arg, list)]
        self.found.append((str(func), lists))
        return func(*args, **(kwargs or {}))


def test_an_update_is_the_same_launches_each_time_and_reads_no_value(data: Path) -> None:
    """As a CUDA graph needs it: what counts the updates is on the device, too."""
    one, launched = trainer(RUN, data), []
    for i in range(3):
        one.backward(i)
        with Launched() as mode:
            one.optimizer.step(1e-3)
        launched.append(mode.found)
    assert launched[0] == launched[1] == launched[2]
    names = {name for name, _ in launched[0]}
    assert "aten._fused_adamw_.default" in names
    assert not names & {"aten._local_scalar_dense.default", "aten._to_copy.default"}
    counts = {count.device for groups in one.optimizer._groups for group in groups for count in group.updates}
    assert counts == {bucket.weights.device for bucket in one.buckets}


def test_the_kernel_of_attention_is_what_pytorch_chooses(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention_kernel(trainer(RUN, data)) == "flash_attention"
    asked: list[Any] = []
    choose = lambda q, k, v, **how: (asked.append((q.shape, k.shape, q.dtype, how)), 2)[1]
    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    run = replace(RUN, model=replace(MODEL, family="bert", kv_heads=1), precision="bf16")
    assert attention_kernel(trainer(run, data)) == "efficient_attention"
    assert asked == [((1, 2, 8, 8), (1, 1, 8, 8), torch.bfloat16, {"is_causal": False, "enable_gqa": True})]
    assert attention_kernel(trainer(replace(RUN, model=replace(MODEL, dropout=0.1)), data)) == "products"
    plan = SimpleNamespace(cp=2, is_ring=True)
    for precision, kernel in (("bf16", "flash_attention"), ("fp32", "products")):
        one: Any = trainer(replace(RUN, precision=precision), data)
        one.run, one.device = SimpleNamespace(model=MODEL, precision=precision, plan=plan), torch.device("meta")
        assert attention_kernel(one) == kernel


KERNELS = {
    "context_parallel.py", "fused_attention.py", "gelu.py", "gradients.py", "norms.py", "squares.py", "ddp.py",
    "tensors.py",
}  # fmt: skip
"""Modules that choose a kernel by the type of a device, or the setting of another engine's."""


def test_no_other_module_asks_for_the_type_of_a_device() -> None:
    paths = [path for room in ("impl", "harness") for path in (ROOT / room).rglob("*.py")]
    is_asking = lambda node: (
        (isinstance(node, ast.Compare) and ast.unparse(node.left).endswith("device.type"))
        or (isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda")
    )
    asking = {path.name for path in paths if any(map(is_asking, ast.walk(ast.parse(path.read_text()))))}
    assert asking == KERNELS | {"device.py", "devices.py"}  # the latter counts GPUs before PyTorch is needed
