"""One rank and two on CUDA devices with NCCL: equal to the CPU, without waiting for the device, in all precisions."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from harness.rank.instruments import Stopwatch
from harness.rank.profile import profiled
from harness.rank.roofline import roofline
from impl.context_parallel import (
    attention,
    attention_by_products,
    attention_grad,
    attention_grad_by_products,
)  # fmt: skip
from impl.data.synthetic import SyntheticConfig, write_synthetic
from impl.data.tokens import TokenFolder
from impl.device import Cuda
from impl.instruments import attention_kernel
from impl.mesh import build_mesh
from impl.model.config import ModelConfig
from impl.model.norm_placement import PLACEMENTS
from impl.pipeline.schedules import build
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Precision, Run
from impl.train import Trainer
from impl.zero.buckets import ReductionGroup, divide
from impl.zero.gradients import Gradients
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: torch.cuda.is_available() is False"),
]
every_model = pytest.mark.parametrize(("family", "norm"), [(f, n) for f in ("gpt", "bert") for n in PLACEMENTS])

Family = Literal["gpt", "bert"]
ROOT = Path(__file__).resolve().parents[2]
MODEL = ModelConfig(num_layers=2, hidden_size=128, num_heads=2, seq_len=64)
RECIPE = Recipe(steps=20, global_batch=16, microbatch=8, lr=3e-3, warmup_steps=5)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens") / "synthetic"
    write_synthetic(folder, SyntheticConfig(train_tokens=100_000, valid_tokens=10_000))
    return folder


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    """One NCCL rank in this process."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    place = tmp_path_factory.mktemp("group") / "rendezvous"
    dist.init_process_group("nccl", init_method=f"file://{place}", rank=0, world_size=1, device_id=device)
    yield build_mesh(Plan(), "cuda")
    dist.destroy_process_group()


def trainer(run: Run, data: Path, mesh: DeviceMesh) -> Trainer:
    return Trainer(run, TokenFolder.open(data), mesh, torch.device(mesh.device_type))


def first_step(run: Run, data: Path, mesh: DeviceMesh | None = None) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and every gradient of step 0; on the CPU without a mesh."""
    one = trainer(run, data, mesh or build_mesh(run.plan, "cpu"))
    loss = one.backward(0).item()
    gradients = {name: one.gradients.of[p].cpu().numpy().copy() for name, p in one.model.named_parameters()}
    assert one.step(0).loss.item() == pytest.approx(loss, rel=1e-6)
    return loss, gradients


def distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


EXPERTS = [replace(MODEL, experts=4, expert_prototypes=prototypes) for prototypes in (1, 2)]
PLACED = [replace(MODEL, family=family, norm_placement=norm) for family in ("gpt", "bert") for norm in PLACEMENTS]


@pytest.mark.parametrize("model", [*PLACED, *EXPERTS], ids=lambda one: f"{one.family} {one.norm_placement}")
def test_loss_and_every_gradient_equal_the_cpu(model: ModelConfig, data: Path, mesh: DeviceMesh) -> None:
    run = Run(model=model, train=RECIPE)
    loss, gradients = first_step(run, data, mesh)
    [(expected, cpu_gradients)] = run_ranks(1, first_step, run, data)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert gradients.keys() == cpu_gradients.keys()
    for name, gradient in cpu_gradients.items():
        assert distance(gradients[name], gradient) < 1e-4, name


def test_one_kernel_for_all_experts_is_each_expert_s(
    data: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    # one layer: no router chooses by what another kernel has rounded
    run = Run(model=replace(MODEL, num_layers=1, experts=4), train=RECIPE, precision="bf16")
    loss, gradients = first_step(run, data, mesh)
    monkeypatch.setattr("impl.model.experts.is_grouped", lambda *_: False)
    expected, one_by_one = first_step(run, data, mesh)
    assert loss == pytest.approx(expected, rel=1e-3)
    for name, gradient in one_by_one.items():
        assert distance(gradients[name], gradient) < 2e-2, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("mesh")
def test_products_are_summed_without_rounding_them_to_the_weights_type(dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.zeros(96, 64, dtype=dtype, device="cuda"))
    assert dist.group.WORLD is not None
    groups = [ReductionGroup({"weight": weight}, dist.group.WORLD)]
    initial = lambda name, start, stop: [weight.detach().flatten()[start:stop].float()]
    kept = {"dtype": torch.float32, "kept": torch.float32, "device": torch.device("cuda", 0), "initial": initial}
    buckets = divide(groups, stage=0, bucket_bytes=2**20, **kept)
    gradients = Gradients(buckets, dist.group.WORLD, overlap=True, added=[weight])
    generator = torch.Generator("cuda").manual_seed(0)
    random = lambda width: torch.randn(256, width, device="cuda", generator=generator).to(dtype)
    pairs = [(random(96), random(64)) for _ in range(3)]
    with gradients.accumulated(len(pairs)):
        for a, b in pairs:
            gradients.add_product(weight, a, b)
    exact = sum((a.double().t() @ b.double() for a, b in pairs), torch.zeros(()).cuda())
    # products that are rounded before they are added are 1.7e-3 off in bf16, 2.1e-4 in fp16
    assert (gradients.of[weight] - exact).norm() < 1e-5 * exact.norm()


@every_model
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_step_does_not_wait_for_the_device(
    family: Family, norm: str, dropout: float, data: Path, mesh: DeviceMesh
) -> None:
    model = replace(MODEL, family=family, norm_placement=norm, dropout=dropout)
    one = trainer(Run(model=model, train=RECIPE, precision="bf16"), data, mesh)
    for i in range(2):  # the first steps allocate, and load kernels
        one.step(i)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step = one.step(2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(step.loss)


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_h1"])
def test_actions_are_timed_on_the_device_without_waiting_for_it(schedule: str, data: Path, mesh: DeviceMesh) -> None:
    run = Run(model=MODEL, plan=Plan(schedule=schedule), train=RECIPE, precision="bf16")
    one, watch = trainer(run, data, mesh), Stopwatch(torch.device(mesh.device_type))
    for i in range(2):  # the first steps allocate, and load kernels
        one.step(i)
    torch.cuda.set_sync_debug_mode("error")
    try:
        one.step(2, watch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    row = watch.row()
    assert [text for text, _, _ in row] == [str(action) for action in build(schedule, 1, run.microbatches).rows[0]]
    times = [time for _, *both in row for time in both]
    assert times == sorted(times)
    assert all(start < end for _, start, end in row)


@pytest.mark.parametrize("family", ["gpt", "bert"])
@pytest.mark.parametrize("compiled", [False, True])
def test_bf16_learns(family: Family, compiled: bool, data: Path, mesh: DeviceMesh) -> None:
    run = Run(model=replace(MODEL, family=family), train=RECIPE, precision="bf16", compile=compiled)
    one = trainer(run, data, mesh)
    losses = [one.step(i).loss.item() for i in range(RECIPE.steps)]
    assert np.mean(losses[-5:]) < losses[0] - 0.5
    evaluation, *_ = one.evaluate(final=True)
    assert evaluation.nats / evaluation.tokens < losses[0]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_profiled_step_is_its_kernels_and_the_limit_has_all_of_its_products(
    compiled: bool, data: Path, mesh: DeviceMesh
) -> None:
    run = Run(model=MODEL, train=RECIPE, precision="bf16", compile=compiled)
    one, cuda = trainer(run, data, mesh), torch.device("cuda", 0)
    found = profiled(lambda: one.step(0).grad_norm.item(), cuda)
    parts = found["parts"]
    assert sum(parts.values()) == pytest.approx(found["seconds"])
    assert all(parts[part] > 0 for part in ("products", "attention", "optimizer", "operators", "rest"))
    assert parts["communication"] == 0
    alone = roofline(run, one.vocab_size, mesh, cuda)
    assert 0 < alone["gemm_seconds"] < found["seconds"]
    assert 0 < alone["attention_seconds"] < found["seconds"]
    assert alone["collectives"] == []


def test_a_run_through_the_harness_reports_the_device_and_its_memory(tmp_path: Path) -> None:
    options = ["--model", "gpt-0.5m", "--train.steps", "20", "--precision", "bf16", "--compile", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "harness", "train", *options, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    environment, [rank] = record["environment"], record["ranks"]
    assert (environment["device"], environment["backend"]) == ("cuda", "nccl")
    assert environment["device_name"] == torch.cuda.get_device_name(0)
    assert rank["memory_kind"] == "CUDA allocator peak"
    # bf16 weights, fp32 master weights, gradients and two moments, and activations besides
    assert rank["peak_memory_bytes"] > 18 * record["resolved"]["parameters"]
    assert rank["gemm_flops_per_s"] > 0
    losses = [step["loss"] for step in record["steps"]]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("causal", [False, True])
def test_parts_of_a_ring_are_the_same_by_the_fused_kernel_and_by_products(causal: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    random = lambda heads: torch.randn(2, heads, 64, 32, dtype=torch.bfloat16, device="cuda", generator=generator)
    q, k, v, grad = (random(heads) for heads in (4, 2, 2, 4))
    found, expected = (of(q, k, v, causal=causal) for of in (attention, attention_by_products))
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2, check_dtype=False)
    gradients = (of(grad, q, k, v, *expected, causal=causal) for of in (attention_grad, attention_grad_by_products))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("plan", [Plan(recompute="full", offload_activations=True), Plan(offload_optimizer=True)])
def test_offloading_changes_no_more_than_rounding(
    plan: Plan, precision: Precision, data: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    runs = [Run(model=MODEL, plan=of, train=RECIPE, precision=precision) for of in (Plan(), plan)]
    ones = [trainer(run, data, mesh) for run in runs]
    losses = [[one.step(i).loss.item() for i in range(5)] for one in ones]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2 if precision != "fp32" else 1e-4)
    assert attention_kernel(ones[0]) in FUSED


FUSED = ("flash_attention", "efficient_attention", "cudnn_attention")
PLANS = [
    Plan(tp=2), Plan(tp=2, sequence_parallel=True), Plan(pp=2, schedule="interleaved", chunks=2),
    Plan(pp=2, schedule="zb_h1"), Plan(cp=2), *(Plan(dp=2, zero_stage=stage) for stage in (0, 1, 2, 3)),
]  # fmt: skip


def on_nccl(run: Run, data: Path, place: str) -> list[float]:
    """The losses of a rank, after gloo's ranks have met once more by NCCL."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    device = Cuda.of_rank(rank)
    how = {"init_method": f"file://{place}", "rank": rank, "world_size": ranks}
    dist.init_process_group(device.backend, device_id=device.enter(), **how)
    one = Trainer(run, TokenFolder.open(data), build_mesh(run.plan, "cuda"), device.device)
    return [one.step(i).loss.item() for i in range(5)]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device: torch.cuda.device_count() < 2")
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_two_gpus_train_as_one(plan: Plan, data: Path, tmp_path: Path) -> None:
    run = Run(model=replace(MODEL, num_layers=4), plan=plan, train=RECIPE)
    [expected] = run_ranks(1, on_nccl, replace(run, plan=Plan()), data, f"{tmp_path}/one")
    for found in run_ranks(2, on_nccl, run, data, f"{tmp_path}/two"):
        assert found == pytest.approx(expected, rel=1e-4)
