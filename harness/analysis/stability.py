"""Map of stable training: over depth, warm-up and learning rate, where each norm placement trains, and how well."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from harness.analysis.render import Column, Table, number
from harness.records.measures import about
from harness.records.record import Record
from harness.records.statistics import Estimate, estimate
from harness.records.store import FINISHED
from impl.model.norm_placement import order_of
from impl.run import Run

UNIGRAM = {"data/books-byte": 3.0738}
"""Nats per token of the frequencies of a training text's tokens: what a model reaches that learns nothing else."""
MARGIN = 0.1
"""Nats per token below UNIGRAM that a run has to reach; else it diverged. Set on 2026-11-24, before any run."""


def loss_or_inf(record: Record) -> float:
    """Return the nats per token of held-out text after the last step; infinite if the run diverged.

    It diverged if a loss was not a number, the last one is above the first, or it learnt no more than frequencies.
    """
    found = [last.per("tokens") for last in record.last_evaluations if last.kind in ("causal", "masked")]
    limit = UNIGRAM.get(record.run.data.dataset, math.inf) - MARGIN
    return math.inf if record.has_diverged or not found or not found[0] <= limit else found[0]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Runs of one norm placement, depth and warm-up over the learning rates."""

    norm: str
    """Its name, and in what else it differs (`arm_name`)."""
    layers: int
    warmup: int
    """Steps of warm-up."""
    losses: dict[float, list[float]]
    """Loss of each seed by learning rate, the lowest first; infinite where a run diverged."""

    @property
    def stable_rate(self) -> float:
        """Largest rate up to which no run diverged; 0 if some did at the lowest."""
        stable = 0.0
        for rate, losses in self.losses.items():
            if math.inf in losses:
                return stable
            stable = rate
        return stable

    @property
    def best_rate(self) -> float:
        """Rate with the lowest mean loss, the lowest rate where all diverge."""
        return min(self.losses, key=lambda rate: math.fsum(self.losses[rate]) / len(self.losses[rate]))

    @property
    def best_loss(self) -> Estimate:
        """Loss at the best rate over the seeds."""
        return estimate(self.losses[self.best_rate])


def arm_name(run: Run, *, named: bool) -> str:
    """Return a run's norm placement, with the norms' function and the family if these are not LayerNorm and GPT.

    Args:
        named: add the parametrization.
    """
    model = run.model
    parts = [model.family.upper()] * (model.family != "gpt") + [model.norm_placement]
    parts += [model.norm] * (model.norm != "layernorm") + [run.train.parametrization] * named
    return " ".join(parts)


def arms(records: Sequence[Record]) -> list[Arm]:
    """Return every arm all of whose rates have run, by depth, warm-up and placement.

    Where runs have several parametrizations, those with the standard one are arms of their own.
    """
    several = len({one.run.train.parametrization for one in records}) > 1
    found: dict[tuple[int, int, str], dict[float, list[float]]] = {}
    order: dict[str, int] = {}
    for one in (one for one in records if one.status in FINISHED):
        model, train = one.run.model, one.run.train
        name = arm_name(one.run, named=several and train.parametrization == "standard")
        order[name] = order_of(model.norm_placement)
        rates = found.setdefault((model.num_layers, train.warmup_steps, name), {})
        rates.setdefault(train.lr, []).append(loss_or_inf(one))
    every = {rate for rates in found.values() for rate in rates}
    return [
        Arm(norm=norm, layers=layers, warmup=warmup, losses=dict(sorted(rates.items())))
        for (layers, warmup, norm), rates in sorted(
            found.items(), key=lambda one: (*one[0][:2], order[one[0][2]], one[0][2])
        )
        if rates.keys() == every
    ]


def outcome(losses: Sequence[float]) -> str | None:
    """Return how many of the runs diverged, as `2 of 3 diverged`; None if none did."""
    count = sum(map(math.isinf, losses))
    return f"{count} of {len(losses)} diverged" if count else None


def table(records: Sequence[Record]) -> Table:
    """Tabulate the loss of every arm at every rate, its best rate, and the largest rate at which it is stable."""
    found, title = arms(records), f"Loss by depth, warm-up, norm placement and learning rate{about(records)}"
    if not found:
        return Table("stability_map", title, (), pd.DataFrame())
    rates = list(found[0].losses)
    columns = [
        Column(key="layers", header="layers"), Column(key="warmup", header="warm-up", unit="steps", si="steps"),
        Column(key="norm", header="norm", text=True),
        *(
            Column(key=f"loss_{rate:g}", header=f"lr {rate:g}", unit="nats", si="nats", interval=f"half_width_{rate:g}")
            for rate in rates
        ),
        Column(key="best", header="best", unit="nats", si="nats", interval="best_half_width"),
        Column(key="best_rate", header="at lr"), Column(key="stable", header="largest stable lr"),
        Column(key="n", header="n"),
    ]  # fmt: skip
    rows = []
    for one in found:
        row: dict[str, Any] = {"layers": one.layers, "warmup": one.warmup, "norm": one.norm}
        for rate, losses in one.losses.items():
            mean = estimate(losses)
            row |= {f"loss_{rate:g}": outcome(losses) or mean.mean}
            row |= {f"half_width_{rate:g}": mean.half_width if math.isfinite(mean.mean) else None}
        best = one.best_loss
        stays = math.isfinite(best.mean)
        row |= {"best": best.mean if stays else "none", "best_half_width": best.half_width if stays else None}
        row |= {"best_rate": f"{one.best_rate:g}" if stays else None}
        row |= {"stable": f"{one.stable_rate:g}" if one.stable_rate else "none"}
        rows.append(row | {"n": min(map(len, one.losses.values()))})
    texts = sorted({record.run.data.dataset for record in records} & UNIGRAM.keys())
    limits = (
        f"above {number(UNIGRAM[text] - MARGIN)} nats, {MARGIN} below the frequencies' of {text}" for text in texts
    )
    notes = (
        "Loss: nats per token of held-out text after the last step; ± is the half-width of the 95% t-interval over n "
        "seeds. Best: at the rate with the lowest mean.",
        f"Diverged: a loss was not a number, or the last one is {', '.join([*limits, 'or above the first'])}. Largest "
        "stable: no run diverged at this rate or a lower one.",
    )
    return Table("stability_map", title, tuple(columns), pd.DataFrame(rows), notes)
