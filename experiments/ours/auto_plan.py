"""Does a search find better plans than the papers' authors found by hand, at the scale of each paper?

Megatron-LM, ZeRO, PTD-P, Korthikanti et al. and Frontier train models of 8 billion to a trillion parameters with plans
that their authors chose and tuned on the machine. `lmscale tune` estimates all plans for the same model,
batch and devices on the same system, described, and lets events decide among the best. It is asked twice: with the
knobs that the paper's software had, to see how good the hand-made plan is, and with all of today's, to see what later
inventions add. Small models are trained on two cores with both plans.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from experiments.ours import SLOWER, claim
from harness.experiment.contests import plan_in_words as in_words
from harness.experiment.folders import ARCHIVE
from harness.experiment.kit import (
    MARK, RANKS, RUNS, UNKNOWN, Claim, Column, Estimate, Evidence, Experiment, ModelConfig, Plan, Point, Precision,
    Recipe, Record, Run, Table, Tolerance, about, cost, ends, gib, known, measured_only, named, of_run, point, points,
    share, step_seconds, tabulate, tally, untested,
)  # fmt: skip
from harness.predict.systems import load_system
from harness.tune.tune import best_plan
from impl.files import read_text
from impl.simulator.plans import DEFAULTS, KNOBS

Way = Literal["by hand", "same knobs", "all knobs"]
WAYS: tuple[Way, ...] = ("by hand", "same knobs", "all knobs")
BUCKET = 2**29
"""Bytes of all plans' buckets at the papers' sizes."""
NEAR_BEST = Tolerance(1.1, "assumed", "2026-11-22")
"""Largest ratio of a hand-made plan's time to the best one's with the same knobs that counts as near it."""
MEASURED_HERE = ARCHIVE / "ours" / "predicted" / "two_cores.yaml"
"""The system on which the small models' plans were found."""


class Hand(NamedTuple):
    """A recipe of a paper, or of its rules, for a model on a number of devices."""

    name: str
    model: ModelConfig
    system: str
    batch: int
    precision: Precision
    knobs: tuple[str, ...]
    """Values for `tune --fix` that keep plans to features of the paper's software."""
    plans: dict[Way, dict[str, Any]]
    """Fields of the plan in which each way differs from the defaults, and the microbatch."""

    def way(self, way: Way, repeat: int = 0) -> Run:
        """Return the run with the hand-made plan, or with one that was found."""
        fields = dict(self.plans[way])
        microbatch = fields.pop("microbatch")
        plan = Plan(**fields)
        plan = replace(plan, bucket_bytes=BUCKET) if plan.world_size > 2 else plan
        recipe = Recipe(steps=12, global_batch=self.batch, microbatch=microbatch, lr=1e-4, warmup_steps=2)
        return replace(untested(self.model, plan, recipe, self.precision), repeat=repeat)

    def searched(self, way: Way) -> dict[str, Any]:
        """Return the entry of `plans`: the fields in which the best plan differs from the defaults.

        At the papers' sizes this takes minutes.
        """
        base = self.way("by hand")
        system = load_system(str(MEASURED_HERE if self.system == MEASURED_HERE.stem else self.system))
        fix = self.knobs if way == "same knobs" else ()
        best = best_plan(base, system, base.plan.world_size, (*fix, "cp=1"))
        return {knob: best[knob] for knob in KNOBS if knob == "microbatch" or best[knob] != DEFAULTS[knob]}


def hands() -> list[Hand]:
    """Return the recipes in the file beside this one."""
    recipes = yaml.safe_load(read_text(Path(__file__).with_suffix(".yaml")))["recipes"]
    model = lambda given: named(given) if isinstance(given, str) else ModelConfig(**given)
    return [Hand(name, **{**one, "model": model(one["model"])}) for name, one in recipes.items()]


CPUS = [hand for hand in hands() if hand.system == MEASURED_HERE.stem]
HANDS = [hand for hand in hands() if hand.system != MEASURED_HERE.stem]


def runs(hands: Sequence[Hand], repeats: int = 1) -> list[Run]:
    """Return every recipe in all ways, in turn; once where ways are the same."""
    return list(dict.fromkeys(hand.way(way, i) for i in range(repeats) for hand in hands for way in WAYS))


@dataclass(frozen=True, eq=False, kw_only=True)
class Planned(Point):
    """Point of a recipe; relative is how many times as fast it is as the hand-made plan."""

    hand: Hand
    way: Way


def compared(records: Sequence[Record]) -> list[Planned]:
    """Return every recipe in every way that was run, or simulated for its own system, over the hand-made plan."""
    found: list[Planned] = []
    ran = sorted(points(records, step_seconds), key=lambda one: one.is_simulated)
    for hand in (*HANDS, *CPUS):
        by_hand: dict[str, Point] = {}
        for way in WAYS:
            run = point(hand.way(way))
            for one in (one for one in ran if one.run == run):
                if not one.is_simulated or one.records[0].environment.system == hand.system:
                    if way == "by hand":
                        by_hand[one.device] = one
                    first = by_hand.get(one.device)
                    speed = first.over(one, step_seconds) if first else UNKNOWN
                    found.append(replace(Planned(**vars(one), hand=hand, way=way), relative=speed))
    return found


SHOWN = (
    Column(key="recipe", header="recipe", text=True, of=lambda one: one.hand.name), RANKS,
    Column(key="device_name", header="device", text=True),
    Column(key="way", header="plan by", text=True, of=lambda one: one.way),
    of_run("plan", "plan", in_words, text=True),
    Column(key="step_seconds", header="step", unit="s", si="s", of=lambda one: one.estimate(step_seconds)),
    Column(key="speedup", header="over the hand-made", si="ratio", digits=3, of=lambda one: one.relative.mean),
    share("mfu", "MFU"),
    gib("peak_memory_bytes", "memory per rank"), RUNS, MARK,
)  # fmt: skip
NOTES = (
    "By hand: the paper's plan. Same knobs: the fastest that `tune` finds among plans that the paper's software "
    "could carry out. All knobs: among all. Over the hand-made: how many times as fast.",
)


def table(records: Sequence[Record]) -> Table:
    """Tabulate each recipe's plan and step: by hand, found with the same knobs, and found with all."""
    found = compared(records)
    title, notes = f"Plans by hand and by search{about(records)}", NOTES
    if systems := ", ".join(dict.fromkeys(one.hand.system for one in found if one.is_simulated)):
        notes = (*NOTES, f"Simulated for {systems}; nothing was run there.")
    return tabulate("auto_plan", title, SHOWN, found, notes, apart=True)


def judged(records: Sequence[Record], way: Way, margin: Callable[[Estimate], Estimate]) -> Evidence | None:
    """Judge the speed-ups of a way's plans over the hand-made ones; without runs whose ranks shared cores."""
    found = {one.hand.name: one for one in known(compared(records)) if one.way == way and not one.is_oversubscribed}
    text = lambda one: f"{one.relative:.2f} ({one.hand.name})"
    numbers = ends(list(found.values()), lambda one: one.relative.mean, text)
    margins = [one.relative.mean == 1 or margin(one.relative) for one in found.values()]
    return tally(margins, "recipes", f"{numbers} times as fast")


def no_slower(records: Sequence[Record]) -> Evidence | None:
    """Judge whether the plan found among all is as fast as every hand-made one, but for SLOWER."""
    return judged(records, "all knobs", lambda ratio: ratio - 1 / SLOWER)


def near_the_best(records: Sequence[Record]) -> Evidence | None:
    """Judge whether every hand-made plan takes at most NEAR_BEST of the best with the same knobs."""
    return judged(records, "same knobs", lambda ratio: ratio.scaled(-1) - -NEAR_BEST)


def within_nodes(records: Sequence[Record]) -> Evidence | None:
    """Judge whether layers are shared within a node in all the plans found for several nodes."""
    found = [one for one in compared(records) if one.way != "by hand" and one.is_simulated]
    plans = [(one.run.plan, one.hand.system) for one in found if one.run.plan.world_size > 2]
    size = {system: load_system(system).node.size.value for _, system in plans}
    large = [(plan.tp, size[system]) for plan, system in plans if plan.world_size > size[system]]
    numbers = ", ".join(sorted({f"tp {tp}" for tp, _ in large}))
    return tally([tp <= node for tp, node in large], "plans", numbers)


EXPERIMENT = Experiment(
    source="our own; recipes: Megatron-LM 2019, table 1; ZeRO 2019, figure 2; PTD-P 2021, table 1; Korthikanti et al. "
    "2022, table 5; Frontier 2023, section V",
    expectation="hand-made plans are near the best with the same knobs; with all of today's, older ones lose most to "
    "what recomputes less",
    claims=(
        claim(
            "the plan that a search finds is as fast as every hand-made one, or faster, but for 2%",
            measured_only(no_slower),  # the simulator that chose the plan finds it the fastest whatever its errors
            tolerance=SLOWER,
        ),
        claim(
            "every hand-made plan takes at most 10% more than the best with the same knobs",
            measured_only(near_the_best), tolerance=NEAR_BEST,
        ),
        Claim(
            "in the plans found, layers are shared within a node at most", "PTD-P 2021, section 3.2", within_nodes,
            published="up to g in servers with g GPUs", kind="arithmetic",
        ),
    ),
    table=table,
    cost=cost("4 min", "hours, 3,072 GPUs"),
    deviations="Recipes are in bf16 where the system has it, gradients are accumulated in fp32 unless the system's "
    "software does otherwise, and buckets have 512 MiB. A plan may take 95% of a device's memory. The search "
    "judges plans by the simulator, whose error for such systems is in results/accuracy.md: gains of less than that "
    "are no gains.",
    runs={"smoke": runs(CPUS[:1]), "small": runs(CPUS, 3), "paper": runs(HANDS)},
)  # fmt: skip
