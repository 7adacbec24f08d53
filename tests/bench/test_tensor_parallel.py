"""Step time of tensor parallelism over two ranks: ours against PyTorch's DTensor, by `make bench`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.capture import CaptureManager
from pytest_benchmark.fixture import BenchmarkFixture

from harness import render
from harness.environment import device_environment, host_environment
from harness.side_by_side import Turn, compared, table, take_turns
from harness.store import write_atomically
from impl.data.synthetic import SyntheticConfig, write_synthetic
from impl.data.tokens import TokenFolder
from impl.mesh import build_mesh
from impl.model.config import ModelConfig
from impl.peers.dtensor import DTensorTrainer
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Precision, Run, to_dict
from impl.train import Trainer
from tests import ranks

MODEL = ModelConfig(num_layers=6, hidden_size=512, num_heads=8, seq_len=256, vocab_size=8192)
RECIPE = Recipe(steps=20, global_batch=8, microbatch=4, lr=1e-4)  # at 1e-3 the loss jumps, and so do rounding errors
WARMUP = 3
PLANS = {"tensor": Plan(tp=2), "tensor + sequence": Plan(tp=2, sequence_parallel=True)}
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
LOSSES_AGREE = {"fp32": 1e-5, "bf16": 1e-3}
Cell = dict[str, Any]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens") / "synthetic"
    write_synthetic(folder, SyntheticConfig(train_tokens=200_000, valid_tokens=2_000))
    return folder


@pytest.fixture(scope="module")
def cells(request: pytest.FixtureRequest) -> Iterator[list[Cell]]:
    """Comparisons as they are measured; shown at the end, and kept if all are there and a folder is given."""
    measured: list[Cell] = []
    yield measured
    text = render.markdown(table("tensor_parallel", TITLE, "DTensor", measured, notes(measured))) if measured else ""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    assert isinstance(capture, CaptureManager)
    with capture.global_and_fixture_disabled():
        print(f"\n\n{text}")
    folder = request.config.getoption("--keep", default=None)
    if folder is not None and len(measured) == len(PLANS) * len(PRECISIONS):
        document = {"environment": host_environment(["make", "bench"]), "cells": measured}
        write_atomically(folder / "tensor_parallel.json", json.dumps(document, indent=1) + "\n")
        write_atomically(folder / "tensor_parallel.md", text)


TITLE = "Tensor parallelism over two ranks: ours against PyTorch's DTensor"


def notes(measured: list[Cell]) -> list[str]:
    """What must be known to read the table."""
    device, microbatches = measured[0]["device"], RECIPE.global_batch // RECIPE.microbatch
    return [
        f"GPT, {MODEL.num_layers} layers, hidden size {MODEL.hidden_size}, {MODEL.num_heads} heads, sequence "
        f"{MODEL.seq_len}, vocabulary {MODEL.vocab_size:,}; a step is {microbatches} microbatches of "
        f"{RECIPE.microbatch} sequences, gradient clipping and AdamW on fp32 weights.",
        f"Step time: the slowest rank's, median of {RECIPE.steps - WARMUP} steps after {WARMUP}; both engines take "
        "turns step by step in the same processes. Interval: 95%, bootstrap over the pairs. Below 1 ours is faster. "
        "Losses: the largest relative difference at any step.",
        f"Two ranks of {device['torch_threads']} thread, {device['backend']}, on {device['device_name']}; torch "
        f"{torch.__version__}. Two cores and their loopback tell about mechanics, not about a cluster.",
        "DTensor: `ColwiseParallel`, `RowwiseParallel`, `SequenceParallel` and `loss_parallel` around fused AdamW, "
        "one matrix for queries, keys and values, activations as plain tensors between split blocks.",
        "Made by `make bench`.",
    ]


def turns_of_a_rank(run: Run, data: Path) -> tuple[dict[str, list[Turn]], dict[str, Any]]:
    folder, mesh, cpu = TokenFolder.open(data), build_mesh(run.plan, "cpu"), torch.device("cpu")
    engines = {kind.__name__: kind(run, folder, mesh, cpu) for kind in (Trainer, DTensorTrainer)}
    return take_turns(engines, RECIPE.steps), device_environment(cpu)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_step_time_against_dtensor(
    precision: Precision,
    plan: str,
    data: Path,
    cells: list[Cell],
    benchmark: BenchmarkFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "TIMEOUT_SECONDS", 600)
    run = Run(model=MODEL, plan=PLANS[plan], train=RECIPE, precision=precision)
    answers = benchmark.pedantic(ranks.run_ranks, (2, turns_of_a_rank, run, data), rounds=1)
    result = compared([turns for turns, _ in answers], "Trainer", "DTensorTrainer", warmup=WARMUP)
    assert result["loss_difference"] < LOSSES_AGREE[precision], "the engines do different work"
    cells.append({"precision": precision, "plan": plan, "run": to_dict(run), "device": answers[0][1], **result})
    benchmark.extra_info.update({key: result[key] for key in ("ours", "theirs", "value", "low", "high")})
    assert result["low"] <= 1.0, "DTensor is faster"
