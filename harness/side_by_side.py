"""Two engines train the same run in turn, step by step, in one process group: what the machine does meets both."""

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple, Protocol

import numpy as np
import pandas as pd
import torch.distributed as dist

from harness.render import Column, Table
from harness.statistics import CONFIDENCE
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


def slowest_rank(ranks: Sequence[Sequence[Turn]]) -> list[float]:
    """Seconds of each step on the rank that took longest."""
    return [max(turn.seconds for turn in step) for step in zip(*ranks, strict=True)]


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


def compare(
    ranks: Sequence[Mapping[str, Sequence[Turn]]], ours: str, theirs: str, *, warmup: int
) -> dict[str, Any]:
    """What all ranks' turns say: medians and their ratio without the first `warmup` steps, and how far losses differ."""
    seconds = {name: slowest_rank([rank[name] for rank in ranks]) for name in (ours, theirs)}
    ratio = ratio_of_medians(seconds[ours][warmup:], seconds[theirs][warmup:])
    pairs = zip(ranks[0][ours], ranks[0][theirs], strict=True)
    return {
        "seconds": seconds,
        "warmup": warmup,
        "ours": median(seconds[ours][warmup:]),
        "theirs": median(seconds[theirs][warmup:]),
        "ratio": ratio.value,
        "low": ratio.low,
        "high": ratio.high,
        "loss_difference": max(abs(a.loss - b.loss) / abs(b.loss) for a, b in pairs),
    }
