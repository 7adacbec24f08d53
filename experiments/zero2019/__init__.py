"""What the experiments of ZeRO (Rajbhandari et al. 2019, arXiv 1910.02054) share: runs, bars and checks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from harness.experiment.checks import as_predicted, within_points
from harness.experiment.kit import (
    GB, POINTS, TERA, Estimate, EvaluationConfig, Evidence, ModelConfig, Plan, Point, Printed, Recipe, Record, Run,
    Tolerance, ZeroStage, apart_from, flop_rate, gigabytes, larger, noted, of_run, points, printed as in_print,
    published, relative_to, tally, with_printed,
)  # fmt: skip
from harness.records.measures import model_names, shape
from impl.cost.memory import model_state_bytes

STAGES: tuple[ZeroStage, ...] = (0, 1, 2, 3)
OF_ZERO_100B: ZeroStage = 2
"""Stage that divides gradients and optimizer states."""
CPU = Recipe(steps=8, warmup_steps=2)
V100S = Recipe(steps=10, lr=1.5e-4, min_lr=1e-5, warmup_steps=2)
"""Ten steps, of which seven are timed."""
UNTESTED = EvaluationConfig(sequences=None)
UNITS = {"TFLOP/s per GPU": ("published_rate", TERA), "GB per device": ("cached", GB)}
"""Column and SI value of the units in which bars of the figures are printed."""
T = of_run("tp", "t", lambda run: run.plan.tp)
N = of_run("dp", "N", lambda run: run.plan.dp)
COUNTED = gigabytes("memory_bytes", "all, counted")
PREDICTED = gigabytes("predicted_memory_bytes", "all, predicted")
CLOSE = Tolerance(0.05, "what formulas leave out of a step's working memory", "2026-11-21")
"""Relative distance of a step's counted memory from the predicted."""
ALL_AS_PREDICTED = as_predicted(lambda one: one.memory_bytes, lambda one: one.predicted_memory_bytes, CLOSE)
PRINTED_RATE = in_print("published_rate", "published rate", "TFLOP/s", TERA, "FLOP/s")


def for_memory(model: ModelConfig, plan: Plan, batch: int, microbatch: int = 1) -> Run:
    """Return a run of two steps, for the memory only, in the paper's precisions; the batch is of each replica."""
    recipe = Recipe(steps=2, global_batch=batch * plan.dp, microbatch=microbatch, warmup_steps=0)
    return Run(model=model, plan=plan, train=recipe, evaluation=UNTESTED, precision="fp16", fp32_gradients=False)


def divided(model: ModelConfig, dp: int, zero_stage: ZeroStage, *, bucket_bytes: int = 2**18) -> Run:
    """Return a run of data-parallel ranks alone, for the memory."""
    return for_memory(model, Plan(dp=dp, zero_stage=zero_stage, bucket_bytes=bucket_bytes), batch=2)


def timed(model: ModelConfig, plan: Plan, batch: int, repeat: int) -> Run:
    """Return a run for speed only, on CPUs; the batch is of each replica, in one microbatch."""
    recipe = replace(CPU, global_batch=batch * plan.dp, microbatch=batch)
    return Run(model=model, plan=plan, train=recipe, evaluation=UNTESTED, repeat=repeat)


def on_v100s(printed: Printed, **plan: Any) -> Run:
    """Return the run behind a point of a figure: one microbatch a step, all layers recomputed; GPT-2's model else."""
    tp, dp, batch = (int(printed[name]) for name in ("tp", "dp", "global_batch"))
    return Run(
        model=ModelConfig(seq_len=1024, vocab_size=51200, **noted(printed["note"])),
        plan=Plan(tp=tp, dp=dp, recompute="full", bucket_bytes=2**28, **plan),
        train=replace(V100S, global_batch=batch, microbatch=batch // dp),
        evaluation=UNTESTED,
        precision="fp16",
        fp32_gradients=False,
    )


def bars(run_of: Callable[[Printed], Run], *figures: str) -> dict[Run, Point]:
    """Return the points of figures by their runs, with the printed rate of a device or its cached memory."""
    rows = published("zero2019").query("where in @figures and unit in @UNITS").to_dict("records")
    found: dict[Run, Point] = {}
    for row in rows:
        key, scale = UNITS[row["unit"]]
        run, model = run_of(row), f"GPT {row['note'].partition(':')[0]}"
        found[run] = Point(run, model=model, printed={key: row["value"] * scale})
    return found


def compared(found: Sequence[Point]) -> list[Point]:
    """Return the points whose relative rate is known, without the baselines."""
    return [one for one in found if not one.is_baseline and not math.isnan(one.relative.mean)]


V100_BYTES = 32 * 2**30
"""Memory of a V100, which the runs of figure 4 have to fit."""


def run_of_figure_4(printed: Printed) -> Run:
    return on_v100s(printed, zero_stage=OF_ZERO_100B if printed["quantity"] == "flop_rate_zero_dp" else 0)


FIGURE_4 = bars(run_of_figure_4, "figure 4")
SMALLEST = next(one.printed["published_rate"] for one in FIGURE_4.values() if one.model == "GPT 1.5B")
TOO_LARGE = next(run for run, one in FIGURE_4.items() if one.model == "GPT 2.5B")
PLAIN = replace(TOO_LARGE, plan=replace(TOO_LARGE.plan, zero_stage=0))
"""Smallest of figure 4's models that does not fit with undivided states, of 16 bytes a parameter."""


def over_smallest(one: Point) -> float:
    """Return the published rate over that of the smallest model with divided states; NaN if there is none."""
    return one.printed.get("published_rate", math.nan) / SMALLEST


def is_divided(one: Point) -> bool:
    return one.run.plan.zero_stage > 0


def of_figure_4(records: Sequence[Record]) -> list[Point]:
    """Return timed points relative to the device's smallest model with divided states, those with them first."""
    alone = [one for one in points(records, flop_rate) if one.run.plan.dp == one.run.plan.world_size > 1]
    found = relative_to(sorted(alone, key=lambda one: one.parameters), is_divided, flop_rate)
    return with_printed(sorted(found, key=lambda one: not is_divided(one)), FIGURE_4)


def fits_the_larger(records: Sequence[Record]) -> Evidence | None:
    """Judge whether figure 4's models fit 32 GB as in the paper, and 2.5B only with divided states; by prediction."""
    names, runs = model_names(records), {*FIGURE_4, PLAIN}
    found = [one for one in records if one.point in runs and one.is_memory_predicted]
    is_plain = lambda one: one.run.plan.zero_stage == 0 and one.parameters > 2e9
    numbers = (
        f"{one.peak_memory_bytes / 1e9:.0f} GB ({names[shape(one.run)]}{', undivided' * is_plain(one)})"
        for one in sorted(found, key=lambda one: (one.run.plan.zero_stage, one.parameters))
        if is_plain(one) or one.parameters > 12e9
    )
    return tally([(one.peak_memory_bytes > V100_BYTES) == is_plain(one) for one in found], "models", ", ".join(numbers))


def as_figure_4(records: Sequence[Record]) -> Evidence | None:
    pairs = ((one.relative, over_smallest(one)) for one in compared(of_figure_4(records)))
    return within_points(pairs, POINTS, "points")


def last_is_slower(records: Sequence[Record]) -> Evidence | None:
    """Judge whether the largest model, with the fewest sequences a rank, is slower per device than the fastest."""
    found = [one for one in of_figure_4(records) if is_divided(one) and not math.isnan(one.relative.mean)]
    if len(found) < 3:
        return None
    best, last = max(found[:-1], key=lambda one: one.relative.mean), found[-1]
    numbers = ", ".join(f"{one.relative:.0%} ({one.model})" for one in (best, last))
    return tally([larger(best, last, flop_rate)], "", numbers)


def divided_is_no_slower(records: Sequence[Record]) -> Evidence | None:
    """Judge whether the fastest model with divided states is faster than every model with undivided ones."""
    known = [one for one in of_figure_4(records) if not math.isnan(one.relative.mean)]
    divided, plain = ([one for one in known if is_divided(one) is wanted] for wanted in (True, False))
    if not divided or not plain:
        return None
    best = max(divided, key=lambda one: one.relative.mean)
    others = ", ".join(f"{one.relative:.0%}" for one in plain)
    numbers = f"{best.relative:.0%} with divided states, {others} with undivided ones"
    return tally([larger(best, one, flop_rate) for one in plain], "models", numbers)


SAME_VOLUME = Tolerance(0.05, "the embedding is gathered once more than section 7 counts, for the head", "2026-11-21")
"""Tolerance of sent volumes."""
Baseline = Callable[[Point, Sequence[Point]], Point | None]
"""Function that returns the baseline of a point among those of the same model on the same device, or None."""


def megatron(one: Point, others: Sequence[Point]) -> Point | None:
    """Return the baseline of a point with divided states: more ranks to a layer, and undivided states."""
    is_baseline = lambda plan: plan.zero_stage == 0 and plan.tp > one.run.plan.tp
    is_divided = one.run.plan.zero_stage > 0 and one.run.plan.dp > 1
    return next((other for other in others if is_divided and is_baseline(other.run.plan)), None)


def fewest(one: Point, others: Sequence[Point]) -> Point | None:
    """Return ZeRO-100B on the fewest ranks that divide the same model, each with a smaller batch."""
    layout = lambda point: (point.run.plan.zero_stage, point.run.plan.tp)
    ranks = lambda point: point.run.plan.world_size
    alike = [other for other in others if layout(other) == layout(one) == (OF_ZERO_100B, one.run.plan.tp)]
    return min(alike, key=ranks) if len(set(map(ranks, alike))) > 1 else None


def model_of(one: Point) -> tuple[int, int]:
    """Return layers and hidden size: figure 2's baselines have more heads, for more ranks to share."""
    return one.run.model.num_layers, one.run.model.hidden_size


def with_baselines(found: Sequence[Point], baseline: Baseline) -> list[tuple[Point, Point | None]]:
    """Return the points with their baselines, whose ranks do not share cores."""
    place = lambda one: (model_of(one), one.device)
    fair = [one for one in found if not one.is_oversubscribed]
    return [(one, baseline(one, [other for other in fair if place(other) == place(one)])) for one in found]


def run_of_throughput(printed: Printed) -> Run:
    """Return the run of ZeRO-100B, or of Megatron's tensor and data parallelism."""
    if printed["quantity"] == "flop_rate_megatron":
        return on_v100s(printed)
    return on_v100s(printed, zero_stage=OF_ZERO_100B, partition_activations=bool(printed["tp"] > 1))


def figures_2_and_3() -> dict[Run, Point]:
    """Return figures 2 and 3, with ratios of the printed rates."""
    found = bars(run_of_throughput, "figure 2", "figure 3")
    for name, baseline in (("published_speedup", megatron), ("published_scaling", fewest)):
        for one, other in with_baselines(list(found.values()), baseline):
            if other:
                ratio = one.printed["published_rate"] / other.printed["published_rate"]
                found[one.run] = replace(one, printed={**one.printed, name: ratio})
    return found


FIGURES_2_AND_3 = figures_2_and_3()


def over(records: Sequence[Record], baseline: Baseline) -> list[Point]:
    """Return timed points relative to their baselines, with what is printed; NaN if oversubscribed."""
    pairs = with_baselines(points(records, flop_rate), baseline)
    return with_printed((one.against(other, flop_rate) for one, other in pairs), FIGURES_2_AND_3)


def faster_than_megatron(records: Sequence[Record]) -> Evidence | None:
    found = [one for one in compared(over(records, megatron)) if one.run.plan.zero_stage == OF_ZERO_100B]
    numbers = (f"{one.relative:.3g} times ({one.model}, {one.run.plan.world_size} ranks)" for one in found)
    return tally([one.relative - 1 for one in found], "models", ", ".join(numbers))


def super_linear(records: Sequence[Record]) -> Evidence | None:
    """Judge whether the rate per device is above that on the fewest ranks wherever there are more."""
    found = compared(over(records, fewest))
    numbers = (f"{one.relative:.0%} of the rate per device ({one.run.plan.world_size} ranks)" for one in found)
    return tally([one.relative - 1 for one in found], "points", ", ".join(numbers))


def beside_printed(records: Sequence[Record], baseline: Baseline, name: str) -> list[tuple[Estimate, float]]:
    """Return ratios over the baseline with the published ones."""
    found = compared(over(records, baseline))
    return [(one.relative, one.printed[name]) for one in found if name in one.printed]


def volumes(records: Sequence[Record]) -> Evidence | None:
    """Judge whether stages send 2, 2, 2 and 3 times the parameters, over stage 0's; bytes count on any cores."""
    groups: dict[Any, dict[int, float]] = {}
    for one in points(records, flop_rate):
        plan, sent = one.run.plan, one.mean(lambda record: record.dp_bytes_sent)
        if plan.dp > 1 and sent > 0:
            at = model_of(one), plan.tp, plan.dp, one.run.train.global_batch, one.run.train.microbatch
            groups.setdefault(at, {})[plan.zero_stage] = sent
    whole = [group for group in groups.values() if 0 in group]
    shares = sorted({(stage, sent / group[0]) for group in whole for stage, sent in group.items() if stage > 0})
    held = [abs(share - (1.5 if stage == 3 else 1)) <= SAME_VOLUME for stage, share in shares]
    numbers = ", ".join(f"{2 * share:.3g} (stage {stage})" for stage, share in shares)
    return tally(held, "volumes", f"{numbers} times the parameters")


LIMIT = 20e6
"""Bytes of the paper's devices, and bytes that a rank may take here."""


def by_depth(records: Sequence[Record]) -> list[Point]:
    """Return the points whose tensors were counted, by layout and size."""
    found = points(records, lambda record: record.memory_bytes, failed=True)
    return sorted(found, key=lambda one: (one.run.plan.tp, one.run.plan.zero_stage, one.parameters))


def edge_is_where_predicted(records: Sequence[Record]) -> Evidence | None:
    """Judge whether the runs predicted to fit do, and the others do not."""
    found = [one for one in records if one.run.plan.dp == 2 and one.memory_bytes > 0]
    right = [(one.memory_bytes <= LIMIT) == (one.predicted_memory_bytes <= LIMIT) for one in found]
    closest = min((abs(one.memory_bytes / LIMIT - 1) for one in found), default=0.0)
    return tally(right, "points", f"the nearest is {closest:.1%} from the edge")


def grows_with_the_stage(records: Sequence[Record]) -> Evidence | None:
    """Judge whether the largest model that was counted to fit is larger, or as large, with every stage."""
    fits: dict[int, dict[int, int]] = {}
    for one in records:
        plan, layers = one.run.plan, one.run.model.num_layers
        if plan.dp == 2 and one.memory_bytes <= LIMIT:
            of_tp = fits.setdefault(plan.tp, {})
            of_tp[plan.zero_stage] = max(of_tp.get(plan.zero_stage, 0), layers)
    whole = {tp: [of_tp[s] for s in STAGES] for tp, of_tp in sorted(fits.items()) if len(of_tp) == len(STAGES)}
    numbers = [f"{', '.join(map(str, layers))} layers (t={tp})" for tp, layers in whole.items()]
    return tally([a <= b for layers in whole.values() for a, b in pairwise(layers)], "steps", "; ".join(numbers))


SAME = Tolerance(0.01, "padding of slices and vocabulary", "2026-11-20")
"""Relative distance of counted states from predicted ones, and of shares from the formulas'."""


def states(record: Record) -> float:
    return record.states_bytes


def with_states(records: Sequence[Record]) -> list[Point]:
    return points(records, states, failed=True)


def states_formula(one: Point) -> float:
    """Return figure 1's bytes of model states on each device."""
    return model_state_bytes(one.run, one.parameters)


def stages_save(records: Sequence[Record]) -> Evidence | None:
    """Judge whether each stage leaves at most the share of stage 0's states that figure 1's formulas give."""
    found, whole_run = with_states(records), lambda one: apart_from(one.run, "plan.zero_stage")
    whole = {one.run: one for one in found if one.run.plan.zero_stage == 0}
    pairs = [(one, whole[whole_run(one)]) for one in found if one.run.plan.zero_stage and whole_run(one) in whole]
    shares = [
        (one.mean(states) / other.mean(states), states_formula(one) / states_formula(other)) for one, other in pairs
    ]
    numbers = (
        f"{share:.1%} ({most:.1%}; stage {one.run.plan.zero_stage}, N={one.run.plan.dp})"
        for (one, _), (share, most) in zip(pairs, shares, strict=True)
    )
    return tally([share <= most + SAME for share, most in shares], "points", ", ".join(numbers))


V100 = 32e9
"""Memory of a V100 as the paper counts it."""
SHAPE = ModelConfig(hidden_size=128, num_heads=4, seq_len=64, vocab_size=512)


def deep(layers: int, tp: int, zero_stage: ZeroStage, dp: int = 2) -> Run:
    plan = Plan(tp=tp, dp=dp, zero_stage=zero_stage, bucket_bytes=2**16)
    return for_memory(replace(SHAPE, num_layers=layers), plan, batch=1)


def table_2() -> list[Point]:
    """Return table 2's analysis: parameters whose states fill a device's memory, by formula and as printed."""
    rows = published("zero2019").query("where == 'table 2' and not quantity.str.contains('measured')")
    found = []
    for row in rows.to_dict("records"):
        run = deep(1, row["tp"], STAGES[int(row["quantity"].rpartition("_")[2])], row["dp"])
        numbers = {"formula": row["tp"] * V100 / model_state_bytes(run, 1), "published": row["value"] * 1e9}
        found.append(Point(run, printed=numbers))
    return sorted(found, key=lambda one: (one.run.plan.tp, one.run.plan.zero_stage))


BY_A_FIFTH = Tolerance(0.2, "assumed: plots are read to a tenth, and batches differ", "2026-11-21")
"""Relative tolerance of a speed-up against the published one."""


OPTIONS = ("zero_stage", "partition_activations", "offload_activations")


P_A: dict[str, Any] = {"partition_activations": True}


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "C1": {"zero_stage": 1}, "C2": {"zero_stage": 1, **P_A}, "C3": {"zero_stage": 2}, "C4": {"zero_stage": 2, **P_A},
    "C5": {"zero_stage": 2, **P_A, "offload_activations": True},
}  # fmt: skip
"""Configurations of table 3; constant-size buffers and one-time allocation (C_B, M_D) are in all of them."""


def configuration(run: Run) -> str:
    """Return a run's configuration in table 3; empty for others."""
    own = {name: value for name in OPTIONS if (value := getattr(run.plan, name))}
    alike = (name for name, fields in CONFIGURATIONS.items() if fields == own and run.plan.recompute == "full")
    return next(alike, "")


def of_bar(bar: Printed) -> str:
    return bar["quantity"].rpartition("_")[2].upper()


def five_ways(model: ModelConfig, tp: int, dp: int, batch: int, bucket_bytes: int = 2**18) -> list[Run]:
    """Return all configurations on CPUs, for the memory."""
    plan = Plan(tp=tp, dp=dp, recompute="full", bucket_bytes=bucket_bytes)
    return [for_memory(model, replace(plan, **fields), batch, batch) for fields in CONFIGURATIONS.values()]


def for_speed(found: Sequence[Run], repeats: int) -> list[Run]:
    """Return the runs with more steps and in fp32."""
    longer = [replace(one, train=replace(one.train, steps=8), precision="fp32", fp32_gradients=True) for one in found]
    return [replace(one, repeat=repeat) for repeat in range(repeats) for one in longer]
