"""Step time and memory of ZeRO's stages over two ranks, by `make bench`: ours against DeepSpeed and PyTorch's FSDP2."""

import ctypes
import gc
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from pytest_benchmark.fixture import BenchmarkFixture
from torch.distributed.tensor import DTensor

from harness import render
from harness.environment import device_environment
from harness.render import Column, Table
from harness.side_by_side import Engine, Turn, compared, notes, table, take_turns
from impl.data.tokens import TokenFolder
from impl.mesh import build_mesh
from impl.model.config import ModelConfig
from impl.pipeline.engine import Watch
from impl.plan import Plan, ZeroStage
from impl.recipe import Recipe
from impl.run import Precision, Run, from_dict, to_dict
from impl.train import Step, Trainer
from tests import ranks

CPU = torch.device("cpu")
MODEL = ModelConfig(num_layers=6, hidden_size=512, num_heads=8, seq_len=256, vocab_size=8192)
RECIPE = Recipe(steps=10, global_batch=32, microbatch=4, lr=1e-4)
WARMUP = 2
PEERS: dict[ZeroStage, tuple[str, ...]] = {1: ("DeepSpeed",), 2: ("DeepSpeed", "FSDP2"), 3: ("DeepSpeed", "FSDP2")}
"""By stage."""
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
LOSSES_AGREE = {"fp32": 3e-5, "bf16": 1e-3}  # 10 steps of AdamW, whose first divide by tiny gradients

MEMORY_RECIPE = replace(RECIPE, steps=2, global_batch=16)  # of two microbatches the second one meets gradients
TINY = ModelConfig(num_layers=2, hidden_size=32, num_heads=2, seq_len=16)
NOISE = 0.02

Cell = dict[str, Any]
Publish = Callable[[str, str, dict[str, Any] | None], None]


@pytest.fixture(scope="module")
def measured(publish: Publish) -> Iterator[dict[str, list[Cell]]]:
    """Results as they are measured, by kind; shown at the end, and kept if all are there."""
    found: dict[str, list[Cell]] = {"cells": [], "memory": []}
    yield found
    wanted = len(PRECISIONS) * sum(map(len, PEERS.values()))
    is_whole = len(found["cells"]) == wanted and len(found["memory"]) == wanted + len(PRECISIONS) * len(PEERS)
    publish("zero", "\n".join(render.markdown(one) for one in tables(found)), found if is_whole else None)


def tables(found: dict[str, list[Cell]]) -> Iterator[Table]:
    if rows := found["cells"]:
        said = notes(from_dict(rows[0]["run"]), rows[0]["device"], warmup=WARMUP)
        title = "ZeRO over two ranks: ours against DeepSpeed and PyTorch's FSDP2"
        yield table("zero", title, "Theirs", rows, [*said, *notes_of_peers()])
    if rows := found["memory"]:
        frame = pd.DataFrame(rows, columns=["precision", "stage", "engine", "peak", "held", "ratio"])
        yield Table("zero_memory", "Memory of a rank with ZeRO over two ranks", MEMORY, frame, NOTES_OF_MEMORY)


def notes_of_peers() -> Iterator[str]:
    yield (
        f"DeepSpeed {version('deepspeed')}: buckets of our bytes, contiguous gradients, reduce-scatter and overlap on, "
        "no overflow check in bf16, gradients accumulated and reduced in fp32; stage 3 fetches one layer ahead and "
        "keeps vectors whole. Around PyTorch's fused AdamW, as ours is."
    )
    yield (
        "FSDP2: `fully_shard` around each layer and the whole, gathers asynchronous and one layer ahead, gradients "
        "reduced at every microbatch in fp32, no division; stage 2 keeps parameters from the first forward pass to the "
        "last backward pass (`reshard_after_forward=False`, `set_reshard_after_backward`)."
    )
    yield ("Ours: a step ends when all parameters are gathered, which in training goes on into the next forward pass.")
    yield "Made by `make bench`."


MB: dict[str, Any] = {"unit": "MB", "scale": 1e6, "si": "B"}
MEMORY = (
    Column(key="precision", header="Precision", text=True),
    Column(key="stage", header="Stage"),
    Column(key="engine", header="Engine", text=True),
    Column(key="peak", header="Peak above the start", **MB),
    Column(key="held", header="Tensors held between steps", **MB),
    Column(key="ratio", header="Ours / theirs, peak", digits=3),
)
NOTES_OF_MEMORY = (
    "The model of the table above, two microbatches. Each engine in processes of its own, the larger rank's value. "
    "Start: the process's resident memory after the engine has trained a tiny model. Peak: the highest resident memory "
    "in the first two steps, when the engine has been built; freed memory is given back to the system at once.",
    "Held: parameters, gradients and optimizer states, and any buffer that stays, after the second step.",
    "Made by `make bench`.",
)


class Settled(Trainer):
    """Ours, which begins to gather parameters as a step ends: in another engine's turn, if it were not awaited."""

    def step(self, i: int, watch: Watch | None = None) -> Step:
        step = super().step(i, watch)
        for bucket in self.buckets:
            self.parameters.settle(bucket)
        return step


def engine(name: str, run: Run, data: TokenFolder) -> Engine:
    mesh = build_mesh(run.plan, "cpu")
    if name == "ours":
        return Settled(run, data, mesh, CPU)
    if name == "FSDP2":
        from impl.peers.fsdp import FSDPTrainer

        return FSDPTrainer(run, data, mesh, CPU)
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(dist.get_rank()), LOCAL_SIZE=str(dist.get_world_size()))
    from impl.peers.deepspeed import DeepSpeedTrainer

    return DeepSpeedTrainer(run, data, mesh, CPU)


def turns_of_a_rank(run: Run, data: Path, names: Sequence[str]) -> tuple[dict[str, list[Turn]], dict[str, Any]]:
    folder = TokenFolder.open(data)
    engines = {name: engine(name, run, folder) for name in names}
    return take_turns(engines, run.train.steps), device_environment(CPU)


@pytest.mark.parametrize("stage", PEERS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_step_time_against_peers(
    precision: Precision,
    stage: ZeroStage,
    tokens: Path,
    measured: dict[str, list[Cell]],
    benchmark: BenchmarkFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "TIMEOUT_SECONDS", 600)
    run = Run(model=MODEL, plan=Plan(dp=2, zero_stage=stage), train=RECIPE, precision=precision)
    answers = benchmark.pedantic(ranks.run_ranks, (2, turns_of_a_rank, run, tokens, ("ours", *PEERS[stage])), rounds=1)
    results = {name: compared([turns for turns, _ in answers], "ours", name, warmup=WARMUP) for name in PEERS[stage]}
    for name, result in results.items():
        assert result["loss_difference"] < LOSSES_AGREE[precision], f"{name} does different work"
        plan = f"stage {stage}, {name}"
        device = answers[0][1]
        measured["cells"].append(
            {"precision": precision, "plan": plan, "run": to_dict(run), "device": device, **result}
        )
        benchmark.extra_info[name] = {key: result[key] for key in ("ours", "theirs", "value", "low", "high")}
    assert all(result["low"] <= 1.0 for result in results.values()), f"faster than ours: {results.keys()}"


def memory_of_a_rank(run: Run, data: Path, name: str) -> tuple[int, int]:
    """Peak of resident memory above what it is with a tiny model, and tensors held between steps. Units: bytes."""
    folder, libc = TokenFolder.open(data), ctypes.CDLL(None)
    trim_threshold, mmap_threshold, block = -1, -3, 1 << 16  # of glibc's mallopt: freed blocks go back at once
    assert libc.mallopt(trim_threshold, block)
    assert libc.mallopt(mmap_threshold, block)
    engine(name, replace(run, model=TINY), folder).step(0)
    gc.collect()
    libc.malloc_trim(0)
    start, tensors = resident("VmRSS"), tensor_bytes()
    trainer = engine(name, run, folder)  # not counted: all begin with a whole model
    gc.collect()
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is the present again
    for i in range(run.train.steps):
        trainer.step(i)
    peak = resident("VmHWM")
    gc.collect()
    return peak - start, tensor_bytes() - tensors


def resident(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def tensor_bytes() -> int:
    """Of all tensors that Python knows, and their gradients; memory that several share counts once."""
    sizes: dict[int, int] = {}
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor) and not issubclass(type(found), DTensor):
            for tensor in (found, found.grad if found.is_leaf else None):
                if tensor is not None and tensor.device == CPU and not isinstance(tensor, DTensor):
                    sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(sizes.values())


@pytest.mark.parametrize("stage", PEERS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_memory_against_peers(
    precision: Precision, stage: ZeroStage, tokens: Path, measured: dict[str, list[Cell]], benchmark: BenchmarkFixture
) -> None:
    run = Run(model=MODEL, plan=Plan(dp=2, zero_stage=stage), train=MEMORY_RECIPE, precision=precision)

    def of_every_engine() -> dict[str, list[tuple[int, int]]]:
        return {name: ranks.run_ranks(2, memory_of_a_rank, run, tokens, name) for name in ("ours", *PEERS[stage])}

    found = benchmark.pedantic(of_every_engine, rounds=1)
    peaks = {name: max(peak for peak, _ in answers) for name, answers in found.items()}
    for name, answers in found.items():
        row = {"peak": peaks[name], "held": max(held for _, held in answers), "ratio": peaks["ours"] / peaks[name]}
        benchmark.extra_info[name] = row
        kind = {"precision": precision, "stage": stage, "engine": name, "run": to_dict(run), "ranks": answers}
        measured["memory"].append({**kind, **row})
    assert all(peaks["ours"] <= (1 + NOISE) * peak for peak in peaks.values()), "less memory than ours"
