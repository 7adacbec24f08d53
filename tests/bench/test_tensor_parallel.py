"""Step time of tensor parallelism over two ranks: ours against PyTorch's DTensor, by `make bench`."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from harness import render
from harness.environment import device_environment
from harness.side_by_side import Turn, compared, notes, table, take_turns
from impl.data.tokens import TokenFolder
from impl.mesh import build_mesh
from impl.model.config import ModelConfig
from impl.peers.dtensor import DTensorTrainer
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Precision, Run, from_dict, to_dict
from impl.train import Trainer
from tests import ranks

MODEL = ModelConfig(num_layers=6, hidden_size=512, num_heads=8, seq_len=256, vocab_size=8192)
RECIPE = Recipe(steps=20, global_batch=8, microbatch=4, lr=1e-4)  # at 1e-3 the loss jumps, and so do rounding errors
WARMUP = 3
PLANS = {"tensor": Plan(tp=2), "tensor + sequence": Plan(tp=2, sequence_parallel=True)}
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
LOSSES_AGREE = {"fp32": 1e-5, "bf16": 1e-3}
Cell = dict[str, Any]
Publish = Callable[[str, str, dict[str, Any] | None], None]


@pytest.fixture(scope="module")
def cells(publish: Publish) -> Iterator[list[Cell]]:
    """Comparisons as they are measured; shown at the end, and kept if all are there."""
    measured: list[Cell] = []
    yield measured
    if measured:
        said = [*notes(from_dict(measured[0]["run"]), measured[0]["device"], warmup=WARMUP), *NOTES]
        text = render.markdown(table("tensor_parallel", TITLE, "DTensor", measured, said))
        publish("tensor_parallel", text, {"cells": measured} if len(measured) == len(PLANS) * len(PRECISIONS) else None)


TITLE = "Tensor parallelism over two ranks: ours against PyTorch's DTensor"
NOTES = (
    "DTensor: `ColwiseParallel`, `RowwiseParallel`, `SequenceParallel` and `loss_parallel` around fused AdamW, "
    "one matrix for queries, keys and values, activations as plain tensors between split blocks.",
    "Made by `make bench`.",
)


def turns_of_a_rank(run: Run, data: Path) -> tuple[dict[str, list[Turn]], dict[str, Any]]:
    folder, mesh, cpu = TokenFolder.open(data), build_mesh(run.plan, "cpu"), torch.device("cpu")
    engines = {kind.__name__: kind(run, folder, mesh, cpu) for kind in (Trainer, DTensorTrainer)}
    return take_turns(engines, RECIPE.steps), device_environment(cpu)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_step_time_against_dtensor(
    precision: Precision,
    plan: str,
    tokens: Path,
    cells: list[Cell],
    benchmark: BenchmarkFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "TIMEOUT_SECONDS", 600)
    run = Run(model=MODEL, plan=PLANS[plan], train=RECIPE, precision=precision)
    answers = benchmark.pedantic(ranks.run_ranks, (2, turns_of_a_rank, run, tokens), rounds=1)
    result = compared([turns for turns, _ in answers], "Trainer", "DTensorTrainer", warmup=WARMUP)
    assert result["loss_difference"] < LOSSES_AGREE[precision], "the engines do different work"
    cells.append({"precision": precision, "plan": plan, "run": to_dict(run), "device": answers[0][1], **result})
    benchmark.extra_info.update({key: result[key] for key in ("ours", "theirs", "value", "low", "high")})
    assert result["low"] <= 1.0, "DTensor is faster"
