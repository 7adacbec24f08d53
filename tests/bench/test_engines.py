"""Step time of every engine on every plan that two ranks can do: all engines of a cell by turns."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from harness import render
from harness.side_by_side import against_peers, notes, slowest, table
from impl.run import Precision, Run, to_dict
from tests.bench.cells import (
    FEWER_SEQUENCES,
    LOSSES_AGREE,
    OURS,
    PLANS,
    PRECISIONS,
    WARMUP,
    Cell,
    Publish,
    engines_of,
    measure,
    run_of,
    said_of,
    take_rounds,
    turns_of_a_rank,
)
from tests.bench.screen import Screen

NOTES = (
    f"With tensor parallelism a step is {FEWER_SEQUENCES} sequences: both ranks are on the same ones.",
    "Ours: a step ends when all parameters are gathered, which in training goes on into the next forward pass.",
)


@pytest.fixture(scope="module")
def cells(publish: Publish) -> Iterator[list[Cell]]:
    """Cells as they are measured; shown at the end, and kept if all are there."""
    measured: list[Cell] = []
    yield measured
    if measured:
        title = "Engines side by side over two ranks"
        text = render.markdown(table("engines", title, measured, all_notes(measured)))
        publish("engines", text, {"cells": measured} if len(measured) == len(PLANS) * len(PRECISIONS) else None)


def all_notes(measured: list[Cell]) -> list[str]:
    peers = {name for cell in measured for name in cell["peers"]}
    said = notes(run_of("dp", "fp32"), measured[0]["device"], warmup=WARMUP)
    return [*said, *NOTES, *said_of(peers), "Made by `python -m harness bench`."]


def wanted(run: Run) -> float:
    """The ratio to the best peer that ours has to reach."""
    if run.precision != "bf16":
        return 1.0
    plan = run.plan
    return 0.9 if plan.zero_stage == 3 else 0.85 if plan.tp > 1 else 0.95 if plan.pp > 1 else 1.0


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_step_time(
    precision: Precision, plan: str, tokens: Path, screen: Screen, cells: list[Cell], benchmark: BenchmarkFixture
) -> None:
    run = run_of(plan, precision)
    runs = engines_of(run)
    assert len(runs) > 1, "no peer can do this"
    answers = measure(turns_of_a_rank, f"{plan} {precision}", runs, tokens, screen, benchmark)
    turns = [turns for turns, _ in answers]
    take_rounds(benchmark, slowest(turns, OURS)[WARMUP:])
    cell = against_peers(turns, OURS, warmup=WARMUP)
    cells.append({"precision": precision, "plan": plan, "run": to_dict(run), "device": answers[0][1], **cell})
    benchmark.extra_info.update(cell["peers"])
    different = {name: result["loss_difference"] for name, result in cell["peers"].items()}
    assert max(different.values()) <= LOSSES_AGREE[precision], f"not the same work: {different}"
    best, most = cell["peers"][cell["best"]], wanted(run)
    assert best["low"] <= 1.0, f"{cell['best']} is faster: {best}"
    assert most == 1.0 or best["value"] <= most, f"ours has to take at most {most} of {cell['best']}: {best}"
