"""What is measured side by side: every plan that two ranks can do, in each precision, by all engines that can do it."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from pytest_benchmark.fixture import BenchmarkFixture

from harness.records.environment import device_environment
from impl import engines
from impl.data.tokens import TokenFolder
from impl.mesh import build_mesh
from impl.model.config import ModelConfig
from impl.peers.validity import EnginePart, part_of
from impl.pipeline.engine import Watch
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import EngineName, Precision, Run
from impl.train import Step, Trainer
from tests import ranks
from tests.bench.screen import Screen
from tests.bench.side_by_side import Engine, Turn, take_turns

Cell = dict[str, Any]
Publish = Callable[[str, str, Mapping[str, Any] | None], None]

CPU = torch.device("cpu")
OURS = "ours"
MODEL = ModelConfig(num_layers=6, hidden_size=512, num_heads=8, seq_len=256, vocab_size=8192)
LLAMA = replace(
    MODEL, kv_heads=4, positions="rotary", mlp="swiglu", mlp_size=1408, biases=False, tied=False, norm="rmsnorm"
)
RECIPE = Recipe(steps=12, global_batch=32, microbatch=4, lr=1e-4)
FEWER_SEQUENCES = 16
"""Of a step where both ranks are on the same ones."""
LONGER, LONG_SEQUENCES = 1024, 2
"""Tokens of a sequence that ranks share, and sequences of a step."""
PIPELINE_STEPS = 22
"""Pipelines of two ranks are close together: more pairs tell them apart."""
WARMUP = 2
SECONDS = 900
"""That the ranks of a cell may take."""
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
LOSSES_AGREE = {"fp32": 1e-5, "bf16": 1e-3}
PLANS = {
    "dp": Plan(dp=2),
    "zero-1": Plan(dp=2, zero_stage=1),
    "zero-2": Plan(dp=2, zero_stage=2),
    "zero-3": Plan(dp=2, zero_stage=3),
    "tp": Plan(tp=2),
    "tp-sequence": Plan(tp=2, sequence_parallel=True),
    "gpipe": Plan(pp=2, schedule="gpipe"),
    "1f1b": Plan(pp=2, schedule="one_f_one_b"),
    "interleaved": Plan(pp=2, schedule="interleaved", chunks=2),
    "zb-v": Plan(pp=2, schedule="zbv", chunks=2),
    "dualpipe-v": Plan(pp=2, schedule="dualpipe_v", chunks=2),
    "ring": Plan(cp=2),
    "hsdp": Plan(dp=4, zero_stage=3, zero_group=2),
}
PLANS |= {f"llama-{plan}": PLANS[plan] for plan in ("dp", "zero-3", "tp-sequence", "1f1b")}
NAMES: dict[EnginePart, str] = {
    "native": OURS,
    "plain": "PyTorch",
    "ddp": "DDP",
    "fsdp": "FSDP2",
    "dtensor": "DTensor",
    "context": "torch context_parallel",
    "pipelining": "torch pipelining",
    "deepspeed": "DeepSpeed",
    "deepspeed_pipeline": "DeepSpeed pipeline",
}
"""What an engine's part is called in a table."""


def run_of(plan: str, precision: Precision) -> Run:
    """One cell of the table."""
    recipe = RECIPE if PLANS[plan].tp == 1 else replace(RECIPE, global_batch=FEWER_SEQUENCES)
    recipe = recipe if PLANS[plan].pp == 1 else replace(RECIPE, steps=PIPELINE_STEPS)
    model = LLAMA if plan.startswith("llama-") else MODEL
    if PLANS[plan].cp > 1:
        model, recipe = replace(model, seq_len=LONGER), replace(RECIPE, global_batch=LONG_SEQUENCES, microbatch=1)
    return Run(model=model, plan=PLANS[plan], train=recipe, precision=precision)


def engines_of(run: Run) -> dict[str, Run]:
    """The run under every engine that can do it, by the engine's name in tables, ours first."""
    every = (replace(run, engine=engine) for engine in get_args(EngineName))
    return {NAMES[part_of(one)]: one for one in every if not one.problems()}


class Settled:
    """Ours, which begins to gather parameters as a step ends: in another engine's turn, if it were not awaited."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def step(self, i: int, watch: Watch | None = None) -> Step:
        step = self.trainer.step(i, watch)
        for bucket in self.trainer.buckets:
            self.trainer.parameters.settle(bucket)
        return step


def make(run: Run, data: TokenFolder) -> Engine:
    """The run's engine on this rank, over a mesh of its own."""
    # the launcher's part: DeepSpeed reads its place from the environment
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(dist.get_rank()), LOCAL_SIZE=str(dist.get_world_size()))
    made = engines.make(run, data, build_mesh(run.plan, "cpu"), CPU)
    return Settled(made) if isinstance(made, Trainer) else made


def turns_of_a_rank(
    label: str, runs: Mapping[str, Run], data: Path, screen: Screen
) -> tuple[dict[str, list[Turn]], dict[str, Any]]:
    """Every engine's turns, and what they ran on; rank 0 says where they are."""
    folder = TokenFolder.open(data)
    if dist.get_rank() == 0:
        screen.say(f"{label}: {', '.join(runs)} are built")
    made = {name: make(run, folder) for name, run in runs.items()}
    steps = next(iter(runs.values())).train.steps

    def tell(i: int, seconds: Mapping[str, float]) -> None:
        took = ", ".join(f"{name} {1e3 * each:,.0f} ms" for name, each in seconds.items())
        screen.say(f"{label}: step {i + 1} of {steps}; {took}")

    return take_turns(made, steps, tell if dist.get_rank() == 0 else None), device_environment(CPU)


def measure(
    rank: Callable[..., tuple[Any, ...]],
    label: str,
    runs: Mapping[str, Run],
    data: Path,
    screen: Screen,
    benchmark: BenchmarkFixture,
) -> list[tuple[Any, ...]]:
    """What `rank` answers on every rank: `turns_of_a_rank`, or one that answers more."""
    world = next(iter(runs.values())).plan.world_size
    before, ranks.TIMEOUT_SECONDS = ranks.TIMEOUT_SECONDS, SECONDS
    try:
        return benchmark.pedantic(ranks.run_ranks, (world, rank, label, runs, data, screen), rounds=1)
    finally:
        ranks.TIMEOUT_SECONDS = before
        screen.clear()


def take_rounds(benchmark: BenchmarkFixture, seconds: list[float]) -> None:
    """What the ranks timed themselves becomes the benchmark's rounds."""
    assert benchmark.stats is not None
    benchmark.stats.stats.data.clear()
    for each in seconds:
        benchmark.stats.update(each)


def said_of(peers: set[str]) -> list[str]:
    """How the peers are set up, and where a step of ours ends."""
    notes = {
        "PyTorch": "PyTorch: the same model from `torch.nn`, fused AdamW.",
        "DDP": "DDP: `DistributedDataParallel` with gradients as views of buckets of our bytes, reduced at a step's "
        "last microbatch; in bf16 a communication hook reduces the sums in fp32. Fused AdamW.",
        "FSDP2": "FSDP2: `fully_shard` around each layer and the whole, gathers asynchronous and one layer ahead, no "
        "division; stage 1 reduces once a step, stages 2 and 3 at every microbatch, in fp32; stages 1 and 2 keep "
        "parameters from the first forward pass to the last backward pass.",
        "DeepSpeed": f"DeepSpeed {version('deepspeed')}: buckets of our bytes, contiguous gradients, reduce-scatter "
        "and overlap on, no overflow check in bf16, gradients accumulated and reduced in fp32; stage 3 fetches one "
        "layer ahead and keeps vectors whole. Around PyTorch's fused AdamW, as ours is.",
        "DTensor": "DTensor: `ColwiseParallel`, `RowwiseParallel`, `SequenceParallel` and `loss_parallel` around fused "
        "AdamW, one matrix for queries, keys and values, activations as plain tensors between split blocks.",
        "torch context_parallel": "torch context_parallel: its ring, keys and values all-gathered at once as is its "
        "default, called with the CPU's fused attention, which its table of kernels lacks; DDP over the ranks.",
        "torch pipelining": "torch pipelining: `PipelineStage` with static shapes under torch's schedule of that name, "
        "the loss divided by the microbatches in place of `scale_grads`, fused AdamW, the layers of ours on each rank.",
        "DeepSpeed pipeline": "DeepSpeed pipeline: `PipelineModule`, which is 1F1B, with tied embeddings and the "
        "layers of ours on each rank; in bf16 under ZeRO's stage 1, which adds gradients up in fp32. Fused AdamW.",
    }
    return [text for name, text in notes.items() if name in peers]
