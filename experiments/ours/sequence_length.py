"""What do context parallelism, sequence parallelism and recomputation buy as sequences grow?

Attention's work grows with the square of a sequence's length, its activations, computed in blocks, with the length, and
so does what tensor parallelism sends. The same ranks share a model's matrices (tensor parallelism), also the tokens
between them (sequence parallelism), or the tokens of every sequence (context parallelism), whose ranks pass on keys and
values in a ring or exchange heads (Ulysses). Every step has as many tokens, so that what differs is how they are cut.
"""

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from experiments.ours import NO_SLOWER, claim, shared_by
from harness.experiment.kit import (
    DEVICE, MARK, MODEL, RANKS, RUNS, STEP, Column, Experiment, ModelConfig, Plan, Point, Precision, Recipe, Record,
    Run, by_choice, cost, each, figure_of, gigabytes, less, named, of_run, points, relative_to, share, step_seconds,
    table_of, untested,
)  # fmt: skip

LONG = 32768
"""Tokens from which on a sequence is called long, as in Llama's longest recipes before 128k."""


def way(run: Run) -> str:
    """Return how ranks share the work, in words."""
    return " + ".join(shared_by(run.plan)) + " recomputed" * (run.plan.recompute == "full")


def timed_ways(records: Sequence[Record]) -> list[Point]:
    """Return all points by length, each relative to sequence parallelism's step for sequences as long."""
    found = sorted(points(records, step_seconds), key=lambda one: (one.device, one.run.model.seq_len))
    place = lambda one: (one.device, one.run.model.seq_len)
    is_first = lambda one: way(one.run) == f"tp {one.run.plan.world_size} + sp"
    return relative_to(found, is_first, step_seconds, place)


def rings(records: Sequence[Record], least: int = 0) -> list[tuple[Point, Point]]:
    """Return rings that share nothing else, each with Ulysses for sequences as long."""
    plain = (one for one in timed_ways(records) if one.run.plan.recompute == "none" and one.run.model.seq_len >= least)
    alone = (one for one in plain if one.run.plan.cp > 1 == one.run.plan.tp)
    both = by_choice(alone, lambda run: run.plan.cp_attention, "plan.cp_attention").values()
    return [(ways["ring"], ways["ulysses"]) for ways in both if len(ways) == 2]


length_of = attrgetter("run.model.seq_len")
SHOWN = (
    MODEL, DEVICE, RANKS,
    Column(key="seq_len", header="sequence", unit="Ki tokens", si="tokens", scale=1024, of=length_of),
    of_run("way", "shared by", way, text=True), STEP, share("relative", "of tp + sp", lambda one: one.relative),
    gigabytes("memory", "memory of a rank", lambda one: one.mean(lambda record: record.peak_memory_bytes), 3), RUNS,
    MARK,
)  # fmt: skip


def ways(n: int, tp: int) -> list[Plan]:
    """Return every way for n ranks; the mixed one has tp ranks that share matrices."""
    split, shared = Plan(tp=n, sequence_parallel=True), Plan(cp=n, zero_stage=1)
    mixed = [Plan(tp=tp, cp=n // tp, sequence_parallel=True, zero_stage=1)] if 1 < tp < n else []
    again, heads = (replace(one, recompute="full") for one in (split, shared)), replace(shared, cp_attention="ulysses")
    return [Plan(tp=n), split, shared, heads, *mixed, *again]


def runs(model: ModelConfig, lengths: Sequence[int], plans: Sequence[Plan], precision: Precision = "fp32") -> list[Run]:
    """Return a run for each length and plan: steps of two of the longest sequences, microbatches of a 16th of one."""

    def of(length: int, plan: Plan) -> Run:
        batch, microbatch = 2 * lengths[-1] // length, max(1, lengths[-1] // 16 // length)
        recipe = Recipe(steps=12, global_batch=batch, microbatch=microbatch, warmup_steps=2)
        return untested(replace(model, seq_len=length), plan, recipe, precision)

    return [of(length, plan) for length in lengths for plan in plans]


CPU = ModelConfig(num_layers=2, hidden_size=128, num_heads=4, positions="rotary", dropout=0.0)
EXPERIMENT = Experiment(
    source="our own; Liu et al. 2023 (2310.01889), Jacobs et al. 2023 (2309.14509), Korthikanti et al. 2022",
    expectation="tensor parallelism sends with every token, a ring keys and values only: context parallelism wins with "
    "long sequences, and its memory falls as sequence parallelism's does",
    claims=(
        claim(
            "from 32k tokens on, a ring's step is no longer than with tensor and sequence parallelism on as many ranks",
            each(
                lambda records: [(one.relative, one.run) for one, _ in rings(records, LONG)],
                lambda relative, _: less(relative, 1 + NO_SLOWER), "lengths", "{:.2f} ({.model.seq_len})",
            ), about="network", tolerance=NO_SLOWER,
        ),
        claim(
            "a ring's step is no longer than with exchanged heads",
            each(
                lambda records: [(ring.over(other, step_seconds), ring.run) for ring, other in rings(records)],
                lambda ratio, _: less(ratio, 1 + NO_SLOWER), "lengths", "{:.2f} ({.model.seq_len})",
            ), about="network", tolerance=NO_SLOWER,
        ),
    ),
    table=table_of("sequence_length", "Ways to share long sequences", SHOWN, timed_ways, [
        "tp: tensor parallelism; sp: with sequence parallelism; ring, Ulysses: context parallelism, by keys and values "
        "that are passed on or by an exchange of heads, with ZeRO-1; recomputed: all layers' forward passes. All steps "
        "have as many tokens, and microbatches too until they are one sequence."
    ]),
    figure=figure_of(
        "Steps with as many tokens", "tokens of a sequence", "step (s)", timed_ways, name=lambda one: way(one.run),
        at=length_of, ours=lambda one: one.mean(step_seconds),
    ),
    cost=cost("5 min", "40 min, 8 GPUs with 80 GB"),
    deviations="At `smoke` and `small` a small model with rotary positions on two ranks. Attention is fused, and keeps "
    "no scores.",
    runs={
        "smoke": runs(CPU, (256, 512), ways(2, 1)),
        "small": runs(CPU, (512, 1024, 2048, 4096), ways(2, 1)),
        "paper": runs(named("llama-8b"), tuple(1024 * 2**i for i in range(8)), ways(8, 2), "bf16"),
    },
)  # fmt: skip
