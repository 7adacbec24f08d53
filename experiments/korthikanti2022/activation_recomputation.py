"""How much activation memory does recomputation save, what does it cost in time, and what is it worth?

Full recomputation keeps a layer's input only, 2sbh bytes, and computes the whole layer again; selective recomputes the
core of attention alone, which takes most memory and little work. With sequence parallelism it leaves a fifth of the
memory (Korthikanti et al. 2022, figure 7) for 4% of a layer's time instead of 39% (table 4), and steps are 29 to 32%
faster than with full recomputation (table 5). PTD-P recomputes fully: at most a third slower at the same batch, but
with room for batches whose smaller pipeline bubble makes up for more than that (section 5.6, figure 17).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from experiments.korthikanti2022 import (
    BOTH, DEGREE, FULL, LAYER, NOTHING, P, PAPER, PARALLEL, SAME_SHARE, SELECTIVE, SMOKE, T, WAYS, Saved,
    beside_figure_7, counted, few_steps, in_print, layer, of_table_5, published_share, quarter, rate, rate_of, saved,
    size_of, two_layers, way_of, with_way,
)  # fmt: skip
from experiments.ptdp2021 import on_selene, small_model, timed
from harness.experiment.kit import (
    BATCH, MARK, MILLI, MODEL, POINTS, RUNS, Claim, Column, Estimate, Evidence, Experiment, ModelConfig, Plan, Point,
    Record, Run, Tolerance, all_hold, and_absent, as_expected, cost, each, mebibytes, named, of_run, printed,
    printed_value, published, repeated, share, table_of, tally, within,
)  # fmt: skip
from impl.cost.activations import layer_bytes

EXACT = Tolerance(0.01, "what allocators and masks round", "2026-11-21")
A_THIRD = Tolerance(1 / 3, "one forward pass more of three", "2026-11-24")


@cache
def of_the_paper() -> dict[Run, Saved]:
    """Return every point of figure 7, tables 4 and 5 and PTD-P's figure 17, with the published times, by its run."""
    found: list[Saved] = []
    add = lambda run, size, **printed: found.append(Saved(run, model=f"GPT {size}", printed=printed))
    for name in PAPER:
        times = {way: in_print(f"layer_combined_milliseconds{way}", name) for way in WAYS}
        for way, time in times.items():
            add(with_way(two_layers(name), way), f"{size_of(name)}, two layers", published_speed=times[NOTHING] / time)
    for name in PAPER:
        times = {way: in_print(f"iteration_seconds{way}", name) for way in (FULL, BOTH)}
        for way, time in times.items():
            add(of_table_5(name, way), size_of(name), published_gain=times[FULL] / time)
    rows = published("ptdp2021").query("where == 'figure 17'").to_dict("records")
    plain = {row["global_batch"]: row["value"] for row in rows if row["quantity"].endswith("no_recompute")}
    for row in rows:
        run = on_selene(row, named("ptdp-145.6b"))
        run = with_way(run, NOTHING) if row["quantity"].endswith("no_recompute") else run
        speed = row["value"] / plain.get(row["global_batch"], math.nan)
        add(run, "145B", published_speed=speed, published_rate=row["value"])
    return {one.run: one for one in found}


def compared(records: Sequence[Record], way: str | None = None, *, is_pipeline: bool | None = None) -> list[Saved]:
    """Return points, of one way and with or without a pipeline if these are given; simulated ones have times only."""
    found = saved(records, lambda record: 1.0 if record.is_simulated else layer(record), of_the_paper())
    return [one for one in found if way in (None, way_of(one.run)) and is_pipeline in (None, one.run.plan.pp > 1)]


COLUMNS = (
    MODEL, T, P, replace(BATCH, header="batch"), PARALLEL,
    of_run("recompute", "recomputed", lambda run: run.plan.recompute, text=True),
    mebibytes(LAYER, "layer, counted"), mebibytes("formula", "layer, predicted", lambda one: layer_bytes(one.run)),
    share("share", "share, counted", Saved.share),
    share("formula_share", "share, predicted", lambda one: one.formula_share),
    share("published_share", "share, published", lambda one: published_share(one.run)),
    Column(key="step_seconds", header="step, median", unit="ms", si="s", scale=MILLI),
    share("speed", "speed", lambda one: one.rate_over(NOTHING)),
    share("published_speed", "speed, published", lambda one: one.printed.get("published_speed")),
    Column(key="gain", header="over full", si="ratio", digits=3, of=lambda one: one.rate_over(FULL)),
    printed("published_gain", "over full, published", si="ratio"),
    Column(key="rate", header="rate", unit="sequences/s", si="sequences/s", digits=3, of=rate),
    printed("published_rate", "rate, published", "sequences/s", si="sequences/s"),
    share("mfu", "MFU"), share("hfu", "HFU"), RUNS, MARK,
)  # fmt: skip
NOTES = (
    "Layer: bytes that the forward pass of one microbatch keeps for the backward pass in the last layer, on the "
    "rank with most. Share: of those with tensor parallelism and nothing recomputed; published: figure 7, of "
    "models with the same t and 5as/h, on which alone it depends.",
    "Speed: the rate over that of the same run with nothing recomputed, and no sequence parallelism; published: "
    "one layer of 22B (table 4), and PTD-P's figure 17. Over full: the rate over that with full recomputation; "
    "published: table 5.",
)


def ours_and_theirs(records: Sequence[Record]) -> list[Point]:
    """Return our points, then the papers' that were not run here."""
    ways = [*WAYS, "none of these"]
    place = lambda plan, one: (plan.pp, one.model, plan.tp, one.run.train.global_batch, ways.index(way_of(one.run)))
    ours = sorted(compared(records), key=lambda one: place(one.run.plan, one))
    return and_absent(ours, of_the_paper()) if ours else []


def added(records: Sequence[Record]) -> list[tuple[Estimate, Estimate]]:
    """Return the time that selective and full recomputation add to a step without a pipeline, as shares of it."""
    found = [one.same for one in compared(records, SELECTIVE, is_pipeline=False) if FULL in one.same]
    over = lambda same, way: same[NOTHING].over(same[way], rate_of) - 1
    return [(over(same, SELECTIVE), over(same, FULL)) for same in found]


def lost(records: Sequence[Record]) -> list[tuple[Estimate, int]]:
    """Return the share of its speed that a pipeline loses by full recomputation, and batches."""
    found = compared(records, FULL, is_pipeline=True)
    return [(one.rate_over(NOTHING).scaled(-1) - -1, one.run.train.global_batch) for one in found]


def worth_more_than_it_costs(records: Sequence[Record]) -> Evidence | None:
    """Judge whether the fastest batch with full recomputation is faster than every batch that fits without it."""
    full, plain = (
        [one for one in compared(records, way, is_pipeline=True) if rate(one) > 0 and not one.is_oversubscribed]
        for way in (FULL, NOTHING)
    )
    best = max((one for one in full if "published_gain" not in one.printed), key=rate, default=None)
    without = max(plain, key=rate, default=None)
    if best is None or without is None:
        return None
    ratio = best.over(without, rate_of)
    return tally([ratio - 1], "", f"{ratio:.2f} times as fast: {rate(best):.3g} and {rate(without):.3g} sequences/s")


def in_every_way(model: ModelConfig, tp: int, microbatch: int, steps: int, repeats: int = 1) -> list[Run]:
    """Return runs for the memory of every way, which serve for time too if ranks have a core each and steps suffice."""
    run = few_steps(model, Plan(tp=tp), microbatch, steps=steps, precision="bf16" if steps == 2 else "fp32")
    return repeated([with_way(run, way) for way in WAYS], repeats)


def pipelines(seq_len: int, batches: Sequence[int], repeats: int = 1) -> list[Run]:
    """Return runs two ranks deep, with microbatches of two sequences, each recomputing nothing and all."""
    plain = [timed(small_model(seq_len), Plan(pp=2), batch) for batch in batches]
    return repeated([with_way(run, way) for run in plain for way in (NOTHING, FULL)], repeats)


EXPERIMENT = Experiment(
    source="Korthikanti et al. 2022, sections 5 and 6, figure 7, tables 4 and 5; PTD-P 2021, section 5.6, figure 17",
    expectation="with selective recomputation and sequence parallelism a fifth of the memory, for a few percent of the "
    "time, and steps 29 to 32% faster than with full recomputation",
    claims=(
        Claim(
            "bytes of a layer are as predicted, within 1%", "table 2",
            as_expected(compared, counted, lambda one: layer_bytes(one.run), EXACT, digits=2),
            kind="self-consistency", tolerance=EXACT,
        ),
        Claim(
            "each way leaves the share of figure 7, within a point, for the same t and 5as/h", "figure 7",
            each(lambda records: beside_figure_7(compared(records)), within(SAME_SHARE), "points", "{:.1%} ({:.1%})"),
            kind="self-consistency", tolerance=SAME_SHARE,
        ),
        Claim(
            "selective recomputation takes less than half of the time that full takes", "table 4",
            each(added, lambda one, full: full.scaled(0.5) - one, "pairs", "{:+.0%} of a step, full {:+.0%}", "; "),
            "+7% of a layer (+4% with sequence parallelism), full +39%", kind="direction", about="network",
        ),
        Claim(
            "selective with sequence parallelism is faster than full recomputation", "table 5, figure 8",
            each(
                lambda records: [(one.rate_over(FULL) - 1, one.model) for one in compared(records, BOTH)],
                lambda gain, _: gain, "models", "{:+.0%} ({})",
            ),
            "+29% (22B), +32% (175B), +30% (530B), +32% (1T)", kind="direction", about="computing",
        ),
        Claim(
            "by the published 29, 32, 30 and 32%, within 5 points", "table 5",
            as_expected(
                lambda records: compared(records, BOTH), lambda one: one.rate_over(FULL),
                printed_value("published_gain"), POINTS, "models", are_shares=True,
            ),
            kind="quantitative", about="computing", tolerance=POINTS,
        ),
        Claim(
            "full recomputation slows pipelines down at every batch, by a third at most", "PTD-P, figure 17",
            each(lost, lambda one, _: all_hold([one, one.scaled(-1) - -A_THIRD]), "batches", "{:.0%} (batch {})"),
            kind="self-consistency", tolerance=A_THIRD,
        ),
        Claim(
            "the larger batches that it has room for are faster still than what it costs", "PTD-P, figure 17",
            worth_more_than_it_costs, kind="direction", about="bubble",
        ),
    ),
    table=table_of("activation_recomputation", "Recomputation of activations", COLUMNS, ours_and_theirs, NOTES),
    cost=cost("10 min", "60 min, 512 GPUs with 80 GB"),
    deviations="bf16, not fp16; at `smoke` and `small` fp32 where times count. Models of figure 7 and table 4 have "
    "two layers of their width, and times are of whole steps: the embedding and the update are in them. With dropout, "
    "as the formulas count its masks; at `small` pipelines without, with fused attention. At `small`, 175B's heads and "
    "sequence are a quarter of the paper's for the shares, which eight ranks on two cores count in two steps. PTD-P "
    "had no memory for batches above 8 without recomputation; they are simulated, as by prediction they fit 80 GiB. "
    "Bytes of its layers are without dropout and with fused attention; it is simulated with one, without the other.",
    runs={
        "smoke": [*in_every_way(SMOKE, 2, 4, steps=8), *pipelines(128, (2, 16))],
        "small": [
            *in_every_way(SMOKE, 2, 8, steps=10, repeats=8),
            *in_every_way(quarter(PAPER["korthikanti-175b"]), DEGREE, 4, steps=2),
            *pipelines(256, (2, 8, 32), repeats=8),
        ],
        "paper": list(dict.fromkeys([*of_the_paper(), *(  # and figure 17's batches that PTD-P had no memory for
            with_way(run, NOTHING) for run, one in of_the_paper().items() if one.model == "GPT 145B"
        )])),
    },
)  # fmt: skip
