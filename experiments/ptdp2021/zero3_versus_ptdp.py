"""Is a model trained faster when ranks divide its states, or when they share its layers and its depth?

PTD-P compares itself with ZeRO-3 without model parallelism, on models of 175B and 530B parameters at constant global
batches (section 5.2, table 2, figure 10). ZeRO-3 gathers all weights from other nodes, twice a step, and reduces all
gradients; shared layers keep their traffic within a node, and a shared depth sends activations only. With the fewest
GPUs PTD-P is 6 and 24% faster; with twice as many, which halve what ZeRO-3 computes between transfers, by 70%.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache

from experiments.ptdp2021 import AS_RUN, on_selene, small_model, timed
from harness.experiment.kit import (
    BATCH, DP, MICROBATCH, MODEL, POINTS, PP, RANKS, TP, TP_SENT, ZERO_STAGE, Claim, Comparison, Estimate, Evidence,
    Experiment, Plan, Point, Printed, Record, Run, best_over, cost, each, flop_rate, grouped, mebibytes, named, near,
    points, repeated, tally,
)  # fmt: skip
from impl.cost.place import Place
from impl.cost.traffic import pipeline_traffic, state_traffic

TWICE, TWICE_THE_FEWEST = 0.7, (2 * 384, 2 * 560)
"""Published gain of PTD-P over ZeRO-3 with twice the fewest GPUs, and these numbers of GPUs."""
BUCKET = 2**29
"""Bytes of a bucket at the paper's sizes, where a rank owns a thousandth of it."""


def run_of(printed: Printed) -> Run:
    """Return a row's run: ZeRO-3 has one microbatch a rank and 16-bit gradients, PTD-P one-sequence microbatches."""
    if printed["tp"] > 1:
        return on_selene(printed, named(printed["model"]), bucket_bytes=BUCKET)
    microbatch = int(printed["global_batch"]) // int(printed["dp"])
    run = on_selene(printed, named(printed["model"]), microbatch, zero_stage=3, bucket_bytes=BUCKET)
    return replace(run, fp32_gradients=False)


@cache
def sent_beyond_layers(run: Run, vocab_size: int) -> float:
    """Return the bytes that the busiest rank sends to data-parallel ranks and other stages in a step.

    They leave a node that has all ranks which share a layer.
    """
    pp, dp = run.plan.pp, run.plan.dp
    places = [Place(run, vocab_size, rank) for rank in sorted({0, pp // 2, pp - 1})]  # stages between these are alike
    passes = lambda op: 2 if op == "all_reduce" else 1  # an all-reduce goes round the ring twice
    of_ranks = [state_traffic(place).get("dp", {}).items() for place in places]
    round_the_ring = max(sum(count.bytes * passes(op) for op, count in of_rank) for of_rank in of_ranks)
    middle = pipeline_traffic(Place(run, vocab_size, pp // 2))  # in both directions
    return round_the_ring * ((dp - 1) / dp) + (middle["send"].bytes if pp > 1 else 0)


def by_formula(point: Point) -> float:
    vocab_size = point.records[0].resolved.vocab_size if point.records else point.run.model.vocab_size
    return sent_beyond_layers(point.run, vocab_size or 0)


def sent(record: Record) -> float:
    """Return bytes that the busiest rank sent to data-parallel ranks and to other stages in a step."""
    return record.dp_bytes_sent + record.pp_bytes_sent


def sent_or_to_send(point: Point) -> float:
    """Return what was sent, by formula for a row of the paper whose bytes were not counted."""
    bytes_sent = point.mean(sent)
    return by_formula(point) if math.isnan(bytes_sent) and point.run in FIGURE.printed else bytes_sent


BETWEEN = mebibytes("between_nodes", "sent between nodes", sent_or_to_send, 3)
FIGURE = Comparison(
    paper="ptdp2021", where="table 2", name="zero3_versus_ptdp", title="ZeRO-3 against PTD-P", run_of=run_of,
    shown=(ZERO_STAGE, TP, PP, DP, MICROBATCH, BATCH),
    baseline=lambda point: (-point.run.plan.zero_stage, point.run.plan.world_size),
    relative_to="ZeRO-3 on the fewest ranks", group=(MODEL,), line=(MODEL, ZERO_STAGE, TP, PP), at=(RANKS,),
    more=(BETWEEN, TP_SENT),
    notes=(
        "Sent between nodes: what the busiest rank sends to data-parallel ranks and to other stages in a step; by "
        "formula, as this engine sends, for what was not run. A node has all ranks that share a layer.",
    ),
)  # fmt: skip


def zero_3(found: Iterable[Point]) -> list[Point]:
    return [one for one in found if one.run.plan.zero_stage == 3]


def shared(found: Iterable[Point]) -> list[Point]:
    """Return the points whose ranks share layers or the depth, and no states."""
    plans = ((one, one.run.plan) for one in found)
    return [one for one, plan in plans if plan.zero_stage == 0 and max(plan.tp, plan.pp) > 1]


def gains(records: Sequence[Record]) -> list[tuple[Estimate, Point]]:
    """Return what the fastest layouts that share layers or the depth gain over ZeRO-3 on as many ranks."""
    found = FIGURE.known(records)
    over = best_over(shared(found), zero_3(found), flop_rate, MODEL, RANKS, BATCH)
    return [(by - 1, one) for one, by in sorted(over, key=lambda one: (one[0].model, one[0].run.plan.world_size))]


def on_twice(records: Sequence[Record]) -> list[tuple[Estimate, Point]]:
    """Return the gains on twice the fewest GPUs."""
    return [(by, one) for by, one in gains(records) if one.printed and one.run.plan.world_size in TWICE_THE_FEWEST]


GAIN = "{0:+.0%} ({1.model}, {1.run.plan.world_size} ranks)"


def kept(found: Iterable[Point]) -> dict[str, Estimate]:
    """Return the rate per device on the most ranks over that on the fewest at the same batch, by model."""
    lines = [sorted(line, key=lambda one: one.run.plan.world_size) for line in grouped(found, MODEL, BATCH)]
    several = [line for line in lines if line[-1].run.plan.world_size > line[0].run.plan.world_size]
    return {line[0].model: line[-1].over(line[0], flop_rate) for line in several}


def both_kept(records: Sequence[Record]) -> list[tuple[Estimate, Estimate, str]]:
    """Return what PTD-P and ZeRO-3 keep of their rate per device as ranks are added at the same batch, by model."""
    found = FIGURE.known(records)
    zero, others = kept(zero_3(found)), kept(one for one in found if one.run.plan.zero_stage != 3)
    return [(others[model], zero[model], model) for model in others if model in zero]


def counted(records: Sequence[Record]) -> list[Point]:
    """Return the points whose ranks counted what they sent."""
    return [one for one in points(records, sent) if one.run.plan.world_size > 1]


def as_counted(records: Sequence[Record]) -> Evidence | None:
    return tally([one.mean(sent) == by_formula(one) for one in counted(records)], "points to the byte")


def runs(seq_len: int, layouts: Sequence[Plan], repeats: int = 1) -> list[Run]:
    """Return runs of eight sequences a step; ZeRO-3's in one microbatch a rank, the others' in microbatches of two."""
    plans = [replace(plan, recompute="full", bucket_bytes=2**18) for plan in layouts]
    microbatch = lambda plan: 8 // plan.dp if plan.zero_stage == 3 else 2
    return repeated([timed(small_model(seq_len), plan, 8, microbatch(plan)) for plan in plans], repeats)


TWO = (Plan(dp=2, zero_stage=3), Plan(tp=2), Plan(pp=2))
FOUR = (Plan(dp=4, zero_stage=3), Plan(tp=2, pp=2), Plan(tp=2, dp=2))

EXPERIMENT = Experiment(
    source="PTD-P 2021, section 5.2, table 2, figure 10",
    expectation="6 and 24% faster than ZeRO-3 on the fewest GPUs, 70% on twice as many, because less crosses nodes",
    claims=(
        FIGURE.direction(
            "PTD-P is faster than ZeRO-3 on as many ranks", each(gains, lambda by, _: by, "pairs", GAIN, "; "),
            "network", "+6% (175B, 384 ranks), +24% (530B, 640 ranks), +70% on twice as many",
        ),
        Claim(
            "with twice the fewest GPUs it is 70% faster, within 5 points", "section 5.2, figure 10",
            each(on_twice, lambda by, _: near(by, TWICE, POINTS), "models", GAIN, "; "),
            kind="quantitative", about="network", tolerance=POINTS,
        ),
        FIGURE.direction(
            "it keeps more of its rate per device as ranks are added at the same batch",
            each(both_kept, lambda a, b, _: a / b - 1, "models", "{2}: keeps {0:.0%}, ZeRO-3 {1:.0%}", "; "), "network",
        ),
        FIGURE.quantitative(
            "rates relative to ZeRO-3's on the fewest GPUs are within 5 points of the published", "network"
        ),
        Claim("what crosses nodes is what the formulas say, exactly", "our own", as_counted, kind="self-consistency"),
    ),
    table=FIGURE.table,
    cost=cost("4 min", "60 min, 2240 GPUs with 80 GB"),
    deviations=AS_RUN + "Every layer is recomputed, as in the paper. ZeRO-3 is ours, not DeepSpeed's. The paper does "
    "not say whether PTD-P interleaves here: it does not. At `smoke` and `small` a model of eight small layers is on "
    "two ranks; at `small`, four ranks share two cores, and say what is sent but nothing of speed. CPUs have no nodes: "
    "ranks that share layers count as one.",
    runs={"smoke": runs(128, TWO), "small": runs(256, TWO, repeats=8) + runs(256, FOUR), "paper": FIGURE.runs},
)  # fmt: skip
