"""Step time of one rank with one thread: ours against PyTorch's plain model, and against its own matrix products."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from harness.analysis import render
from harness.analysis.render import Column, Table
from harness.rank.roofline import roofline
from impl.mesh import build_mesh
from impl.run import Precision, Run, to_dict
from tests.bench.cells import (
    CPU,
    LOSSES_AGREE,
    MODEL,
    OURS,
    PRECISIONS,
    RECIPE,
    WARMUP,
    Cell,
    Publish,
    engines_of,
    measure,
    said_of,
    take_rounds,
    turns_of_a_rank,
)
from tests.bench.screen import Screen
from tests.bench.side_by_side import Turn, against_peers, notes, slowest, table

SEQUENCES = 16
PLAIN = "PyTorch"
MOST_OF_PLAIN = {"fp32": 1.0, "bf16": 0.85}
"""Of the plain model's time, that ours may take."""
MOST_OF_LIMIT = {"fp32": 1.25}
"""Of the time that its matrix products and its attention take alone."""

MS: dict[str, Any] = {"unit": "ms", "scale": 1e-3, "si": "s"}
COLUMNS = (
    Column(key="precision", header="Precision", text=True),
    Column(key="step", header="Ours, step time", **MS),
    Column(key="gemm_seconds", header="Matrix products alone", **MS),
    Column(key="attention_seconds", header="Attention alone", **MS),
    Column(key="ratio", header="Ours / both alone", digits=3),
)
ALONE = (
    "Alone: each of a step's matrix products, and scaled dot product attention, forward and backward, at its shape and "
    "precision in the same process after the steps; median of a few calls, times the calls of a step.",
    "Made by `lmscale bench`.",
)


def run_of(precision: Precision) -> Run:
    return Run(model=MODEL, train=replace(RECIPE, global_batch=SEQUENCES), precision=precision)


@pytest.fixture(scope="module")
def cells(publish: Publish) -> Iterator[list[Cell]]:
    """Cells as they are measured; shown at the end, and kept if all are there."""
    measured: list[Cell] = []
    yield measured
    if measured:
        said = notes(run_of("fp32"), measured[0]["device"], warmup=WARMUP)
        said += said_of({name for cell in measured for name in cell["peers"]})
        rows = [{"precision": cell["precision"], **cell["limit"]} for cell in measured]
        frame = pd.DataFrame(rows, columns=[column.key for column in COLUMNS])
        shown = (
            table("single_process", "Engines side by side on one rank", measured, said),
            Table("limit", "One rank against its own matrix products and attention", COLUMNS, frame, ALONE),
        )
        text = "\n".join(map(render.markdown, shown))
        publish("single_process", text, {"cells": measured} if len(measured) == len(PRECISIONS) else None)


def turns_and_limit(
    label: str, runs: Mapping[str, Run], data: Path, screen: Screen
) -> tuple[dict[str, list[Turn]], dict[str, Any], dict[str, Any]]:
    """The engines' turns, what they ran on, and the limit of a step."""
    turns, device = turns_of_a_rank(label, runs, data, screen)
    run = runs[OURS]
    return turns, device, roofline(run, run.model.vocabulary(0), build_mesh(run.plan, "cpu"), CPU)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_step_time(
    precision: Precision, tokens: Path, screen: Screen, cells: list[Cell], benchmark: BenchmarkFixture
) -> None:
    run = run_of(precision)
    [answer] = measure(turns_and_limit, f"one rank {precision}", engines_of(run), tokens, screen, benchmark)
    turns, device, alone = answer
    seconds = slowest([turns], OURS)[WARMUP:]
    take_rounds(benchmark, seconds)
    cell = against_peers([turns], OURS, warmup=WARMUP)
    ratio = median(seconds) / (alone["gemm_seconds"] + alone["attention_seconds"])
    cell["limit"] = {"step": median(seconds), "ratio": ratio, **alone}
    cells.append({"precision": precision, "plan": "one rank", "run": to_dict(run), "device": device, **cell})
    benchmark.extra_info.update(cell["peers"])
    different = {name: result["loss_difference"] for name, result in cell["peers"].items()}
    assert max(different.values()) <= LOSSES_AGREE[precision], f"not the same work: {different}"
    plain, most = cell["peers"][PLAIN], MOST_OF_PLAIN[precision]
    assert plain["low" if most == 1.0 else "value"] <= most, f"ours against {PLAIN}: {plain}"
    assert ratio <= MOST_OF_LIMIT.get(precision, ratio), f"{ratio:.3f} of its products and attention alone"
