"""What the experiments of Zero Bubble (Qi et al. 2024, arXiv 2401.10241) share: its pipelines, and their measures."""

import math
from collections.abc import Sequence
from dataclasses import replace

from experiments.ptdp2021 import SELENE, UNTESTED
from harness.experiment.kit import (
    GB, MICROBATCHES, MODEL, PP, RANKS, SCHEDULE, Estimate, Measure, ModelConfig, Plan, Point, Printed, Record, Run,
    apart_from, exact, flop_rate, noted, points, published, with_printed,
)  # fmt: skip

AS = {"one_f_one_b": "one_f_one_b", "zb_h1": "zb_1p"}
"""Schedule of table 4 that stands for each of ours: ZB-1p finds ZB-H1's order by search, with table 5's same bubble."""
SCHEDULES = tuple(AS)
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


def tables_4_and_5() -> dict[Run, Point]:
    """Return the points of tables 4 and 5 by their runs: rate, the rate over 1F1B's, bubble and memory."""
    rows = published("zerobubble2024").to_dict("records")
    value = {(row["quantity"], row["note"].partition(":")[0], row["global_batch"]): row["value"] for row in rows}
    found: dict[Run, Point] = {}
    for row in (row for row in rows if row["quantity"] == "sample_rate_one_f_one_b"):
        of = row["note"].partition(":")[0], row["global_batch"]
        for schedule, printed in AS.items():
            rate = value[f"sample_rate_{printed}", *of]
            numbers = {"published_rate": rate, "published_gain": rate / row["value"]}
            numbers["published_bubble"] = value[f"bubble_rate_{schedule}", *of]
            numbers["published_memory"] = value[f"memory_{printed}", *of] * GB
            run = on_a100s(row, schedule)
            found[run] = Point(run, model=f"GPT {of[0]}", printed=numbers)
    return found


PAPER = tables_4_and_5()


def pipelines(records: Sequence[Record], measure: Measure, *, failed: bool = False) -> list[Point]:
    """Return the points of pipelines of both schedules, with tables 4 and 5, by size, microbatches and schedule."""
    found = points(records, measure, failed=failed)
    both = [one for one in found if one.run.plan.schedule in SCHEDULES and one.run.plan.pp > 1]
    order = lambda one: (one.parameters, one.run.microbatches, SCHEDULES.index(one.run.plan.schedule))
    return sorted(with_printed(both, PAPER), key=order)


def held(record: Record) -> float:
    """Return bytes of the fullest rank: counted over its tensors, or predicted for a simulated run."""
    return record.peak_memory_bytes if record.is_memory_predicted else record.memory_bytes


def by_memory(records: Sequence[Record]) -> list[Point]:
    """Return pipelines whose memory is known, failed ones too, relative to 1F1B's; it counts with any cores."""
    found = _with_1f1b(pipelines(records, held, failed=True))
    return [replace(one, relative=exact(one.mean(held) / plain.mean(held))) if plain else one for one, plain in found]


def by_rate(records: Sequence[Record]) -> list[Point]:
    """Return timed pipelines, with their rate relative to 1F1B's."""
    found = _with_1f1b(pipelines(records, flop_rate))
    return [one.against(plain, lambda record: record.tokens_per_second) for one, plain in found]


def gains(records: Sequence[Record]) -> list[Point]:
    """Return ZB-H1's timed pipelines whose rate relative to 1F1B's is known."""
    return [one for one in by_rate(records) if not is_plain(one) and not math.isnan(one.relative.mean)]


def samples_per_second(one: Point) -> float:
    """Return the rate of one device."""
    return one.mean(lambda record: record.tokens_per_second_per_device) / one.run.model.seq_len


def bubble(one: Point) -> Estimate:
    """Return the share of the step, not of the computing time, that is idle, as table 5 counts."""
    return one.estimate(lambda record: record.bubble / (1 + record.bubble))


def is_plain(one: Point) -> bool:
    return one.run.plan.schedule == "one_f_one_b"


def _with_1f1b(found: Sequence[Point]) -> list[tuple[Point, Point | None]]:
    """Return the points, each with the one of 1F1B that is equal but for the schedule; None without it."""
    alike = lambda one: (apart_from(one.run, "plan.schedule"), one.device)
    plain = {alike(one): one for one in found if is_plain(one)}
    return [(one, plain.get(alike(one))) for one in found]
