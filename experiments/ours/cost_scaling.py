"""Does a step's time grow as the FLOPs of the model?

One rank trains GPT models of 8M to 400M parameters, with as many tokens a step: were time proportional to the model
FLOPs, then each would have the same rate. What stands against it is what a small model spends between its products, and
what a large one has to fetch from memory. Beside that, 1, 2, 4 and 8 data-parallel ranks with as many sequences each:
more ranks than cores take turns, and say nothing of scaling but that.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import geometric_mean, linear_regression
from typing import Any

from experiments.ours import claim, timed
from harness.experiment.kit import (
    FLOP_RATE, MARK, MILLI, MODEL, RUNS, TERA, Column, Estimate, Evidence, Experiment, ModelConfig, Plan, Point,
    Precision, Recipe, Record, Run, Table, Tolerance, about, exact, flop_rate, named, near, of_run, points, share,
    size_name, step_seconds, tabulate, tally,
)  # fmt: skip

LINEAR = Tolerance(0.15, "assumed", "2026-11-21")
"""Relative tolerance of a step's time against time proportional to its FLOPs."""
LEAST, SPAN = 7e6, 20
"""Parameters of the smallest model that counts, and the least ratio of the largest to it for a law."""
NO_FASTER = Tolerance(0.05, "repeats of one point differ by as much", "2026-11-21")
"""Share by which a rate that still counts as no faster may be higher."""


def one_rank(models: Sequence[ModelConfig], recipe: Recipe, repeats: int, precision: Precision = "fp32") -> list[Run]:
    every = [timed(model, Plan(), recipe, precision) for model in models]
    return [replace(run, repeat=repeat) for repeat in range(repeats) for run in every]


def in_ranks(
    degrees: Sequence[int], model: ModelConfig, recipe: Recipe, repeats: int, precision: Precision = "fp32"
) -> list[Run]:
    """Return runs of data-parallel ranks with a batch of `recipe.global_batch` each."""
    return [
        replace(run, plan=Plan(dp=dp), train=replace(recipe, global_batch=recipe.global_batch * dp))
        for run in one_rank([model], recipe, repeats, precision)
        for dp in degrees
    ]


def sizes(records: Sequence[Record]) -> list[list[Point]]:
    """Return models of one rank with the same tokens a step on one device, by parameters, over proportional time."""
    groups: dict[tuple[Any, ...], list[Point]] = {}
    for one in sorted(points(records, flop_rate), key=lambda one: one.parameters):
        if one.run.plan.world_size == 1:
            groups.setdefault((one.device, one.run.tokens_per_step, one.run.engine), []).append(one)
    return [over_proportional(group) for group in groups.values() if len(group) > 1]


def over_proportional(group: Sequence[Point]) -> list[Point]:
    """Return points with their time over c times their FLOPs.

    c is the geometric mean of time over FLOPs, so that the models deviate to both sides.
    """
    mean = geometric_mean(one.mean(flop_rate) for one in group)
    return [replace(one, relative=exact(mean) / one.estimate(flop_rate)) for one in group]


def flops(one: Point) -> float:
    """Return the model FLOPs of a step."""
    return one.records[0].flops_per_step()


def name(one: Point) -> str:
    return size_name(round(one.parameters))


SHOWN = (
    MODEL, Column(key="parameters", header="parameters", of=lambda one: round(one.parameters)),
    of_run("tokens_per_step", "tokens a step", lambda run: run.tokens_per_step),
    Column(key="flops", header="model FLOPs a step", unit="TFLOP", si="FLOP", scale=TERA, digits=3, of=flops),
    Column(
        key="step_seconds", header="step, median", unit="ms", si="s", scale=MILLI,
        of=lambda one: one.estimate(step_seconds),
    ),
    FLOP_RATE,
    share("over", "over proportional", lambda one: one.relative.mean - 1), RUNS, MARK,
)  # fmt: skip
LINE = of_run("line", "line", lambda run: f"{run.tokens_per_step:,} tokens a step")
AT = Column(key="at", header="at", of=name)
UNPUBLISHED = Column(key="published_rate", header="published", of=lambda _: math.nan)
NOTES = (
    "Model FLOPs: palm_12, 6 N + 12 L h s a token, where N counts what a token is multiplied by: 12 L h^2 and the "
    "output head. Over proportional: step time over c times these, less 1; c is the geometric mean over the sizes.",
)


def table(records: Sequence[Record]) -> Table:
    """Tabulate step time and rate of one rank by model size, next to proportional time."""
    title, found = f"Cost of a step by model size{about(records)}", [one for group in sizes(records) for one in group]
    return tabulate("cost_scaling", title, SHOWN, found, NOTES, line=LINE, at=AT, published_rate=UNPUBLISHED)


def is_linear(records: Sequence[Record]) -> Evidence | None:
    """Judge whether time is proportional to FLOPs within LINEAR, from LEAST parameters on, where sizes span enough."""
    fair = [[one for one in group if one.parameters >= LEAST and not one.is_oversubscribed] for group in sizes(records)]
    spans = [group for group in fair if len(group) > 2 and group[-1].parameters >= SPAN * group[0].parameters]
    judged = [over_proportional(group) for group in spans]
    if not judged:
        return None
    every = [one for group in judged for one in group]
    worst = max(every, key=lambda one: abs(one.relative.mean - 1))
    grows = (f"{name(group[0])} to {name(group[-1])}: time grows as FLOPs^{slope(group):.3f}" for group in judged)
    numbers = f"{'; '.join(grows)}; furthest {worst.relative - 1:+.1%} ({name(worst)})"
    return tally([near(one.relative, 1, LINEAR) for one in every], "sizes", numbers)


def slope(group: Sequence[Point]) -> float:
    """Return the slope of log time over log FLOPs, by least squares."""
    seconds = [math.log(one.mean(step_seconds)) for one in group]
    return linear_regression([math.log(flops(one)) for one in group], seconds).slope


def turns_add_nothing(records: Sequence[Record]) -> Evidence | None:
    """Judge whether ranks that share cores have in total no higher rate than ranks with a core each."""
    groups: dict[tuple[Any, ...], list[Point]] = {}
    for one in points(records, rate):
        run, ranks = one.run, one.run.plan.world_size
        if run.plan.dp == ranks:
            at = one.model, run.train.global_batch / ranks, one.device, run.engine
            groups.setdefault(at, []).append(one)
    gains: list[tuple[Estimate, int]] = []
    for group in groups.values():
        own = max((one for one in group if not one.is_oversubscribed), key=lambda one: one.mean(rate), default=None)
        shared = [one for one in group if one.is_oversubscribed] if own else []
        gains += [(one.estimate(rate) / own.estimate(rate), one.run.plan.world_size) for one in shared if own]
    numbers = ", ".join(f"{gain:.2f} times ({ranks} ranks)" for gain, ranks in gains)
    margins = [gain.scaled(-1) - -(1 + NO_FASTER) for gain, _ in gains]
    return tally(margins, "points", f"{numbers} the best rate of a core each")


def rate(record: Record) -> float:
    return record.tokens_per_second


CPU = Recipe(steps=9, global_batch=2, microbatch=2, lr=1e-4, warmup_steps=2)
GPU = Recipe(steps=15, global_batch=32, microbatch=4, lr=1.5e-4, warmup_steps=2)
SMALL = [
    named("gpt-8m"), named("gpt-25m"),
    *(
        ModelConfig(num_layers=layers, hidden_size=hidden, num_heads=hidden // 64, seq_len=256)
        for layers, hidden in ((12, 768), (16, 1024), (20, 1280))
    ),
]  # fmt: skip
"""Models of `impl.model.sizes`, then on to 85M, 200M and 400M with as many hidden units a head."""
PAPER = [replace(named(f"gpt-{size}"), dropout=0.0) for size in ("355m", "1.2b", "2.5b", "4.2b")]

EXPERIMENT = Experiment(
    source="our own; Kaplan et al. 2020 (2001.08361), section 2.1, take a step's cost as 6 N a token",
    expectation="proportional within 15%; with more ranks than cores, no more tokens a second",
    claims=(
        claim(
            "from 8M parameters to 20 times as many or more, time is proportional to model FLOPs within 15%",
            is_linear,
            tolerance=LINEAR,
        ),
        claim("ranks that share cores are no faster together, but for 5%", turns_add_nothing, tolerance=NO_FASTER),
    ),
    table=table,
    cost={"smoke": "1 min, 2 CPU cores", "small": "8 min, 2 CPU cores", "paper": "30 min, 8 GPUs with 141 GB"},
    deviations="At `small` in fp32, whose products take most of a step, and with 512 tokens a step: 400M parameters "
    "take a core seconds for each. Vocabularies are those of bytes, so that N is what the layers have.",
    runs={
        "smoke": [
            *one_rank([replace(named(f"gpt-{size}"), seq_len=256) for size in ("0.5m", "2m", "8m")], CPU, 1),
            *in_ranks((1, 2, 4), replace(named("gpt-0.5m"), seq_len=256), replace(CPU, global_batch=4), 1),
        ],
        "small": [*one_rank(SMALL, CPU, 2), *in_ranks((1, 2, 4, 8), named("gpt-8m"), replace(CPU, global_batch=4), 2)],
        "paper": [*one_rank(PAPER, GPU, 3, "bf16"), *in_ranks((2, 4, 8), PAPER[1], GPU, 3, "bf16")],
    },
)
