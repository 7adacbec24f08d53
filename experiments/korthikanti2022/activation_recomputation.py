"""How much activation memory does recomputation save, what does it cost in time, and what is it worth?

Full recomputation keeps a layer's input only, 2sbh bytes, and computes the whole layer again; selective recomputes the
core of attention alone, which takes most memory and little work. With sequence parallelism it leaves a fifth of the
memory (Korthikanti et al. 2022, figure 7) for 4% of a layer's time instead of 39% (table 4), and steps are 29 to 32%
faster than with full recomputation (table 5). PTD-P recomputes fully: at most a third slower at the same batch, but
with room for batches whose smaller pipeline bubble makes up for more than that (section 5.6, figure 17).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pandas as pd

from experiments.korthikanti2022.sequence_parallel_memory import (
    DEGREE,
    MICROBATCH,
    PAPER,
    SMOKE,
    quarter,
    same_in_paper,
)
from experiments.ptdp2021.pipeline_weak_scaling import on_selene, small_model, timed
from harness.analysis.render import Column, Table
from harness.analysis.scaling import ratio
from harness.analysis.tables import MARK, MILLI, MODEL, PERCENT, RUNS, measured
from harness.experiment.claims import Claim, Evidence, Row, tally
from harness.experiment.comparison import POINTS
from harness.experiment.experiment import Experiment
from harness.experiment.published import published
from harness.records.labels import apart_from
from harness.records.measures import about, combine, frame
from harness.records.record import Record, point
from harness.records.store import SIMULATED
from impl.cost.activations import layer_bytes
from impl.evaluation_config import EvaluationConfig
from impl.model.config import ModelConfig
from impl.model.sizes import named
from impl.plan import Plan
from impl.recipe import Recipe
from impl.run import Run

WAYS: dict[str, dict[str, Any]] = {
    "": {},
    "_sequence_parallel": {"sequence_parallel": True},
    "_selective": {"recompute": "selective"},
    "_sequence_parallel_selective": {"sequence_parallel": True, "recompute": "selective"},
    "_full_recompute": {"recompute": "full"},
}
"""Ways of saving memory, by the suffixes of the names of published quantities."""
FULL, BOTH = "_full_recompute", "_sequence_parallel_selective"
INTERLEAVED = ("korthikanti-175b", "korthikanti-530b")
"""Models that run with three chunks a rank (table 3)."""
EXACT, SAME_SHARE = 0.01, 0.01
A_THIRD = 1 / 3 + POINTS
LAYER, RATE = "layer_activation_bytes", "tokens_per_second"
TIMED = Recipe(steps=8, warmup_steps=2)


def way_of(run: Run) -> str:
    own = {"sequence_parallel": run.plan.sequence_parallel, "recompute": run.plan.recompute}
    plain = {"sequence_parallel": False, "recompute": "none"}
    return next((way for way, fields in WAYS.items() if plain | fields == own), "none of these")


def with_way(run: Run, way: str) -> Run:
    plain: dict[str, Any] = {"sequence_parallel": False, "recompute": "none"}
    return replace(run, plan=replace(run.plan, **plain | WAYS[way]))


def every_way(run: Run) -> list[Run]:
    return [with_way(run, way) for way in WAYS]


def printed(quantity: str, **where: Any) -> float:
    """Return the published number, or NaN."""
    paper = "ptdp2021" if quantity.startswith("sequence_rate") else "korthikanti2022"
    rows = published(paper).query("quantity == @quantity").to_dict("records")
    return next((row["value"] for row in rows if all(row[name] == value for name, value in where.items())), math.nan)


def two_layers(name: str) -> Run:
    """Return a two-layer run of one of the paper's models, which fits eight GPUs with any recomputation."""
    microbatch = MICROBATCH.get(name, 1)
    return Run(
        model=replace(PAPER[name], num_layers=2),
        plan=Plan(tp=DEGREE),
        train=replace(TIMED, steps=10, lr=1e-4, global_batch=microbatch, microbatch=microbatch),
        evaluation=EvaluationConfig(sequences=None),
        precision="bf16",
    )


def of_table_5(name: str, way: str) -> Run:
    row = next(row for row in published("korthikanti2022", "parameters").to_dict("records") if row["model"] == name)
    chunks: dict[str, Any] = {"schedule": "interleaved", "chunks": 3} if name in INTERLEAVED else {}
    run = on_selene(row, PAPER[name], MICROBATCH.get(name, 1), **chunks)
    return with_way(run, way)


@cache
def of_the_paper() -> dict[Run, tuple[Run, dict[str, float]]]:
    """Return every point of figure 7, tables 4 and 5 and PTD-P's figure 17: its run, and the published times."""
    found: list[tuple[Run, dict[str, float]]] = []
    for name in PAPER:
        layer = {way: printed(f"layer_combined_milliseconds{way}", model=name) for way in WAYS}
        found += [(run, {"published_speed": layer[""] / layer[way_of(run)]}) for run in every_way(two_layers(name))]
    for name in PAPER:
        seconds = {way: printed(f"iteration_seconds{way}", model=name) for way in (FULL, BOTH)}
        found += [(of_table_5(name, way), {"published_gain": seconds[FULL] / seconds[way]}) for way in seconds]
    rates = published("ptdp2021").query("where == 'figure 17'").to_dict("records")
    for row in rates:
        way = "" if row["quantity"].endswith("no_recompute") else FULL
        without = printed("sequence_rate_no_recompute", global_batch=row["global_batch"])
        times = {"published_speed": row["value"] / without, "published_rate": row["value"]}
        found.append((with_way(on_selene(row, named("ptdp-145.6b")), way), times))
    return {point(run): (run, times) for run, times in found}


@cache
def described(run: Run) -> dict[str, Any]:
    """Return what is known of a point before it is run: bytes of a layer by formula, and published numbers."""
    names = same_in_paper(run.model, run.plan.tp) if run.model.dropout else []
    way, known = way_of(run), layer_bytes(run)
    share = printed(f"activation_memory{way}", model=names[0]) / 100 if names and way else math.nan
    _, times = of_the_paper().get(point(run), (run, {}))
    degrees = {name: getattr(run.plan, name) for name in ("tp", "pp", "sequence_parallel", "recompute")}
    return {
        **degrees,
        "way": way,
        "global_batch": run.train.global_batch,
        "microbatch": run.train.microbatch,
        "formula": known,
        "formula_share": known / layer_bytes(with_way(run, "")),
        "published_share": share,
        **{name: times.get(name, math.nan) for name in ("published_speed", "published_gain", "published_rate")},
    }


def points(rows: pd.DataFrame) -> list[dict[Any, Any]]:
    """Return measured points, repeats combined: bytes of a layer, and rates relative to those of the other ways."""
    if not rows.empty:
        known = rows[LAYER].notna() | (rows["source"] == SIMULATED)  # simulated records have times only
        rows = pd.DataFrame(rows[(rows["status"] == "ok") & known]).drop_duplicates("id")
    if rows.empty:
        return []
    found = combine(rows, ("point", "source", "device_name"), (RATE, LAYER, "step_seconds", "mfu", "hfu"))
    out = []
    for row in found:
        run: Run = row["point"]
        apart = apart_from(run, "plan.sequence_parallel", "plan.recompute")
        out.append(row | described(run) | {"apart": apart, "seq_len": run.model.seq_len})
    return [row | _against_the_others(row, out) for row in out]


def _against_the_others(row: Mapping[Any, Any], rows: Sequence[Mapping[Any, Any]]) -> dict[str, float]:
    """Return shares of bytes and rate without recomputation, and the gain over the rate with full recomputation."""
    same = [r for r in rows if (r["apart"], r["device_name"]) == (row["apart"], row["device_name"])]
    plain, full = (next((r for r in same if r["way"] == way), None) for way in ("", FULL))
    out = {"share": row[LAYER] / plain[LAYER] if plain else math.nan, "rate": row[RATE] / row["seq_len"]}
    for name, other in (("speed", plain), ("gain", full)):
        found = ratio(row, other, RATE) if other is not None and not math.isnan(row[RATE]) else None
        width = None if found is None else found.half_width
        out |= {name: found.mean if found else math.nan, f"{name}_half_width": math.nan if width is None else width}
    return out


BYTES: dict[str, Any] = {"unit": "MiB", "si": "B", "scale": 2**20}
SHARE: dict[str, Any] = {"unit": "%", "si": "fraction", "scale": PERCENT, "digits": 3}
TIMES: dict[str, Any] = {"si": "ratio", "digits": 3}
SHOWN = (
    MODEL,
    Column(key="tp", header="t"),
    Column(key="pp", header="p"),
    Column(key="global_batch", header="batch"),
    Column(key="parallel", header="parallel", text=True),
    Column(key="recompute", header="recomputed", text=True),
    Column(key=LAYER, header="layer, counted", **BYTES),
    Column(key="formula", header="layer, predicted", **BYTES),
    Column(key="share", header="share, counted", **SHARE),
    Column(key="formula_share", header="share, predicted", **SHARE),
    Column(key="published_share", header="share, published", **SHARE),
    Column(key="step_seconds", header="step, median", unit="ms", si="s", scale=MILLI),
    Column(key="speed", header="speed", interval="speed_half_width", **SHARE),
    Column(key="published_speed", header="speed, published", **SHARE),
    Column(key="gain", header="over full", interval="gain_half_width", **TIMES),
    Column(key="published_gain", header="over full, published", **TIMES),
    Column(key="rate", header="rate", unit="sequences/s", si="sequences/s", digits=3),
    Column(key="published_rate", header="rate, published", unit="sequences/s", si="sequences/s", digits=3),
    Column(key="mfu", header="MFU", **SHARE),
    Column(key="hfu", header="HFU", **SHARE),
    RUNS, MARK,
)  # fmt: skip
PARALLEL = {False: "tensor", True: "tensor, sequence"}


def table(records: Sequence[Record]) -> Table:
    """Tabulate our points, then the papers'; a paper's point that was run here shares one row."""
    title = f"Recomputation of activations{about(records)}"
    ours = points(frame(records))
    if not ours:
        return Table("activation_recomputation", title, (), pd.DataFrame())
    there = {row["point"] for row in ours}
    absent = [described(run) | {"model": _name(run)} for key, (run, _) in of_the_paper().items() if key not in there]
    ways = list(WAYS)
    order = lambda row: (row["pp"], row["model"], row["tp"], row["global_batch"], ways.index(row["way"]))
    rows = pd.DataFrame([*sorted(ours, key=order), *absent])
    rows["parallel"] = [
        PARALLEL[bool(split)] if t > 1 else "no" for split, t in zip(rows["sequence_parallel"], rows["tp"], strict=True)
    ]
    rows["device_name"] = rows["device_name"].fillna(rows["device_name"].iloc[0])
    rows["oversubscribed"] = rows["oversubscribed"].eq(True)
    notes = (
        "Layer: bytes that the forward pass of one microbatch keeps for the backward pass in the last layer, on the "
        "rank with most. Share: of those with tensor parallelism and nothing recomputed; published: figure 7, of "
        "models with the same t and 5as/h, on which alone it depends.",
        "Speed: the rate over that of the same run with nothing recomputed, and no sequence parallelism; published: "
        "one layer of 22B (table 4), and PTD-P's figure 17. Over full: the rate over that with full recomputation; "
        "published: table 5.",
    )
    return measured("activation_recomputation", title, SHOWN, rows, notes)


def _name(run: Run) -> str:
    name = next((name for name in PAPER if PAPER[name].hidden_size == run.model.hidden_size and run.model.dropout), "")
    size = name.rpartition("-")[2].upper() or "145B"
    return f"GPT {size}, two layers" if run.model.num_layers == 2 else f"GPT {size}"


def as_predicted(rows: Sequence[Row]) -> Evidence | None:
    found = [(r[LAYER], r["formula"]) for r in points(pd.DataFrame(list(rows))) if not math.isnan(r[LAYER])]
    if not found:
        return None
    off = [abs(a / b - 1) for a, b in found]
    return tally(
        [one <= EXACT for one in off], "points", f"{off.count(0)} to the byte, the furthest {max(off):.2%} off"
    )


def shares_as_published(rows: Sequence[Row]) -> Evidence | None:
    found = [row for row in points(pd.DataFrame(list(rows))) if not math.isnan(row["share"] + row["published_share"])]
    numbers = [f"{row['share']:.1%} ({row['published_share']:.1%})" for row in found]
    held = [abs(row["share"] - row["published_share"]) <= SAME_SHARE for row in found]
    return tally(held, "points", ", ".join(dict.fromkeys(numbers)))


def speeds(rows: Sequence[Row], *, is_pipeline: bool) -> dict[str, list[dict[Any, Any]]]:
    """Return points whose speed is known, by way."""
    found: dict[str, list[dict[Any, Any]]] = {}
    for row in points(pd.DataFrame(list(rows))):
        if not math.isnan(row["speed"]) and (row["pp"] > 1) == is_pipeline:
            found.setdefault(row["way"], []).append(row)
    return found


def selective_is_cheap(rows: Sequence[Row]) -> Evidence | None:
    """Judge whether selective recomputation takes less than half of the time that full takes, for the same run."""
    by_way = speeds(rows, is_pipeline=False)
    taken = {way: {row["apart"]: 1 / row["speed"] - 1 for row in found} for way, found in by_way.items()}
    selective, full = taken.get("_selective", {}), taken.get(FULL, {})
    both = [(selective[key], full[key]) for key in selective if key in full]
    numbers = [f"{one:+.0%} of a step, full {other:+.0%}" for one, other in both]
    return tally([one < other / 2 for one, other in both], "pairs", "; ".join(numbers))


def beats_full(rows: Sequence[Row]) -> Evidence | None:
    found = [row for row in points(pd.DataFrame(list(rows))) if row["way"] == BOTH and not math.isnan(row["gain"])]
    numbers = ", ".join(f"{row['gain'] - 1:+.0%} ({row['model']})" for row in found)
    return tally([row["gain"] > 1 for row in found], "models", numbers)


def gains_as_published(rows: Sequence[Row]) -> Evidence | None:
    found = [row for row in points(pd.DataFrame(list(rows))) if row["way"] == BOTH]
    found = [row for row in found if not math.isnan(row["gain"] + row["published_gain"])]
    off = [abs(row["gain"] - row["published_gain"]) for row in found]
    return tally([one <= POINTS for one in off], "models", f"furthest {100 * max(off):.1f} points off") if off else None


def a_third_at_most(rows: Sequence[Row]) -> Evidence | None:
    """Judge whether full recomputation slows pipelines at every batch, by a third at most, measured within 5 points."""
    found = speeds(rows, is_pipeline=True).get(FULL, [])
    numbers = ", ".join(f"{1 - row['speed']:.0%} (batch {row['global_batch']})" for row in found)
    return tally([0 < 1 - row["speed"] <= A_THIRD for row in found], "batches", numbers)


def worth_more_than_it_costs(rows: Sequence[Row]) -> Evidence | None:
    """Judge whether the largest batch with full recomputation is faster than batches without it that keep as little.

    Batches without it have at most half as many microbatches as the pipeline has ranks, as in the paper.
    """
    found: dict[str, list[float]] = {"": [], FULL: []}
    for row in points(pd.DataFrame(list(rows))):
        if row["pp"] > 1 and row["way"] in found and not row["oversubscribed"] and row["model"]:
            few = row["microbatches"] <= row["pp"] / 2
            if (row["way"] == FULL or few) and not math.isnan(row["rate"]) and math.isnan(row["published_gain"]):
                found[row["way"]].append(row["rate"])
    if not all(found.values()):
        return None
    best, without = max(found[FULL]), max(found[""])
    return Evidence(best > without, f"{best / without:.2f} times as fast: {best:.3g} and {without:.3g} sequences/s")


def in_every_way(model: ModelConfig, tp: int, microbatch: int, steps: int, repeats: int = 1) -> list[Run]:
    """Return runs for the memory of every way, which serve for time too if ranks have a core each and steps suffice."""
    run = Run(
        model=model,
        plan=Plan(tp=tp),
        train=replace(TIMED, steps=steps, global_batch=microbatch, microbatch=microbatch, warmup_steps=0),
        evaluation=EvaluationConfig(sequences=None),
        precision="bf16" if steps == 2 else "fp32",
    )
    return [replace(one, repeat=repeat) for repeat in range(repeats) for one in every_way(run)]


def pipelines(seq_len: int, batches: Sequence[int], repeats: int = 1) -> list[Run]:
    """Return runs two ranks deep, with microbatches of two sequences; the smallest batch has half as many as ranks."""
    return [
        with_way(timed(small_model(seq_len), Plan(pp=2), batch, repeat=repeat), way)
        for repeat in range(repeats)
        for batch in batches
        for way in ("", FULL)
    ]


EXPERIMENT = Experiment(
    source="Korthikanti et al. 2022, sections 5 and 6, figure 7, tables 4 and 5; PTD-P 2021, section 5.6, figure 17",
    expectation="with selective recomputation and sequence parallelism a fifth of the memory, for a few percent of the "
    "time, and steps 29 to 32% faster than with full recomputation",
    found="Layers keep what is predicted to the byte, in figure 7's shares. Full recomputation costs 46% of a step "
    "with dropout and 18 to 25% without; selective costs 36%, not a small part, since on a CPU attention with "
    "dropout is slow out of proportion to its FLOPs. The batches that recomputation has room for pay for it: "
    "1.5 times the speed.",
    claims=(
        Claim(text="bytes of a layer are as predicted, within 1%", source="table 2", check=as_predicted),
        Claim(
            text="each way leaves the share of figure 7, within a point, for the same t and 5as/h",
            source="figure 7",
            check=shares_as_published,
        ),
        Claim(
            text="selective recomputation takes less than half of the time that full takes",
            source="table 4",
            check=selective_is_cheap,
            published="+7% of a layer (+4% with sequence parallelism), full +39%",
        ),
        Claim(
            text="selective with sequence parallelism is faster than full recomputation",
            source="table 5, figure 8",
            check=beats_full,
            published="+29% (22B), +32% (175B), +30% (530B), +32% (1T)",
        ),
        Claim(text="by the published 29, 32, 30 and 32%, within 5 points", source="table 5", check=gains_as_published),
        Claim(
            text="full recomputation slows pipelines down at every batch, by 38.3% at most (a third and 5 points)",
            source="PTD-P, figure 17",
            check=a_third_at_most,
        ),
        Claim(
            text="the larger batches that it has room for are faster still than what it costs",
            source="PTD-P, figure 17",
            check=worth_more_than_it_costs,
        ),
    ),
    table=table,
    cost={"smoke": "1 min, 2 CPU cores", "small": "4 min, 2 CPU cores", "paper": "60 min, 512 GPUs with 80 GB"},
    deviations="bf16, not fp16; at `smoke` and `small` fp32 where times count. Models of figure 7 and table 4 have two "
    "layers of their width, and times are of whole steps: the embedding and the update are in them. With dropout, as "
    "the formulas count its masks; PTD-P's figure 17 without, with fused attention. At `small`, 175B's heads and "
    "sequence are a quarter of the paper's for the shares, which eight ranks on two cores count in two steps. What "
    "PTD-P could not run for want of memory, batches above 8 without recomputation, is not run either.",
    runs={
        "smoke": [*in_every_way(SMOKE, tp=2, microbatch=4, steps=8), *pipelines(128, (2, 16))],
        "small": [
            *in_every_way(SMOKE, tp=2, microbatch=8, steps=10, repeats=3),
            *in_every_way(quarter(PAPER["korthikanti-175b"]), DEGREE, microbatch=4, steps=2),
            *pipelines(256, (2, 8, 32)),
        ],
        "paper": [run for run, _ in of_the_paper().values()],
    },
)
