"""What the experiments of Zero Bubble (Qi et al. 2024, arXiv 2401.10241) share: its pipelines, and their measures."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from experiments.ptdp2021 import SELENE
from harness.experiment.kit import (
    GB, MICROBATCHES, MODEL, PP, RANKS, SCHEDULE, UNTESTED, Estimate, Measure, ModelConfig, Plan, Point, Printed,
    Record, Run, apart_from, exact, flop_rate, known, noted, points, published, simulated, with_printed,
)  # fmt: skip
from impl.pipeline.schedule import Op
from impl.simulator.periodic import execute

AS = {"one_f_one_b": "one_f_one_b", "zb_h1": "zb_1p", "zb_h2": "zb_2p"}
"""Schedule of the paper's table 4 that each of our schedules is compared with.

ZB-1p is found by search and has ZB-H1's bubble in table 5. ZB-2p is found with room for 2p microbatches, where ZB-H2
holds 2p - 1; its bubble is smaller.
"""
SCHEDULES = tuple(AS)
TIMES = ("forward", "input_gradient", "weight_gradient", "transfer")
"""Times of table 6, of which table 5's bubbles are made."""
PIPELINE = (MODEL, RANKS, PP, MICROBATCHES, SCHEDULE)
"""Columns that name a pipeline."""


def on_a100s(printed: Printed, schedule: str) -> Run:
    """Return a row's model in one pipeline, with Megatron's vocabulary, dropout and 16-bit gradients."""
    shape = noted(printed["note"])
    recipe = replace(SELENE, global_batch=int(printed["global_batch"]), microbatch=shape.pop("microbatch"))
    return Run(
        model=ModelConfig(vocab_size=51200, dropout=0.1, **shape),
        plan=Plan(pp=int(printed["pp"]), schedule=schedule),
        train=recipe,
        evaluation=UNTESTED,
        precision="fp16",
        fp32_gradients=False,
    )


def tables_4_to_7() -> dict[Run, Point]:
    """Return the points of tables 4 to 7 by their runs.

    Rate, the rate over 1F1B's, bubble and memory; the times of passes; and ZB-2p's rate over 1F1B's where all ranks
    wait for each other before the update, as ours do.
    """
    rows = published("zerobubble2024").to_dict("records")
    value = {(row["quantity"], row["note"].partition(":")[0], row["global_batch"]): row["value"] for row in rows}
    found: dict[Run, Point] = {}
    for row in (row for row in rows if row["quantity"] == "sample_rate_one_f_one_b"):
        at = row["note"].partition(":")[0], row["global_batch"]
        for schedule, printed in AS.items():
            rate = value[f"sample_rate_{printed}", *at]
            numbers = {"published_rate": rate, "published_gain": rate / row["value"]}
            numbers["published_bubble"] = value[f"bubble_rate_{schedule}", *at]
            memory, plain = (value[f"memory_{name}", *at] for name in (printed, "one_f_one_b"))
            numbers |= {"published_memory": memory * GB, "published_share": memory / plain}
            run = on_a100s(row, schedule)
            numbers |= {f"time_{part}": value[f"time_{part}", *at] for part in TIMES}
            if rate := value.get((f"sample_rate_{printed}_synchronized", *at)):
                numbers["published_synchronized"] = rate / row["value"]
            found[run] = Point(run, model=f"GPT {at[0]}", printed=numbers)
    return found


PAPER = tables_4_to_7()


def pipelines(records: Sequence[Record], measure: Measure, *, failed: bool = False) -> list[Point]:
    """Return the points of pipelines of these schedules, with tables 4 to 7, by size, microbatches and schedule."""
    found = points(records, measure, failed=failed)
    there = [one for one in found if one.run.plan.schedule in SCHEDULES and one.run.plan.pp > 1]
    order = lambda one: (one.parameters, one.run.microbatches, SCHEDULES.index(one.run.plan.schedule))
    return sorted(with_printed(there, PAPER), key=order)


def held(record: Record) -> float:
    """Return bytes of the fullest rank: counted over its tensors, or predicted for a simulated run."""
    return record.peak_memory_bytes if record.is_memory_predicted else record.memory_bytes


def by_memory(records: Sequence[Record]) -> list[Point]:
    """Return pipelines whose memory is known, failed runs included, relative to 1F1B's; ranks may share cores."""
    found = _with_1f1b(pipelines(records, held, failed=True))
    return [replace(one, relative=exact(one.mean(held) / plain.mean(held))) if plain else one for one, plain in found]


def by_rate(records: Sequence[Record]) -> list[Point]:
    """Return timed pipelines, with their rate relative to 1F1B's."""
    found = _with_1f1b(pipelines(records, flop_rate))
    return [one.against(plain, lambda record: record.tokens_per_second) for one, plain in found]


def gains(records: Sequence[Record], schedule: str = "zb_h1") -> list[Point]:
    """Return a schedule's timed pipelines whose rate relative to 1F1B's is known."""
    return [one for one in known(by_rate(records)) if of(one, schedule)]


def samples_per_second(one: Point) -> float:
    """Return the rate of one device."""
    return one.mean(lambda record: record.tokens_per_second_per_device) / one.run.model.seq_len


def bubble(one: Point) -> Estimate:
    """Return the share of the step, not of the computing time, that is idle, as table 5 counts.

    Of a simulated step the error that is its own, by which gains are uncertain, is one of its idle time.
    """
    found = one.estimate(lambda record: record.bubble / (1 + record.bubble))
    own = (one.estimate(flop_rate).causes or {}).get(one.records[0].id, 0.0)
    return replace(found, half_width=simulated(1 - found.mean, {"own": own}).half_width) if own else found


def bubble_by_paper(one: Point) -> float:
    """Return table 5's bubble of our table with the times of table 6; NaN where they are not printed.

    It is the idle share of the rank with the longest time from its first action to its last.
    """
    times = [one.printed.get(f"time_{part}", math.nan) for part in TIMES]
    return math.nan if math.isnan(sum(times)) else _longest_idle(one.run, *times)


@cache
def _longest_idle(run: Run, forward: float, input_gradient: float, weight_gradient: float, transfer: float) -> float:
    whole, p = input_gradient + weight_gradient, run.plan.pp
    times = {Op.F: forward, Op.B: whole, Op.I: input_gradient, Op.W: weight_gradient}
    seconds = {op: [time] * p for op, time in times.items()}
    ran = execute(run.plan.schedule, p, run.microbatches, 1, seconds, transfer)
    begins = (rank * (forward + transfer) for rank in range(p))  # with the first microbatch's forward pass
    return 1 - ran.busy[0] / max(end - begin for begin, end in zip(begins, ran.ends, strict=True))


def of(one: Point, schedule: str) -> bool:
    return one.run.plan.schedule == schedule


def _with_1f1b(found: Sequence[Point]) -> list[tuple[Point, Point | None]]:
    """Return the points, each with the one of 1F1B that is equal but for the schedule; None without it."""
    alike = lambda one: (apart_from(one.run, "plan.schedule"), one.device)
    plain = {alike(one): one for one in found if of(one, "one_f_one_b")}
    return [(one, plain.get(alike(one))) for one in found]
