"""A whole training step of small models, and what comes after its backward pass."""

from functools import partial

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch.distributed.device_mesh import DeviceMesh

from impl.cost.flops import model_flops
from impl.data.tokens import TokenFolder
from impl.model.sizes import named
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Precision, Run
from impl.train import Trainer
from impl.zero.buckets import ReductionGroup, divide

SIZES = ("gpt-0.5m", "gpt-2m")
RECIPE = Recipe(global_batch=8, microbatch=4)


def trainer(size: str, precision: Precision, data: TokenFolder, mesh: DeviceMesh) -> Trainer:
    run = Run(model=named(size), train=RECIPE, precision=precision)
    return Trainer(run, data, mesh, torch.device("cpu"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("size", SIZES)
def test_training_step(
    size: str, precision: Precision, data: TokenFolder, mesh: DeviceMesh, benchmark: BenchmarkFixture
) -> None:
    one = trainer(size, precision, data, mesh)
    step = benchmark.pedantic(partial(one.step, 0), rounds=12, warmup_rounds=2)
    flops = model_flops("palm_12", one.run.model, RECIPE.global_batch, one.vocab_size)
    benchmark.extra_info["tokens_per_step"] = one.run.tokens_per_step
    benchmark.extra_info["model_flops_per_step"] = flops
    assert torch.isfinite(step.loss)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("size", SIZES)
def test_optimizer_step(
    size: str, precision: Precision, data: TokenFolder, mesh: DeviceMesh, benchmark: BenchmarkFixture
) -> None:
    one = trainer(size, precision, data, mesh)
    one.backward(0)
    benchmark(one.optimizer.step, 1e-3)


def test_gradient_clipping(data: TokenFolder, mesh: DeviceMesh, benchmark: BenchmarkFixture) -> None:
    one = trainer("gpt-2m", "fp32", data, mesh)
    one.backward(0)

    def clip() -> torch.Tensor:
        norm = one.gradients.norm()
        one.optimizer.step(0.0, torch.clamp(1.0 / norm, max=1.0))
        return norm

    assert benchmark(clip) > 0


def test_gradient_buckets_are_laid_out(data: TokenFolder, mesh: DeviceMesh, benchmark: BenchmarkFixture) -> None:
    shapes = {name: p.shape for name, p in trainer("gpt-2m", "fp32", data, mesh).model.named_parameters()}
    dp = mesh.get_group("dp")
    group = lambda: ReductionGroup({name: torch.nn.Parameter(torch.empty(shape)) for name, shape in shapes.items()}, dp)
    new = lambda: (
        ([group()],),
        {
            "stage": 0,
            "dtype": torch.float32,
            "kept": torch.float32,
            "bucket_bytes": Plan().bucket_bytes,
            "device": torch.device("cpu"),
            "initial": lambda name, start, stop: [torch.zeros(stop - start)],
        },
    )
    buckets = benchmark.pedantic(divide, setup=new, rounds=20, warmup_rounds=2)
    assert len(buckets) > 1
