"""How much of its rate per GCD does a model keep on thousands of them, at a batch that grows and at a constant one?

Frontier's authors add replicas of one pipeline: of 175B parameters up to 1,024 GCDs, of 1T up to 3,072. With the same
sequences for each replica (weak scaling) nothing is lost; with the same for all (strong scaling) each has fewer
microbatches to fill its pipeline with, and 89 and 87% of the rate per GCD are left.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from experiments.ptdp2021 import timed
from harness.experiment.kit import (
    BATCH, DP, EFFICIENCY, FLOP_RATE, MARK, MICROBATCH, MODEL, POINTS, PP, PUBLISHED, RANKS, RUNS, TP, Claim, Column,
    Estimate, Evidence, Experiment, ModelConfig, Plan, Point, Record, Run, Table, about, cost, each, falls_along,
    flop_rate, grouped, known, less, point, points, repeated, tabulate, tally, within,
)  # fmt: skip
from harness.predict.published_scaling import FITTED, STUDIES, Kind, Study, published_efficiency, run_of

KINDS: tuple[Kind, ...] = ("weak", "strong")
"""Kinds that verdicts are about; the fitted one is shown in the table only."""
BETWEEN = {"frontier-175b": (2, 4, 8, 16), "frontier-1t": (1, 2, 4, 6)}
"""Replicas, from the study's fewest to its most."""
SMALL = ModelConfig(num_layers=4, hidden_size=192, num_heads=6, seq_len=128)
SMOKE = ModelConfig(num_layers=2, hidden_size=64, num_heads=2, seq_len=64)
SHOWN_KINDS: tuple[Kind, ...] = (*KINDS, *FITTED)
EVERY: list[tuple[Study, Kind, int]] = [
    (study, kind, dp) for study in STUDIES for kind in SHOWN_KINDS for dp in BETWEEN[study.model]
]
"""Points of the paper."""


def on_two(model: ModelConfig, kind: Kind) -> list[Run]:
    """Return runs with a replica on each of one and two ranks, which has 16 sequences (weak) or its part of 16."""
    runs = [(Plan(dp=dp, zero_stage=1, recompute="full"), dp) for dp in (1, 2)]
    return [timed(model, plan, *((16 * dp, 2) if kind == "weak" else (16, 4))) for plan, dp in runs]


@cache
def kinds() -> dict[Run, tuple[Kind, float]]:
    """Return the kind of scaling and the published efficiency, NaN where there is none, of the experiment's points."""
    found: dict[Run, tuple[Kind, float]] = {}
    for study, kind, dp in EVERY:
        printed = published_efficiency(study.model, kind) / 100 if dp == study.many else math.nan
        found[point(run_of(study, kind, dp))] = kind, printed
    for kind in KINDS:
        found |= dict.fromkeys([*on_two(SMOKE, kind), *on_two(SMALL, kind)], (kind, math.nan))
    return found


def kind_of(one: Point) -> Kind:
    return kinds()[one.run][0]


def published(one: Point) -> float:
    return kinds()[one.run][1]


KIND = Column(key="kind", header="scaling", text=True, of=kind_of)
SHOWN = (
    KIND, MODEL, RANKS, TP, PP, DP, MICROBATCH, BATCH, FLOP_RATE, replace(EFFICIENCY, of=lambda one: one.relative),
    replace(PUBLISHED, of=published), RUNS, MARK,
)  # fmt: skip
LINE = Column(key="line", header="line", of=lambda one: f"{kind_of(one)}, {one.model}")


def scaled(records: Sequence[Record]) -> list[Point]:
    """Return the timed points, each with its rate per device over that of the fewest replicas on the same device."""
    meant = [one for one in points(records, flop_rate) if one.run in kinds()]
    out: list[Point] = []
    for group in grouped(meant, KIND, MODEL):
        first = min(group, key=lambda one: one.run.plan.world_size)
        out += [replace(one, relative=one.over(first, flop_rate)) for one in group]
    order = SHOWN_KINDS
    return sorted(out, key=lambda one: (one.parameters, order.index(kind_of(one)), one.run.plan.world_size))


def table(records: Sequence[Record]) -> Table:
    """Tabulate the rate per device of every number of replicas, and its share of the rate with the fewest."""
    found = scaled(records)
    notes = [
        "Efficiency: the rate per device over that of the fewest replicas, at as many sequences of a replica (weak), "
        "or of all (strong). Published: the abstract's, which names the most devices only."
    ]
    if any(kind_of(one) in FITTED for one in found):
        notes.append("Fitted: the microbatch was picked to match the published strong scaling; no verdict uses it.")
    return tabulate("scaling_of_replicas", f"Frontier's scaling{about(records)}", SHOWN, found, notes, line=LINE)


def lines(records: Sequence[Record], kind: Kind) -> list[list[Point]]:
    """Return points of a kind whose efficiency is known, by model, each from its fewest replicas on."""
    found = [one for one in known(scaled(records)) if kind_of(one) == kind]
    return [line for line in grouped(found, MODEL) if len(line) > 1]


def in_words(found: Sequence[Point]) -> str:
    return ", ".join(f"{one.relative:.1%} on {one.run.plan.world_size:,} ({one.model})" for one in found)


def with_most(records: Sequence[Record]) -> list[tuple[Estimate, float, Point]]:
    """Return the shares of the rate that devices keep in strong scaling, with the published ones, and their points."""
    return [(one.relative, published(one), one) for line in lines(records, "strong") for one in line]


def strong_falls(records: Sequence[Record]) -> Evidence | None:
    """Judge whether every increase of the replicas lowers the rate per device, at the same batch of all."""
    found = lines(records, "strong")
    return falls_along(found, flop_rate, "increases", in_words([line[-1] for line in found]))


def weak_is_better(records: Sequence[Record]) -> Evidence | None:
    """Judge whether weak scaling keeps more of the rate than strong, from as many devices to as many, of each model.

    A point that constants were fitted to is missing from one of the two, which then begins later.
    """
    weak, strong = (lines(records, kind) for kind in KINDS)
    place = lambda one: (one.device, one.model, one.run.plan.world_size)
    at = {place(one): one for line in strong for one in line}
    ends = [(line[-1], line[0]) for line in weak if {place(line[0]), place(line[-1])} <= at.keys()]
    both = [(a.over(b, flop_rate), at[place(a)].over(at[place(b)], flop_rate), a.model) for a, b in ends]
    numbers = ", ".join(f"{ours:.1%} and {theirs:.1%} ({model})" for ours, theirs, model in both)
    return tally([less(theirs, ours) for ours, theirs, _ in both], "models", numbers)


EXPERIMENT = Experiment(
    source="Frontier 2023 (Dash et al.), abstract, section V",
    expectation="100% weak scaling, and 89 and 87% strong scaling, of 175B on 1,024 GCDs and 1T on 3,072",
    claims=(
        Claim(
            "strong scaling leaves the published share of the rate, within 5 points", "abstract",
            each(with_most, within(POINTS), "models", "{0:.1%} on {2.run.plan.world_size:,} ({2.model})"),
            "89% (175B, 1,024), 87% (1T, 3,072)", kind="quantitative", about="bubble", tolerance=POINTS,
        ),
        Claim(
            "every increase of the devices lowers the rate per device at the same batch", "section V (from memory)",
            strong_falls, kind="direction", about="bubble",
        ),
        Claim(
            "weak scaling leaves more of the rate than strong scaling", "abstract", weak_is_better, kind="direction",
            about="bubble",
        ),
    ),
    table=table,
    cost=cost("4 min", "6 h, 3072 GCDs with 64 GB"),
    deviations="The abstract has neither batches nor where scaling begins. The batches of all, 8,000 and 8,016, and "
    "1T's 1,600 sequences of a replica are from memory; 175B's 320 of a replica, and the 128 and 512 GCDs of the "
    "beginning, are assumed. Microbatches are 1, as in the launch scripts; `strong, fitted` has 4, as in the DeepSpeed "
    "configuration stored with them, picked because its pipeline bubble gives the published strong scaling. With 4 the "
    "inputs of recomputed layers are divided among the tensor-parallel ranks, as 1T does not fit 64 GiB by prediction "
    "otherwise. At `smoke` and `small` a replica is one rank, no pipeline; microbatches are 2 (weak) and 4 (strong).",
    runs={
        "smoke": [run for kind in KINDS for run in on_two(SMOKE, kind)],
        "small": repeated([run for kind in KINDS for run in on_two(SMALL, kind)], 8),
        "paper": [run_of(*one) for one in EVERY],
    },
)  # fmt: skip
