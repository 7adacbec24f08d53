"""A rank needs hardly more memory while it starts than it holds afterwards, also where it loads a checkpoint."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from impl.checkpoint import Checkpoints
from impl.data.tokens import TokenFolder
from impl.instruments import tracked
from impl.mesh import build_mesh
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from impl.start import start_from
from impl.train import Trainer
from tests.impl.on_ranks import own_group, trainer
from tests.ranks import run_ranks

CPU = torch.device("cpu")
MOST = 1.1
"""Of what is held."""
LARGE = ModelConfig(num_layers=16, hidden_size=256, num_heads=8, seq_len=64, vocab_size=1024)
"""13 million parameters: a 64th of their states is large against a slice of initial weights, which on a CPU counts."""
SMALL = replace(LARGE, num_layers=12, hidden_size=128, vocab_size=512)
"""No parameter is more than a 36th: on a CPU two count once more while they are read from a checkpoint."""
WORLD = 64


def run(model: ModelConfig, precision: Any = "bf16", **plan: Any) -> Run:
    recipe = Recipe(steps=2, global_batch=WORLD, microbatch=1)
    made = Run(model=model, plan=Plan(**plan), train=recipe, precision=precision)
    assert made.problems() == []
    return made


DEGREES = [{"dp": 64}, {"dp": 32, "tp": 2}, {"dp": 32, "pp": 2}, {"dp": 16, "tp": 2, "pp": 2}]
STARTS = [
    *(run(LARGE, zero_stage=stage, **degrees) for degrees in DEGREES for stage in (0, 1, 2, 3)),
    *(run(LARGE, zero_stage=stage, offload_optimizer=True, **DEGREES[3]) for stage in (0, 1, 2, 3)),
    *(run(LARGE, "fp32", zero_stage=stage, **DEGREES[3]) for stage in (0, 1, 2, 3)),
    run(replace(LARGE, family="bert"), zero_stage=3, **DEGREES[3]),
    run(LARGE, zero_stage=3, sequence_parallel=True, **DEGREES[3]),
]


def held_bytes(one: Trainer) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for some in one.held().values() for t in some}
    return sum(storage.nbytes() for storage in storages.values())


def one_of_many(runs: list[Run], rank: int, data: Path) -> list[tuple[int, int]]:
    """Peak and held bytes of one rank; its collectives, of which starting has none, would do nothing."""
    found = []
    for run in runs:
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
        mesh, tokens = build_mesh(run.plan, "cpu"), TokenFolder.open(data)
        with tracked({}, CPU) as memory:
            one = Trainer(run, tokens, mesh, CPU)
        found.append((memory.peak, held_bytes(one)))
    return found


@pytest.mark.parametrize("rank", [0, WORLD - 1])
def test_starting_takes_what_is_held(rank: int, data: Path) -> None:
    starts = STARTS[:4] + STARTS[4 + bool(rank) :: 2]
    [found] = run_ranks(1, one_of_many, starts, rank, data)
    for run, (peak, held) in zip(starts, found, strict=True):
        assert held <= peak <= MOST * held, f"{run.precision} {run.plan}: {peak / held:.2f} of what is held"
    by_stage = [held for _, held in found[:4]]
    assert by_stage[3] < by_stage[2] / 8, "dividing saves little: the peak at stage 3 proves nothing"


LOADS = {
    "load": run(SMALL, zero_stage=3, dp=2, tp=2, offload_optimizer=True),
    "start_from": run(SMALL, "fp32", zero_stage=2, dp=2, pp=2),
}


def save(run: Run, data: Path, folder: Path) -> None:
    checkpoints = Checkpoints(folder, trainer(run, data), own_group())
    checkpoints.save(1)
    checkpoints.wait()


def start_and_load(runs: Mapping[str, Run], data: Path, folder: Path) -> Mapping[str, float]:
    """Peak of starting with a checkpoint in two ways, in parts of what is held."""
    peaks, group = dict[str, float](), own_group()
    for way, run in runs.items():
        mesh, tokens = build_mesh(run.plan, "cpu"), TokenFolder.open(data)
        with tracked({}, CPU) as memory:
            one = Trainer(run, tokens, mesh, CPU)
            loaded = Checkpoints(folder, one, group).load() if way == "load" else start_from(folder, one, group)
        assert loaded, way
        peaks[way] = memory.peak / held_bytes(one)
    return peaks


def test_starting_with_a_checkpoint_takes_what_is_held(data: Path, tmp_path: Path) -> None:
    run_ranks(1, save, run(SMALL), data, tmp_path)
    for rank, peaks in enumerate(run_ranks(4, start_and_load, LOADS, data, tmp_path)):
        assert all(1 <= peak <= MOST for peak in peaks.values()), f"rank {rank}: {peaks}"
