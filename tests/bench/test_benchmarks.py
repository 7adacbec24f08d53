"""Times of the parts, by `make bench`; left out of `make test`. One rank, one thread, on the CPU."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pytest_benchmark.fixture import BenchmarkFixture
from torch.distributed.device_mesh import DeviceMesh

from harness import tables
from impl.cost.flops import palm_12
from impl.data.batches import causal_batch, masked_batch, window_permutation
from impl.data.synthetic import SyntheticConfig, write_synthetic
from impl.data.tokens import TokenFolder
from impl.mesh import build_mesh
from impl.model.sizes import named
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Precision, Run
from impl.tensor_parallel.cross_entropy import Tokens, split_nats
from impl.train import Trainer
from impl.zero.buckets import Kind, divide
from tests.harness.made_up_records import record

CPU = torch.device("cpu")
SIZES = ("gpt-0.5m", "gpt-2m")
RECIPE = Recipe(global_batch=8, microbatch=4)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TokenFolder:
    folder = tmp_path_factory.mktemp("tokens") / "synthetic"
    write_synthetic(folder, SyntheticConfig(train_tokens=1_000_000, valid_tokens=10_000))
    return TokenFolder.open(folder)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    """One gloo rank in this process, with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp("group") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=0, world_size=1)
    yield build_mesh(Plan(), "cpu")
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def trainer(size: str, precision: Precision, data: TokenFolder, mesh: DeviceMesh) -> Trainer:
    return Trainer(Run(model=named(size), train=RECIPE, precision=precision), data, mesh, CPU)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("size", SIZES)
def test_training_step(
    size: str, precision: Precision, data: TokenFolder, mesh: DeviceMesh, benchmark: BenchmarkFixture
) -> None:
    one = trainer(size, precision, data, mesh)
    step = benchmark.pedantic(partial(one.step, 0), rounds=8, warmup_rounds=2)
    flops = palm_12(one.run.model, RECIPE.global_batch, one.vocab_size)
    benchmark.extra_info["tokens_per_step"] = one.run.tokens_per_step
    benchmark.extra_info["model_flops_per_step"] = flops
    assert torch.isfinite(step.loss)


@pytest.mark.parametrize("size", SIZES)
def test_optimizer_step(size: str, data: TokenFolder, mesh: DeviceMesh, benchmark: BenchmarkFixture) -> None:
    one = trainer(size, "bf16", data, mesh)
    one.backward(0)
    benchmark(one.optimizer.step, 1e-3)


def test_gradient_clipping(data: TokenFolder, mesh: DeviceMesh, benchmark: BenchmarkFixture) -> None:
    one = trainer("gpt-2m", "fp32", data, mesh)
    one.backward(0)

    def clip() -> torch.Tensor:
        norm = one.gradients.norm()
        one.gradients.scale(torch.clamp(1.0 / norm, max=1.0))
        return norm

    assert benchmark(clip) > 0


def test_gradient_buckets_are_laid_out(data: TokenFolder, mesh: DeviceMesh, benchmark: BenchmarkFixture) -> None:
    shapes = {name: p.shape for name, p in trainer("gpt-2m", "fp32", data, mesh).model.named_parameters()}
    dp = mesh.get_group("dp")
    kind = lambda: Kind({name: torch.nn.Parameter(torch.empty(shape)) for name, shape in shapes.items()}, dp)
    new = lambda: (
        ([kind()],),
        {"stage": 0, "dtype": torch.float32, "kept": torch.float32, "bucket_bytes": Plan().bucket_bytes},
    )
    buckets = benchmark.pedantic(divide, setup=new, rounds=20, warmup_rounds=2)
    assert len(buckets) > 1


def test_cross_entropy(mesh: DeviceMesh, benchmark: BenchmarkFixture) -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(4 * 128, 8192, generator=random)
    targets = torch.randint(8192, (4 * 128,), generator=random)
    new = lambda: ((logits.clone().requires_grad_(),), {})  # the backward pass overwrites them

    def forward_and_backward(logits: torch.Tensor) -> torch.Tensor:
        nats = split_nats(logits, targets, Tokens(0, 8192), mesh.get_group("tp"))
        return torch.autograd.grad(nats.mean(), logits)[0]

    assert benchmark.pedantic(forward_and_backward, setup=new, rounds=20, warmup_rounds=2).shape == logits.shape


@pytest.mark.parametrize("sequences", [8, 512])
def test_causal_batch(sequences: int, data: TokenFolder, benchmark: BenchmarkFixture) -> None:
    tokens, indices = data.tokens("train"), np.arange(sequences)
    batch = benchmark(causal_batch, tokens, indices, seq_len=128, seed=0)
    assert batch.inputs.shape == (sequences, 128)


@pytest.mark.parametrize("sequences", [8, 512])
def test_masked_batch(sequences: int, data: TokenFolder, benchmark: BenchmarkFixture) -> None:
    tokens, indices = data.tokens("train"), np.arange(sequences)
    batch = benchmark(masked_batch, tokens, indices, seq_len=128, seed=0, vocab_size=257)
    assert batch.inputs.shape == (sequences, 128)


def test_window_permutation(benchmark: BenchmarkFixture) -> None:
    windows = benchmark(window_permutation, np.arange(100_000), 100_000, 0, 0)
    assert len(np.unique(windows)) == 100_000


def test_synthetic_language_is_written(tmp_path: Path, benchmark: BenchmarkFixture) -> None:
    config = SyntheticConfig(train_tokens=1_000_000, valid_tokens=10_000)
    folders = (tmp_path / str(i) for i in range(10**6))
    benchmark.pedantic(lambda: write_synthetic(next(folders), config), rounds=5, warmup_rounds=1)


def test_all_tables_of_200_records(benchmark: BenchmarkFixture) -> None:
    records = [
        record(seed=seed, train__lr=lr, train__microbatch=1, plan__dp=dp, model__norm_placement=norm)
        for seed in range(5)
        for lr in (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
        for dp in (1, 2, 4, 8)
        for norm in ("pre", "post")
    ]
    assert len(records) == 200
    made = benchmark.pedantic(tables.all_tables, (records,), rounds=3, warmup_rounds=1)
    assert {"throughput", "scaling"} <= {table.name for table in made}
