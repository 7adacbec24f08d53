"""Rates by size and by ranks: against time that is proportional to FLOPs, and against one rank."""

import math
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from statistics import geometric_mean
from typing import Any

from harness.analysis.points import Point, points
from harness.experiment.checks import known
from harness.experiment.claims import Evidence, Tolerance, less, near, tally
from harness.experiment.comparison import flop_rate
from harness.experiment.pairs import step_seconds
from harness.records.measures import size_name
from harness.records.record import Record
from harness.records.statistics import Estimate, exact, slope
from impl.grouping import by_key

rate, rate_per_device = attrgetter("tokens_per_second"), attrgetter("tokens_per_second_per_device")
LINEAR = Tolerance(0.15, "assumed", "2026-11-21")
"""Relative tolerance of a step's time against time proportional to its FLOPs."""
LEAST, SPAN = 7e6, 20
"""Parameters of the smallest model that counts, and the least ratio of the largest to it for a law."""
NO_FASTER = Tolerance(0.05, "repeats of one point differ by as much", "2026-11-21")
"""Largest share by which a rate may be above another and still count as no faster."""


def sizes(records: Sequence[Record]) -> list[list[Point]]:
    """Return models of one rank with the same tokens a step on one device, by parameters, over proportional time."""
    by_size = sorted(points(records, flop_rate), key=lambda one: one.parameters)
    alone = [one for one in by_size if one.run.plan.world_size == 1]
    groups = by_key(((one.device, one.run.tokens_per_step, one.run.engine), one) for one in alone)
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


def is_linear(records: Sequence[Record]) -> Evidence | None:
    """Judge whether step times are proportional to FLOPs, over sizes from LEAST parameters on that span enough."""
    fair = [[one for one in group if one.parameters >= LEAST and not one.is_oversubscribed] for group in sizes(records)]
    spans = [group for group in fair if len(group) > 2 and group[-1].parameters >= SPAN * group[0].parameters]
    judged = [over_proportional(group) for group in spans]
    if not judged:
        return None
    exponent = lambda group: slope([(math.log(flops(one)), math.log(one.mean(step_seconds))) for one in group])
    every = [one for group in judged for one in group]
    worst = max(every, key=lambda one: abs(one.relative.mean - 1))
    grows = (f"{name(group[0])} to {name(group[-1])}: time grows as FLOPs^{exponent(group):.3f}" for group in judged)
    numbers = f"{'; '.join(grows)}; furthest {worst.relative - 1:+.1%} ({name(worst)})"
    return tally([near(one.relative, 1, LINEAR) for one in every], "sizes", numbers)


def turns_add_nothing(records: Sequence[Record]) -> Evidence | None:
    """Judge whether ranks that share cores have in total no higher rate than ranks with a core each."""
    found = [one for one in points(records, rate) if one.run.plan.dp == one.run.plan.world_size]
    of = lambda one: (one.model, one.run.train.global_batch / one.run.plan.dp, one.device, one.run.engine)
    groups = by_key((of(one), one) for one in found)
    gains: list[tuple[Estimate, int]] = []
    for group in groups.values():
        own = max((one for one in group if not one.is_oversubscribed), key=lambda one: one.mean(rate), default=None)
        shared = [one for one in group if one.is_oversubscribed] if own else []
        gains += [(one.estimate(rate) / own.estimate(rate), one.run.plan.world_size) for one in shared if own]
    numbers = ", ".join(f"{gain:.2f} times ({ranks} ranks)" for gain, ranks in gains)
    margins = [gain.scaled(-1) - -(1 + NO_FASTER) for gain, _ in gains]
    return tally(margins, "points", f"{numbers} the best rate of a core each")


SLOWER = Tolerance(0.02, "repeats of one point differ by as much", "2026-11-21")
"""Largest share of its speed that a run may lose and still count as no slower."""


def scaled(records: Sequence[Record]) -> list[Point]:
    """Return points on several ranks relative to one rank with the same model, device and overlap, where known."""
    found = points(records, rate_per_device)
    like = lambda one: (one.model, one.device, one.run.engine, one.run.plan.overlap_grad_reduce)
    alone = {like(one): one for one in found if one.run.plan.world_size == 1}
    out = []
    for one in found:
        first = alone.get(like(one), one)
        batch, ranks = first.run.train.global_batch, one.run.plan.world_size
        if one is not first and one.run.train.global_batch in (batch, batch * ranks):
            is_weak = one.run.train.global_batch == batch * ranks
            out.append(replace(one, relative=one.over(first, rate_per_device), printed={"weak": is_weak}))
    return known(out)


def choices(one: Point) -> dict[str, bool]:
    """Return whether the batch grows with the ranks, and whether gradients are reduced in the backward pass."""
    return {"weak": bool(one.printed["weak"]), "overlap": one.run.plan.overlap_grad_reduce}


def pairs(records: Sequence[Record], choice: str) -> list[tuple[Point, Point]]:
    """Return points with a choice, each with the one that differs in this choice only."""
    found: dict[tuple[Any, ...], dict[bool, Point]] = {}
    for one in scaled(records):
        rest = choices(one)
        chosen = rest.pop(choice)
        at = (one.model, one.device, one.run.engine, one.run.plan.world_size, *rest.values())
        found.setdefault(at, {})[chosen] = one
    return [(ways[True], ways[False]) for ways in found.values() if len(ways) == 2]


def weak_keeps_more(records: Sequence[Record]) -> Evidence | None:
    """Judge whether a rank keeps more of its speed, with more ranks, in weak scaling than in strong."""
    found = [(a, b) for a, b in pairs(records, "weak") if choices(a)["overlap"]]
    one = lambda a, b: f"{a.relative:.0%} and {b.relative:.0%} ({a.run.plan.world_size} ranks)"
    margins = [less(b.relative, a.relative) for a, b in found]
    return tally(margins, "degrees", ", ".join(one(*ab) for ab in found))


def overlap_is_no_slower(records: Sequence[Record]) -> Evidence | None:
    """Judge whether gradients that are reduced during the backward pass make no step slower, but for SLOWER."""
    found = [(on, on.over(off, rate_per_device)) for on, off in pairs(records, "overlap")]
    kind = lambda one: "weak" if choices(one)["weak"] else "strong"
    numbers = (f"{gain:.3f} times as fast ({one.run.plan.world_size} ranks, {kind(one)})" for one, gain in found)
    return tally([gain - (1 - SLOWER) for _, gain in found], "points", ", ".join(numbers))
