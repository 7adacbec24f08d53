"""Many runs in few starts: runs of one number of ranks share their processes, those of one layout their groups."""

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from impl import mesh
from impl.data.tokens import TokenFolder
from impl.mesh import build_mesh
from impl.own_code import trust_code_of
from impl.plan import AXES
from impl.run import Run
from impl.start import start_from
from impl.train import Trainer
from tests.ranks import run_ranks

Measure = Callable[[Trainer], Any]
"""What every rank finds out about its part of a run, no tensors; a function of a module."""


def on_ranks(measure: Measure, runs: Iterable[Run], data: Path) -> dict[Run, list[Any]]:
    """What each rank finds out, in the order of the ranks, about every run."""
    by_ranks: dict[int, list[Run]] = {}
    for run in dict.fromkeys(runs):
        assert run.problems() == []
        by_ranks.setdefault(run.plan.world_size, []).append(run)
    answers: dict[Run, list[Any]] = {}
    for ranks, some in by_ranks.items():
        of_ranks = run_ranks(ranks, _one_after_another, measure, some, data)
        answers.update({run: list(found) for run, *found in zip(some, *of_ranks, strict=True)})
    return answers


def own_group() -> dist.ProcessGroup:
    """A group of all ranks that nothing else uses."""
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group


def trainer(run: Run, data: Path) -> Trainer:
    return Trainer(run, TokenFolder.open(data), build_mesh(run.plan, "cpu"), torch.device("cpu"))


def _one_after_another(measure: Measure, runs: list[Run], data: Path) -> list[Any]:
    layout = lambda run: tuple(getattr(run.plan, axis) for axis in AXES)
    meshes = {layout(run): run.plan for run in runs}
    meshes = {degrees: build_mesh(plan, "cpu") for degrees, plan in meshes.items()}
    tokens = TokenFolder.open(data)
    for run in runs:
        trust_code_of(run)
    made: dict[tuple[int, ...], Any] = {}
    answers: list[Any] = []
    for run in runs:
        with mock.patch.object(mesh.dist, "new_group", _Groups(made)):
            one = Trainer(run, tokens, meshes[layout(run)], torch.device("cpu"))
        answers.append(measure(one))
    return answers


class _Groups:
    """Groups for one trainer, those of others before it where the ranks are the same: three threads serve each."""

    def __init__(self, made: dict[tuple[int, ...], Any]) -> None:
        self.made, self.asked, self.new = made, Counter[tuple[int, ...]](), dist.new_group

    def __call__(self, ranks: list[int], **_: Any) -> Any:
        self.asked[tuple(ranks)] += 1
        key = (self.asked[tuple(ranks)], *ranks)
        if key not in self.made:
            self.made[key] = self.new(ranks)
        return self.made[key]


def loaded(one: Trainer) -> float:
    """Loss of the first batch with the weights of a checkpoint; here so that ranks import no more than they need."""
    start_from(Path(one.run.start or ""), one, one.gradients.every_rank)
    return one.backward(0).item()
