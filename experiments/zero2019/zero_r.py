"""What do partitioned and offloaded activations add to divided states, in memory and in speed?

With layers recomputed a rank keeps their inputs, and every tensor-parallel rank keeps the same: P_a leaves each its
part, P_a+cpu moves that to the host. Table 3 has five configurations: C1 divides optimizer states (P_os), C2 adds P_a,
C3 divides gradients too (P_os+g), C4 adds P_a to that and C5 P_a+cpu. They train models of up to 40, 60, 50, 140 and
150B parameters (figure 6); what they save (figure 7) buys larger batches, and with these speed (figure 8).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from experiments.zero2019 import (
    ALL_AS_PREDICTED, CLOSE, CONFIGURATIONS, N, OPTIONS, PRINTED_RATE, T, bars, compared, configuration,
    deepest, five_ways, for_speed, needed, of_bar, on_v100s,
)  # fmt: skip
from harness.analysis.scaling import LEAST_TIMED_STEPS
from harness.experiment.kit import (
    FLOP_RATE, GB, MARK, MODEL, POINTS, RUNS, Claim, Evidence, Experiment, ModelConfig, Point, Record, Run, Table,
    Tolerance, about, and_absent, by_choice, cost, each, gigabytes, of_run, points, printed, published, relative_to,
    tabulate, tally, with_printed, within_points,
)  # fmt: skip
from impl.cost.activations import layer_bytes

NEAR = Tolerance(0.1, "the paper prints its sizes to ten billions", "2026-11-23")
SAVES = (("C1", "C2"), ("C1", "C3"), ("C2", "C4"), ("C3", "C4"))
"""Pairs of configurations, of which the second has one saving more than the first."""
SMOKE = ModelConfig(num_layers=8, hidden_size=128, num_heads=4, seq_len=128)
SMALL = ModelConfig(num_layers=8, hidden_size=256, num_heads=4, seq_len=256)
TINY = replace(SMOKE, num_layers=4)
TINY_BUCKETS = 2**16
"""With usual buckets, two of which wait for their sums, the smallest model's gradients would be whole."""
NOTES = (
    "Memory: of all tensors on the fullest rank, at the fullest moment of the first step; predicted by `lmscale "
    "memory`, for GPUs where nothing was run here. On a CPU the host's memory is the device's. A layer keeps: its "
    "input, of one microbatch, for the backward pass to recompute the rest from.",
    "Published: figures 7 and 8, read off the plots. Cached is what PyTorch's allocator had taken, in use or not. "
    "The paper does not say whether recomputed FLOPs count in its rates; ours are model FLOPs.",
)


@cache
def in_print() -> dict[Run, Point]:
    """Return figures 7 and 8."""
    return bars(lambda bar: on_v100s(bar, **CONFIGURATIONS[of_bar(bar)]), "figure 7", "figure 8")


def largest(name: str) -> float:
    """Return parameters (12 L h^2) of the deepest model of figure 6's width, batch and ranks that fits a V100."""
    bar = published("zero2019", f"max_model_size_{name.lower()}").to_dict("records")[0]
    run = on_v100s(bar | {"note": "1 layers, hidden size 8192, 64 heads"}, **CONFIGURATIONS[name])
    return 12.0 * deepest(run).num_layers * run.model.hidden_size**2


def memory(one: Point) -> float:
    """Return counted bytes of the first repeat."""
    return one.records[0].memory_bytes if one.records else math.nan


def kept(one: Point) -> float:
    """Return counted bytes that a layer keeps."""
    return one.mean(lambda record: record.layer_activation_bytes)


def rate(record: Record) -> float:
    """Return the FLOP/s of a device; NaN for a run that is too short, which is for the memory only."""
    is_timed = record.is_simulated or len(record.timed_seconds) >= LEAST_TIMED_STEPS
    return record.flop_rate if is_timed else math.nan


def configured(records: Sequence[Record]) -> list[Point]:
    """Return runs in one of table 3's configurations C1 to C5, with what figures 7 and 8 print for them."""
    return with_printed((one for one in points(records, lambda _: 0.0) if configuration(one.run)), in_print())


def by_configuration(records: Sequence[Record]) -> list[dict[str, Point]]:
    """Return groups of points that differ in their configuration only."""
    return list(by_choice(configured(records), configuration, *(f"plan.{name}" for name in OPTIONS)).values())


def table(records: Sequence[Record]) -> Table:
    """Tabulate our points, then the bars of figures 7 and 8; a bar that was run here shares one row."""
    of_ours = lambda one: one.mean(lambda record: record.predicted_memory_bytes)
    in_theory = lambda one: of_ours(one) if one.records else needed(one.run)
    a_layer = gigabytes("layer_activation_bytes", "a layer keeps, counted", digits=3)
    a_layer = replace(a_layer, unit="MB", scale=1e6)
    columns = (
        MODEL, of_run("configuration", "configuration", configuration, text=True), T, N,
        of_run("microbatch", "batch of a replica", lambda run: run.train.microbatch),
        gigabytes("memory_bytes", "memory, counted", memory, digits=3),
        gigabytes("predicted_memory_bytes", "memory, predicted", in_theory, digits=3),
        printed("cached", "cached, published", "GB", GB, "B"), a_layer,
        replace(a_layer, key="predicted_layer", header="a layer keeps, predicted", of=lambda one: layer_bytes(one.run)),
        replace(FLOP_RATE, of=lambda one: one.mean(rate)), PRINTED_RATE, RUNS, MARK,
    )  # fmt: skip
    order = lambda one: (-one.run.plan.dp, one.run.plan.tp, configuration(one.run))
    rows = and_absent(sorted(configured(records), key=order), in_print())
    return tabulate("zero_r", f"ZeRO-R's configurations{about(records)}", columns, rows, NOTES)


def parts(records: Sequence[Record]) -> list[tuple[int, float]]:
    """Return the share of the inputs of layers that P_a leaves, by tensor-parallel degree."""
    groups = by_configuration(records)
    pairs = [(g[a], g[b]) for g in groups for a, b in (("C1", "C2"), ("C3", "C4")) if {a, b} <= set(g)]
    return sorted({(one.run.plan.tp, kept(one) / kept(whole)) for whole, one in pairs if kept(whole) > 0})


def every_saving_counts(records: Sequence[Record]) -> Evidence | None:
    """Judge whether each of P_os+g and P_a lowers the memory; P_a+cpu moves nothing on a CPU, and cannot fail there."""
    groups = [{name: memory(one) for name, one in group.items()} for group in by_configuration(records)]
    groups = [group for group in groups if len(group) == len(CONFIGURATIONS) and not math.isnan(sum(group.values()))]
    held = [g[b] < g[a] for g in groups for a, b in SAVES]
    numbers = (", ".join(f"{name} {size / g['C1']:.0%}" for name, size in g.items()) for g in groups)
    return tally(held, "savings", "; ".join(numbers))


def largest_as_published(records: Sequence[Record]) -> Evidence | None:
    """Judge whether the largest models predicted to fit 32 GB are figure 6's; None without simulated runs."""
    if not any(record.is_simulated for record in records):
        return None
    rows = published("zero2019").query("where == 'figure 6'").sort_values("value").to_dict("records")
    sizes = [(of_bar(bar), largest(of_bar(bar)) / 1e9, bar["value"]) for bar in rows]
    numbers = ", ".join(f"{name} {size:.0f}B" for name, size, _ in sizes)
    held = [abs(size / bar - 1) <= NEAR for _, size, bar in sizes]
    return tally(held, "configurations", f"largest by prediction: {numbers}")


def rates_as_published(records: Sequence[Record]) -> Evidence | None:
    """Judge whether the rates of figure 8's 60B model relative to C4's are the published."""
    found = [one for one in configured(records) if "published_rate" in one.printed]
    others = relative_to(found, lambda one: configuration(one.run) == "C4", rate)
    first = next((one.printed["published_rate"] for one in others if one.is_baseline), math.nan)
    pairs = ((one.relative, one.printed["published_rate"] / first) for one in compared(others))
    return within_points(pairs, POINTS, "points")


EXPERIMENT = Experiment(
    source="ZeRO (Rajbhandari et al. 2019), sections 6.1 and 10.5, tables 3 and 7 to 9, figures 6 to 8",
    expectation="P_a and divided gradients each lower the memory, P_a leaves 1/t of the activations; 40, 60, 50, 140 "
    "and 150B fit; C4 is three times as fast as C1, by larger batches, and C5 slower than C4",
    claims=(
        Claim(
            "a step takes as much memory as predicted, within 5%", "our own",
            lambda records: ALL_AS_PREDICTED([one.records[0] for one in configured(records)]), kind="self-consistency",
            tolerance=CLOSE,
        ),
        Claim(
            "P_a leaves one of t parts of the activations, exactly", "section 6.1",
            each(parts, lambda tp, share: tp * share == 1, "degrees", "{1:.4g} (t={0})"), kind="self-consistency",
        ),
        Claim(
            "P_a and the division of gradients lower the memory, each and together", "figure 7", every_saving_counts,
            kind="direction",
        ),
        Claim(
            "the largest models predicted to fit 32 GB are figure 6's, within 10%", "figure 6", largest_as_published,
            "C1 40B, C3 50B, C2 60B, C4 140B, C5 150B", kind="arithmetic", tolerance=NEAR,
        ),
        Claim(
            "rates relative to C4's are within 5 points of the published", "figure 8", rates_as_published,
            kind="quantitative", about="network", tolerance=POINTS,
        ),
    ),
    table=table,
    cost=cost("4 min", "20 min, 400 GPUs with 32 GB"),
    deviations="No dropout; fused attention in what runs, none in simulated steps; the paper names neither vocabulary "
    "nor sequence: 51,200 and 1,024. Figure 6's models are not trained: C1 to C5 are at the paper's sizes in figures 7 "
    "and 8, and figure 6 is held against what is predicted, with its widest models' width. At `smoke` and `small` 4 or "
    "8 ranks share two cores for two steps: these say what is kept, and nothing of speed, which two tensor-parallel "
    "ranks are for, in fp32. A CPU's memory is the host's, so that P_a+cpu moves nothing there.",
    runs={
        "smoke": [
            *five_ways(TINY, 2, 2, 4, TINY_BUCKETS), *for_speed(five_ways(SMOKE, 2, 1, 8, TINY_BUCKETS)[3:], 1),
        ],  # for speed C4 and C5
        "small": [
            *five_ways(SMALL, 2, 2, 8), *five_ways(SMOKE, 4, 2, 8),
            *for_speed(five_ways(SMALL, 2, 1, 4)[2:], 3),  # from C3
        ],
        "paper": list(in_print()),
    },
)  # fmt: skip
