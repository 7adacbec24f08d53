"""Pipelines that cannot run, and pipelines that break: what is told, and how soon all ranks are gone."""

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.experiment.experiment import Point
from harness.records.store import Store
from impl.data.config import DataConfig
from impl.model.config import ModelConfig
from impl.own_code import trust
from impl.pipeline.schedule import Rows
from impl.pipeline.schedules import gpipe
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run
from tests.harness.small_runs import ENDLESS, Told, kept, processes, small, sweep, trains, worker, write_tokens
from tests.impl.pipeline import own_schedule

REACTION_SECONDS = 10.0


# Breaks -------------------------------------------------------------------------------------------------------------


def endless(tokens: Path, seed: int) -> Run:
    """Two stages, a layer each, that train until something happens."""
    run = small(tokens, steps=ENDLESS, seed=seed, global_batch=4)
    return replace(run, model=replace(run.model, num_layers=2), plan=Plan(pp=2))


@pytest.mark.usefixtures("forked_ranks")
def test_a_pipeline_that_breaks_ends_at_once_and_says_where(store: Store, tmp_path: Path) -> None:
    """SIGKILL to the last stage's rank, and tokens that become unknown while a run trains."""
    tokens, lost = write_tokens(tmp_path / "tokens"), write_tokens(tmp_path / "lost")
    last, raises = endless(tokens, 1), endless(lost, 2)
    hit_at: dict[str, float] = {}
    ranks: list[psutil.Process] = []

    def hit(point: Point) -> None:
        [attempt] = (store.folder / "attempts").glob(f"{point.run.id}-*")
        if point.run.id in hit_at or not trains(attempt, 2):
            return
        ranks.extend(processes(attempt, "harness.rank.worker"))
        hit_at[point.run.id] = time.monotonic()
        if point.run == raises:
            file = lost / "train.bin"
            with file.open("r+b") as text:  # in place: ranks have it mapped into memory
                text.write(b"\xff" * file.stat().st_size)
        else:
            worker(attempt, rank=1).kill()

    told = sweep(store, [last, raises], told=Told(on_look=hit), jobs=2, retries=0)
    found = kept(store, last)
    assert found.status == "failed"
    assert found.reason == "rank 1 was killed by SIGKILL (pipeline rank 1, stage 1)"
    assert found.steps
    found = kept(store, raises)
    assert found.status == "failed"
    where = r"rank (\d): RuntimeError: pipeline rank \1, stage \1, forward pass of microbatch (\d) \(\1F\2\): .+"
    assert re.fullmatch(where, str(found.reason)), found.reason
    assert max(told.end_times[run_id] - at for run_id, at in hit_at.items()) < REACTION_SECONDS
    assert len(ranks) == 4
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in ranks)


# Is refused ---------------------------------------------------------------------------------------------------------


def run_of(layers: int = 4, batch: int = 8, **plan: Any) -> Run:
    recipe = Recipe(global_batch=batch, microbatch=1)
    return Run(model=ModelConfig(num_layers=layers, seq_len=16), plan=Plan(**plan), train=recipe)


def stuck(p: int, m: int) -> Rows:
    """A schedule whose last rank wants to go back before it has gone forward."""
    rows = gpipe(p, m)
    return [*rows[:-1], rows[-1][::-1]]


REFUSED = {
    "layers": (run_of(layers=5, pp=8), "plan.pp x plan.chunks 8 is more than model.num_layers 5"),
    "chunks": (
        run_of(pp=2, chunks=3, schedule="interleaved"),
        "plan.pp x plan.chunks 6 is more than model.num_layers 4",
    ),
    "a multiple": (run_of(batch=6, pp=4, schedule="interleaved"), "multiples of plan.pp 4 microbatches, not 6"),
    "of one rank": (run_of(pp=4, dp=4, schedule="interleaved"), "multiples of plan.pp 4 microbatches, not 2; valid: 4"),
    "a part": (run_of(batch=6, pp=2, dp=4), "train.global_batch 6 is not divisible by train.microbatch 1 x plan.dp 4"),
    "no chunks": (run_of(pp=2, chunks=2, schedule="zb_h1"), "zb_h1 has 1 chunk a rank, not plan.chunks 2"),
    "unknown": (run_of(pp=2, schedule="1f1b"), "plan.schedule '1f1b' does not exist; valid: gpipe, one_f_one_b"),
    "nowhere": (run_of(pp=2, schedule="no.where:mine"), "plan.schedule 'no.where:mine' cannot be loaded"),
    "own": (run_of(pp=2, schedule=f"{own_schedule.__name__}:two_ways"), "two_ways has 2 chunks a rank"),
    "stuck": (run_of(pp=2, schedule=f"{__name__}:stuck"), "rank 0 is stuck at 0B0, which needs 1B0"),
    "a half": (run_of(pp=2, tp=4, schedule="gpipe"), "plan.tp 4 does not divide model.num_heads 2"),
}
for _run, _ in REFUSED.values():
    trust(_run.plan.schedule)


def test_a_pipeline_that_cannot_run_is_told_why_and_not_launched(store: Store, tokens: Path) -> None:
    runs = [replace(run, data=DataConfig(dataset=str(tokens))) for run, _ in REFUSED.values()]
    assert sweep(store, runs).starts == []
    for run, (_, reason) in zip(runs, REFUSED.values(), strict=True):
        record = kept(store, run)
        assert record.status == "invalid"
        assert reason in str(record.reason)
        assert "\n" not in str(record.reason)
