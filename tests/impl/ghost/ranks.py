"""Ghosts beside real gloo ranks: what both do, in processes of the tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from impl.ghost.events import Begin, Log
from impl.ghost.rank import Executed, execute, settle
from impl.ghost.recorder import recorded
from impl.instruments import gradients_under_way, tracked
from impl.own_code import trust_code_of
from impl.run import Run
from impl.train import Trainer
from tests.impl.on_ranks import on_ranks
from tests.ranks import run_ranks

CORES = 2


class Real(NamedTuple):
    log: Log
    memory: dict[str, int]


def recorded_step(one: Trainer) -> Real:
    """What a real rank begins and awaits in its first step, and needs."""
    with recorded("gloo", is_real=True) as recorder:
        with tracked(one.held(), one.device, lambda: gradients_under_way(one)) as memory:
            one.step(0)
        settle(one)
    return Real(recorder.log, memory.parts(one.held()))


def real_ranks(runs: Sequence[Run], data: Path) -> dict[Run, list[Real]]:
    return on_ranks(recorded_step, runs, data)


def ghosts(runs: Sequence[Run], vocab: int = 257, **how: object) -> dict[Run, list[Executed]]:
    """Every rank of every run, one after another on as many processes as there are cores."""
    by_core = run_ranks(CORES, _share_of, runs, vocab, how)
    found: dict[Run, list[Executed]] = {run: [] for run in runs}
    for i, (run, _) in enumerate(_work(runs)):
        found[run].append(by_core[i % CORES][i // CORES])
    return found


def _work(runs: Sequence[Run]) -> list[tuple[Run, int]]:
    return [(run, rank) for run in runs for rank in range(run.plan.world_size)]


def _share_of(runs: Sequence[Run], vocab: int, how: dict[str, object]) -> list[Executed]:
    mine = _work(runs)[dist.get_rank() :: CORES]
    dist.destroy_process_group()
    for run, _ in mine:
        trust_code_of(run)
    return [execute(run, rank, vocab, **how) for run, rank in mine]  # type: ignore[arg-type]


def numbered(log: Log) -> Log:
    """The log with its groups numbered as they first appear: their names depend on what the process did before."""
    numbers: dict[str, str] = {}
    number = lambda name: numbers.setdefault(name, str(len(numbers)))
    return [event._replace(group=number(event.group)) if isinstance(event, Begin) else event for event in log]
