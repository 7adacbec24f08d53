"""How does each knob alone move the rate of the 175B recipe: ranks to a layer, pipeline, microbatch, batch, ZeRO stage?

Frontier's authors vary one knob at a time before they search (section III). Their figures are not among the numbers
that are stored here, and their observations III.1 to III.4 are known from memory only: more ranks to a layer are
slower, larger batches faster, more pipeline ranks slower at one batch and about as fast if the batch grows with them.
So no claim here is the paper's. Those that the whole space of `search` can judge are made there.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from experiments.ptdp2021 import timed
from harness.experiment.kit import (
    BATCH, DP, FLOP_RATE, MICROBATCH, PP, RUNS, TERA, TP, ZERO_STAGE, Check, Claim, Column, Estimate, Evidence,
    Experiment, ModelConfig, Plan, Point, Record, Run, Table, Tolerance, about, cost, flop_rate, larger, largest, near,
    points, repeated, tabulate, tally, value,
)  # fmt: skip
from harness.figures.style import panels, to_draw
from harness.predict.published_scaling import on_frontier

RECIPE: dict[str, Any] = {"tp": 4, "pp": 16, "dp": 4, "batch": 1280, "microbatch": 1, "zero_stage": 1}
"""The launch script of 175B parameters, with four replicas; `frontier` is fitted to it with two: no evidence."""
KNOBS: dict[str, tuple[Column, list[dict[str, Any]]]] = {
    "ranks to a layer": (TP, [{"tp": tp} for tp in (2, 4, 8, 16)]),
    "pipeline ranks": (PP, [{"pp": pp} for pp in (8, 16, 32, 48)]),
    "pipeline ranks, batch in step": (PP, [{"pp": pp, "batch": 80 * pp} for pp in (8, 16, 32, 48)]),
    "microbatch": (MICROBATCH, [{"microbatch": size} for size in (1, 2, 4, 8)]),
    "batch": (BATCH, [{"batch": batch} for batch in (160, 320, 640, 1280, 2560)]),
    "ZeRO stage": (ZERO_STAGE, [{"zero_stage": stage} for stage in range(4)]),
}
FLAT = Tolerance(0.05, "of 'about as fast', assumed", "2026-11-24")
"""Largest relative change of a rate that counts as about as fast."""
MODEL = ModelConfig(num_layers=8, hidden_size=128, num_heads=4, seq_len=64)


def on_two(microbatch: int = 1, batch: int = 16) -> Run:
    return timed(MODEL, Plan(pp=2, recompute="full"), batch, microbatch)


CPU_KNOBS = {"microbatch": [on_two(size) for size in (1, 2, 4)], "batch": [on_two(batch=size) for size in (4, 8, 32)]}
SWEEPS: dict[str, list[list[Run]]] = {
    name: [[on_frontier("frontier-175b", **(RECIPE | one)) for one in changes], CPU_KNOBS.get(name, [])]
    for name, (_, changes) in KNOBS.items()
}
"""Runs of each knob, on GCDs and on two ranks of a CPU."""


def lines(records: Sequence[Record], name: str) -> list[list[Point]]:
    """Return the points of a knob in order, those that failed left out, by device."""
    found = points(records, flop_rate)
    places = dict.fromkeys(one.device for one in found)
    of = lambda runs, device: [one for run in runs for one in found if (one.run, one.device) == (run, device)]
    return [line for runs in SWEEPS[name] for device in places if len(line := of(runs, device)) > 1]


COLUMNS = (
    Column(key="knob", header="knob", text=True, of=lambda one: one.model), TP, PP, DP, MICROBATCH, BATCH, ZERO_STAGE,
    FLOP_RATE, RUNS,
)  # fmt: skip


def table(records: Sequence[Record]) -> Table:
    """Tabulate every point by knob; the recipe is in all of them."""
    every = [replace(one, model=name) for name in KNOBS for line in lines(records, name) for one in line]
    return tabulate("sweeps", f"One knob at a time{about(records)}", COLUMNS, every)


def figure(records: Sequence[Record]) -> Any:
    """Draw the rate over each knob, a panel each."""
    records, simulated = to_draw(records)
    known = {name: found for name in KNOBS if (found := lines(records, name))}
    if not known:
        return None
    drawn, axes = panels(len(known))
    for ax, (name, found) in zip(axes, known.items(), strict=True):
        for line in found:
            rates = [one.mean(flop_rate) / TERA for one in line]
            ax.plot([str(value(one, KNOBS[name][0])) for one in line], rates, "o-")
        ax.margins(y=0.1)
        ax.set(xlabel=name, ylabel="model TFLOP/s per device")
    drawn.suptitle(f"One knob at a time{about(records)}{simulated}")
    return drawn


def judged(name: str, margins: Callable[[Sequence[Point]], Sequence[bool | Estimate]], what: str) -> Check:
    """Return a check of the lines of a knob by the margins of each, with their rates."""
    rate = lambda one: f"{one.mean(flop_rate) / TERA:.3g} ({value(one, KNOBS[name][0])})"

    def check(records: Sequence[Record]) -> Evidence | None:
        found = lines(records, name)
        numbers = "; ".join(", ".join(map(rate, line)) + " TFLOP/s" for line in found)
        return tally([margin for line in found for margin in margins(line)], what, numbers)

    return check


def keeps_its_rate(line: Sequence[Point]) -> list[bool | Estimate]:
    """Return by how much the change of the rate stays below FLAT, at each step along the line."""
    return [near(b.over(a, flop_rate), 1, FLAT) for a, b in pairwise(line)]


def inner_is_fastest(line: Sequence[Point]) -> list[Estimate]:
    best = max(line[1:-1], key=lambda one: one.mean(flop_rate), default=line[0])
    return [largest(best, (line[0], line[-1]), flop_rate)]


def more_is_slower(line: Sequence[Point]) -> list[Estimate]:
    """Return by how much stage 1 is faster than the stages that divide more."""
    first = [one for one in line if one.run.plan.zero_stage == 1]
    return [larger(one, other, flop_rate) for one in first for other in line if other.run.plan.zero_stage > 1]


EXPERIMENT = Experiment(
    source="Frontier 2023 (Dash et al.), section III",
    expectation="from memory of the paper: slower with ranks to a layer and with pipeline ranks, faster with batches, "
    "about level with pipeline ranks at a batch that grows with them; stage 1 of ZeRO is preferred",
    claims=(
        Claim(
            "more pipeline ranks keep the rate within 5% at every step if the batch grows with them",
            "our own; section III from memory", judged("pipeline ranks, batch in step", keeps_its_rate, "steps"),
            about="network", tolerance=FLAT,
        ),
        Claim(
            "neither the smallest microbatch is fastest nor the largest that fits, at the same batch", "our own",
            judged("microbatch", inner_is_fastest, "lines"), about="computing",
        ),
        Claim(
            "ZeRO's stages 2 and 3 are slower than stage 1", "our own; section III from memory",
            judged("ZeRO stage", more_is_slower, "stages"), about="network",
        ),
    ),
    table=table,
    figure=figure,
    cost=cost("1 min", "3 h, 128 to 1024 GCDs with 64 GB"),
    deviations="The authors' values of each knob are not known to us. Replicas stay four, so that more ranks to a "
    "layer or a pipeline are more GCDs. At `smoke` and `small` microbatch and batch vary, with a "
    "pipeline of two ranks.",
    runs={
        "smoke": CPU_KNOBS["microbatch"],
        "small": repeated([run for runs in CPU_KNOBS.values() for run in runs], 3),
        "paper": list(dict.fromkeys(run for on_gcds, _ in SWEEPS.values() for run in on_gcds)),
    },
)  # fmt: skip
