"""Step time of pipeline schedules over two and four ranks, against a simulation from costs measured before."""

import inspect
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from harness.analysis import render
from harness.analysis.render import Column, Table
from harness.rank.instruments import Stopwatch
from impl.collectives import receive_start, send_start
from impl.data.tokens import TokenFolder
from impl.mesh import build_mesh
from impl.model.config import ModelConfig
from impl.own_code import trust
from impl.pipeline.engine import Engine as PipelineEngine
from impl.pipeline.engine import Links, Owed
from impl.pipeline.schedule import Action, Op
from impl.pipeline.schedules import SCHEDULES, build, generator
from impl.pipeline.simulate import Timeline, simulate
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run, to_dict
from impl.train import Step, Trainer
from tests import ranks
from tests.bench.cells import CPU, MODEL, WARMUP, Cell, Publish, take_rounds
from tests.bench.screen import Screen
from tests.bench.side_by_side import Engine, Turn, compared, raw, slowest, take_turns

PLANS = {
    "1F1B": Plan(pp=2, schedule="one_f_one_b"),
    "GPipe": Plan(pp=2, schedule="gpipe"),
    "interleaved": Plan(pp=2, schedule="interleaved", chunks=2),
    "ZB-H1": Plan(pp=2, schedule="zb_h1"),
}
PAIRS = 4
"""Of a step that the costs are taken from and one that is predicted, by turns: what slows both tells nothing."""
SIXTEEN = Recipe(steps=1 + 2 * PAIRS, global_batch=32, microbatch=2, lr=1e-4)
WITHIN = 0.1
PINGS = 25

SHORT = Run(  # actions of milliseconds: what a stopwatch costs shows more than in any run worth the name
    model=ModelConfig(num_layers=4, hidden_size=128, num_heads=4, seq_len=64, vocab_size=512),
    plan=Plan(pp=2),
    train=Recipe(steps=103, global_batch=16, microbatch=1, lr=1e-4),
)
STOPWATCH_COSTS, EMPTY_ACTIONS = 0.01, 10_000
SHORTEST = "impl.pipeline.optimum:shortest"
SLEEPING = {name: (2 if "v" in inspect.signature(generator(name)).parameters else 1) for name in SCHEDULES} | {
    SHORTEST: 1
}
"""Chunks of each schedule that four ranks execute whose passes sleep: they share no cores, as ranks on GPUs do not."""
PASS, MICROBATCHES = 0.02, 8
"""Seconds of a rank's forward pass, input gradient or weight gradient; microbatches of a step."""


@pytest.fixture(scope="module")
def measured(publish: Publish) -> Iterator[dict[str, list[Cell]]]:
    """Results as they are measured, by kind; shown at the end, and kept if all are there."""
    found: dict[str, list[Cell]] = {"simulated": [], "stopwatch": []}
    yield found
    if rows := found["simulated"]:
        frame = pd.DataFrame(rows, columns=[column.key for column in COLUMNS])
        title = "Pipeline schedules over two and four ranks: simulated against measured"
        said = [*notes_of_simulation(found["stopwatch"]), "Made by `lmscale bench`."]
        text = render.markdown(Table("pipeline", title, COLUMNS, frame, tuple(said)))
        is_whole = len(rows) == len(PLANS) + len(SLEEPING) and len(found["stopwatch"]) == 1
        publish("pipeline", text, found if is_whole else None)


MS: dict[str, Any] = {"unit": "ms", "scale": 1e-3, "si": "s"}
COLUMNS = (
    Column(key="schedule", header="Schedule", text=True),
    Column(key="ranks", header="Ranks"),
    Column(key="simulated", header="Simulated", **MS),
    Column(key="measured", header="Measured", **MS),
    Column(key="error", header="Error", unit="%", scale=0.01, digits=2),
    Column(key="outside", header="Rest of the step, measured", **MS),
    Column(key="transfer", header="One transfer", digits=3, **MS),
)


def notes_of_simulation(stopwatch: list[Cell]) -> Iterator[str]:
    count = SIXTEEN.global_batch // SIXTEEN.microbatch
    yield (
        f"GPT, {MODEL.num_layers} layers, hidden size {MODEL.hidden_size}, {MODEL.num_heads} heads, sequence "
        f"{MODEL.seq_len}, vocabulary {MODEL.vocab_size:,}, in fp32; {count} microbatches of {SIXTEEN.microbatch} "
        "sequences; 2 ranks of one thread. Measured: from the first start to the last end of a forward or backward "
        f"pass on any rank, median of {PAIRS} steps."
    )
    yield (
        f"Simulated: the schedule's table with the median time of each stage's passes in as many "
        f"steps, each before one of those, and the time that a transfer took in {PINGS} exchanges before the first "
        "step. Error: simulated over measured, less 1. Rest of the step: the tied embedding's sum, clipping, AdamW."
    )
    yield (
        f"Four ranks: every pass sleeps, {1e3 * PASS:.0f} ms for all of a rank's layers, in place of computing, since "
        f"they have two cores; {MICROBATCHES} microbatches, transfers taken as nothing. Shortest: that in half of "
        "1F1B's memory. The rest is the engine's."
    )
    for cost in stopwatch:
        yield (
            f"The stopwatch takes {100 * (cost['value'] - 1):.2f}% of a step (95%: {100 * (cost['low'] - 1):.2f}% to "
            f"{100 * (cost['high'] - 1):.2f}%) where a step is {1e3 * cost['theirs']:.0f} ms with "
            f"{cost['actions']} actions on each rank; on and off by turns, {SHORT.train.steps - WARMUP} pairs. Around "
            f"nothing at all it takes {1e6 * cost['alone']:.1f} µs an action."
        )


class Watched:
    """An engine that keeps the rows of all its steps' timelines."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.watch = trainer, Stopwatch(trainer.device)
        self.rows: list[list[list[Any]]] = []

    def step(self, i: int) -> Step:
        self.watch.reset()
        step = self.trainer.step(i, self.watch)
        self.rows.append(self.watch.row())
        return step


def seconds_of_a_transfer(like: Tensor, group: dist.ProcessGroup) -> float:
    """One way, between two ranks that do nothing else: median of half of there and back."""
    peer, taken = 1 - group.rank(), []
    for _ in range(PINGS):
        dist.barrier(group)
        begin = time.perf_counter()
        for is_sender in (group.rank() == 0, group.rank() == 1):
            (send_start if is_sender else receive_start)(like, peer, group).wait()
        taken.append((time.perf_counter() - begin) / 2)
    return median(taken)


def watched_rank(run: Run, data: Path) -> tuple[list[list[list[Any]]], list[Turn], float]:
    """This rank's row of every step, its steps' whole times, and the time of a transfer."""
    mesh = build_mesh(run.plan, "cpu")
    engine = Watched(Trainer(run, TokenFolder.open(data), mesh, CPU))
    like = torch.zeros(run.train.microbatch * run.model.seq_len, run.model.hidden_size)
    transfer = seconds_of_a_transfer(like, mesh.get_group("pp"))
    turns = take_turns({"watched": engine}, run.train.steps)["watched"]
    return engine.rows, turns, transfer


def costs(timelines: Sequence[Timeline]) -> dict[tuple[Op, int], float]:
    """The median time of each stage's forward and backward passes."""
    seconds: dict[tuple[Op, int], list[float]] = {}
    for span in (span for timeline in timelines for span in timeline.spans):
        seconds.setdefault(span.action[:2], []).append(float(span.end - span.start))
    return {kind: median(values) for kind, values in seconds.items()}


@pytest.mark.parametrize("name", PLANS)
def test_step_time_is_simulated_from_costs_of_other_steps(
    name: str,
    tokens: Path,
    screen: Screen,
    measured: dict[str, list[Cell]],
    benchmark: BenchmarkFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "TIMEOUT_SECONDS", 600)
    plan = PLANS[name]
    run = Run(model=MODEL, plan=plan, train=SIXTEEN)
    screen.say(f"{name}: {SIXTEEN.steps} steps, watched")
    answers = benchmark.pedantic(ranks.run_ranks, (2, watched_rank, run, tokens), rounds=1)
    screen.clear()
    timelines = [Timeline.from_rows(rows) for rows in zip(*(rows for rows, _, _ in answers), strict=True)]
    whole = [max(turn.seconds for turn in turns) for turns in zip(*(turns for _, turns, _ in answers), strict=True)]
    take_rounds(benchmark, whole[1:])
    before, others = timelines[1::2], timelines[2::2]
    cost, transfer = costs(before), max(seconds for _, _, seconds in answers)
    schedule = build(plan.schedule, plan.pp, run.microbatches, plan.chunks)
    simulated = float(simulate(schedule, lambda action: cost[action[:2]], transfer).step_time)
    took = median(float(timeline.step_time) for timeline in others)
    rest = [seconds - float(timeline.step_time) for seconds, timeline in zip(whole, timelines, strict=True)]
    row = {"simulated": simulated, "measured": took, "error": simulated / took - 1, "transfer": transfer, "ranks": 2}
    every = {"steps": [float(timeline.step_time) for timeline in timelines], "whole_steps": whole}
    costs_by_name = {f"{stage}{op}": seconds for (op, stage), seconds in cost.items()}
    outside = median(rest[2::2])
    measured["simulated"].append(
        {"schedule": name, "run": to_dict(run), **row, "outside": outside, "costs": costs_by_name, **every}
    )
    benchmark.extra_info.update(row)
    assert abs(row["error"]) < WITHIN


class _Sleep(torch.autograd.Function):
    """Pass of a stage that sleeps in place of computing; its weight gradient may be put off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, deferred: list[Owed]) -> Tensor:
        ctx.seconds, ctx.deferred = seconds, deferred
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        later = partial(time.sleep, ctx.seconds)
        time.sleep(ctx.seconds)
        ctx.deferred[-1].append(later) if ctx.deferred else later()
        return grads[0], None, None


def sleeping_rank(name: str, chunks: int) -> list[list[list[Any]]]:
    """This rank's row of every step of a pipeline whose passes sleep."""
    trust(name)
    schedule = build(name, dist.get_world_size(), MICROBATCHES, chunks)
    watch, like, deferred = Stopwatch(CPU), torch.zeros(8), list[Owed]()
    last, rows = len(schedule.rank_of) - 1, list[list[list[Any]]]()

    @contextmanager
    def collecting() -> Iterator[Owed]:
        deferred.append([])
        yield deferred[-1]
        deferred.pop()

    def forward(stage: int, _: int, x: Tensor | None) -> Tensor:
        y = _Sleep.apply(like.clone().requires_grad_() if x is None else x, PASS / chunks, deferred)
        return y.sum() if stage == last else y

    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    engine = PipelineEngine(schedule, Links(group), collecting)
    for _ in range(SIXTEEN.steps):
        dist.barrier()
        watch.reset()
        engine.run(forward, like, watch)
        rows.append(watch.row())
    return rows


@pytest.mark.parametrize("name", SLEEPING)
def test_step_of_four_ranks_is_simulated_where_they_share_no_cores(
    name: str, screen: Screen, measured: dict[str, list[Cell]], benchmark: BenchmarkFixture
) -> None:
    screen.say(f"{name}: {SIXTEEN.steps} steps of four ranks that sleep")
    answers = benchmark.pedantic(ranks.run_ranks, (4, sleeping_rank, name, SLEEPING[name]), rounds=1)
    screen.clear()
    timelines = [Timeline.from_rows(rows) for rows in zip(*answers, strict=True)]
    steps = [float(timeline.step_time) for timeline in timelines]
    take_rounds(benchmark, steps[1:])
    trust(name)
    cost, schedule = costs(timelines[1::2]), build(name, 4, MICROBATCHES, SLEEPING[name])
    simulated, took = float(simulate(schedule, lambda action: cost[action[:2]]).step_time), median(steps[2::2])
    row = {"simulated": simulated, "measured": took, "error": simulated / took - 1, "ranks": 4}
    measured["simulated"].append({"schedule": name.rpartition(":")[2], **row, "steps": steps})
    benchmark.extra_info.update(row)
    assert abs(row["error"]) < WITHIN


def stopwatch_of_a_rank(run: Run, data: Path) -> tuple[dict[str, list[Turn]], int, float]:
    """Steps with the stopwatch on and off, the actions that it times in each, and its own time for one of them."""
    folder, mesh = TokenFolder.open(data), build_mesh(run.plan, "cpu")
    watched = Watched(Trainer(run, folder, mesh, CPU))
    engines: dict[str, Engine] = {"on": watched, "off": Trainer(run, folder, mesh, CPU)}
    turns = take_turns(engines, run.train.steps)
    begin = time.perf_counter()
    for _ in range(EMPTY_ACTIONS):
        with watched.watch(Action(Op.F, 0, 0)):
            pass
    return turns, len(watched.rows[0]), (time.perf_counter() - begin) / EMPTY_ACTIONS


def test_stopwatch_costs_under_a_hundredth(
    tokens: Path, measured: dict[str, list[Cell]], benchmark: BenchmarkFixture
) -> None:
    answers = benchmark.pedantic(ranks.run_ranks, (2, stopwatch_of_a_rank, SHORT, tokens), rounds=1)
    turns = [turns for turns, _, _ in answers]
    take_rounds(benchmark, slowest(turns, "on")[WARMUP:])
    result = compared(turns, "on", "off", warmup=WARMUP)
    assert result["loss_difference"] == 0
    actions, alone = answers[0][1], max(seconds for _, _, seconds in answers)
    measured["stopwatch"].append({"run": to_dict(SHORT), "actions": actions, "alone": alone, **result, **raw(turns)})
    benchmark.extra_info.update({key: result[key] for key in ("ours", "theirs", "value", "low", "high")})
    assert actions * alone < STOPWATCH_COSTS * result["theirs"]
    assert result["low"] < 1 + STOPWATCH_COSTS
