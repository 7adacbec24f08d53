"""Engines train the same run in turn, step by step, in one process group: what the machine does meets all of them."""

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple, Protocol

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist

from harness.render import Column, Table
from harness.statistics import CONFIDENCE
from impl.run import Run
from impl.train import Step

RESAMPLES = 10_000


class Engine(Protocol):
    """Trains one run: `step(i)` does the i-th optimizer step."""

    def step(self, i: int) -> Step: ...


class Turn(NamedTuple):
    """One step of one engine on one rank."""

    seconds: float
    loss: float


def take_turns(engines: Mapping[str, Engine], steps: int) -> dict[str, list[Turn]]:
    """Every engine's steps 0, 1, ... on this rank: A B A B. All ranks start a step together."""
    turns: dict[str, list[Turn]] = {name: [] for name in engines}
    gc.collect()
    gc.freeze()  # models are never garbage: do not scan them between steps
    for i in range(steps):
        for name, engine in engines.items():
            dist.barrier()
            begin = time.perf_counter()
            loss = engine.step(i).loss.item()
            turns[name].append(Turn(time.perf_counter() - begin, loss))
    return turns


@dataclass(frozen=True)
class Ratio:
    """Ratio of the medians of paired measurements, with its 95% interval."""

    value: float
    low: float
    high: float


def ratio_of_medians(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Median of ours over median of theirs; the interval is a bootstrap over the pairs (Efron 1979, percentiles).

    Raises:
        ValueError: the two have different lengths, or no pairs.
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"paired measurements come in pairs; {len(ours)} and {len(theirs)} are not")
    a, b = np.asarray(ours), np.asarray(theirs)
    drawn = np.random.default_rng(0).integers(len(a), size=(RESAMPLES, len(a)))
    ratios = np.median(a[drawn], axis=1) / np.median(b[drawn], axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(ratios, [tail, 1 - tail])
    return Ratio(median(ours) / median(theirs), float(low), float(high))


def compared(ranks: Sequence[Mapping[str, Sequence[Turn]]], ours: str, theirs: str, *, warmup: int) -> dict[str, Any]:
    """All ranks' raw turns, and what they say without the first `warmup` steps.

    A step takes what its slowest rank takes. `ours` and `theirs` are medians in seconds, `value`, `low` and `high` are
    their ratio, `loss_difference` the largest relative one of a step.
    """
    slowest = {
        name: [max(turn.seconds for turn in step) for step in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in (ours, theirs)
    }
    timed = {name: seconds[warmup:] for name, seconds in slowest.items()}
    losses = {name: [turn.loss for turn in ranks[0][name]] for name in (ours, theirs)}
    pairs = zip(losses[ours], losses[theirs], strict=True)
    return {
        "ours": median(timed[ours]),
        "theirs": median(timed[theirs]),
        **asdict(ratio_of_medians(timed[ours], timed[theirs])),
        "loss_difference": max(abs(a - b) / abs(b) for a, b in pairs),
        "warmup": warmup,
        "seconds": {name: [[turn.seconds for turn in rank[name]] for rank in ranks] for name in (ours, theirs)},
        "losses": losses,
    }


def notes(run: Run, device: Mapping[str, Any], *, warmup: int) -> list[str]:
    """What is measured, how, and on what: of runs that differ in plan and precision only."""
    model, recipe = run.model, run.train
    return [
        f"GPT, {model.num_layers} layers, hidden size {model.hidden_size}, {model.num_heads} heads, sequence "
        f"{model.seq_len}, vocabulary {model.vocab_size:,}; a step is {run.microbatches} microbatches of "
        f"{recipe.microbatch} sequences, gradient clipping and AdamW on fp32 weights.",
        f"Step time: the slowest rank's, median of {recipe.steps - warmup} steps after {warmup}; both engines take "
        "turns step by step in the same processes. Interval: 95%, bootstrap over the pairs. Below 1 ours is faster. "
        "Losses: the largest relative difference at any step.",
        f"{run.plan.world_size} ranks of {device['torch_threads']} thread, {device['backend']}, on "
        f"{device['device_name']}; torch {torch.__version__}. Cores of one machine and their loopback tell about "
        "mechanics, not about a cluster.",
    ]


def table(name: str, title: str, peer: str, rows: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> Table:
    """One line for each comparison: its `precision` and `plan`, both medians, their ratio and how far losses differ."""
    frame = pd.DataFrame(
        [{**row, "interval": f"{row['low']:.3f} to {row['high']:.3f}"} for row in rows],
        columns=["precision", "plan", "ours", "theirs", "value", "interval", "loss_difference"],
    )
    step = {"unit": "ms", "scale": 1e-3, "si": "s"}
    columns = (
        Column(key="precision", header="Precision", text=True),
        Column(key="plan", header="Plan", text=True),
        Column(key="ours", header="Ours, step time", **step),
        Column(key="theirs", header=f"{peer}, step time", **step),
        Column(key="value", header="Ours / theirs", digits=3),
        Column(key="interval", header="95% interval", text=True),
        Column(key="loss_difference", header="Losses differ by", digits=2),
    )
    return Table(name, title, columns, frame, tuple(notes))
