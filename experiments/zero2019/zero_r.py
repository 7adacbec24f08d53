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
from typing import Any

import pandas as pd

from experiments.zero2019.zero_throughput import CPU, on_v100s
from harness.analysis.render import Column, Table
from harness.analysis.scaling import LEAST_TIMED_STEPS
from harness.analysis.tables import FLOP_RATE, MARK, MODEL, RUNS, TERA, measured
from harness.experiment.claims import Claim, Evidence, Row, tally
from harness.experiment.comparison import POINTS, Printed
from harness.experiment.experiment import Experiment
from harness.experiment.published import published
from harness.records.measures import about, combine, frame
from harness.records.record import Record, point
from harness.records.store import SIMULATED
from impl.cost.activations import layer_bytes
from impl.cost.memory import memory_of_ranks
from impl.evaluation_config import EvaluationConfig
from impl.model.config import ModelConfig
from impl.plan import Plan
from impl.run import Precision, Run

V100 = 32e9
"""Bytes."""
CLOSE = 0.05
"""Relative tolerance of counted bytes against the predicted."""
NEAR = 0.10
"""Relative tolerance of a largest model against the published one; assumed."""
NEEDED = "peak_memory_bytes"
P_A: dict[str, Any] = {"partition_activations": True}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "C1": {"zero_stage": 1},
    "C2": {"zero_stage": 1, **P_A},
    "C3": {"zero_stage": 2},
    "C4": {"zero_stage": 2, **P_A},
    "C5": {"zero_stage": 2, **P_A, "offload_activations": True},
}
"""Configurations of table 3; constant-size buffers and one-time allocation (C_B, M_D) are in all of them."""
SAVES = (("C1", "C2"), ("C1", "C3"), ("C2", "C4"), ("C3", "C4"))
"""Pairs of configurations, of which the second has one saving more than the first."""
LAYER = "layer_activation_bytes"
SMALL_BUCKETS = 2**16


def configuration(plan: Plan) -> str:
    """Return a configuration's name in table 3; empty for other plans."""
    fields = ("zero_stage", "partition_activations", "offload_activations")
    own = tuple(int(getattr(plan, name)) for name in fields)
    named = {tuple(int(c.get(name, 0)) for name in fields): name for name, c in CONFIGURATIONS.items()}
    return named.get(own, "")


def of_the_paper() -> list[tuple[Run, Printed]]:
    """Return the run behind each bar of figures 7 and 8."""
    bars = published("zero2019").query("where in ('figure 7', 'figure 8')").to_dict("records")
    return [(on_v100s(bar, **CONFIGURATIONS[_of_bar(bar)]), bar) for bar in bars]


def _of_bar(bar: Printed) -> str:
    return bar["quantity"].rpartition("_")[2].upper()


@cache
def predicted(run: Run) -> dict[str, float]:
    """Return predicted bytes of a GPU: of all, and of the layer inputs, on the GPU or offloaded."""
    memory = memory_of_ranks(run, run.model.vocab_size or 0, run.model.seq_len)[0]
    return {"predicted_memory_bytes": memory.total, "predicted_layer": layer_bytes(run)}


@cache
def printed_rows() -> dict[Run, dict[str, Any]]:
    """Return figures 7 and 8 as rows of the table, by the point of the run, with its prediction."""
    rows: dict[Run, dict[str, Any]] = {}
    for run, bar in of_the_paper():
        known = {"model": f"GPT {bar['note'].partition(':')[0]}", "configuration": _of_bar(bar), **predicted(run)}
        known |= {"tp": run.plan.tp, "dp": run.plan.dp, "microbatch": run.train.microbatch}
        is_rate = bar["where"] == "figure 8"
        known |= {"published_rate" if is_rate else "cached": bar["value"] * (TERA if is_rate else 1e9)}
        rows[point(run)] = {"published_rate": math.nan, "cached": math.nan} | known
    return rows


def points(rows: pd.DataFrame) -> list[dict[Any, Any]]:
    """Return runs in one of the configurations, repeats combined, with the numbers of figures 7 and 8."""
    if not rows.empty:
        rows = pd.DataFrame(rows[rows["status"] == "ok"]).drop_duplicates("id")
    if rows.empty:
        return []
    out = []
    for row in combine(rows, ("point", "source", "device_name"), (FLOP_RATE.key,)):
        beside = printed_rows().get(row["point"], {})
        extra = {name: beside.get(name, math.nan) for name in ("published_rate", "cached")}
        run: Run = row["point"]
        extra |= {"configuration": configuration(run.plan) if run.plan.recompute == "full" else ""}
        extra |= {"predicted_layer": layer_bytes(run)}
        is_timed = row["timed_steps"] >= LEAST_TIMED_STEPS or row["source"] == SIMULATED
        extra |= {} if is_timed else {FLOP_RATE.key: math.nan}
        out.append(row | extra)
    return [row for row in out if row["configuration"]]


def by_configuration(rows: Sequence[Row]) -> list[dict[str, dict[Any, Any]]]:
    """Return groups of points that differ in their configuration only."""
    groups: dict[tuple[Any, ...], dict[str, dict[Any, Any]]] = {}
    for row in points(pd.DataFrame(list(rows))):
        same = tuple(row[name] for name in ("model", "tp", "dp", "microbatch", "global_batch", "device_name"))
        groups.setdefault(same, {})[row["configuration"]] = row
    return list(groups.values())


BYTES: dict[str, Any] = {"unit": "GB", "si": "B", "scale": 1e9, "digits": 3}
MEGABYTES: dict[str, Any] = BYTES | {"unit": "MB", "scale": 1e6}
SHOWN = (
    MODEL,
    Column(key="configuration", header="configuration", text=True),
    Column(key="tp", header="t"),
    Column(key="dp", header="N"),
    Column(key="microbatch", header="batch of a replica"),
    Column(key="memory_bytes", header="memory, counted", **BYTES),
    Column(key="predicted_memory_bytes", header="memory, predicted", **BYTES),
    Column(key="cached", header="cached, published", **BYTES),
    Column(key=LAYER, header="a layer keeps, counted", **MEGABYTES),
    Column(key="predicted_layer", header="a layer keeps, predicted", **MEGABYTES),
    FLOP_RATE,
    Column(key="published_rate", header="published rate", unit="TFLOP/s", si="FLOP/s", scale=TERA, digits=3),
    RUNS, MARK,
)  # fmt: skip


def table(records: Sequence[Record]) -> Table:
    """Tabulate our points, then the bars of figures 7 and 8; a bar that was run here shares one row."""
    title = f"ZeRO-R's configurations{about(records)}"
    ours = points(frame(records))
    if not ours:
        return Table("zero_r", title, (), pd.DataFrame())
    there = {row["point"] for row in ours}
    ours.sort(key=lambda row: (-row["dp"], row["tp"], row["configuration"]))
    rows = pd.DataFrame([*ours, *(row for key, row in printed_rows().items() if key not in there)])
    rows["device_name"] = rows["device_name"].fillna(rows["device_name"].iloc[0])
    rows["oversubscribed"] = rows["oversubscribed"].eq(True)
    notes = (
        "Memory: of all tensors on the fullest rank, at the fullest moment of the first step; predicted by `lmscale "
        "memory`, for GPUs where nothing was run here. On a CPU the host's memory is the device's. A layer keeps: its "
        "input, of one microbatch, for the backward pass to recompute the rest from.",
        "Published: figures 7 and 8, read off the plots. Cached is what PyTorch's allocator had taken, in use or not. "
        "The paper does not say whether recomputed FLOPs count in its rates; ours are model FLOPs.",
    )
    return measured("zero_r", title, SHOWN, rows, notes)


def as_predicted(rows: Sequence[Row]) -> Evidence | None:
    found = [row for row in points(pd.DataFrame(list(rows))) if not math.isnan(row["memory_bytes"])]
    ratios = [row["memory_bytes"] / row["predicted_memory_bytes"] for row in found]
    if not ratios:
        return None
    numbers = f"{min(ratios):.3f} to {max(ratios):.3f} times the prediction"
    return tally([abs(one - 1) <= CLOSE for one in ratios], "points", numbers)


def leaves_a_part(rows: Sequence[Row]) -> Evidence | None:
    """Judge whether P_a leaves exactly 1/t of the inputs of layers."""
    pairs = [(g[a], g[b]) for g in by_configuration(rows) for a, b in (("C1", "C2"), ("C3", "C4")) if {a, b} <= set(g)]
    pairs = [(whole, part) for whole, part in pairs if not math.isnan(whole[LAYER])]
    shares = {(row["tp"], row[LAYER] / whole[LAYER]) for whole, row in pairs}
    numbers = ", ".join(f"{share:.4g} (t={tp})" for tp, share in sorted(shares))
    return tally([tp * share == 1 for tp, share in shares], "degrees", numbers)


def every_saving_counts(rows: Sequence[Row]) -> Evidence | None:
    """Judge whether each of P_os+g and P_a lowers the memory, and P_a+cpu does not raise it."""
    groups = [{name: row["memory_bytes"] for name, row in group.items()} for group in by_configuration(rows)]
    groups = [group for group in groups if len(group) == len(CONFIGURATIONS) and not math.isnan(sum(group.values()))]
    if not groups:
        return None
    held = [g[b] < g[a] for g in groups for a, b in SAVES] + [g["C5"] <= g["C4"] * 1.001 for g in groups]
    numbers = (", ".join(f"{name} {size / g['C1']:.0%}" for name, size in g.items()) for g in groups)
    return tally(held, "savings", "; ".join(numbers))


def largest_as_published(rows: Sequence[Row]) -> Evidence | None:
    """Judge whether the largest models predicted to fit 32 GB are figure 6's; None without simulated runs."""
    if all(row["source"] != SIMULATED for row in rows):
        return None
    bars = sorted(published("zero2019").query("where == 'figure 6'").to_dict("records"), key=lambda bar: bar["value"])
    sizes = {_of_bar(bar): largest(_of_bar(bar)) / 1e9 for bar in bars}
    numbers = ", ".join(f"{name} {size:.0f}B" for name, size in sizes.items())
    held = [abs(sizes[_of_bar(bar)] / bar["value"] - 1) <= NEAR for bar in bars]
    return tally(held, "configurations", f"largest by prediction: {numbers}")


@cache
def largest(name: str) -> float:
    """Return parameters (12 L h^2) of the deepest model of figure 6's width, batch and ranks that fits a V100."""
    bar = next(bar for bar in published("zero2019", f"max_model_size_{name.lower()}").to_dict("records"))
    run = on_v100s(bar | {"note": "1 layers, hidden size 8192, 64 heads"}, **CONFIGURATIONS[name])
    fits, too_deep = 1, 1024
    while too_deep - fits > 1:
        layers = (fits + too_deep) // 2
        deeper = replace(run, model=replace(run.model, num_layers=layers))
        if predicted(deeper)["predicted_memory_bytes"] <= V100:
            fits = layers
        else:
            too_deep = layers
    return 12.0 * fits * run.model.hidden_size**2


def below_the_cached(rows: Sequence[Row]) -> Evidence | None:
    """Judge whether simulated runs of figure 7's models need less than PyTorch had cached, in the same order."""
    found = [row for row in points(pd.DataFrame(list(rows))) if not math.isnan(row["cached"] + row[NEEDED])]
    bars = [row for row in found if row["source"] == SIMULATED]
    if not bars:
        return None
    numbers = [
        f"{row[NEEDED] / 1e9:.1f} of {row['cached'] / 1e9:.1f} GB ({row['configuration']}, "
        f"{row['model'].removeprefix('GPT ')})"
        for row in bars
    ]
    of_one = [row for row in bars if row["model"] == bars[0]["model"]]
    orders = [
        [row["configuration"] for row in sorted(of_one, key=lambda row: (-row[key], row["configuration"]))]
        for key in ("cached", NEEDED)
    ]
    holds = all(row[NEEDED] <= row["cached"] for row in bars) and orders[0] == orders[1]
    return Evidence(holds, ", ".join(numbers))


def rates_as_published(rows: Sequence[Row]) -> Evidence | None:
    """Judge whether the rates of figure 8's 60B model relative to C4's are the published."""
    found = [
        row for row in points(pd.DataFrame(list(rows))) if not math.isnan(row["published_rate"] + row[FLOP_RATE.key])
    ]
    first = next((row for row in found if row["configuration"] == "C4"), None)
    if first is None or len(found) < 2:
        return None
    of_first = lambda row, key: row[key] / first[key]
    others = [row for row in found if row is not first]
    off = [abs(of_first(row, FLOP_RATE.key) - of_first(row, "published_rate")) for row in others]
    return tally([one <= POINTS for one in off], "points", f"furthest {100 * max(off):.1f} points off")


def tried(model: ModelConfig, names: Sequence[str], tp: int, dp: int, batch: int, **run: Any) -> list[Run]:
    """Return the configurations on CPUs; by default two steps for the memory, in the paper's precision."""
    precision: Precision = run.pop("precision", "fp16")
    steps, repeats = run.pop("steps", 2), run.pop("repeats", 1)
    return [
        Run(
            model=model,
            plan=Plan(tp=tp, dp=dp, recompute="full", bucket_bytes=2**18, **CONFIGURATIONS[name]),
            train=replace(CPU, steps=steps, global_batch=batch * dp, microbatch=batch, warmup_steps=0),
            evaluation=EvaluationConfig(sequences=None),
            precision=precision,
            fp32_gradients=precision == "fp32",
            repeat=repeat,
        )
        for repeat in range(repeats)
        for name in names
    ]


SMOKE = ModelConfig(num_layers=8, hidden_size=128, num_heads=4, seq_len=128)
SMALL = ModelConfig(num_layers=8, hidden_size=256, num_heads=4, seq_len=256)
ON_FAIR_TERMS: dict[str, Any] = {"tp": 2, "dp": 1, "steps": 8, "precision": "fp32"}
"""Options of runs for speed: two ranks with a core each."""

EXPERIMENT = Experiment(
    source="ZeRO (Rajbhandari et al. 2019), sections 6.1 and 10.5, tables 3 and 7 to 9, figures 6 to 8",
    expectation="memory falls from C1 to C5, P_a leaves 1/t of the activations; 40, 60, 50, 140 and 150B fit; "
    "C4 is three times as fast as C1, by larger batches, and C5 slower than C4",
    claims=(
        Claim(text="a step takes as much memory as predicted, within 5%", source="section 10.5", check=as_predicted),
        Claim(text="P_a leaves one of t parts of the activations, exactly", source="section 6.1", check=leaves_a_part),
        Claim(
            text="P_a and the division of gradients lower the memory, each and together; P_a+cpu does not raise it",
            source="figure 7",
            check=every_saving_counts,
        ),
        Claim(
            text="by simulation, figure 7's models take less than was cached, in the same order",
            source="figure 7",
            check=below_the_cached,
        ),
        Claim(
            text="the largest models predicted to fit 32 GB are figure 6's, within 10%",
            source="figure 6",
            check=largest_as_published,
            published="C1 40B, C3 50B, C2 60B, C4 140B, C5 150B",
        ),
        Claim(
            text="rates relative to C4's are within 5 points of the published",
            source="figure 8",
            check=rates_as_published,
        ),
    ),
    found="A rank's memory is within 5% of the prediction in 12 of 13 configurations and 10% below it in one, and "
    "partitioned checkpoints are one of t parts exactly. Dividing gradients besides saves nothing at the smallest "
    "model, whose reduction buffers are as large as what is divided; so the order of figure 7 is not reproduced "
    "there. Checkpoints in host memory cost nothing on a CPU, where nothing is moved. By formula the largest models "
    "that fit 32 GB are 14 to 65% larger than figure 6's, in the same order (C1 49B, C3 59B, C2 99B, C4 159B, C5 "
    "180B): not reproduced. The rates of figure 8 relative to C4's are up to 22.6 points off.",
    table=table,
    cost={"smoke": "1 min, 2 CPU cores", "small": "4 min, 2 CPU cores", "paper": "20 min, 400 GPUs with 32 GB"},
    deviations="No dropout, with fused attention; the paper names neither vocabulary nor sequence: 51,200 and 1,024. "
    "Figure 6's models are not trained: C1 to C5 are at the paper's sizes in figures 7 and 8, and figure 6 is held "
    "against what is predicted, with its widest models' width. At `smoke` and `small` 4 or 8 ranks share two cores for "
    "two steps: these say what is kept, and nothing of speed, which two tensor-parallel ranks are for, in fp32. A "
    "CPU's memory is the host's, so that P_a+cpu moves nothing there.",
    runs={
        "smoke": [
            # with usual buckets, two of which wait for their sums, such a small model's gradients would be whole
            replace(run, plan=replace(run.plan, bucket_bytes=SMALL_BUCKETS))
            for run in (
                *tried(replace(SMOKE, num_layers=4), list(CONFIGURATIONS), tp=2, dp=2, batch=4),
                *tried(SMOKE, ("C4", "C5"), batch=8, **ON_FAIR_TERMS),
            )
        ],
        "small": [
            *tried(SMALL, list(CONFIGURATIONS), tp=2, dp=2, batch=8),
            *tried(SMOKE, list(CONFIGURATIONS), tp=4, dp=2, batch=8),
            *tried(SMALL, ("C3", "C4", "C5"), batch=4, repeats=3, **ON_FAIR_TERMS),
        ],
        "paper": [run for run, _ in of_the_paper()],
    },
)
