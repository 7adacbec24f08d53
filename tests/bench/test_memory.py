"""Memory of a rank with ZeRO's stages over two ranks, under every engine."""

import ctypes
import gc
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch.distributed.tensor import DTensor

from harness.analysis import render
from harness.analysis.render import Column, Table
from impl.data.tokens import TokenFolder
from impl.model.config import ModelConfig
from impl.run import Precision, Run, to_dict
from tests import ranks
from tests.bench.cells import CPU, OURS, PLANS, PRECISIONS, RECIPE, Cell, Publish, engines_of, make, run_of
from tests.bench.screen import Screen

STAGES = [name for name, plan in PLANS.items() if plan.zero_stage and plan.world_size == 2 and "llama" not in name]
MEMORY_RECIPE = replace(RECIPE, steps=2, global_batch=16)  # of two microbatches the second one meets gradients
TINY = ModelConfig(num_layers=2, hidden_size=32, num_heads=2, seq_len=16)
NOISE = 0.02

MB: dict[str, Any] = {"unit": "MB", "scale": 1e6, "si": "B"}
COLUMNS = (
    Column(key="precision", header="Precision", text=True),
    Column(key="stage", header="Stage"),
    Column(key="engine", header="Engine", text=True),
    Column(key="peak", header="Peak above the start", **MB),
    Column(key="held", header="Tensors held between steps", **MB),
    Column(key="ratio", header="Ours / theirs, peak", digits=3),
)
NOTES = (
    "The model and the batches of the engines' step times, two microbatches. Each engine in processes of its own, the "
    "larger rank's value. Start: the process's resident memory after the engine has trained a tiny model. Peak: the "
    "highest resident memory in the first two steps, when the engine has been built; freed memory is given back to the "
    "system at once.",
    "Held: parameters, gradients and optimizer states, and any buffer that stays, after the second step.",
    "Made by `lmscale bench`.",
)


@pytest.fixture(scope="module")
def measured(publish: Publish) -> Iterator[list[Cell]]:
    """Results as they are measured; shown at the end, and kept if all are there."""
    found: list[Cell] = []
    yield found
    if found:
        frame = pd.DataFrame(found, columns=[column.key for column in COLUMNS])
        text = render.markdown(Table("zero_memory", "Memory of a rank with ZeRO over two ranks", COLUMNS, frame, NOTES))
        cells = {(row["precision"], row["stage"]) for row in found}
        publish("zero_memory", text, {"memory": found} if len(cells) == len(STAGES) * len(PRECISIONS) else None)


def memory_of_a_rank(run: Run, data: Path) -> tuple[int, int]:
    """Peak of resident memory above what it is with a tiny model, and tensors held between steps. Units: bytes."""
    folder, libc = TokenFolder.open(data), ctypes.CDLL(None)
    trim_threshold, mmap_threshold, block = -1, -3, 1 << 16  # of glibc's mallopt: freed blocks go back at once
    assert libc.mallopt(trim_threshold, block)
    assert libc.mallopt(mmap_threshold, block)
    make(replace(run, model=TINY), folder).step(0)
    gc.collect()
    libc.malloc_trim(0)
    start, tensors = resident("VmRSS"), tensor_bytes()
    engine = make(run, folder)  # not counted: all begin with a whole model
    gc.collect()
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is the present again
    for i in range(run.train.steps):
        engine.step(i)
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


@pytest.mark.parametrize("plan", STAGES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_memory(
    precision: Precision, plan: str, tokens: Path, screen: Screen, measured: list[Cell], benchmark: BenchmarkFixture
) -> None:
    runs = engines_of(replace(run_of(plan, precision), train=MEMORY_RECIPE))

    def of_every_engine() -> dict[str, list[tuple[int, int]]]:
        found = {}
        for name, run in runs.items():
            screen.say(f"{plan} {precision}: memory of {name}")
            found[name] = ranks.run_ranks(2, memory_of_a_rank, run, tokens)
        return found

    found = benchmark.pedantic(of_every_engine, rounds=1)
    screen.clear()
    peaks = {name: max(peak for peak, _ in answers) for name, answers in found.items()}
    for name, answers in found.items():
        row = {"peak": peaks[name], "held": max(held for _, held in answers), "ratio": peaks[OURS] / peaks[name]}
        benchmark.extra_info[name] = row
        stage = runs[name].plan.zero_stage
        kind = {"precision": precision, "stage": stage, "engine": name, "run": to_dict(runs[name]), "ranks": answers}
        measured.append({**kind, **row})
    assert all(peaks[OURS] <= (1 + NOISE) * peak for peak in peaks.values()), f"less memory than ours: {peaks}"
