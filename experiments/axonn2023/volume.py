"""What does each grid of ranks send, and does a model of that find the fast ones?

AxoNN divides matrices along both sides (x, y), weights and tokens over z, and tokens over d. Which of these grids is
fast its authors predict by the bytes that each sends, over the network's bandwidths: of a few that the model names they
train with the best. Here ranks count what they send, the model's bytes stand beside that, and its order beside that of
the steps' times.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf, nan, prod, sqrt
from typing import Any

from scipy.stats import kendalltau

from experiments.axonn2023 import (
    AS_STORED, PRODUCTS, SHAPES, WHOLE, Grid, communicating, grid_of, grids, modelled, name, on_grid, on_perlmutter,
)  # fmt: skip
from experiments.ours import claim
from experiments.ptdp2021 import timed
from harness.experiment.kit import (
    DEVICE, MARK, MODEL, RANKS, RUNS, STEP, Check, Claim, Estimate, Evidence, Experiment, Measure, ModelConfig, Point,
    Record, Run, Tolerance, cost, figure_of, flop_rate, gigabytes, grouped, largest, milliseconds, of_run, points,
    step_seconds, table_of, tally,
)  # fmt: skip
from impl.cost.least_traffic import moved_bytes
from impl.cost.place import Place
from impl.cost.traffic import Count, Op, step_traffic
from impl.data.batches import head_positions

FEW = 5
"""Grids that the authors' function returns unless it is asked for more."""
SURE = 1.96
"""Standard deviations of Kendall's tau without any order, beyond which a tau is no chance: 95%."""
EXACT = Tolerance(0.01, "biases, embeddings, logits and norms are under 1% of 80B's traffic", "2026-11-27")
Counts = dict[str, dict[str, tuple[int, int]]]
"""Calls and bytes of a step's collectives, by axes of the mesh."""


def by_axis(traffic: Mapping[str, Mapping[Any, Any]]) -> Counts:
    """Return counts as records have them, which call several axes of the mesh `joint`."""
    name_of = lambda axes: "joint" if "_" in axes else axes
    return {name_of(axes): {op: (n.calls, n.bytes) for op, n in ops.items()} for axes, ops in traffic.items()}


def by_formula(record: Record) -> dict[str, dict[Op, Count]]:
    vocab_size = record.resolved.vocab_size or record.run.model.vocab_size or 1
    return step_traffic(Place(record.run, vocab_size), head_positions(record.run.model))


def counted_alike(records: Sequence[Record]) -> Evidence | None:
    """Judge whether all ranks of every measured grid count the formula's calls and bytes, to the byte."""
    ranks = [(one, rank.traffic) for one in records for rank in one.ranks if rank.traffic]
    return tally([by_axis(counted) == by_axis(by_formula(one)) for one, counted in ranks], "ranks")


def moved(one: Point) -> float:
    """Return the bytes that a rank takes in or gives away in a step, by formula."""
    return moved_bytes(one.run, by_formula(one.records[0]))


def alike(records: Sequence[Record]) -> list[list[Point]]:
    """Return the timed grids of each model and number of ranks, of several."""
    return [group for group in grouped(points(records, step_seconds), MODEL, RANKS) if len(group) > 2]


def least_is_no_line(records: Sequence[Record]) -> Evidence | None:
    """Judge whether the grid that sends least has a y or z above 1."""
    best = [min(group, key=moved) for group in alike(records)]
    said = ", ".join(f"{name(one.run)} of {one.run.plan.world_size:,}" for one in best)
    return tally([max(grid_of(one.run)[1:3]) > 1 for one in best], "numbers of ranks", said)


def sends_less_with_y(records: Sequence[Record]) -> Evidence | None:
    """Judge whether of grids that divide products alone the one that sends least has a y above 1."""
    lines = [[one for one in group if prod(grid_of(one.run)[2:]) == 1] for group in alike(records)]
    best = [min(line, key=moved) for line in lines if len(line) > 2]
    said = ", ".join(f"{name(one.run)} of {one.run.plan.world_size}" for one in best)
    return tally([grid_of(one.run)[1] > 1 for one in best], "numbers of ranks", said)


def stored_is_exact(records: Sequence[Record]) -> Evidence | None:
    """Judge whether the stored model has the bytes of x and y that a layer's products send, by formula."""
    ratios = [
        stored / exact
        for one in (one for group in alike(records) for one in group)
        for stored, exact in zip(modelled(one.run, AS_STORED)[:2], modelled(one.run, PRODUCTS)[:2], strict=True)
        if exact
    ]
    numbers = f"{min(ratios, default=1):.3f} to {max(ratios, default=1):.3f} times what is sent"
    return tally([abs(ratio - 1) <= EXACT for ratio in ratios], "axes", numbers)


def added(record: Record) -> float:
    """Return the seconds by which a free network would shorten a simulated step, in ns; NaN of a measured one."""
    free = record.prediction.without.get("network", nan)
    return round(1e9 * (record.step_seconds - free)) if record.is_simulated else nan


def tau(group: Sequence[Point], measure: Measure) -> Estimate:
    """Return Kendall's tau of the model's seconds and a measure, with the interval of no order at all."""
    n = len(group)
    found: Any = kendalltau([communicating(one.run) for one in group], [one.mean(measure) for one in group])
    return Estimate(float(found.statistic), SURE * sqrt(2 * (2 * n + 5) / (9 * n * (n - 1))), n, inf)


def in_order(measure: Measure) -> Check:
    """Return a check that a measure is larger, beyond chance, of grids that the model has later."""

    def check(records: Sequence[Record]) -> Evidence | None:
        found = [(tau(group, measure), group[0].run.plan.world_size) for group in alike(records)]
        numbers = [
            f"tau {one:.2f} ± {one.half_width:.2f} ({ranks:,} ranks)" for one, ranks in found if one.mean == one.mean
        ]
        return tally([one for one, _ in found], "numbers of ranks", ", ".join(numbers))

    return check


def few_have_the_fastest(records: Sequence[Record]) -> Evidence | None:
    """Judge whether the fastest grid is among the model's first, of four times as many or more."""
    margins, said, rate = [], [], lambda one: one.mean(flop_rate)
    for group in (group for group in alike(records) if len(group) >= 4 * FEW):
        order = sorted(group, key=lambda one: communicating(one.run))
        fastest, best = max(order, key=rate), max(order[:FEW], key=rate)
        number = f"is the model's number {order.index(fastest) + 1} on {fastest.run.plan.world_size:,}"
        longer = f"the best of its first {FEW} takes {rate(fastest) / rate(best):.2f} times as long"
        margins.append(largest(best, order[FEW:], flop_rate))
        said.append(f"{name(fastest.run)} {number}, {longer}")
    return tally(margins, "numbers of ranks", ", ".join(said))


def on_cpus(model: ModelConfig, *ranks: int) -> list[Run]:
    every = [grid for n in ranks for grid in grids(n, has_d=False)]
    return [timed(model, on_grid(grid), 8, 8 // grid[2]) for grid in every]


def at_scale() -> list[Run]:
    """Return the grids of 80B on 1,024 GPUs, of at least the authors' 64 parts of a weight, in one microbatch."""
    plan: Callable[[Grid], Run] = lambda grid: on_perlmutter(
        SHAPES[80], on_grid(grid, bucket_bytes=WHOLE), 1024 // (grid[2] * grid[3])
    )
    return [plan(grid) for grid in grids(1024, has_d=True, least=64, most=16)]


SHOWN = (
    MODEL, DEVICE, RANKS, of_run("grid", "grid (x, y, z, d)", name, text=True),
    gigabytes("moved", "moved by a rank", moved),
    gigabytes("modelled", "by AxoNN's model", lambda one: sum(modelled(one.run))),
    gigabytes("corrected", "with its last product turned", lambda one: sum(modelled(one.run, PRODUCTS))),
    milliseconds("communicating", "its time on Perlmutter", lambda one: communicating(one.run)),
    STEP, RUNS, MARK,
)  # fmt: skip
SMOKE = ModelConfig(num_layers=1, hidden_size=64, num_heads=8, seq_len=32, vocab_size=512)
EXPERIMENT = Experiment(
    source="AxoNN 2023, abstract; its model: examples/comm_model.py of axonn-ai/Megatron-AxoNN at 8a4ae24",
    expectation="ranks count what the formula says; the model's first grids have the fastest",
    claims=(
        Claim("grids that the model has later communicate longer", "abstract", in_order(added),
              kind="self-consistency", about="network"),
        Claim("the fastest grid is among the first five of the model", "abstract", few_have_the_fastest,
              kind="direction", about="network"),
        Claim("the model, as stored, has the bytes that a layer's products send", "examples/comm_model.py",
              stored_is_exact, kind="arithmetic", tolerance=EXACT),
        Claim("the grid that sends least is not Megatron's, which has x alone", "abstract", least_is_no_line,
              kind="arithmetic"),
        Claim("of grids that divide products alone one with y above 1 sends least", "abstract", sends_less_with_y,
              kind="arithmetic"),
        claim("steps of grids that the model has later take longer", in_order(step_seconds)),
        claim("every rank counts the formula's calls and bytes, to the byte", counted_alike, kind="self-consistency"),
    ),
    table=table_of("volume", "What grids send", SHOWN, lambda records: [o for g in alike(records) for o in g], [
        "x divides heads, y hidden features, z weights and tokens, d tokens. Moved: in rings, all of a step's "
        "collectives by formula. AxoNN's model has no embeddings, logits and norms."
    ]),
    figure=figure_of(
        "Steps of grids, by the time that AxoNN's model has for communication", "by the model (s)", "a step (s)",
        lambda records: [one for group in alike(records) for one in sorted(group, key=lambda o: communicating(o.run))],
        name=lambda one: f"{one.run.plan.world_size} ranks, x {one.run.plan.x}, y {one.run.plan.y}",
        at=lambda one: communicating(one.run), ours=lambda one: one.mean(step_seconds),
    ),
    cost=cost("20 min", "2 h, 1024 GPUs with 40 GB", smoke="2 min"),
    deviations="Of the paper only the abstract was read; the model is the stored code's, with x as the innermost "
    "axis. Bandwidths are those that it has for Perlmutter, at all tiers. The batch of `paper`, 1,024 "
    "sequences of 2,048, is our own. At `smoke` and `small` ranks share two cores: their time is what all of them "
    "compute and copy, one after another. The simulator overlaps gathers over z with the block before and sums over x "
    "and y with weight gradients, as AxoNN does; it lets each axis have the whole network meanwhile.",
    runs={
        "smoke": on_cpus(SMOKE, 4),
        "small": on_cpus(replace(SMOKE, num_layers=2, hidden_size=128, seq_len=64), 4, 8),
        "paper": at_scale(),
    },
)  # fmt: skip
