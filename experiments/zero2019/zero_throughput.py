"""Is training faster when data-parallel ranks divide a model's states than when more ranks share its layers?

Megatron's tensor parallelism has to grow with the model, and is slow where it leaves a node. ZeRO-100B (gradients and
optimizer states divided, layers recomputed from partitioned inputs) stays within one: 100B parameters reach 38 TFLOP/s
on each of 400 V100s, ten times the baseline (section 10.2, figure 2). The more ranks divide the states, the larger the
batch that each has room for: 60B parameters are more than twice as fast on twice the GPUs (section 10.3, figure 3).
"""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pandas as pd

from harness.analysis.render import Column, Table
from harness.analysis.scaling import ratio
from harness.analysis.tables import FLOP_RATE, MARK, MODEL, PERCENT, RANKS, RUNS, TERA, measured
from harness.experiment.claims import Claim, Evidence, Row, tally
from harness.experiment.comparison import COLUMNS, MIB, POINTS, Printed, combine
from harness.experiment.experiment import Experiment
from harness.experiment.published import published
from harness.records.measures import about, frame
from harness.records.record import Record, point
from impl.evaluation_config import EvaluationConfig
from impl.model.config import ModelConfig
from impl.plan import Plan, ZeroStage
from impl.recipe import Recipe
from impl.run import Run

V100S = Recipe(steps=10, lr=1.5e-4, min_lr=1e-5, warmup_steps=2)
"""Ten steps, of which seven are timed."""
CPU = Recipe(steps=8, warmup_steps=2)
OF_ZERO_100B: ZeroStage = 2
NEAR = 0.2
"""Relative tolerance of a speed-up against the published one; assumed."""
SAME_VOLUME = 0.05
"""Tolerance of sent volumes: the embedding is gathered once more than section 7 counts, for the output head."""


def shape_of(printed: Printed) -> ModelConfig:
    """Return the model of the appendix's tables, GPT-2's otherwise."""
    found = re.search(r"(\d+) layers, hidden size (\d+), (\d+) heads", printed["note"])
    assert found is not None, printed["note"]
    layers, hidden, heads = map(int, found.groups())
    return ModelConfig(num_layers=layers, hidden_size=hidden, num_heads=heads, seq_len=1024, vocab_size=51200)


def on_v100s(printed: Printed, **plan: Any) -> Run:
    """Return the run behind a point of a figure: one microbatch a step, all layers recomputed."""
    tp, dp, batch = (int(printed[name]) for name in ("tp", "dp", "global_batch"))
    return Run(
        model=shape_of(printed),
        plan=Plan(tp=tp, dp=dp, recompute="full", bucket_bytes=2**28, **plan),
        train=replace(V100S, global_batch=batch, microbatch=batch // dp),
        evaluation=EvaluationConfig(sequences=None),
        precision="fp16",
        fp32_gradients=False,
    )


def run_of(printed: Printed) -> Run:
    """Return the run of ZeRO-100B, or of Megatron's tensor and data parallelism."""
    if printed["quantity"] == "flop_rate_megatron":
        return on_v100s(printed)
    return on_v100s(printed, zero_stage=OF_ZERO_100B, partition_activations=bool(printed["tp"] > 1))


@cache
def of_the_paper() -> dict[Run, dict[str, Any]]:
    """Return every rate of figures 2 and 3 as a row of the table, by the point of its run."""
    rates = published("zero2019").query("where in ('figure 2', 'figure 3') and unit == 'TFLOP/s per GPU'")
    rows: dict[Run, dict[str, Any]] = {}
    for printed in rates.to_dict("records"):
        run = run_of(printed)
        known = {name: getattr(run.plan, name) for name in ("tp", "dp", "zero_stage")}
        size = f"GPT {printed['note'].partition(':')[0]}"
        train = {"global_batch": run.train.global_batch, "microbatch": run.train.microbatch}
        rate = {"published_rate": printed["value"] * TERA, FLOP_RATE.key: printed["value"] * TERA}
        rows[point(run)] = {"model": size, "ranks": run.plan.world_size, **known, **train, **rate}
    return {
        key: {**row, FLOP_RATE.key: math.nan, **_printed_ratios(rows, key)} for key, row in rows.items()
    }  # the rates of this table are ours


def _printed_ratios(rows: dict[Run, dict[str, Any]], key: Run) -> dict[str, float]:
    """Return published speed-up and scaling, from published rates only."""
    every = [{**row, "point": at, "device_name": "V100"} for at, row in rows.items()]
    own = next(row for row in every if row["point"] == key)
    against = {name: found(own, every) for name, found in (("speedup", megatron), ("scaling", fewest))}
    rate = own[FLOP_RATE.key]
    return {f"published_{name}": rate / row[FLOP_RATE.key] if row else math.nan for name, row in against.items()}


def model_of(row: Row) -> tuple[int, int]:
    """Return layers and hidden size: figure 2's baselines have more heads, for more ranks to share."""
    model = row["point"].model
    return model.num_layers, model.hidden_size


def megatron(row: Row, rows: Sequence[Row]) -> Row | None:
    """Return the baseline of a row with divided states: more ranks to a layer, and undivided states."""
    if row["zero_stage"] == 0 or row["dp"] == 1:
        return None
    alike = [other for other in rows if model_of(other) == model_of(row) and other["device_name"] == row["device_name"]]
    return next((other for other in alike if other["zero_stage"] == 0 and other["tp"] > row["tp"]), None)


def fewest(row: Row, rows: Sequence[Row]) -> Row | None:
    """Return ZeRO-100B on the fewest ranks that divide the same model, each with a smaller batch."""
    if row["zero_stage"] != OF_ZERO_100B:
        return None
    same = lambda one: (model_of(one), one["tp"], one["zero_stage"], one["device_name"])
    alike = [other for other in rows if same(other) == same(row)]
    return min(alike, key=lambda other: other["ranks"]) if len({other["ranks"] for other in alike}) > 1 else None


def compared(rows: pd.DataFrame) -> list[dict[Any, Any]]:
    """Return points of timed runs, each relative to Megatron's and to the fewest ranks; NaN if oversubscribed."""
    points, out = combine(rows), []
    fair = [row for row in points if not row["oversubscribed"]]
    for row in points:
        beside = of_the_paper().get(row["point"], {})
        extra: dict[str, Any] = {
            name: beside.get(name, math.nan) for name in ("published_rate", "published_speedup", "published_scaling")
        }
        for name, baseline in (("speedup", megatron(row, fair)), ("scaling", fewest(row, fair))):
            found = ratio(row, baseline, FLOP_RATE.key) if baseline else None
            extra |= {name: found.mean if found else math.nan, f"{name}_of_itself": baseline is row}
            extra |= {f"{name}_half_width": math.nan if found is None else found.half_width or math.nan}
        out.append(row | extra)
    return out


RATIO: dict[str, Any] = {"si": "ratio", "digits": 3}
SHARE: dict[str, Any] = {"unit": "%", "si": "fraction", "scale": PERCENT, "digits": 3}
SHOWN = (
    MODEL, RANKS, *(COLUMNS[name] for name in ("zero_stage", "tp", "dp", "microbatch", "global_batch")), FLOP_RATE,
    Column(key="published_rate", header="published rate", unit="TFLOP/s", si="FLOP/s", scale=TERA, digits=3),
    Column(key="speedup", header="over Megatron's", interval="speedup_half_width", **RATIO),
    Column(key="published_speedup", header="over Megatron's, published", **RATIO),
    Column(key="scaling", header="per device, of the fewest", interval="scaling_half_width", **SHARE),
    Column(key="published_scaling", header="of the fewest, published", **SHARE),
    Column(key="dp_bytes_sent", header="sent to data-parallel ranks", unit="MiB", si="B", scale=MIB, digits=3),
    Column(key="tp_bytes_sent", header="sent within layers", unit="MiB", si="B", scale=MIB, digits=3), RUNS, MARK,
)  # fmt: skip


def table(records: Sequence[Record]) -> Table:
    """Tabulate our points, then those of figures 2 and 3; a published point that was run here shares one row."""
    title = f"Throughput with divided states{about(records)}"
    ours = compared(frame(records))
    if not ours:
        return Table("zero_throughput", title, (), pd.DataFrame())
    there = {row["point"] for row in ours}
    absent = [row for key, row in of_the_paper().items() if key not in there]
    rows = pd.DataFrame([*ours, *absent])
    rows["device_name"] = rows["device_name"].fillna(rows["device_name"].iloc[0])
    rows["oversubscribed"] = rows["oversubscribed"].eq(True)
    for axis in ("tp", "dp"):
        rows[f"{axis}_bytes_sent"] = rows[f"{axis}_bytes_sent"].where(rows[axis] > 1)
    notes = (
        "Rates: ours counts model FLOPs (palm_12). Published: figures 2 and 3, read off the plots, on V100s with 32 "
        "GB; the paper does not say whether recomputed FLOPs count, and only ratios are to be compared.",
        "Over Megatron's: the rate per device, over that of the same model with more ranks to a layer and undivided "
        "states. Of the fewest: the rate per device, over that on the fewest ranks, whose batch is smaller.",
    )
    return measured("zero_throughput", title, SHOWN, rows, notes)


def known(rows: Sequence[Row], name: str) -> list[dict[Any, Any]]:
    return [row for row in compared(pd.DataFrame(list(rows))) if not math.isnan(row[name])]


def faster_than_megatron(rows: Sequence[Row]) -> Evidence | None:
    found = [row for row in known(rows, "speedup") if row["zero_stage"] == OF_ZERO_100B]
    numbers = ", ".join(f"{row['speedup']:.3g} times ({row['model']}, {row['ranks']} ranks)" for row in found)
    return tally([row["speedup"] > 1 for row in found], "models", numbers)


def speedups_as_published(rows: Sequence[Row]) -> Evidence | None:
    found = [row for row in known(rows, "speedup") if not math.isnan(row["published_speedup"])]
    off = [abs(row["speedup"] / row["published_speedup"] - 1) for row in found]
    return tally([one <= NEAR for one in off], "models", f"furthest {max(off):.0%} off") if off else None


def super_linear(rows: Sequence[Row]) -> Evidence | None:
    """Judge whether the rate per device is above that on the fewest ranks wherever there are more."""
    found = [row for row in known(rows, "scaling") if not row["scaling_of_itself"]]
    numbers = ", ".join(f"{row['scaling']:.0%} of the rate per device ({row['ranks']} ranks)" for row in found)
    return tally([row["scaling"] > 1 for row in found], "points", numbers)


def scaling_as_published(rows: Sequence[Row]) -> Evidence | None:
    found = [row for row in known(rows, "scaling") if not math.isnan(row["published_scaling"])]
    off = [abs(row["scaling"] - row["published_scaling"]) for row in found if not row["scaling_of_itself"]]
    return tally([one <= POINTS for one in off], "points", f"furthest {100 * max(off):.1f} points off") if off else None


def volumes(rows: Sequence[Row]) -> Evidence | None:
    """Judge whether the stages send 2, 2, 2 and 3 times the parameters, relative to stage 0.

    Bytes count with any number of cores.
    """
    groups: dict[tuple[Any, ...], dict[int, float]] = {}
    for row in combine(pd.DataFrame(list(rows))):
        if row["dp"] > 1 and row["dp_bytes_sent"] > 0:
            at = (model_of(row), row["tp"], row["dp"], row["global_batch"], row["microbatch"])
            groups.setdefault(at, {})[row["zero_stage"]] = row["dp_bytes_sent"]
    shares = [(stage, sent / group[0]) for group in groups.values() if 0 in group for stage, sent in group.items()]
    shares = sorted({(stage, share) for stage, share in shares if stage > 0})
    held = [abs(share - (1.5 if stage == 3 else 1)) <= SAME_VOLUME for stage, share in shares]
    numbers = ", ".join(f"{2 * share:.3g} (stage {stage})" for stage, share in shares)
    return tally(held, "volumes", f"{numbers} times the parameters")


def small_runs(model: ModelConfig, repeats: int) -> list[Run]:
    """Return runs of two ranks with eight sequences, in all stages and as Megatron's; and one with two sequences."""
    layouts = [(Plan(dp=2, zero_stage=stage), 8) for stage in (0, 1, 2, 3)]
    layouts += [(Plan(tp=2), 8), (Plan(zero_stage=OF_ZERO_100B), 2)]
    return [
        Run(
            model=model,
            plan=replace(plan, bucket_bytes=2**19),
            train=replace(CPU, global_batch=batch, microbatch=batch // plan.dp),
            evaluation=EvaluationConfig(sequences=None),
            repeat=repeat,
        )
        for repeat in range(repeats)
        for plan, batch in layouts
    ]


PAPER = [
    run_of(row)
    for row in published("zero2019").query("where in ('figure 2', 'figure 3')").to_dict("records")
    if row["unit"] == "TFLOP/s per GPU"
]
SMOKE = ModelConfig(num_layers=4, hidden_size=128, num_heads=4, seq_len=128)
SMALL = ModelConfig(num_layers=6, hidden_size=256, num_heads=4, seq_len=128)

EXPERIMENT = Experiment(
    source="ZeRO (Rajbhandari et al. 2019), sections 7, 10.2 and 10.3, figures 2 and 3, tables 5 and 6",
    expectation="1.1 to 10 times Megatron's rate per device, more for larger models; a rate per device that grows by a "
    "half from 64 GPUs to 128",
    claims=(
        Claim(
            text="ZeRO-100B is faster than Megatron at every size",
            source="figure 2",
            check=faster_than_megatron,
            published="1.1 to 10.2 times, 10.2 at 100B",
        ),
        Claim(text="by the published factors, within a fifth", source="figure 2", check=speedups_as_published),
        Claim(text="more ranks, with larger batches each, are faster each", source="figure 3", check=super_linear),
        Claim(text="as much as published, within 5 points", source="figure 3", check=scaling_as_published),
        Claim(
            text="the stages 0 to 3 send 2, 2, 2 and 3 times the parameters, within a twentieth",
            source="section 7",
            check=volumes,
        ),
    ),
    found="Two ranks with stages 1 and 2 are 13 ± 6 and 8 ± 11% faster than two that share the layers, which is "
    "figure 2's side at its smallest model. A rank alone is faster than each of two, by 7%: this memory leaves no "
    "larger batches to gain, so figure 3's super-linear scaling is not seen. Stages 0 to 3 send 2, 2, 2 and 3.01 "
    "times the parameters.",
    table=table,
    cost={"smoke": "1 min, 2 CPU cores", "small": "2 min, 2 CPU cores", "paper": "40 min, 400 GPUs with 32 GB"},
    deviations="No dropout, with fused attention; the paper names neither vocabulary nor sequence: 51,200 and 1,024. "
    "The baseline is ours too, not Megatron-LM of 2019. At `smoke` and `small` fp32, nothing is recomputed, and a "
    "small model is on two ranks, in all of ZeRO's stages beside two tensor-parallel ranks; one rank has a batch of "
    "two, two ranks of four each. There is no slow network, nor a memory that limits the batch.",
    runs={"smoke": small_runs(SMOKE, 1), "small": small_runs(SMALL, 3), "paper": PAPER},
)
