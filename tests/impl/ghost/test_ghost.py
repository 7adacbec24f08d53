"""Ghosts do what real ranks do: the same order, sizes, waits and memory, of random plans; and what the formulas say."""

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

from impl.run import Precision, Run
from tests.impl.ghost.ranks import ghosts, numbered, real_ranks
from tests.impl.test_parity import draws

COUNT, SEED = (int(os.environ.get(name, usual)) for name, usual in (("GHOST_RUNS", 40), ("GHOST_SEED", 5)))
"""More of them, or others: `GHOST_RUNS=200 GHOST_SEED=7 pytest tests/impl/ghost`."""
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp64", "fp16")


def random_runs(seed: int, most: int = 8) -> Iterator[Run]:
    """Random runs on several ranks without end."""
    for run, precision in zip(draws(seed), cycle(PRECISIONS)):
        run = replace(run, precision=precision)
        if 2 <= run.plan.world_size <= most and not run.problems():
            yield run


def test_ghosts_are_as_real_ranks(data: Path) -> None:
    runs = list(islice(random_runs(SEED), COUNT))
    print(f"seed {SEED}, {COUNT} runs")
    real, found = real_ranks(runs, data), ghosts(runs, device="cpu", backend="gloo")
    for run in runs:
        for rank, (one, ghost) in enumerate(zip(real[run], found[run], strict=True)):
            assert numbered(ghost.log) == numbered(one.log), (run, rank)
            total, held = (sum(memory.values()) for memory in (one.memory, ghost.memory))
            assert abs(held / total - 1) < 0.05, (run, rank, ghost.memory, one.memory)
