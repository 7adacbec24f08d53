"""Step time of every engine on every plan that two ranks, or four, can do: all engines of a cell by turns."""

from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from harness.analysis import render
from harness.records.environment import CODE, git_state
from harness.records.store import read_json
from impl.run import Precision, Run, to_dict
from tests.bench.cells import (
    FEWER_SEQUENCES,
    LONG_SEQUENCES,
    LONGER,
    LOSSES_AGREE,
    OURS,
    PIPELINE_STEPS,
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
from tests.bench.side_by_side import against_peers, notes, slowest, table

LLAMAS = (
    "llama-: Llama's block (RMSNorm, SwiGLU of 1,408 features, rotary positions, 4 heads of keys and values, no "
    "biases, an untied head) in place of GPT's."
)
NOTES = (
    f"With tensor parallelism a step is {FEWER_SEQUENCES} sequences: both ranks are on the same ones. Of pipelines "
    f"{PIPELINE_STEPS - WARMUP} steps are timed.",
    "hsdp: ZeRO-3 within two ranks and two replicas of them, four ranks on two cores.",
    f"ring: context parallelism; both ranks have half of each of {LONG_SEQUENCES} sequences of {LONGER} tokens.",
    "Ours: a step ends when all parameters are gathered, which in training goes on into the next forward pass.",
)


@pytest.fixture(scope="module")
def cells(publish: Publish, request: pytest.FixtureRequest) -> Iterator[list[Cell]]:
    """Cells as they are measured; shown at the end, and kept with those that an earlier run kept and this left out."""
    measured: list[Cell] = []
    yield measured
    if measured:
        folder = request.config.getoption("--keep", default=None)
        found = in_order([*(kept_in(folder) if folder else ()), *measured])
        title = "Engines side by side over two ranks, or four"
        publish("engines", render.markdown(table("engines", title, found, all_notes(found))), {"cells": found})


def kept_in(folder: Path) -> list[Cell]:
    """The cells of the table that is there; of one without commits of its cells, each with the table's."""
    document: dict[str, Any] = read_json(folder / "engines.json") or {"cells": []}
    return [{"git": document["environment"]["git"], **cell} for cell in document["cells"]]


def in_order(cells: Iterable[Cell]) -> list[Cell]:
    """Each cell once, the latest."""
    found = {(cell["precision"], cell["plan"]): cell for cell in cells}
    return [found[key] for key in product(PRECISIONS, PLANS) if key in found]


def all_notes(measured: list[Cell]) -> list[str]:
    peers = {name for cell in measured for name in cell["peers"]}
    said = notes(run_of("dp", "fp32"), measured[0]["device"], warmup=WARMUP)
    by_commit: dict[str, list[str]] = {}
    for cell in measured:
        state = cell["git"] or {"commit": "unknown", "dirty": False}
        commit = state["commit"][:7] + (" and changes" if state["dirty"] else "")
        by_commit.setdefault(commit, []).append(f"{cell['plan']} {cell['precision']}")
    ran = "; ".join(f"{commit}: {', '.join(names)}" for commit, names in by_commit.items())
    llamas = [LLAMAS] if any(cell["plan"].startswith("llama-") for cell in measured) else []
    return [*said, *llamas, *NOTES, *said_of(peers), f"Measured on commit {ran}. Made by `lmscale bench`."]


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
    if len(runs) == 1:
        pytest.skip("no peer can do this")
    answers = measure(turns_of_a_rank, f"{plan} {precision}", runs, tokens, screen, benchmark)
    turns = [turns for turns, _ in answers]
    take_rounds(benchmark, slowest(turns, OURS)[WARMUP:])
    cell = against_peers(turns, OURS, warmup=WARMUP)
    cells.append(
        {
            "precision": precision,
            "plan": plan,
            "run": to_dict(run),
            "device": answers[0][1],
            "git": git_state(CODE),
            **cell,
        }
    )
    benchmark.extra_info.update(cell["peers"])
    different = {name: result["loss_difference"] for name, result in cell["peers"].items()}
    assert max(different.values()) <= LOSSES_AGREE[precision], f"not the same work: {different}"
    best, most = cell["peers"][cell["best"]], wanted(run)
    assert best["low"] <= 1.0, f"{cell['best']} is faster: {best}"
    assert most == 1.0 or best["value"] <= most, f"ours has to take at most {most} of {cell['best']}: {best}"
