"""Engines that train the same run in turn, step by step, in one process group, so that disturbances hit all alike."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple, Protocol

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist

from harness.analysis.render import Column, Table
from harness.records.statistics import CONFIDENCE
from impl.run import Run
from impl.train import Step

RESAMPLES = 10_000
Progress = Callable[[int, Mapping[str, float]], None]
"""Function of a step's index and each engine's seconds on this rank, called after all engines have done the step."""


class Engine(Protocol):
    """Training of one run: `step(i)` does the i-th optimizer step."""

    def step(self, i: int) -> Step: ...


class Turn(NamedTuple):
    """One step of one engine on one rank."""

    seconds: float
    loss: float


def take_turns(engines: Mapping[str, Engine], steps: int, progress: Progress | None = None) -> dict[str, list[Turn]]:
    """Return every engine's steps on this rank, in the order A B C A B C; all ranks start a step together."""
    turns: dict[str, list[Turn]] = {name: [] for name in engines}
    gc.collect()
    gc.freeze()  # models are never garbage: do not scan them between steps
    for i in range(steps):
        for name, engine in engines.items():
            dist.barrier()
            begin = time.perf_counter()
            loss = engine.step(i).loss.item()
            turns[name].append(Turn(time.perf_counter() - begin, loss))
        if progress is not None:
            progress(i, {name: done[i].seconds for name, done in turns.items()})
    return turns


class Ratio(NamedTuple):
    """Ratio of the medians of paired measurements, with its 95% interval."""

    value: float
    low: float
    high: float


def ratio_of_medians(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Return the median of ours over that of theirs; the interval is a bootstrap over pairs (Efron 1979, percentiles).

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


Ranks = Sequence[Mapping[str, Sequence[Turn]]]
"""Every rank's turns by engine."""


def slowest(ranks: Ranks, name: str) -> list[float]:
    """Return the seconds of every step of an engine on its slowest rank."""
    return [max(turn.seconds for turn in step) for step in zip(*(rank[name] for rank in ranks), strict=True)]


def raw(ranks: Ranks) -> dict[str, Any]:
    """Return what was measured of each engine: seconds of every step on every rank, and losses, which ranks share."""
    return {
        "seconds": {name: [[turn.seconds for turn in rank[name]] for rank in ranks] for name in ranks[0]},
        "losses": {name: [turn.loss for turn in turns] for name, turns in ranks[0].items()},
    }


def compared(ranks: Ranks, ours: str, theirs: str, *, warmup: int) -> dict[str, Any]:
    """Compare two engines' turns, without the first `warmup` steps.

    `ours` and `theirs` are medians in seconds, `value`, `low` and `high` are their ratio, `loss_difference` the largest
    relative one of a step.
    """
    a, b = (slowest(ranks, name)[warmup:] for name in (ours, theirs))
    pairs = zip(ranks[0][ours], ranks[0][theirs], strict=True)
    return {
        "ours": median(a),
        "theirs": median(b),
        **ratio_of_medians(a, b)._asdict(),
        "loss_difference": max(abs(x.loss - y.loss) / abs(y.loss) for x, y in pairs),
    }


def against_peers(ranks: Ranks, ours: str, *, warmup: int) -> dict[str, Any]:
    """Return `compared` with every other engine, the name of the `best` one by median, and the `raw` measurements."""
    peers = {name: compared(ranks, ours, name, warmup=warmup) for name in ranks[0] if name != ours}
    best = min(peers, key=lambda name: peers[name]["theirs"])
    return {"warmup": warmup, "best": best, "peers": peers, **raw(ranks)}


def notes(run: Run, device: Mapping[str, Any], *, warmup: int) -> list[str]:
    """Return notes on what is measured, how, and on what machine, for runs that differ in plan and precision only."""
    model, recipe = run.model, run.train
    return [
        f"GPT, {model.num_layers} layers, hidden size {model.hidden_size}, {model.num_heads} heads, sequence "
        f"{model.seq_len}, vocabulary {model.vocab_size:,}; a step is {recipe.global_batch} sequences in microbatches "
        f"of {recipe.microbatch}, gradient clipping and AdamW on fp32 weights.",
        f"Step time: the slowest rank's, median of {recipe.steps - warmup} steps after {warmup}; all engines of a cell "
        "take turns step by step in the same processes. Interval: 95%, bootstrap over the pairs, of one start of the "
        "processes, which says nothing of how starts and days differ. Below 1 ours is faster. Losses: the largest "
        "relative difference at any step.",
        f"{run.plan.world_size} {'ranks' if run.plan.world_size > 1 else 'rank'} of {device['torch_threads']} thread, "
        f"{device['backend']}, on {device['device_name']}; torch {torch.__version__}. Cores of one machine and their "
        "loopback tell about mechanics, not about a cluster.",
    ]


def table(name: str, title: str, cells: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> Table:
    """Tabulate each peer of each cell; a cell has a `precision`, a `plan` and the results of `against_peers`."""
    keys = ["precision", "plan", "peer", "ours", "theirs", "value", "interval", "loss_difference"]
    rows = [
        {
            **{key: cell[key] for key in ("precision", "plan")},
            **result,
            "peer": f"{peer} (best)" if peer == cell["best"] and len(cell["peers"]) > 1 else peer,
            "interval": f"{result['low']:.3f} to {result['high']:.3f}",
        }
        for cell in cells
        for peer, result in cell["peers"].items()
    ]
    step = {"unit": "ms", "scale": 1e-3, "si": "s"}
    columns = (
        Column(key="precision", header="Precision", text=True),
        Column(key="plan", header="Plan", text=True),
        Column(key="peer", header="Peer", text=True),
        Column(key="ours", header="Ours, step time", **step),
        Column(key="theirs", header="Peer, step time", **step),
        Column(key="value", header="Ours / peer", digits=3),
        Column(key="interval", header="95% interval", text=True),
        Column(key="loss_difference", header="Losses differ by", digits=2),
    )
    return Table(name, title, columns, pd.DataFrame(rows, columns=keys), tuple(notes))
