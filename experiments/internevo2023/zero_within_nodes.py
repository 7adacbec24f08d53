"""What is dividing optimizer states within a node worth, on more and more nodes?

ZeRO's stage 1 over all data-parallel ranks sends updated parameters through the whole cluster. InternEvo can divide
states within a node instead, and keep a copy on each: its 7B model then trains at 3,625 tokens/s per GPU on 1,024
A100s in place of 2,271, 60% more, while on 8 both are equally fast.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from experiments.ptdp2021 import SELENE, timed
from harness.experiment.kit import (
    DEVICE_RATE, MARK, MODEL, PRINTED_DEVICE_RATE, RANKS, RUNS, TP, UNTESTED, Claim, Experiment, ModelConfig,
    Plan, Point, Printed, Record, Run, Tolerance, against_in_print, as_expected, cost, each, figure_of, grouped, named,
    of_run, per_device, points, printed_value, published, relative, repeated, table_of, with_printed,
)  # fmt: skip
from impl.grouping import by_key
from impl.model.sizes import LLAMA_BLOCK

NEAR = Tolerance(0.1, "set after errors of such steps (mean 5%, largest 22%) were seen", "2026-11-25")
POINTS = Tolerance(0.1, "as for rates, of shares of a rate; set after errors of such steps were seen", "2026-11-25")
BLOCK: dict[str, Any] = LLAMA_BLOCK | {"biases": True}  # of attention; there the MLP has none
INTERNLM = ModelConfig(
    **BLOCK,
    num_layers=32, hidden_size=4096, num_heads=32, seq_len=2048, mlp_size=11008, vocab_size=103168,
)  # fmt: skip
GROUP = of_run("zero_group", "ZeRO over", lambda run: run.plan.zero)


def on_a100s(row: Printed) -> Run:
    """Return the run of a published row: four microbatches, states over all data-parallel ranks or over a node's."""
    tp, dp = int(row["tp"]), int(row["dp"])
    [size] = re.findall(r"zero1=(-?\d+)", row["note"])
    group = int(size) if 0 < int(size) < dp else None
    plan = Plan(dp=dp, tp=tp, zero_stage=1, zero_group=group, bucket_bytes=2**29)
    recipe = replace(SELENE, global_batch=int(row["global_batch"]), microbatch=2 * tp)
    return Run(model=INTERNLM, plan=plan, train=recipe, evaluation=UNTESTED, precision="bf16")


def as_published() -> dict[Run, Point]:
    """Return the points of all rows; on one node both ways are one run, whose rate is the mean of the two."""
    rates = by_key((on_a100s(row), row["value"]) for row in published("internevo2023").to_dict("records"))
    return {
        run: Point(run, model="InternLM 7B", printed={"published_rate": sum(r) / len(r)}) for run, r in rates.items()
    }


PAPER = as_published()
published_rate = printed_value("published_rate")


def all_points(records: Sequence[Record]) -> list[Point]:
    """Return all timed points, by tensor-parallel degree, ranks and ZeRO group."""
    found = with_printed(points(records, per_device), PAPER)
    return sorted(found, key=lambda one: (one.run.plan.tp, one.run.plan.world_size, one.run.plan.zero))


def within(records: Sequence[Record]) -> list[Point]:
    """Return points with states divided within groups, relative to those over all ranks of the same plan."""
    pairs = [group for group in grouped(all_points(records), MODEL, TP, RANKS) if len(group) == 2]
    return [against_in_print(one, every, per_device, "published_rate") for one, every in pairs]


def kept(*, in_groups: bool) -> Callable[[Sequence[Record]], list[Point]]:
    """Return a function that gives each degree's point on most ranks, divided in groups or not, over its fewest."""

    def found(records: Sequence[Record]) -> list[Point]:
        lines = grouped(all_points(records), MODEL, TP)
        ends = [(line[0], [one for one in line if (one.run.plan.replicas > 1) is in_groups][-1:]) for line in lines]
        pairs = [(last, first) for first, most in ends for last in most if last is not first]
        return [against_in_print(*both, per_device, "published_rate") for both in pairs]

    return found


SHOWN = (MODEL, TP, RANKS, GROUP, DEVICE_RATE, PRINTED_DEVICE_RATE, RUNS, MARK)


def on_cpus(model: ModelConfig, repeats: int) -> list[Run]:
    """Return small runs on two ranks, which divide the states or both keep all of them."""
    plans = Plan(), Plan(dp=2, zero_stage=1), Plan(dp=2, zero_stage=1, zero_group=1)
    return repeated([timed(model, plan, 8 * plan.dp, 4) for plan in plans], repeats)


PAGE = "doc/en/train_performance.md at 3a665e8"
EXPERIMENT = Experiment(
    source=f"InternEvo 2023 (github.com/InternLM/InternEvo), {PAGE}",
    expectation="on 1,024 GPUs states within a node are worth 60%; rates keep 89% of those on 8, in place of 56%",
    claims=(
        Claim(
            "dividing states within a node makes a step faster than over all ranks of several nodes", PAGE,
            each(lambda records: [(one.relative - 1,) for one in within(records)], lambda by: by, "pairs", "{:+.1%}",
                 is_brief=True),
            "+2.5 to +60% (tp 1), +1.8 to +25% (tp 2)", kind="direction", about="network",
        ),
        Claim(
            "the gain on every number of GPUs is the published, within 10 points", PAGE,
            as_expected(within, relative, printed_value("relative"), POINTS, "pairs", are_shares=True),
            "+2.5 to +60% (tp 1), +1.8 to +25% (tp 2)", kind="quantitative", about="network", tolerance=POINTS,
            hardware="A100",
        ),
        Claim(
            "over all ranks 1,024 GPUs keep the published share of their rate on 8, within 10 points", PAGE,
            as_expected(kept(in_groups=False), relative, printed_value("relative"), POINTS, "degrees", are_shares=True),
            "56% (tp 1), 73% (tp 2)", kind="quantitative", about="network", tolerance=POINTS, hardware="A100",
        ),
        Claim(
            "within nodes 1,024 GPUs keep the published share of their rate on 8, within 10 points", PAGE,
            as_expected(kept(in_groups=True), relative, printed_value("relative"), POINTS, "degrees", are_shares=True),
            "89% (tp 1), 93% (tp 2)", kind="quantitative", about="network", tolerance=POINTS, hardware="A100",
        ),
        Claim(
            "each rate is the published, within a tenth", PAGE,
            as_expected(all_points, lambda one: one.estimate(per_device), published_rate, NEAR, "points"),
            "2,271 to 4,070 tokens/s per GPU", kind="quantitative", about="computing", tolerance=NEAR, hardware="A100",
        ),
    ),
    table=table_of("zero_within_nodes", "States over all ranks and within nodes", SHOWN, all_points),
    figure=figure_of(
        "States over all ranks and within nodes", "ranks", "rate per device (tokens/s)", all_points,
        name=lambda one: f"tp {one.run.plan.tp}, {'within nodes' if one.run.plan.replicas > 1 else 'over all ranks'}",
        at=lambda one: one.run.plan.world_size, ours=lambda one: one.mean(per_device), published=published_rate,
    ),
    cost=cost("5 min", "1 h, 1,024 GPUs with 80 GB"),
    deviations="InternEvo gives each tensor one owner, which broadcasts it, and sums gradients on all ranks; our own "
    "engine divides flat buckets, by reduce-scatter and all-gather. Simulated for `internevo` it is done in its way. "
    "Its MLPs have no biases and two tensors where ours has one. On one node both ways are one run, whose published "
    "rate is the mean of two. At `smoke` and `small` two ranks divide the states, or both keep them; one machine has "
    "no network that this spares.",
    runs={
        "smoke": on_cpus(replace(named("llama-0.5m"), num_layers=4), 1),
        "small": on_cpus(named("llama-2m"), 3),
        "paper": list(PAPER),
    },
)  # fmt: skip
